"""One line for what is refused, and in which words."""

from collections.abc import Callable
from typing import Any

import pytest

__all__ = ["refused"]


def refused(
    error: type[Exception] | tuple[type[Exception], ...],
    message: str,
    call: Callable[..., object],
    *arguments: Any,
    **options: Any,
) -> None:
    """Check that `call(*arguments, **options)` raises `error`, with words that match `message`."""
    with pytest.raises(error, match=message):
        call(*arguments, **options)
