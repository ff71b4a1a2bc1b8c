"""Numbers as people write them, and the refusals that every input shares, so that all read alike."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

__all__ = [
    "PlanError",
    "count",
    "part",
    "rate",
    "rate_in_words",
    "require_positive",
    "require_whole",
    "seconds",
    "seconds_in_words",
    "size",
    "size_in_words",
]


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


_NUMBER = re.compile(r"\s*([0-9][0-9_,]*(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?|\.[0-9]+)\s*([^0-9\s].*?)?\s*")
_PREFIXES = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_BINARY = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40}

_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ns": 1e-9, "min": 60.0}
_BYTES = {f"{prefix}B": factor for prefix, factor in (_PREFIXES | _BINARY).items()}
_BITS_A_SECOND = {
    f"{prefix}{ending}": factor / 8 for prefix, factor in _PREFIXES.items() for ending in ("b/s", "bps", "bit/s", "bE")
}
_RATES = _BITS_A_SECOND | {f"{unit}/s": factor for unit, factor in _BYTES.items()}
_COUNTS = {**_PREFIXES, "m": 1e6, "B": 1e9, "b": 1e9}


def rate(name: str, text: str) -> float:
    """Bytes a second of a link or a memory: "1Gb/s", "10GbE", "100Mbps", "125MB/s", "2TB/s".

    Raises PlanError, naming the option, for what is no rate above 0; a number without a unit is none, as nobody could
    tell bits from bytes.
    """
    return _read(name, text, _RATES, "a rate, as in 1Gb/s, 10GbE, 100Mb/s (bits) or 125MB/s (bytes)", above_zero=True)


def seconds(name: str, text: str) -> float:
    """Of "25ms", "50us", "1.5s". Raises PlanError for what is no time, at least 0."""
    return _read(name, text, _SECONDS, "a time, as in 25ms, 50us or 1.5s")


def size(name: str, text: str) -> float:
    """Bytes of "80GB", "16MiB". Raises PlanError for what is no size above 0."""
    return _read(name, text, _BYTES, "a size, as in 80GB or 16MiB", above_zero=True)


def count(name: str, text: str) -> int:
    """A whole number: "340M", "1.3B", "7b", "125_000_000". Raises PlanError for what is none, or less than 1."""
    expected = "a whole number above 0, as in 340M, 1.3B or 124439808"
    number = _read(name, text, _COUNTS, expected, above_zero=True)
    whole = round(number)
    if abs(number - whole) > 1e-6 * number:
        raise PlanError(f"{name} must be {expected}, got {text!r}")
    return whole


def part(name: str, text: str) -> float:
    """A part from 0 to 1: "0.15" or "15%". Raises PlanError for what is none."""
    found = _read(name, text, {"": 1.0, "%": 0.01}, "a part from 0 to 1, as in 0.15 or 15%")
    if found > 1:
        raise PlanError(f"{name} must be a part from 0 to 1, as in 0.15 or 15%, got {text!r}")
    return found


def rate_in_words(bytes_per_second: float) -> str:
    """As "1 Gb/s", three digits."""
    bits = 8 * bytes_per_second
    for prefix in ("T", "G", "M", "k"):
        if bits >= 0.9995 * _PREFIXES[prefix]:
            return f"{bits / _PREFIXES[prefix]:.3g} {prefix}b/s"
    return f"{bits:.3g} b/s"


def seconds_in_words(duration: float) -> str:
    """As "2.4 s", "36 ms" or "120 us", three digits at most."""
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


def _read(name: str, text: str, units: Mapping[str, float], expected: str, *, above_zero: bool = False) -> float:
    found = _NUMBER.fullmatch(text)
    factor = units.get(found[2] or "") if found else None
    if found is None or factor is None:
        raise PlanError(f"{name} must be {expected}, got {text!r}")
    value = float(found[1].replace("_", "").replace(",", "")) * factor
    if value == float("inf") or (above_zero and value <= 0):
        raise PlanError(f"{name} must be {expected}, got {text!r}")
    return value
