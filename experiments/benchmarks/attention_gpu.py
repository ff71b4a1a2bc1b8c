"""Block-sparse attention on a GPU beside FlexAttention, dense flash and cuDNN attention, and others that are installed.

Every case runs in a process of its own, and the JSON is written after each: what crashes loses the rest of one case.
The table has the ratios that matter; what could not be had is named with its reason.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from experiments.benchmarks.attention_gpu_case import FLASH, FLEX, OURS, Case, Result
from experiments.common import machine
from experiments.common.command_line import Parser, positive
from experiments.common.errors import InputError, refuse
from experiments.common.results import OUTPUT, check_writable, write_json

__all__ = ["main", "run_case", "summarise"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, prints a table, writes JSON; the exit code: 1 where no case gave figures."""
    try:
        options = _parse(sys.argv[1:] if arguments is None else arguments)
    except InputError as error:
        return refuse("experiments.benchmarks.attention_gpu", error)
    made_on = {**machine.describe(), "gpu": torch.cuda.get_device_name()}
    results: list[Result] = []
    left_out: list[dict[str, Any]] = []
    end = time.monotonic() + options.seconds
    shapes = list(itertools.product(options.lengths, options.head_sizes, options.blocks))
    for number, (length, head_size, block) in enumerate(shapes):
        share = (end - time.monotonic()) / (len(shapes) - number)
        found, missing = run_case(
            [sys.executable, "-m", _CASE], Case(length, block, head_size, options.repetitions), share
        )
        results += found
        left_out += missing
        written = {"machine": made_on, "summary": summarise(results), "left_out": left_out}
        write_json(options.output, {**written, "results": [asdict(one) for one in results]})
    _print_table(summarise(results))
    for one in left_out:
        print("Left out:", *one.values())
    print(f"Written: {options.output}")
    return 0 if results else 1


_CASE = "experiments.benchmarks.attention_gpu_case"


def run_case(command: list[str], case: Case, seconds: float) -> tuple[list[Result], list[dict[str, Any]]]:
    """Results of a case, measured by `command` within `seconds`, and what was left out of it and why."""
    where = {"length": case.length, "block": case.block, "head_size": case.head_size}
    late = "no time was left: see --seconds"
    if seconds <= 0:
        return [], [{**where, "system": "all", "why": late}]
    try:
        ran = subprocess.run([*command, json.dumps(asdict(case))], capture_output=True, text=True, timeout=seconds)
        last = ran.stderr.strip().splitlines()[-1:] or [""]
        output, why = ran.stdout, f"exit code {ran.returncode}: {last[0][:300]}" if ran.returncode else ""
    except subprocess.TimeoutExpired as error:
        output, why = (error.stdout or b"").decode(), late
    lines = [json.loads(line) for line in output.splitlines(keepends=True) if line[0] == "{" and line[-1] == "\n"]
    results = [Result(**one) for line in lines for one in line["results"]]
    missing = [{**where, "system": name, "why": reason} for line in lines for name, reason in line["left_out"].items()]
    if why or not lines:
        missing.append({**where, "system": "the rest" if lines else "all", "why": why or "it printed no figures"})
    return results, missing


def summarise(results: Sequence[Result]) -> list[dict[str, Any]]:
    """For each case how many times faster ours is than FlexAttention and dense attention, the latter by density; as
    launched one by one, and as CUDA graphs, where the host's time to launch plays no part."""
    cases: dict[tuple[Any, ...], dict[str, Result]] = {}
    for result in results:
        case = (result.head_size, result.block, result.length, result.mode)
        cases.setdefault(case, {})[result.system] = result
    summary = []
    for (head_size, block, length, mode), systems in cases.items():
        if OURS not in systems:
            continue
        ours = systems[OURS]
        flex, dense = (systems.get(name) for name in (FLEX, FLASH))
        summary.append(
            {
                "head_size": head_size,
                "block": block,
                "length": length,
                "mode": mode,
                "milliseconds": ours.milliseconds,
                "times_faster_than_flex": flex and flex.milliseconds / ours.milliseconds,
                "times_faster_than_dense": dense and dense.milliseconds / ours.milliseconds,
                "of_one_over_density": dense and dense.milliseconds / ours.milliseconds * ours.density,
                "graph_milliseconds": ours.graph,
                "graph_times_faster_than_flex": flex and flex.graph / ours.graph,
                "graph_times_faster_than_dense": dense and dense.graph / ours.graph,
            }
        )
    return summary


_COLUMNS = {
    "milliseconds": "ms",
    "times_faster_than_flex": "x Flex",
    "times_faster_than_dense": "x dense",
    "of_one_over_density": "of 1/density",
    "graph_milliseconds": "graph, ms",
    "graph_times_faster_than_flex": "x Flex",
    "graph_times_faster_than_dense": "x dense",
}


def _print_table(summary: Sequence[dict[str, Any]]) -> None:
    print(f"{'head':>5} {'block':>5} {'tokens':>7} {'':9}", *(f"{title:>12}" for title in _COLUMNS.values()))
    for case in summary:
        figures = ("" if case[name] is None else f"{case[name]:.3f}" for name in _COLUMNS)
        where = f"{case['head_size']:5} {case['block']:5} {case['length']:7} {case['mode']:9}"
        print(where, *(f"{figure:>12}" for figure in figures))


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = Parser("experiments.benchmarks.attention_gpu", "Times block-sparse attention on the GPU present.")
    lengths = (4096, 16384, 65536)
    parser.add_argument("--lengths", type=positive, nargs="+", default=lengths, metavar="N", help="tokens")
    parser.add_argument(
        "--blocks", type=int, nargs="+", choices=(16, 32, 64, 128), default=(64, 128), help="tokens each"
    )
    parser.add_argument(
        "--head-sizes", type=positive, nargs="+", default=(64, 128), metavar="N", help="width of a head"
    )
    parser.add_argument("--repetitions", type=positive, default=15, metavar="N", help="of every system")
    parser.add_argument(
        "--seconds",
        type=positive,
        default=450,
        metavar="N",
        help="all cases together: each may take its share of what is left",
    )
    output = OUTPUT / "gpu" / "attention.json"
    parser.add_argument("--output", type=Path, default=output, metavar="FILE.json", help="for the measurements")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        raise InputError("there is no NVIDIA GPU here: on CPUs, use python -m experiments.long_sequences")
    check_writable(options.output.parent, "--output")
    return options


if __name__ == "__main__":
    sys.exit(main())
