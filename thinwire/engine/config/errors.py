"""How a bad configuration is told: the full dotted path, what was given, what is expected, the nearest known name.
Every check of the configuration speaks through this, so that all of them read alike."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Sequence
from typing import Any

__all__ = ["CANNOT_WORK", "ConfigError", "did_you_mean", "dotted", "left_auto", "reason", "shown"]

CANNOT_WORK = (ValueError, TypeError, ArithmeticError, RuntimeError)
"""What a class of torch's or of ours raises for values that it cannot work with."""

_LEAST_SIMILARITY = 0.6
_LONGEST_VALUE = 80
_LONGEST_REASON = 500
_MOST_PROBLEMS = 20


class ConfigError(ValueError):
    """A configuration that cannot work. `problems` holds one sentence for each thing that is wrong with it."""

    def __init__(self, problems: str | Sequence[str], source: str = "the configuration") -> None:
        self.problems = (problems,) if isinstance(problems, str) else tuple(problems)
        if len(self.problems) == 1:
            message = f"{source}: {self.problems[0]}"
        else:
            told = [f"\n- {one}" for one in self.problems[:_MOST_PROBLEMS]]
            more = len(self.problems) - len(told)
            rest = f"\n- and {more} more" if more else ""
            message = f"{source} has {len(self.problems)} problems:" + "".join(told) + rest
        super().__init__(message)


def dotted(*parts: str) -> str:
    """The path of a key as people write it: `fp16.loss_scale`, without the empty parts; long ones are shortened."""
    return ".".join(_shortened(part) for part in parts if part)


def left_auto(path: str) -> str:
    """The sentence that refuses an "auto" which nobody has filled in."""
    return (
        f'"{path}" is "auto", which nobody fills in but thinwire.hugging_face.Trainer(thinwire_config=...), from '
        "TrainingArguments: write the value, or delete the key for the default"
    )


def shown(value: Any) -> str:
    """`value` as JSON writes it, shortened where it is long."""
    try:
        text = json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        text = _representation(value)
    return _shortened(text)


def reason(error: Exception) -> str:
    """What `error` says, shortened where it echoes a long value."""
    return _shortened(str(error), _LONGEST_REASON)


def did_you_mean(name: str, known: Sequence[str], unlisted: Iterable[str] = ()) -> str:
    """' Did you mean "..."?' for the most similar of `known` and `unlisted`; where none is similar, lists `known`."""
    name = _shortened(name)  # comparing takes the square of a name's length
    names = sorted({*known, *unlisted})
    similar = {other: _likeness(name, other) for other in names if _ratio(name, other) >= _LEAST_SIMILARITY}
    if not similar:
        return f" Known here: {', '.join(known)}." if known else ""
    best = max(similar.values())
    nearest = [f'"{other}"' for other, likeness in similar.items() if likeness == best]
    return f" Did you mean {' or '.join(nearest)}?"


def _shortened(text: str, longest: int = _LONGEST_VALUE) -> str:
    return text if len(text) <= longest else text[: longest - 3] + "..."


def _representation(value: Any) -> str:
    try:
        return repr(value)
    except Exception:  # of an object that the caller put there: its type says enough
        return f"a {type(value).__name__}"


def _likeness(name: str, other: str) -> float:
    # Two swapped letters look like two errors to difflib; compared without their order, they are none.
    return _ratio(name, other) + _ratio("".join(sorted(name.lower())), "".join(sorted(other.lower())))


def _ratio(name: str, other: str) -> float:
    return difflib.SequenceMatcher(None, name.lower(), other.lower()).ratio()
