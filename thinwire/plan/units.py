"""Numbers as people write them, and the refusals that every input shares, so that all read alike."""

from __future__ import annotations

import math
import re
import sys
from typing import Literal


class PlanError(ValueError):
    """A model, cluster, method or file that no plan can be made for: what was given, what was expected."""


def require_whole(name: str, value: object) -> None:
    """Raise PlanError unless `value` is a whole number, at least 1."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise PlanError(f"{name} must be a whole number, at least 1, got {value!r}")


def require_positive(name: str, value: float) -> None:
    """Raise PlanError unless `value` is a finite number above 0."""
    if not 0 < value < math.inf:
        raise PlanError(f"{name} must be a number above 0, got {value!r}")


def require_seconds(name: str, value: float) -> None:
    """Raise PlanError unless `value` is a finite number, at least 0."""
    if not 0 <= value < math.inf:
        raise PlanError(f"{name} must be a number of seconds, at least 0, got {value!r}")


Kind = Literal["rate", "time", "size", "count", "part"]

_LARGEST = sys.float_info.max
_NUMBER = re.compile(r"\s*([0-9][0-9_,]*(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?|\.[0-9]+)\s*([^0-9\s].*?)?\s*")
_PREFIXES = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ns": 1e-9}
_SECONDS |= {"min": 60.0, "h": 3600.0, "d": 86400.0}
_BINARY = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40}
_BYTES = {f"{prefix}B": factor for prefix, factor in (_PREFIXES | _BINARY).items()}
_BITS_A_SECOND = {
    f"{prefix}{ending}": factor / 8 for prefix, factor in _PREFIXES.items() for ending in ("b/s", "bps", "bit/s", "bE")
}
_RATES = _BITS_A_SECOND | {f"{unit}/s": factor for unit, factor in _BYTES.items()}
_COUNTS = {**_PREFIXES, "m": 1e6, "B": 1e9, "b": 1e9}

_KINDS: dict[Kind, tuple[dict[str, float], str]] = {
    # Without a unit a rate is none: bits cannot be told from bytes.
    "rate": (_RATES, "a rate, as in 1Gb/s, 10GbE, 100Mb/s (bits) or 125MB/s (bytes)"),
    "time": (_SECONDS, "a time, as in 25ms, 50us or 1.5s"),
    "size": (_BYTES, "a size, as in 80GB or 16MiB"),
    "count": (_COUNTS, "a whole number above 0, as in 340M, 1.3B or 124439808"),
    "part": ({"": 1.0, "%": 0.01}, "a part from 0 to 1, as in 0.15 or 15%"),
}


def read(kind: Kind, name: str, text: str) -> float:
    """Read a number with its unit: bytes a second of "10GbE", seconds of "25ms", bytes of "80GB", "1.3B" parameters.

    Raises PlanError, naming the option, for what is no such number. Only times and parts may be 0.
    """
    units, expected = _KINDS[kind]
    found = _NUMBER.fullmatch(text)
    factor = units.get(found[2] or "") if found else None
    if found is not None and factor is not None:
        value = float(found[1].replace("_", "").replace(",", "")) * factor
        if kind == "count" and 0 < value < math.inf and abs(value - round(value)) <= 1e-6 * value:
            return round(value)
        if kind != "count" and (value > 0 or kind in ("time", "part")) and value <= (1 if kind == "part" else _LARGEST):
            return value
    raise PlanError(f"{name} must be {expected}, got {text!r}")


def rate_in_words(bytes_per_second: float) -> str:
    """As "1 Gb/s", three digits."""
    bits = 8 * bytes_per_second
    for prefix in ("T", "G", "M", "k"):
        if bits >= 0.9995 * _PREFIXES[prefix]:
            return f"{bits / _PREFIXES[prefix]:.3g} {prefix}b/s"
    return f"{bits:.3g} b/s"


def seconds_in_words(duration: float) -> str:
    """As "2.4 s", "36 ms", "120 us" or "1.9 h", three digits at most."""
    for unit in ("d", "h"):
        if duration >= _SECONDS[unit]:
            return f"{duration / _SECONDS[unit]:.3g} {unit}"
    if duration >= 0.9995:
        return f"{duration:.3g} s" if duration < 999.5 else f"{duration:.0f} s"
    if duration >= 0.9995e-3:
        return f"{1e3 * duration:.3g} ms"
    return f"{1e6 * duration:.3g} us"


def size_in_words(nbytes: float) -> str:
    """As "22 GB", three digits."""
    for prefix in ("T", "G", "M"):
        if nbytes >= 0.9995 * _PREFIXES[prefix]:
            return f"{nbytes / _PREFIXES[prefix]:.3g} {prefix}B"
    return f"{nbytes / 1e3:.3g} kB"


def count_in_words(count: int) -> str:
    """As "335M" or "1.3B", three digits."""
    for unit in ("T", "B"):
        if count >= 0.9995 * _COUNTS[unit]:
            return f"{count / _COUNTS[unit]:.3g}{unit}"
    return f"{count / 1e6:.3g}M"
