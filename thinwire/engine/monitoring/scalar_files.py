"""Scalars as CSV files that spreadsheets, pandas and DeepSpeed users' scripts read: one file a scalar, always whole
lines, never two values for one sample."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count, takewhile
from pathlib import Path

__all__ = ["Event", "ScalarFiles"]

Event = tuple[str, float, int]

_VALUE = re.compile(rb"\d+,[^,\n]+\n")


@dataclass
class _Scalar:
    """`last`: the latest sample in the file, -1 without any. `size`: bytes of its whole lines."""

    path: Path
    last: int
    size: int


class ScalarFiles:
    """Writes `folder`/Train_loss.csv for the scalar "Train/loss": a line `sample,Train/loss`, then a line a value.

    A run that goes back, as a resumed one does, goes on from where it went back to: lines at or after the new sample
    move to Train_loss.csv.replaced, so that nothing is lost. Every write is in the file when `write` returns; a line
    that a crash cut short is removed by the next write. Of scalars with one file name the second gets
    Train_loss.2.csv.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._scalars: dict[str, _Scalar] = {}

    def write(self, events: Sequence[Event]) -> None:
        """Append values, a `(name, value, sample)` each. Raises OSError where the disk does not take them."""
        for name, value, sample in events:
            scalar = self._scalars.get(name)
            if scalar is None or not scalar.path.exists():
                scalar = self._scalars[name] = self._open(name)
            if sample <= scalar.last:
                _move_aside(scalar, sample)
            _append(scalar, f"{sample},{value!r}\n".encode())
            scalar.last = sample

    def close(self) -> None:
        """Nothing is open between two writes."""

    def _open(self, name: str) -> _Scalar:
        header = _header(name)
        stem = re.sub(r"[^A-Za-z0-9.=+-]", "_", name)
        for number in count(1):
            path = self._folder / (f"{stem}.csv" if number == 1 else f"{stem}.{number}.csv")
            if not path.exists() or path.stat().st_size == 0:
                path.write_bytes(header)
            if path.read_bytes().startswith(header):
                break
        values = _values(path)
        size = len(header) + sum(map(len, values))
        return _Scalar(path, max(map(_sample_of, values), default=-1), size)


def _append(scalar: _Scalar, line: bytes) -> None:
    with scalar.path.open("r+b", buffering=0) as file:
        file.truncate(scalar.size)
        file.seek(scalar.size)
        if file.write(line) != len(line):
            raise OSError(f"no space left for {scalar.path}")
    scalar.size += len(line)


def _move_aside(scalar: _Scalar, sample: int) -> None:
    """Move the values at `sample` and after it to the file next to this one."""
    with scalar.path.open("rb") as file:
        header = file.readline()
    values = _values(scalar.path)
    kept = [line for line in values if _sample_of(line) < sample]
    with scalar.path.with_name(f"{scalar.path.name}.replaced").open("ab") as replaced:
        replaced.write(b"".join(line for line in values if _sample_of(line) >= sample))
    fresh = scalar.path.with_name(f"{scalar.path.name}.tmp")
    fresh.write_bytes(header + b"".join(kept))
    scalar.size = fresh.stat().st_size
    scalar.last = max(map(_sample_of, kept), default=-1)
    fresh.replace(scalar.path)


def _values(path: Path) -> list[bytes]:
    """The lines after the header, up to the first that is not whole."""
    with path.open("rb") as file:
        file.readline()
        return list(takewhile(_VALUE.fullmatch, file))


def _sample_of(line: bytes) -> int:
    return int(line.partition(b",")[0])


def _header(name: str) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(["sample", name])
    return text.getvalue().encode()
