"""deepspeed.utils.torch."""

from __future__ import annotations

import torch

__all__ = ["required_torch_version"]


def required_torch_version(min_version: str | float | None = None, max_version: str | float | None = None) -> bool:
    """Whether torch is not older than the one and not newer than the other, "2.4" or 2.4."""
    installed = _numbers(torch.__version__)
    low, high = _numbers(min_version or 0), _numbers(max_version or torch.__version__)
    return low <= installed <= high


def _numbers(version: str | float) -> tuple[int, ...]:
    """The leading numbers of a version, without zeros at the end."""
    found: list[int] = []
    for part in str(version).partition("+")[0].split("."):
        if not part.isdecimal():
            break
        found.append(int(part))
    while found and found[-1] == 0:
        found.pop()
    return tuple(found)
