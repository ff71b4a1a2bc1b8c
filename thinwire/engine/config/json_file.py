"""Reads the JSON object in a configuration's file: strictly, and within bounds, so that what is wrong with the file is
told in its own terms."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from thinwire.engine.config.errors import ConfigError, shown
from thinwire.engine.config.limits import DEEPEST, LONGEST_NUMBER, LongNumber

__all__ = ["read_json_object"]

_LARGEST_FILE = 16 << 20

_TOKENS = re.compile(r'"(?:[^"\\]|\\.)*"\s*(:?)|[][{}]', re.DOTALL)


def read_json_object(path: Path) -> Mapping[str, Any]:
    """The object that the file holds; whole numbers too long to be read are `LongNumber`s.

    Raises ConfigError for a file that cannot be read, is larger than 16 MiB, is not JSON, nests too deeply, or holds
    something else than an object.
    """
    text = _read(path)
    try:
        _check_depth(text)
        tree = json.loads(
            text, object_pairs_hook=_without_duplicates, parse_constant=_refuse_constant, parse_int=_whole_number
        )
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"is not JSON, at line {error.lineno} column {error.colno}: {error.msg}. JSON has no comments and no "
            "comma after the last entry",
            str(path),
        ) from error
    except _NotStrictJsonError as error:
        raise ConfigError(str(error), str(path)) from None
    if not isinstance(tree, dict):
        raise ConfigError(f"must hold a JSON object, {{...}}, not a {type(tree).__name__}", str(path))
    return tree


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            content = file.read(_LARGEST_FILE + 1)
    except (OSError, ValueError) as error:  # a ValueError for a path that holds a null character
        raise ConfigError(f"cannot be read: {getattr(error, 'strerror', None) or error}", str(path)) from error
    if len(content) > _LARGEST_FILE:
        raise ConfigError("is larger than 16 MiB: a configuration takes a few KB; is this the right file?", str(path))
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"is not UTF-8 text, at byte {error.start}", str(path)) from error


class _NotStrictJsonError(Exception):
    """What Python's reader takes and JSON does not, or what a configuration does not hold."""


def _check_depth(text: str) -> None:
    """Told here, where the key is at hand: Python's reader ends deep nesting with a RecursionError."""
    depth, key = 0, ""
    for token in _TOKENS.finditer(text):
        if token[0][0] in "[{":
            depth += 1
            if depth > DEEPEST:
                line = text.count("\n", 0, token.start()) + 1
                where = f"{key} is nested" if key else "it is nested"
                raise _NotStrictJsonError(
                    f"{where} more than {DEEPEST} deep, at line {line}: nothing in a configuration is"
                )
        elif token[0][0] in "]}":
            depth -= 1
        elif token[1] and depth == 1:
            key = shown(token[0].rstrip(": \t\r\n")[1:-1])


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for key, value in pairs:
        if key in tree:
            raise _NotStrictJsonError(
                f"{shown(key)} is there twice in one object: {shown(tree[key])} and {shown(value)}"
            )
        tree[key] = value
    return tree


def _refuse_constant(name: str) -> Any:
    raise _NotStrictJsonError(f"{name} is not JSON: write a number")


def _whole_number(digits: str) -> int | LongNumber:
    return int(digits) if len(digits) <= LONGEST_NUMBER else LongNumber(digits)
