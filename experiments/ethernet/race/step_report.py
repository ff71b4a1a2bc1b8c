"""The step race's results: one record a rate and contender, the sentences that sum them up, and a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from math import isfinite
from statistics import median
from typing import Any

from experiments.ethernet.race.contenders import BASELINE, CONTENDERS, FAIR_BASELINE
from experiments.ethernet.race.findings import ALONE, Turn, speedup, split_step, winning_rate
from experiments.training.reporting import human_bytes

__all__ = ["at_rates", "fairness", "most_waiting", "print_table", "sentences", "winning_rates"]

Record = dict[str, Any]
"""A contender's, at a rate: `StepBreakdown`, speedups over the baselines, bytes counted by thinwire."""


def at_rates(turns: Mapping[str, Mapping[str, Sequence[Turn]]]) -> list[dict[str, Any]]:
    """By link rate, ascending: `megabits` (None if unlimited), and by contender its record."""
    entries = [
        {"megabits": None if key == "None" else int(key), "contenders": _records(by_name, key)}
        for key, by_name in turns.items()
    ]
    return sorted(entries, key=lambda entry: entry["megabits"] or 0)


def _records(turns: Mapping[str, Sequence[Turn]], key: str) -> dict[str, Record]:
    megabits = None if key == "None" else float(key)
    return {
        name: {
            **asdict(split_step(turns[name], turns[ALONE], megabits)),
            "counted_bytes": median(turn["counted_bytes"] for turn in turns[name]),
            "speedup_over_fp32": speedup(turns[name], turns[BASELINE]),
            "speedup_over_bf16": speedup(turns[name], turns[FAIR_BASELINE]),
            "rounds": len(turns[name]),
        }
        for name in turns
        if name != ALONE
    }


def winning_rates(entries: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """For each of ours, the link rate in Mb/s under which its steps are faster than DDP's in bf16."""
    shaped = [entry for entry in entries if entry["megabits"] is not None]
    if not shaped:
        return {}
    ours = [name for name in shaped[0]["contenders"] if CONTENDERS[name].ours]
    return {
        name: winning_rate({entry["megabits"]: entry["contenders"][name]["speedup_over_bf16"] for entry in shaped})
        for name in ours
    }


def most_waiting(entries: Sequence[Mapping[str, Any]], fraction: float) -> Mapping[str, Any]:
    """The rate at which the fp32 baseline's wait is nearest to `fraction` of its step."""
    return min(entries, key=lambda entry: abs(waiting(entry) - fraction))


def waiting(entry: Mapping[str, Any]) -> float:
    """The fraction of the fp32 baseline's step for which its ranks sleep."""
    baseline = entry["contenders"][BASELINE]
    return float((baseline["wire"] + baseline["wait"]) / baseline["seconds"])


def fairness(measured: Mapping[str, Any], megabits: float) -> dict[str, float]:
    """How near torch's own all-reduce comes to the links' rate; `measured` is `line_rate`'s."""
    seconds = median(measured["seconds"])
    line = 8 * measured["bytes_sent"] / (1e6 * megabits)
    return {
        "megabits": megabits,
        "bytes": measured["bytes"],
        "seconds": seconds,
        "fraction_of_line_rate": line / seconds,
    }


def sentences(entries: Sequence[Mapping[str, Any]], winners: Mapping[str, float], fraction: float) -> list[str]:
    """What the race says, in a line each."""
    entry = most_waiting(entries, fraction)
    where = "without shaped links" if entry["megabits"] is None else f"at {entry['megabits']} Mb/s"
    ours = [name for name in entry["contenders"] if CONTENDERS[name].ours]
    best = max(ours, key=lambda name: float(entry["contenders"][name]["speedup_over_fp32"]), default=None)
    if best is None:
        return [f"DDP in fp32 waits {100 * waiting(entry):.0f}% of its step {where}"]
    record = entry["contenders"][best]
    lines = [
        f"{CONTENDERS[best].label}'s steps are {record['speedup_over_fp32']:.1f}x as fast as DDP's in fp32 and "
        f"{record['speedup_over_bf16']:.1f}x as in bf16, {where}, where fp32 waits {100 * waiting(entry):.0f}%"
    ]
    if best in winners:
        lines.append(_winning_sentence(CONTENDERS[best].label, winners[best]))
    return lines


def _winning_sentence(label: str, rate: float) -> str:
    if rate != rate:
        return f"{label} is slower than DDP in bf16 at every rate measured"
    if not isfinite(rate):
        return f"{label} is faster than DDP in bf16 at every rate measured"
    return f"{label} is faster than DDP in bf16 on links slower than {rate:,.0f} Mb/s"


def print_table(entries: Sequence[Mapping[str, Any]]) -> None:
    """Every rate and contender, in milliseconds a step."""
    for entry in entries:
        rate = "unshaped links" if entry["megabits"] is None else f"{entry['megabits']} Mb/s"
        print(f"\n{rate:28} {'ms':>8} {'compute':>8} {'encode':>7} {'wire':>8} {'wait':>7} {'hidden':>7}", end="")
        print(f" {'sent':>9} {'counted':>9} {'x fp32':>7} {'x bf16':>7}")
        for name, one in entry["contenders"].items():
            times = [1e3 * one[share] for share in ("seconds", "compute", "encode", "wire", "wait")]
            hidden = "" if one["hidden"] is None else f"{100 * one['hidden']:.0f}%"
            print(
                f"{CONTENDERS[name].label:28} {times[0]:8.1f} {times[1]:8.1f} {times[2]:7.1f} {times[3]:8.1f} "
                f"{times[4]:7.1f} {hidden:>7} {human_bytes(one['interface_bytes']):>9} "
                f"{human_bytes(one['counted_bytes']):>9} "
                f"{one['speedup_over_fp32']:7.2f} {one['speedup_over_bf16']:7.2f}"
            )
