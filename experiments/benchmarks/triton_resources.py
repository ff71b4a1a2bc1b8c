"""Registers, spills and shared memory of every Triton kernel on every GPU it is compiled for; no GPU is needed."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import triton

from experiments.benchmarks.triton_compiling import compiling_for, resources
from experiments.common.command_line import Parser
from experiments.common.errors import InputError, refuse
from experiments.common.results import OUTPUT, check_writable, write_json
from thinwire.sparse_attn.block_index import Pattern
from thinwire.sparse_attn.kernels.triton import launch, packed
from thinwire.sparse_attn.layouts.named import Custom

__all__ = ["compile_attention", "compile_packed", "main", "table"]

MASKS = ("none", "BERT", "all")
"""Nothing; padding and dropout, as BERT trains; these, causal, and a learned bias of pairs."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Compiles, prints the table of docs/measurements, writes JSON after every case; the exit code."""
    try:
        options = _parse(sys.argv[1:] if arguments is None else arguments)
    except InputError as error:
        return refuse("experiments.benchmarks.triton_resources", error)
    rows: list[dict[str, Any]] = []
    for capability in options.capabilities:
        for dtype in (torch.bfloat16, torch.float32):
            for width in options.widths:
                for masks in options.masks:
                    with compiling_for(*divmod(capability, 10)) as kernels:
                        compile_attention(dtype, 64, width, masks)
                    rows += _rows(kernels, capability, dtype, f"width {width}, masks: {masks}")
                    _write(options.output, rows)
            with compiling_for(*divmod(capability, 10)) as kernels:
                compile_packed(dtype, 128)
            rows += _rows(kernels, capability, dtype, "blocks of 128")
            _write(options.output, rows)
    print(table(rows))
    print(f"Written: {options.output}")
    return 0


def compile_attention(dtype: torch.dtype, block: int, width: int, masks: str) -> None:
    """Launch forward and backward, with rows and columns long enough to be shared out where `masks` is "all"."""
    number = 34 * max(1, 64 // block) + 1 if masks == "all" else 4
    blocks = torch.eye(number, dtype=torch.bool)
    blocks[-1], blocks[:, 0] = True, True
    length = number * block
    q, k, v, d_out = torch.zeros(4, 1, 1, length, width, dtype=dtype)
    every = masks == "all"
    pattern = Pattern(
        Custom(blocks, block).index(length),
        None if masks == "none" else torch.zeros(1, length),
        torch.zeros(1, 1, length, length) if every else None,
        torch.zeros(1, dtype=torch.int64),
        causal=every,
        scale=0.125,
        dropout_p=0.0 if masks == "none" else 0.1,
    )
    out, lse = launch.forward(q, k, v, pattern)
    launch.backward(d_out, q, k, v, out, lse, pattern, needs_d_bias=every)


def compile_packed(dtype: torch.dtype, block: int) -> None:
    """Launch products and softmaxes of packed blocks, with every mask there is."""
    index = Custom(torch.ones(1, 2, 2).bool(), block).index(2 * block)
    a = torch.zeros(1, 1, 2 * block, 64, dtype=dtype)
    blocks = packed.sampled(a, a.mT, index)
    for transposed in (False, True):
        packed.expanded(blocks, a, index, transposed=transposed)
    packed.softmax(blocks, 0.1, torch.zeros(1, 4, block, block), torch.zeros(1, 2 * block), index, blocks)
    packed.softmax_backward(blocks, blocks, index)


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows as Markdown, a line a kernel and case: registers / spilled words / KB of shared memory by capability."""
    capabilities = sorted({row["capability"] for row in rows})
    cells: dict[tuple[str, str, str], dict[int, str]] = {}
    for row in rows:
        cell = f"{row['registers']} / {row['spills']} / {row['shared'] / 1024:.0f}"
        cells.setdefault((row["kernel"], row["dtype"], row["case"]), {})[row["capability"]] = cell
    heads = " | ".join(f"sm_{one}" for one in capabilities)
    lines = [f"| kernel | dtype | case | {heads} |", "| --- " * (3 + len(capabilities)) + "|"]
    for key, found in cells.items():
        lines.append(f"| {' | '.join((*key, *(found.get(one, '') for one in capabilities)))} |")
    return "\n".join(lines)


def _rows(kernels: dict[str, list[Any]], capability: int, dtype: torch.dtype, case: str) -> list[dict[str, Any]]:
    """One row a kernel; of one compiled twice, as a product and its transpose are, the one that spills most."""
    rows = []
    for name, found in kernels.items():
        worst = max(map(resources, found), key=lambda one: (one.spills, one.registers))
        where = {"capability": capability, "kernel": name.removesuffix("_kernel"), "dtype": str(dtype)[6:]}
        rows.append({**where, "case": case, **asdict(worst)})
    return rows


def _write(output: Path, rows: list[dict[str, Any]]) -> None:
    write_json(output, {"triton": triton.__version__, "kernels": rows})


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = Parser(
        "experiments.benchmarks.triton_resources", "Compiles the Triton kernels for GPUs that are not here."
    )
    parser.add_argument("--capabilities", type=int, nargs="+", default=(80, 90, 100), metavar="N", help="80 for sm_80")
    parser.add_argument("--widths", type=int, nargs="+", default=(64, 128), metavar="N", help="of a head")
    parser.add_argument("--masks", nargs="+", choices=MASKS, default=("BERT", "all"), help="what is done to scores")
    output = OUTPUT / "triton_resources.json"
    parser.add_argument("--output", type=Path, default=output, metavar="FILE.json", help="for the measurements")
    options = parser.parse_args(arguments)
    check_writable(options.output.parent, "--output")
    return options


if __name__ == "__main__":
    sys.exit(main())
