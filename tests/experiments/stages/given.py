"""Losses and jobs that the tests of the stages give."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from experiments.stages.__main__ import small_job
from experiments.stages.findings import EXACT_ON, RESUME_ON, RESUMED
from experiments.stages.losses import Job

__all__ = ["losses", "sharded", "small", "write_job"]


def losses(training: list[float], first_step: int = 0, final: float = 1.0) -> dict[str, Any]:
    return {"first_step": first_step, "training": training, "validation": [2.0, final], "validation_steps": [1, 2]}


def small() -> dict[int, dict[str, Any]]:
    """Losses of every small run, all alike."""
    found: dict[int, dict[str, Any]] = {ranks: {} for ranks in (1, 2, 3, 4, 8)}
    for ranks in EXACT_ON:
        found[ranks] = {f"adamw, stage {stage}": losses([4.0, 2.0]) for stage in range(4)}
    for optimizer in RESUMED:
        found[4][f"{optimizer}, saved"] = losses([4.0, 2.0])
        for ranks in RESUME_ON:
            found[ranks][f"{optimizer}, resumed"] = losses([2.0], first_step=1)
    return found


def sharded(zero_1: float = 1.0) -> dict[str, Any]:
    finals = {"unsharded": 1.0, "ZeRO-1": zero_1, "ZeRO-2": 1.0}
    return {
        f"{system}, seed {seed}": losses([1.0], final=final + seed / 10)
        for system, final in finals.items()
        for seed in (0, 1)
    }


def write_job(folder: Path) -> Job:
    """A job of four steps on a little text."""
    text = folder / "text.txt"
    text.write_text("".join(f"line {line} has {line % 7} words and {line % 11} more\n" for line in range(3000)))
    return replace(small_job(4, 4, [text], folder), batch=6, vocabulary=80, freeze_step=2)
