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

from experiments.benchmarks import engine_memory, engine_step_time
from experiments.benchmarks.engine_plots import draw
from experiments.benchmarks.engine_step_time import BASELINE, REDUNDANCY
from experiments.common import machine
from experiments.common.command_line import Parser, positive
from experiments.common.errors import InputError, refuse
from experiments.common.launching import refuse_launchers
from experiments.common.results import OUTPUT, check_writable, read_json, write_json
from experiments.tasks.sizes import SIZES

__all__ = ["StepTime", "main", "summarise"]

_NAME = "bench_engine"


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
    findings = _time_finding(summary), _memory_finding(memory["systems"])
    content = {
        "machine": machine.describe(),
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
    draw(content, options.output / f"{_NAME}.png")
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


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = Parser(
        "experiments.benchmarks.engine",
        "Measures the engine's steps beside torch's, and its memory by ZeRO stage.",
        "minutes",
    )
    parser.add_argument("--model", choices=tuple(SIZES), default="small", help="which BERT")
    parser.add_argument("--batch-size", type=positive, default=8, metavar="N", help="sequences a rank")
    parser.add_argument("--rounds", type=positive, default=12, metavar="N", help="turns of every system")
    parser.add_argument("--ranks", type=positive, default=2, metavar="N", help="for step times")
    parser.add_argument("--memory-ranks", type=positive, default=4, metavar="N", help="for memory")
    parser.add_argument("--output", type=Path, default=OUTPUT, metavar="DIR", help="for the picture and the JSON")
    options = parser.parse_args(arguments)
    if options.ranks < 2:
        raise InputError("--ranks 1: steps are compared with DistributedDataParallel's, which take 2 ranks or more")
    refuse_launchers()
    check_writable(options.output, "--output")
    return options


if __name__ == "__main__":
    sys.exit(main())
