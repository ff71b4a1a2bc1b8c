"""What the engine costs and what it saves: step time beside torch's DDP, and memory by ZeRO stage beside the formulas.

Starts its ranks by itself, for each of the two measurements in turn.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from experiments.benchmarks import engine_memory, engine_step_time
from experiments.benchmarks.engine_step_time import BASELINE, REDUNDANCY
from experiments.common import machine
from experiments.common.command_line import Parser, positive
from experiments.common.errors import InputError, refuse
from experiments.common.launching import refuse_launchers
from experiments.common.results import RESULTS, check_writable, read_json, write_json
from experiments.tasks.sizes import SIZES
from experiments.training import plotting
from experiments.training.plotting import QUIET

__all__ = ["StepTime", "main", "summarise"]

_NAME = "bench_engine"
_OURS, _ONEBIT = "#3d6b8f", "#d1495b"


@dataclass(frozen=True)
class StepTime:
    """Of one system: quartiles of milliseconds a step, and of its ratio to DDP in the same round."""

    milliseconds: tuple[float, float, float]
    ratio_to_ddp: tuple[float, float, float]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, prints tables, writes JSON and a picture; the exit code."""
    try:
        options = _parse(sys.argv[1:] if arguments is None else arguments)
    except InputError as error:
        return refuse("experiments.benchmarks.engine", error)
    with tempfile.TemporaryDirectory() as folder:
        times, memory = Path(folder) / "times.json", Path(folder) / "memory.json"
        model = ["--model", options.model]
        turns = ["--rounds", str(options.rounds), "--batch-size", str(options.batch_size)]
        code = engine_step_time.main([*model, *turns, "--ranks", str(options.ranks), "--output", str(times)])
        code = code or engine_memory.main([*model, "--ranks", str(options.memory_ranks), "--output", str(memory)])
        if code:
            return code
        _write_results(options, read_json(times), read_json(memory))
    return 0


def summarise(milliseconds: Mapping[str, Sequence[float]]) -> dict[str, StepTime]:
    """Quartiles of what each system took, round by round; ratios pair rounds, so that slow ones do not count."""
    baseline = np.asarray(milliseconds[BASELINE])
    return {
        name: StepTime(_quartiles(np.asarray(times)), _quartiles(np.asarray(times) / baseline))
        for name, times in milliseconds.items()
    }


def _quartiles(values: Any) -> tuple[float, float, float]:
    low, middle, high = np.quantile(values, [0.25, 0.5, 0.75]).tolist()
    return low, middle, high


def _write_results(options: argparse.Namespace, times: dict[str, Any], memory: dict[str, Any]) -> None:
    summary = summarise(times["milliseconds"])
    made_on = machine.describe()
    findings = _time_finding(summary), _memory_finding(memory["systems"])
    content = {
        "machine": made_on,
        "model": options.model,
        "findings": findings,
        "step_time": {
            **times,
            "sequences_a_rank": options.batch_size,
            "summary": {name: asdict(one) for name, one in summary.items()},
        },
        "memory": memory,
    }
    write_json(options.output / f"{_NAME}.json", content)
    _print_tables(summary, memory)
    print("\n".join(findings))
    _draw(summary, times, memory, findings, options, made_on)
    print(f"Written: {options.output / _NAME}.json and .png", flush=True)


def _time_finding(summary: Mapping[str, StepTime]) -> str:
    one, two = (summary[f"stage {stage}, fused AdamW, overlap_comm"].ratio_to_ddp[1] for stage in (1, 2))
    return (
        f"With overlap_comm ZeRO-1 takes {one:.2f} and ZeRO-2 {two:.2f} of DDP's step time, "
        f"torch's ZeroRedundancyOptimizer {summary[REDUNDANCY].ratio_to_ddp[1]:.2f}"
    )


def _memory_finding(systems: Mapping[str, Mapping[str, float]]) -> str:
    apart = max(abs(one["held"] / one["formula"] - 1) for one in systems.values())
    return f"Every stage holds what its formula says, within {100 * apart:.1f}%"


def _print_tables(summary: Mapping[str, StepTime], memory: Mapping[str, Any]) -> None:
    print(f"{'':38} {'ms a step':>10} {'quartiles':>14} {'of DDP':>8} {'quartiles':>14}")
    for name, one in summary.items():
        low, middle, high = one.milliseconds
        ratio_low, ratio, ratio_high = one.ratio_to_ddp
        print(f"{name:38} {middle:10.1f} {low:6.1f}-{high:7.1f} {ratio:8.3f} {ratio_low:6.3f}-{ratio_high:7.3f}")
    elements = memory["elements"]
    print(f"\n{'bytes an element, ' + str(memory['ranks']) + ' ranks, bf16':38} {'measured':>10} {'formula':>9}")
    for name, one in memory["systems"].items():
        measured, formula = one["held"] / elements, one["formula"] / elements
        print(f"{name:38} {measured:10.3f} {formula:9.3f} {100 * (measured / formula - 1):+7.1f}%")


def _draw(
    summary: Mapping[str, StepTime],
    times: Mapping[str, Any],
    memory: Mapping[str, Any],
    findings: Sequence[str],
    options: argparse.Namespace,
    made_on: Mapping[str, Any],
) -> None:
    figure = Figure(figsize=(14, 5.8))
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.1))
    figure.subplots_adjust(left=0.2, right=0.945, top=0.82, bottom=0.19, wspace=0.2)
    figure.text(0.02, 0.94, findings[0], fontsize=14, fontweight="bold")
    figure.text(0.02, 0.885, findings[1], fontsize=14, fontweight="bold")
    subject = f"BERT-{options.model}, {memory['elements'] / 1e6:.1f} M parameters"
    hardware = f"made on {made_on['cpu']}, {made_on['cores']} cores"
    figure.text(0.02, 0.025, f"{subject}; {hardware}", fontsize=9, color=QUIET)
    _draw_times(left, summary, times["ranks"])
    _draw_memory(right, memory)
    plotting.save(figure, options.output / f"{_NAME}.png")


def _draw_times(panel: Any, summary: Mapping[str, StepTime], ranks: int) -> None:
    for place, (name, one) in enumerate(summary.items()):
        colour = QUIET if name.startswith("torch") else _ONEBIT if "1-bit" in name else _OURS
        low, middle, high = one.ratio_to_ddp
        panel.plot([low, high], [place, place], color=colour, linewidth=7, alpha=0.35, solid_capstyle="butt")
        panel.plot(middle, place, "o", color=colour, markersize=8)
        text = f"{middle:.3f}   {one.milliseconds[1]:.0f} ms"
        panel.annotate(text, (high, place), xytext=(8, 0), textcoords="offset points", va="center", fontsize=9)
    panel.axvline(1, color="black", linewidth=1, linestyle="--")
    lowest = min(one.ratio_to_ddp[0] for one in summary.values())
    highest = max(one.ratio_to_ddp[2] for one in summary.values())
    panel.set_xlim(lowest - 0.03, highest + 0.5 * (highest - lowest))
    panel.set_yticks(range(len(summary)), list(summary))
    panel.invert_yaxis()
    panel.grid(axis="x", alpha=0.25)
    panel.set_xlabel(f"step time on {ranks} ranks, over DDP's in the same round\nmedian and quartiles; less is better")
    panel.spines[["top", "right"]].set_visible(False)


def _draw_memory(panel: Any, memory: Mapping[str, Any]) -> None:
    elements = memory["elements"]
    systems = memory["systems"]
    places = np.arange(len(systems))
    measured = [one["held"] / elements for one in systems.values()]
    formulas = [one["formula"] / elements for one in systems.values()]
    colours = [_ONEBIT if "1-bit" in name else _OURS for name in systems]
    bars = panel.bar(places, measured, width=0.62, color=colours, label="measured: live tensors")
    panel.hlines(formulas, places - 0.42, places + 0.42, color="black", linewidth=1.6, label="formula")
    panel.bar_label(bars, [f"{value:.2f}" for value in measured], padding=4, fontsize=9)
    panel.set_xticks(places, [name.replace(", ", "\n").replace("1-bit Adam", "1-bit Adam\nfrozen") for name in systems])
    panel.tick_params(axis="x", labelsize=9)
    panel.set_ylim(0, 1.12 * max(measured))
    panel.set_ylabel(f"bytes an element on each of {memory['ranks']} ranks, bf16")
    panel.spines["top"].set_visible(False)
    megabytes = panel.secondary_yaxis("right", functions=(lambda y: y * elements / 1e6, lambda y: y * 1e6 / elements))
    megabytes.set_ylabel("MB")
    panel.legend(frameon=False, fontsize=9)


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = Parser(
        "experiments.benchmarks.engine", "Measures the engine's steps beside torch's, and its memory by ZeRO stage."
    )
    parser.add_argument("--model", choices=tuple(SIZES), default="small", help="which BERT")
    parser.add_argument("--batch-size", type=positive, default=8, metavar="N", help="sequences a rank")
    parser.add_argument("--rounds", type=positive, default=12, metavar="N", help="turns of every system")
    parser.add_argument("--ranks", type=positive, default=2, metavar="N", help="for step times")
    parser.add_argument("--memory-ranks", type=positive, default=4, metavar="N", help="for memory")
    parser.add_argument("--output", type=Path, default=RESULTS, metavar="DIR", help="for the picture and the JSON")
    options = parser.parse_args(arguments)
    refuse_launchers()
    check_writable(options.output, "--output")
    return options


if __name__ == "__main__":
    sys.exit(main())
