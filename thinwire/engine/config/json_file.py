"""Reads the JSON object in a configuration's file, comments and all, within bounds, so that what is wrong with the file
is told in its own terms."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from thinwire.engine.config.errors import ConfigError
from thinwire.engine.config.relaxed_json import NotReadableError, read_relaxed_json

__all__ = ["read_json_object"]

_LARGEST_FILE = 16 << 20


def read_json_object(path: Path) -> Mapping[str, Any]:
    """The object that the file holds; whole numbers too long to be read are `LongNumber`s.

    Raises ConfigError for a file that cannot be read, is larger than 16 MiB, is not JSON (comments, and commas missing
    or left over at a line's end, are fine), nests too deeply, or holds something else than an object.
    """
    try:
        tree = read_relaxed_json(_read(path))
    except NotReadableError as error:
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
