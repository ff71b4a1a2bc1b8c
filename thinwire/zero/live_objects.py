"""Finds objects that leave no trace where one could look for them: among all objects of the process."""

from __future__ import annotations

import gc
from collections.abc import Collection
from typing import Any

__all__ = ["instances_of"]


def instances_of(kinds: Collection[type]) -> list[Any]:
    """All live instances of these classes. Takes some tens of milliseconds a million objects: ask once, for all kinds.

    Goes by an object's type, as `isinstance` would run the code of proxies.
    """
    wanted = tuple(kinds)
    return [one for one in gc.get_objects() if issubclass(type(one), wanted)] if wanted else []
