"""Whether the parameters written under "params" fit the class they are for, told before the class is built: unknown
names with the nearest known one, wrong types with what is expected."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from thinwire.engine.config.declined import Declined
from thinwire.engine.config.errors import did_you_mean, dotted, left_auto, shown
from thinwire.engine.config.limits import LARGEST_NUMBER

__all__ = ["Expected", "check_params", "expected_by"]

_LISTS = frozenset({"list", "List", "Iterable", "Sequence"})
_NAMED = {"True": True, "False": False, "None": None}


class Expected:
    """What one parameter takes, read from its annotation, such as `float | list[float]` or `Literal['log', 'linear']`.

    Tensors and functions among the alternatives are passed over: a configuration cannot hold them.
    """

    def __init__(self, annotation: str, required: bool = False) -> None:
        self.required = required
        self._alternatives = _alternatives(annotation.strip("'\""))

    @property
    def phrase(self) -> str:
        """`a number or a list of numbers`; empty where a configuration can hold no such thing."""
        return " or ".join(filter(None, (_phrase(one) for one in self._alternatives)))

    def convert(self, value: Any) -> Any:
        """`value` as the class takes it: lists as tuples where it wants those, 1e3 as 1000 where it wants an int.

        Raises TypeError for a value that is none of the alternatives.
        """
        for alternative in self._alternatives:
            if _fits(alternative, value):
                return _converted(alternative, value)
        raise TypeError(self.phrase)


def expected_by(build: Callable[..., Any], hidden: frozenset[str]) -> dict[str, Expected]:
    """The parameters that `build` takes by name, save those in `hidden` and those that only take functions."""
    found = {
        name: Expected(inspect.formatannotation(parameter.annotation), parameter.default is inspect.Parameter.empty)
        for name, parameter in inspect.signature(build).parameters.items()
        if name not in hidden
    }
    return {name: expected for name, expected in found.items() if expected.phrase not in ("", "null")}


def check_params(
    path: str,
    owner: str,
    params: Mapping[str, Any],
    expected: Mapping[str, Expected],
    declined: Mapping[str, Declined],
    problems: list[str],
) -> dict[str, Any]:
    """`params` as `owner` takes them.

    What does not fit joins `problems`: unknown names, `declined` ones, wrong types, "auto" where it is no value of the
    owner's own, required ones that are missing.
    """
    converted: dict[str, Any] = {}
    for name, value in params.items():
        where = dotted(path, str(name))
        if name not in expected:
            if name not in declined:
                hint = did_you_mean(str(name), list(expected), declined)
                problems.append(f'"{where}" is not a parameter of {owner}.{hint}')
            elif not declined[name].accepts(value):
                problems.append(declined[name].refusal(where, value))
            continue
        try:
            converted[name] = expected[name].convert(value)
        except TypeError as error:
            auto = isinstance(value, str) and value == "auto"
            problems.append(left_auto(where) if auto else f'"{where}" must be {error}, got {shown(value)}')
    for name, one in expected.items():
        if one.required and name not in params:
            problems.append(f'"{dotted(path, name)}" is missing: {owner} needs it')
    return converted


def _alternatives(annotation: str) -> list[str]:
    match _head(annotation):
        case "Union":
            return _split(",", annotation.partition("[")[2].removesuffix("]"))
        case "Optional":
            return [*_alternatives(annotation.partition("[")[2].removesuffix("]")), "None"]
    return _split("|", annotation)


def _split(separator: str, text: str) -> list[str]:
    """The parts of `text` between the separators that stand outside brackets."""
    return re.split(rf"\s*[{separator}]\s*(?![^\[]*\])", text)


def _head(alternative: str) -> str:
    return alternative.partition("[")[0].rpartition(".")[2].strip()


def _inside(alternative: str) -> list[str]:
    return [part.strip() for part in alternative.partition("[")[2].rstrip("]").split(",")]


def _choices(alternative: str) -> list[Any]:
    return [_value(part) for part in _inside(alternative) if part]


def _value(written: str) -> Any:
    """What a choice is written for: text, a name of `_NAMED`, or a whole number. Not by `ast`, which may fail where two
    threads of Python 3.11 parse at once, as ranks do."""
    if written[0] in "'\"":
        return written[1:-1]
    return _NAMED[written] if written in _NAMED else int(written)


def _phrase(alternative: str) -> str:
    match _head(alternative):
        case "float":
            return "a number"
        case "int":
            return "a whole number"
        case "bool":
            return "true or false"
        case "str":
            return "a string"
        case "None":
            return "null"
        case "dict":
            return "an object, {...}"
        case "Literal":
            return " or ".join(shown(choice) for choice in _choices(alternative))
        case "tuple" | "Tuple":
            return f"a list of {len(_inside(alternative))} numbers"
        case head if head in _LISTS:
            return "a list of numbers"
    return ""


def _fits(alternative: str, value: Any) -> bool:
    match _head(alternative):
        case "float":
            return _is_number(value)
        case "int":
            return _is_number(value) and float(value).is_integer() and abs(value) < LARGEST_NUMBER
        case "bool":
            return isinstance(value, bool)
        case "str":
            return isinstance(value, str)
        case "None":
            return value is None
        case "dict":
            return isinstance(value, Mapping)
        case "Literal":
            return isinstance(value, str) and value in _choices(alternative)
        case "tuple" | "Tuple":
            return _is_list_of_numbers(value) and len(value) == len(_inside(alternative))
        case head if head in _LISTS:
            return _is_list_of_numbers(value)
    return False


def _converted(alternative: str, value: Any) -> Any:
    match _head(alternative):
        case "int":
            return int(value)
        case "tuple" | "Tuple":
            return tuple(value)
        case head if head in _LISTS:
            return list(value)
    return value


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_list_of_numbers(value: Any) -> bool:
    return isinstance(value, list | tuple) and bool(value) and all(_is_number(one) for one in value)
