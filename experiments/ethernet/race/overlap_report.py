"""How much of the communication hides behind backward, at the rate at which both take as long."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from experiments.ethernet.race.contenders import CONTENDERS
from experiments.ethernet.race.findings import ALONE, split_step

__all__ = ["print_table", "records"]


def records(balanced: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """By contender: the rate, `StepBreakdown` at it, and `slowed`, by how much the step is longer than one that sends
    nothing, as a fraction of the time for which the link is busy: encoding and skew included."""
    found = {}
    for name, at_its_rate in balanced.items():
        turns, megabits = at_its_rate["turns"], at_its_rate["megabits"]
        split = split_step(turns[name], turns[ALONE], megabits)
        alone = split_step(turns[ALONE], turns[ALONE], megabits).seconds
        slowed = (split.seconds - alone) / split.link_busy
        found[name] = {"megabits": megabits, **asdict(split), "alone": alone, "slowed": slowed}
    return found


def print_table(contenders: Mapping[str, Mapping[str, Any]]) -> None:
    """In milliseconds a step, each contender at its own rate."""
    print(
        f"\n{'wire as long as backward':28} {'Mb/s':>7} {'alone':>8} {'ms':>8} {'busy':>8} {'asleep':>8} {'hidden':>7}"
    )
    for name, one in contenders.items():
        seconds = (one["alone"], one["seconds"], one["link_busy"], one["wire"] + one["wait"])
        shown = " ".join(f"{1e3 * value:8.1f}" for value in seconds)
        print(f"{CONTENDERS[name].label:28} {one['megabits']:7.1f} {shown} {100 * one['hidden']:6.0f}%")
