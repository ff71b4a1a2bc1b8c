"""The errors of communication: one type to catch when ranks can no longer work together.

They say which collective failed and, as far as the survivors can tell, which ranks are to blame.
"""

from __future__ import annotations

__all__ = ["CommunicationError", "CommunicationTimeout"]


class CommunicationError(RuntimeError):
    """A collective failed: a rank died, raised, called something else, or the transport broke.

    ``ranks`` holds the ranks at fault (empty when nobody can tell) and ``collective`` the failed call.
    """

    def __init__(self, message: str, *, ranks: tuple[int, ...] = (), collective: str = "") -> None:
        super().__init__(message)
        self.ranks = ranks
        self.collective = collective


class CommunicationTimeout(CommunicationError):  # noqa: N818 - like the built-in TimeoutError, a kind
    """A collective did not finish within the communicator's timeout."""
