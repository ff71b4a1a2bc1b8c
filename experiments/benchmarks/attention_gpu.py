"""Block-sparse attention on a GPU beside compiled FlexAttention on the same blocks and dense flash attention, in bf16.

All take turns within one run; the JSON has every figure, the table the ratios that matter.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from experiments.common import machine
from experiments.common.command_line import Parser, positive
from experiments.common.errors import InputError, refuse
from experiments.common.results import RESULTS, check_writable, write_json
from experiments.tasks.attention_peers import Attention, compiled_flex_attention
from thinwire.sparse_attn import BigBird, block_sparse_attention

__all__ = ["main", "summarise"]

_HEADS = 16
_WARMUP = 3
_OURS, _FLEX, _FLASH = "thinwire", "FlexAttention, compiled", "dense, flash"


@dataclass(frozen=True)
class Result:
    """Median milliseconds of one system. `density`: the fraction of all blocks that the sparse ones attend."""

    system: str
    mode: str
    length: int
    block: int
    head_size: int
    density: float
    milliseconds: float


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, prints a table, writes JSON; the exit code."""
    try:
        options = _parse(sys.argv[1:] if arguments is None else arguments)
    except InputError as error:
        return refuse("experiments.benchmarks.attention_gpu", error)
    results = [
        result
        for head_size in options.head_sizes
        for block in options.blocks
        for length in options.lengths
        for result in _measure(length, block, head_size, options.repetitions)
    ]
    summary = summarise(results)
    _print_table(summary)
    made_on = {**machine.describe(), "gpu": torch.cuda.get_device_name()}
    write_json(
        options.output, {"machine": made_on, "summary": summary, "results": [asdict(result) for result in results]}
    )
    print(f"Written: {options.output}")
    return 0


def summarise(results: Sequence[Result]) -> list[dict[str, Any]]:
    """For each case how many times faster ours is than FlexAttention and dense attention, and the latter by density."""
    cases: dict[tuple[Any, ...], dict[str, Result]] = {}
    for result in results:
        case = (result.head_size, result.block, result.length, result.mode)
        cases.setdefault(case, {})[result.system] = result
    summary = []
    for (head_size, block, length, mode), systems in cases.items():
        ours = systems[_OURS]
        ratios = {
            name: systems[name].milliseconds / ours.milliseconds if name in systems else None
            for name in (_FLEX, _FLASH)
        }
        dense = ratios[_FLASH]
        summary.append(
            {
                "head_size": head_size,
                "block": block,
                "length": length,
                "mode": mode,
                "milliseconds": ours.milliseconds,
                "times_faster_than_flex": ratios[_FLEX],
                "times_faster_than_dense": dense,
                "of_one_over_density": None if dense is None else dense * ours.density,
            }
        )
    return summary


def _measure(length: int, block: int, head_size: int, repetitions: int) -> list[Result]:
    layout = BigBird(_HEADS, block)
    index = layout.index(length, device="cuda")

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return block_sparse_attention(q, k, v, layout)

    def flash(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return F.scaled_dot_product_attention(q, k, v)

    systems: dict[str, Attention] = {_OURS: ours, _FLASH: flash}
    if block % 128 == 0:  # FlexAttention's tiles are whole blocks of its mask
        systems[_FLEX] = compiled_flex_attention(index)
    q, k, v, gradient = (
        torch.randn(1, _HEADS, length, head_size, device="cuda", dtype=torch.bfloat16) for _ in range(4)
    )
    inputs = [one.requires_grad_() for one in (q, k, v)]
    results = []
    for mode in ("forward", "training"):
        runs = {
            name: _run(attend, inputs, gradient if mode == "training" else None) for name, attend in systems.items()
        }
        times = _take_turns(runs, repetitions)
        density = index.density()
        results += [
            Result(name, mode, length, block, head_size, density, milliseconds) for name, milliseconds in times.items()
        ]
    return results


def _run(attend: Attention, inputs: list[Tensor], gradient: Tensor | None) -> Callable[[], None]:
    def forward() -> None:
        with torch.no_grad():
            attend(*inputs)

    def training() -> None:
        torch.autograd.grad(attend(*inputs), inputs, gradient)

    return forward if gradient is None else training


def _take_turns(runs: dict[str, Callable[[], None]], repetitions: int) -> dict[str, float]:
    times: dict[str, list[float]] = {name: [] for name in runs}
    for repetition in range(_WARMUP + repetitions):
        for name, run in runs.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            run()
            end.record()
            torch.cuda.synchronize()
            if repetition >= _WARMUP:
                times[name].append(start.elapsed_time(end))
    return {name: statistics.median(measured) for name, measured in times.items()}


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
    lengths = (4096, 8192, 16384, 32768, 65536)
    parser.add_argument("--lengths", type=positive, nargs="+", default=lengths, metavar="N", help="tokens")
    parser.add_argument(
        "--blocks", type=int, nargs="+", choices=(16, 32, 64, 128), default=(64, 128), help="tokens each"
    )
    parser.add_argument(
        "--head-sizes", type=positive, nargs="+", default=(64, 128), metavar="N", help="width of a head"
    )
    parser.add_argument("--repetitions", type=positive, default=15, metavar="N", help="of every system")
    output = RESULTS / "gpu" / "attention.json"
    parser.add_argument("--output", type=Path, default=output, metavar="FILE.json", help="for the measurements")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        raise InputError("there is no NVIDIA GPU here: on CPUs, use python -m experiments.long_sequences")
    check_writable(options.output, "--output")
    return options


if __name__ == "__main__":
    sys.exit(main())
