"""Is block-sparse attention faster and smaller than dense attention, from 512 to 32,768 tokens, and by how much?

Times all systems in turn, measures their peak memory in processes of their own, and finds the longest sequence that
BERT trains on in a fixed memory.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from experiments.common import machine
from experiments.common.command_line import Parser, positive, rate
from experiments.common.errors import InputError, refuse
from experiments.common.peak_memory import check_supported
from experiments.common.results import OUTPUT, check_writable, write_json
from experiments.long_sequences import bert_memory
from experiments.long_sequences.bert_memory import ATTENTIONS, Growth
from experiments.long_sequences.findings import findings, longest_sequences, summarise, timings
from experiments.long_sequences.memory import measure_peaks
from experiments.long_sequences.plots import draw
from experiments.long_sequences.systems import (
    BATCH,
    BLOCK,
    DENSE,
    GATHERED,
    HEAD_SIZE,
    HEADS,
    LAYOUTS,
    MATERIALISED,
    MODES,
    SYSTEMS,
    input_bytes,
)
from experiments.long_sequences.timing import Times, time_systems
from experiments.tasks.sizes import SIZES

__all__ = ["main"]

_NAME = "long_sequences"
_LENGTHS = (512, 1024, 2048, 4096, 8192, 16384, 32768)
_MEMORY_LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768)
_FEWEST_BLOCKS = 4
_TREATMENTS = {"all activations kept": False, "layers recomputed": True}
"""What a training step of BERT does with activations; and whether layers run again in backward."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, prints tables, writes JSON and a picture; the exit code."""
    try:
        options = _parse(sys.argv[1:] if arguments is None else arguments)
        check_supported()
    except InputError as error:
        return refuse("experiments.long_sequences", error)
    torch.set_num_threads(options.threads)
    limits = {DENSE: options.dense_limit, MATERIALISED: options.materialised_limit}
    times = time_systems(options.systems, options.lengths, options.rounds, limits)
    memory = _measure_memory(options.systems, options.memory_lengths, limits, times)
    growths = {
        treatment: _measure_growth(options.model, options.bert_length, checkpointing)
        for treatment, checkpointing in _TREATMENTS.items()
    }
    _write_results(options, times, memory, growths)
    return 0


def _measure_memory(
    systems: Sequence[str], lengths: Sequence[int], limits: Mapping[str, int], times: Times
) -> dict[int, dict[str, dict[str, int]]]:
    """Extra peak bytes by length, system and mode, of what was found to work."""
    memory: dict[int, dict[str, dict[str, int]]] = {}
    for length in lengths:
        for name in systems:
            modes = [mode for mode in MODES if name not in times.unsupported[mode]]
            if modes and length <= limits.get(name, length):
                memory.setdefault(length, {})[name] = measure_peaks(name, length, modes)
        print(f"memory: {length} tokens are done", file=sys.stderr, flush=True)
    return memory


def _measure_growth(model: str, longest: int, checkpointing: bool) -> dict[str, Growth]:
    """How the memory of a training step grows with the length, by attention."""
    # What is kept instead of recomputed costs several times as much.
    longest = longest if checkpointing else longest // 2
    lengths = {
        "dense": [longest * quarters // 4 for quarters in (1, 2, 3, 4)],
        "sparse": [longest, 2 * longest, 4 * longest],
    }
    growths = {}
    for attention in ATTENTIONS:
        measured = {}
        for length in lengths[attention]:
            measured[length] = bert_memory.measure(model, attention, length, checkpointing=checkpointing)
            print(f"BERT's memory: {attention} at {length} tokens is done", file=sys.stderr, flush=True)
        growths[attention] = bert_memory.grow(measured, len(measured) - 2)
    return growths


def _write_results(
    options: argparse.Namespace,
    times: Times,
    memory: dict[int, dict[str, dict[str, int]]],
    growths: dict[str, dict[str, Growth]],
) -> None:
    made_on = machine.describe()
    summary = summarise(times, memory)
    longest = longest_sequences(growths, options.gigabytes)
    found = findings(summary, longest, options.model)
    content = {
        "machine": {**made_on, "threads": options.threads},
        "shape": {"batch": BATCH, "heads": HEADS, "head_size": HEAD_SIZE, "block": BLOCK, "dtype": "float32"},
        "findings": found,
        "bigbird": summary,
        "densities": {
            name: {length: layout.index(length).density() for length in options.lengths}
            for name, layout in LAYOUTS.items()
        },
        "time": timings(times),
        "unsupported": times.unsupported,
        "skipped_from_length": times.skipped,
        "memory": {
            "bytes_of_qkv": {length: input_bytes(length) for length in memory},
            "extra_peak_bytes": memory,
        },
        "longest_sequence": {
            "model": options.model,
            "tokens": longest,
            "growth": {
                treatment: {attention: asdict(growth) for attention, growth in by_attention.items()}
                for treatment, by_attention in growths.items()
            },
        },
    }
    write_json(options.output / f"{_NAME}.json", content)
    _print_tables(content)
    print("\n".join(found))
    draw(content, options.output / f"{_NAME}.png")
    print(f"Written: {options.output / _NAME}.json and .png", flush=True)


def _print_tables(content: Mapping[str, Any]) -> None:
    lengths = list(content["time"]["forward"])
    for mode in MODES:
        print(f"\n{'milliseconds, ' + mode:26}" + "".join(f"{length:>16,}" for length in lengths))
        for name in SYSTEMS:
            cells = [_time_cell(content["time"][mode][length].get(name)) for length in lengths]
            print(f"{name:26}" + "".join(f"{cell:>16}" for cell in cells))
    for mode, refusals in content["unsupported"].items():
        for name, reason in refusals.items():
            print(f"{name}, {mode}: unsupported: {reason}")
    for name, length in content["skipped_from_length"].items():
        print(f"{name}: not run from {length:,} tokens on")
    memory = content["memory"]["extra_peak_bytes"]
    print(f"\n{'extra peak memory over qkv':26}" + "".join(f"{length:>16,}" for length in memory))
    for name in SYSTEMS:
        cells = [_memory_cell(systems.get(name), input_bytes(length)) for length, systems in memory.items()]
        print(f"{name:26}" + "".join(f"{cell:>16}" for cell in cells))
    print(f"\nBigBird, training{'':9}" + "".join(f"{length:>16,}" for length in lengths))
    for name, by_length in content["bigbird"].items():
        print(f"{name.replace('_', ' '):42}" + "".join(f"{length}: {x:.3g}  " for length, x in by_length.items() if x))
    print(f"\nlongest sequence, BERT-{content['longest_sequence']['model']}, one training step of one sequence")
    for treatment, rows in content["longest_sequence"]["tokens"].items():
        for budget, one in rows.items():
            ratio = "" if one["ratio"] is None else f": {one['ratio']:.1f}x"
            print(f"{treatment}, {budget:8} dense {one['dense']:>8,}, BigBird {one['sparse']:>10,}{ratio}")
    print()


def _time_cell(one: Mapping[str, Any] | None) -> str:
    if one is None:
        return "-"
    faster = one["times_faster_than_dense"]
    return f"{1e3 * one['seconds'][1]:.1f}" + ("" if faster is None else f" ({faster:.2f}x)")


def _memory_cell(by_mode: Mapping[str, int] | None, of_inputs: int) -> str:
    return "-" if by_mode is None else " / ".join(f"{extra / of_inputs:.2f}" for extra in by_mode.values())


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = Parser(
        "experiments.long_sequences",
        "Times attention and measures its memory, dense and block-sparse, by length.",
        "about 20 minutes on 2 cores",
    )
    timing = parser.add_argument_group("attention")
    timing.add_argument("--lengths", nargs="+", type=positive, default=_LENGTHS, metavar="N", help="tokens, to time")
    timing.add_argument(
        "--systems", nargs="+", choices=tuple(SYSTEMS), default=tuple(SYSTEMS), metavar="NAME", help=", ".join(SYSTEMS)
    )
    timing.add_argument("--rounds", type=positive, default=9, metavar="N", help="at 4096; more where it is quicker")
    timing.add_argument("--threads", type=positive, default=2, metavar="N", help="of every system")
    timing.add_argument("--dense-limit", type=positive, default=16384, metavar="N", help="longest for dense attention")
    timing.add_argument("--materialised-limit", type=positive, default=4096, metavar="N", help="longest with scores")
    timing.add_argument(
        "--memory-lengths", nargs="+", type=positive, default=_MEMORY_LENGTHS, metavar="N", help="tokens, to measure"
    )
    longest = parser.add_argument_group("longest sequence")
    longest.add_argument("--model", choices=tuple(SIZES), default="base", help="which BERT")
    longest.add_argument(
        "--bert-length", type=positive, default=4096, metavar="N", help="longest measured dense; 4 times that sparse"
    )
    longest.add_argument("--gigabytes", nargs="+", type=rate, default=(24, 40, 80), metavar="GB", help="of memory")
    parser.add_argument("--output", type=Path, default=OUTPUT, metavar="DIR", help="for the picture and the JSON")
    options = parser.parse_args(arguments)
    for name in ("lengths", "memory_lengths"):
        lengths = sorted(set(getattr(options, name)))
        if lengths[0] < _FEWEST_BLOCKS * BLOCK or any(length % BLOCK for length in lengths):
            raise InputError(
                f"--{name.replace('_', '-')} must be multiples of {BLOCK}, at least {_FEWEST_BLOCKS * BLOCK}; "
                f"got {' '.join(map(str, lengths))}"
            )
        setattr(options, name, lengths)
    if options.lengths[0] > options.dense_limit:
        raise InputError(f"--dense-limit {options.dense_limit} must allow one of --lengths, to compare with")
    if missing := {DENSE, "BigBird", GATHERED} - {*options.systems}:
        raise InputError(f"--systems must have {', '.join(sorted(missing))}, which the findings compare")
    if options.bert_length % (8 * BLOCK):
        raise InputError(f"--bert-length {options.bert_length} must be a multiple of {8 * BLOCK}")
    check_writable(options.output, "--output")
    return options


if __name__ == "__main__":
    sys.exit(main())
