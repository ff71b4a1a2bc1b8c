"""What machine made the numbers: enough to compare them by, nothing that names the machine."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

__all__ = ["cores", "describe", "in_words"]


def cores() -> int:
    """CPU cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def describe() -> dict[str, str | int]:
    """CPU model, usable cores, and the versions that matter."""
    return {
        "cpu": _cpu_model(),
        "cores": cores(),
        "system": platform.system(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def in_words(made_on: Mapping[str, Any]) -> str:
    """What `describe` gave, for the foot of a picture: "made on AMD EPYC, 2 cores"."""
    count = made_on["cores"]
    return f"made on {made_on['cpu']}, {count} {'core' if count == 1 else 'cores'}"


def _cpu_model() -> str:
    table = Path("/proc/cpuinfo")
    if table.is_file():
        for line in table.read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
