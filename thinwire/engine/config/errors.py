"""How a bad configuration is told: the full dotted path, what was given, what is expected, the nearest known name.
Every check of the configuration speaks through this, so that all of them read alike."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Sequence
from typing import Any

__all__ = ["ConfigError", "did_you_mean", "dotted", "shown"]

_LEAST_SIMILARITY = 0.6
_LONGEST_VALUE = 80


class ConfigError(ValueError):
    """A configuration that cannot work. `problems` holds one sentence for each thing that is wrong with it."""

    def __init__(self, problems: str | Sequence[str], source: str = "the configuration") -> None:
        self.problems = (problems,) if isinstance(problems, str) else tuple(problems)
        if len(self.problems) == 1:
            message = f"{source}: {self.problems[0]}"
        else:
            message = f"{source} has {len(self.problems)} problems:" + "".join(f"\n- {one}" for one in self.problems)
        super().__init__(message)


def dotted(*parts: str) -> str:
    """The path of a key as people write it: `fp16.loss_scale`, without the empty parts."""
    return ".".join(part for part in parts if part)


def shown(value: Any) -> str:
    """`value` as JSON writes it, shortened where it is long."""
    try:
        text = json.dumps(value)
    except (TypeError, ValueError):
        text = repr(value)
    return text if len(text) <= _LONGEST_VALUE else text[: _LONGEST_VALUE - 3] + "..."


def did_you_mean(name: str, known: Sequence[str], unlisted: Iterable[str] = ()) -> str:
    """' Did you mean "..."?' for the most similar of `known` and `unlisted`; where none is similar, lists `known`."""
    names = sorted({*known, *unlisted})
    similar = {other: _likeness(name, other) for other in names if _ratio(name, other) >= _LEAST_SIMILARITY}
    if not similar:
        return f" Known here: {', '.join(known)}." if known else ""
    best = max(similar.values())
    nearest = [f'"{other}"' for other, likeness in similar.items() if likeness == best]
    return f" Did you mean {' or '.join(nearest)}?"


def _likeness(name: str, other: str) -> float:
    # Two swapped letters look like two errors to difflib; compared without their order, they are none.
    return _ratio(name, other) + _ratio("".join(sorted(name.lower())), "".join(sorted(other.lower())))


def _ratio(name: str, other: str) -> float:
    return difflib.SequenceMatcher(None, name.lower(), other.lower()).ratio()
