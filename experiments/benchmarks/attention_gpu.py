"""Block-sparse attention on a GPU beside FlexAttention, dense flash and cuDNN attention, and others that are installed.

Every case runs in a process of its own, and the JSON is written after each: what crashes loses one case. The table has
the ratios that matter; what could not be had is named with its reason.
"""

from __future__ import annotations

import argparse
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
    for length in options.lengths:
        for head_size in options.head_sizes:
            for block in options.blocks:
                case = Case(length, block, head_size, options.repetitions)
                found, missing = run_case([sys.executable, "-m", _CASE], case, end - time.monotonic())
                results += found
                left_out += missing
                summary = summarise(results)
                written = {"machine": made_on, "summary": summary, "left_out": left_out}
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
    if seconds <= 0:
        return [], [{**where, "system": "all", "why": "no time was left: see --seconds"}]
    try:
        ran = subprocess.run([*command, json.dumps(asdict(case))], capture_output=True, text=True, timeout=seconds)
        found = json.loads(ran.stdout.splitlines()[-1]) if ran.returncode == 0 else None
    except (subprocess.TimeoutExpired, ValueError, IndexError) as error:
        return [], [{**where, "system": "all", "why": type(error).__name__}]
    if found is None:
        last = ran.stderr.strip().splitlines()[-1:] or [""]
        return [], [{**where, "system": "all", "why": f"exit code {ran.returncode}: {last[0][:300]}"}]
    missing = [{**where, "system": name, "why": why} for name, why in found["left_out"].items()]
    return [Result(**one) for one in found["results"]], missing


def summarise(results: Sequence[Result]) -> list[dict[str, Any]]:
    """For each case how many times faster ours is than FlexAttention and dense attention, and the latter by density."""
    cases: dict[tuple[Any, ...], dict[str, Result]] = {}
    for result in results:
        case = (result.head_size, result.block, result.length, result.mode)
        cases.setdefault(case, {})[result.system] = result
    summary = []
    for (head_size, block, length, mode), systems in cases.items():
        if OURS not in systems:
            continue
        ours = systems[OURS]
        ratios = {
            name: systems[name].milliseconds / ours.milliseconds if name in systems else None for name in (FLEX, FLASH)
        }
        dense = ratios[FLASH]
        summary.append(
            {
                "head_size": head_size,
                "block": block,
                "length": length,
                "mode": mode,
                "milliseconds": ours.milliseconds,
                "times_faster_than_flex": ratios[FLEX],
                "times_faster_than_dense": dense,
                "of_one_over_density": None if dense is None else dense * ours.density,
            }
        )
    return summary


def _print_table(summary: Sequence[dict[str, Any]]) -> None:
    print(f"{'head':>5} {'block':>5} {'tokens':>7} {'':9} {'ms':>9} {'x Flex':>7} {'x dense':>8} {'of 1/density':>13}")
    for case in summary:
        ratios = [
            "" if case[name] is None else f"{case[name]:.2f}"
            for name in ("times_faster_than_flex", "times_faster_than_dense", "of_one_over_density")
        ]
        where = f"{case['head_size']:5} {case['block']:5} {case['length']:7} {case['mode']:9}"
        print(f"{where} {case['milliseconds']:9.3f} {ratios[0]:>7} {ratios[1]:>8} {ratios[2]:>13}")


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
        "--seconds", type=positive, default=450, metavar="N", help="no case goes on for longer than this from the start"
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
