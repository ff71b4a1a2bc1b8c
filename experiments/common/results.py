"""Writing results so that a reader never finds half a file, and finding out early that it will work."""

from __future__ import annotations

import json
import math
import os
import tempfile
from pathlib import Path
from typing import Any

from experiments.common.errors import InputError

__all__ = ["OUTPUT", "RESULTS", "check_writable", "read_json", "write_json"]

RESULTS = Path(__file__).parents[1] / "results"
"""Where the committed numbers and pictures live."""

OUTPUT = Path(__file__).parents[2] / "runs" / "results"
"""Where experiments write unless `--output` says another folder, so that what is committed stays as it was measured."""


def check_writable(folder: Path, option: str) -> None:
    """Makes the folder if need be and tries to write there.

    Raises:
        InputError: it cannot be made or written; names the command-line `option` to change.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise InputError(
            f"{option} {folder} cannot be written ({error.strerror}): give a folder you may write to"
        ) from error


def read_json(path: Path) -> dict[str, Any]:
    """What `write_json` wrote."""
    content: dict[str, Any] = json.loads(path.read_text())
    return content


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Writes `content`, replacing the file in one go; null stands for numbers that JSON does not know."""
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("w") as file:
        json.dump(_without_nan(content), file, indent=1, allow_nan=False)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def _without_nan(value: Any) -> Any:
    """The same with None for NaN and infinities, at any depth."""
    if isinstance(value, dict):
        return {key: _without_nan(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
