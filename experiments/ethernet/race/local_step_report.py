"""What DiLoCo's steps take over those of the inner optimizer alone: at the median, while something is under way, and
over a whole period."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from thinwire.optim.diloco.fragments import Timetable

__all__ = ["print_table", "record", "under_way"]


def under_way(timetable: Timetable) -> list[bool]:
    """Of each step of a turn, whether a fragment leaves after it or is under way behind it. A turn begins when the last
    fragment of a period has come back."""
    every, overlap = timetable.every, timetable.overlap
    steps = range(every + overlap + 1, 2 * every + overlap + 1)
    return [any(timetable.leaving(step - ago) for ago in range(overlap + 1)) for step in steps]


def record(measured: Mapping[str, Any], timetable: Timetable) -> dict[str, Any]:
    """One rate's turns, `alone` and `local` [turns][steps], as multiples of the steps alone.

    Returns:
        `alone`: the median step that sends nothing, in seconds. Over it, `step`: the median of all of DiLoCo's;
        `under_way`: of those that leave a fragment or have one under way; `period`: the median turn, whose steps are
        all of them, over the turn alone that came before it; `by_step`: the median of each step of a turn.
    """
    alone = median(one for turn in measured["alone"] for one in turn)
    local: Sequence[Sequence[float]] = measured["local"]
    busy = [one for turn in local for one, goes in zip(turn, under_way(timetable), strict=True) if goes]
    periods = [sum(ours) / sum(theirs) for ours, theirs in zip(local, measured["alone"], strict=True)]
    return {
        "fill": measured["fill"],
        "megabits": measured["megabits"],
        "alone": alone,
        "step": median(one for turn in local for one in turn) / alone,
        "under_way": median(busy) / alone,
        "period": median(periods),
        "periods": periods,
        "by_step": [median(steps) / alone for steps in zip(*local, strict=True)],
    }


def print_table(setting: Mapping[str, Any]) -> None:
    """A setting's records, a line a rate."""
    megabytes = setting["fragment_bytes"] / 1e6
    print(f"\nwith an overlap of {setting['overlap']} steps: a fragment of {megabytes:.2f} MB, both legs")
    print(f"{'a fragment takes':28} {'Mb/s':>8} {'alone ms':>9} {'median':>7} {'under way':>10} {'period':>7}")
    for one in setting["rates"]:
        takes = "nothing: links unlimited" if one["fill"] is None else f"{one['fill'] * setting['overlap']:g} steps"
        rate = "" if one["megabits"] is None else f"{one['megabits']:.2f}"
        ratios = f"{one['step']:7.3f} {one['under_way']:10.3f} {one['period']:7.3f}"
        print(f"{takes:28} {rate:>8} {1e3 * one['alone']:9.1f} {ratios}")
