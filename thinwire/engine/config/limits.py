"""What no configuration holds, told before anything reads it: values nested without end, whole numbers that fit no
machine number, and collections that no JSON has. What comes after would fail on them without naming the key."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from thinwire.engine.config.errors import ConfigError, dotted, shown

__all__ = ["DEEPEST", "LARGEST_NUMBER", "LONGEST_NUMBER", "LongNumber", "check_limits"]

DEEPEST = 16
"""Objects and lists inside one another; a configuration of DeepSpeed's has four."""

LONGEST_NUMBER = 40
"""Digits that are read as a number at all: Python refuses thousands of them, and 64 bits have 20."""

LARGEST_NUMBER = 2**63
"""What whole numbers stay below, and above its negative: they become machine numbers."""


@dataclass(frozen=True)
class LongNumber:
    """A whole number of a file, in its digits: too long to be read."""

    digits: str

    def __repr__(self) -> str:
        return self.digits


def check_limits(tree: Mapping[Any, Any], source: str) -> None:
    """Raise ConfigError, naming the key, for a value of `tree` that is nested too deeply, too large a number, or
    another collection than a list."""
    _check(tree, "", source, 1)


def _check(value: Any, path: str, source: str, depth: int) -> None:
    if isinstance(value, LongNumber) or (isinstance(value, int) and not -LARGEST_NUMBER <= value < LARGEST_NUMBER):
        raise ConfigError(f'"{path}" must be a number of at most 64 bits, got {_large(value)}', source)
    if not isinstance(value, Mapping | list | tuple):
        if isinstance(value, Iterable) and not isinstance(value, str | bytes):
            raise ConfigError(f'"{path}" must be a list, where it holds several values, got {shown(value)}', source)
        return
    if depth > DEEPEST:
        raise ConfigError(f'"{path}" is nested more than {DEEPEST} deep: nothing in a configuration is', source)
    entries = value.items() if isinstance(value, Mapping) else [("", entry) for entry in value]
    for key, entry in entries:
        _check(entry, dotted(path, _name(key)), source, depth + 1)


def _name(key: Any) -> str:
    return key if isinstance(key, str) else shown(key)


def _large(value: Any) -> str:
    """Its digits, or how many bits it has: a long number cannot even be written out."""
    if isinstance(value, int) and value.bit_length() > 4 * LONGEST_NUMBER:
        return f"one of {value.bit_length()} bits"
    return shown(value)
