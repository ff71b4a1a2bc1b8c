"""Counts of the bytes a rank sends, so that a claim about compression is measured and not assumed.

They are what a bandwidth-optimal algorithm makes this rank send, whatever algorithm the backend runs. No torch: a plan
counts them too.
"""

from __future__ import annotations

from collections import Counter


def sent_bytes(collective: str, nbytes: int, size: int) -> int:
    """Bytes one of ``size`` ranks sends in ``collective`` over an input of ``nbytes`` bytes, rounded up.

    all_to_all and broadcast send (W-1)/W n, all_reduce 2(W-1)/W n, and the gathering ones (all_gather,
    all_gather_bytes, barrier) (W-1)n.
    """
    if collective == "all_reduce":
        return -(-2 * (size - 1) * nbytes // size)
    if collective in ("all_to_all", "broadcast"):
        return -(-(size - 1) * nbytes // size)
    return (size - 1) * nbytes


class Traffic:
    """What one communicator made this rank send since it was created or last reset."""

    def __init__(self) -> None:
        self.bytes_by_collective: Counter[str] = Counter()
        self.calls_by_collective: Counter[str] = Counter()

    @property
    def bytes_sent(self) -> int:
        """Bytes sent by this rank in all collectives."""
        return self.bytes_by_collective.total()

    @property
    def calls(self) -> int:
        """Collectives issued by this rank."""
        return self.calls_by_collective.total()

    def add(self, collective: str, nbytes: int) -> None:
        """Record one call of ``collective`` that sends ``nbytes`` bytes."""
        self.bytes_by_collective[collective] += nbytes
        self.calls_by_collective[collective] += 1

    def copy(self) -> Traffic:
        """What was counted so far."""
        copied = Traffic()
        copied.include(self)
        return copied

    def since(self, earlier: Traffic) -> Traffic:
        """What was counted after `earlier` was copied."""
        found = Traffic()
        found.bytes_by_collective = self.bytes_by_collective - earlier.bytes_by_collective
        found.calls_by_collective = self.calls_by_collective - earlier.calls_by_collective
        return found

    def include(self, other: Traffic) -> None:
        """Count what `other` has counted, too."""
        self.bytes_by_collective.update(other.bytes_by_collective)
        self.calls_by_collective.update(other.calls_by_collective)

    def reset(self) -> None:
        """Start counting from zero again."""
        self.bytes_by_collective.clear()
        self.calls_by_collective.clear()

    def __repr__(self) -> str:
        counts = ", ".join(f"{name}: {count} B" for name, count in sorted(self.bytes_by_collective.items()))
        return f"Traffic({self.bytes_sent} B sent{'; ' + counts if counts else ''})"
