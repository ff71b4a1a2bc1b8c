"""How close the fused kernels come to the speed of the memory, and what the same work costs in eager torch.

All peers take turns within one run, so that whatever else the machine does hits them alike; medians are reported.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import re
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from experiments.benchmarks.kernel_contenders import BLOCK_SIZE, Kind, Peer, contenders
from experiments.common import machine
from experiments.common.command_line import Parser, positive
from experiments.common.errors import InputError, refuse
from experiments.common.results import OUTPUT, check_writable, write_json
from thinwire.compress.kernels.loading import compiled_backend

__all__ = ["main"]

_ELEMENTS = {"cpu": 64 << 20, "cuda": 256 << 20}
_OUTPUT = {"cpu": OUTPUT / "bench_kernels.json", "cuda": OUTPUT / "gpu" / "kernels.json"}
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_WARMUP = 2


@dataclass(frozen=True)
class Result:
    """What a peer reached: medians, bandwidth over the fastest copy's and fill's, and how much faster than others."""

    name: str
    kind: Kind
    bytes_per_element: float
    milliseconds: float
    gigabytes_per_second: float
    ratio_to_copy: float
    ratio_to_fill: float
    times_faster_than: dict[str, float]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, prints a table, writes JSON and a picture; the exit code."""
    try:
        options = _parse(sys.argv[1:] if arguments is None else arguments)
    except InputError as error:
        return refuse("experiments.benchmarks.kernels", error)
    peers = contenders(options.device, options.elements)
    results = _summarise(peers, _measure(peers, options.device, options.repetitions), options.elements)
    _print_table(results)
    made_on = _describe(options.device)
    content = {
        "machine": made_on,
        "elements": options.elements,
        "block_size": BLOCK_SIZE,
        "repetitions": options.repetitions,
        "finding": _finding(results),
        "results": [asdict(result) for result in results],
    }
    write_json(options.output, content)
    print(f"{_finding(results)}\nWritten: {options.output}")
    # A machine with a GPU may have neither.
    if all(map(importlib.util.find_spec, ("matplotlib", "rich"))):
        from experiments.benchmarks.kernel_plots import draw

        picture = options.output.with_suffix(".png")
        draw(content, picture)
        print(f"Written: {picture}")
    return 0


def _measure(peers: Sequence[Peer], device: str, repetitions: int) -> list[float]:
    """Median milliseconds of each peer; all take turns."""
    timer = _cuda_milliseconds if device == "cuda" else _cpu_milliseconds
    times: list[list[float]] = [[] for _ in peers]
    for repetition in range(_WARMUP + repetitions):
        for peer, measured in zip(peers, times, strict=True):
            elapsed = timer(peer.run)
            if repetition >= _WARMUP:
                measured.append(elapsed)
    return [statistics.median(measured) for measured in times]


def _cpu_milliseconds(run: Callable[[], None]) -> float:
    start = time.perf_counter()
    run()
    return (time.perf_counter() - start) * 1e3


def _cuda_milliseconds(run: Callable[[], None]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end))


def _summarise(peers: Sequence[Peer], milliseconds: Sequence[float], elements: int) -> list[Result]:
    bandwidths = [
        elements * peer.bytes_per_element / time / 1e6 for peer, time in zip(peers, milliseconds, strict=True)
    ]
    copy, fill = (
        max(bandwidth for peer, bandwidth in zip(peers, bandwidths, strict=True) if peer.kind == kind)
        for kind in ("copy", "fill")
    )
    results = []
    for peer, time_taken, bandwidth in zip(peers, milliseconds, bandwidths, strict=True):
        slower = {
            other.name: other_time / time_taken
            for other, other_time in zip(peers, milliseconds, strict=True)
            if peer.kind == "kernel" and other.kind == "eager" and other.job == peer.job
        }
        ratios = bandwidth / copy, bandwidth / fill
        results.append(Result(peer.name, peer.kind, peer.bytes_per_element, time_taken, bandwidth, *ratios, slower))
    return results


def _print_table(results: Sequence[Result]) -> None:
    print(f"{'':42} {'bytes/element':>13} {'ms':>9} {'GB/s':>8} {'of copy':>8} {'of fill':>8}   faster than eager")
    for result in results:
        faster = ", ".join(f"{factor:.1f}x" for factor in result.times_faster_than.values())
        print(
            f"{result.name:42} {result.bytes_per_element:13.3f} {result.milliseconds:9.2f} "
            f"{result.gigabytes_per_second:8.1f} {result.ratio_to_copy:8.2f} {result.ratio_to_fill:8.2f}   {faster}"
        )


def _finding(results: Sequence[Result]) -> str:
    encode = next(result for result in results if result.name == "sign1 encode")
    factor = max(encode.times_faster_than.values())
    return (
        f"The fused 1-bit encode moves its bytes at {encode.ratio_to_copy:.2f} of the speed of a memory copy, "
        f"{factor:.1f}x faster than DeepSpeed's passes"
    )


def _describe(device: str) -> dict[str, Any]:
    made_on: dict[str, Any] = {**machine.describe(), "threads": torch.get_num_threads()}
    for package in ("numba", "cuda-bindings", "cupy-cuda12x", "cupy-cuda13x"):
        try:
            made_on[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    if device == "cuda":
        made_on["gpu"] = torch.cuda.get_device_name()
        made_on["cuda"] = torch.version.cuda
    return made_on


def _elements(text: str) -> int:
    """A number of elements such as 64M; K, M and G are powers of 1024."""
    match = re.fullmatch(r"(\d+)([KMG]?)", text.upper())
    elements = int(match[1]) * _UNITS[match[2]] if match else 0
    if elements < BLOCK_SIZE or elements % BLOCK_SIZE:
        raise argparse.ArgumentTypeError(f"{text!r} is not a multiple of {BLOCK_SIZE}, such as 64M")
    return elements


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = Parser(
        "experiments.benchmarks.kernels",
        "Measures the kernels against copies of memory and against eager torch.",
        "two minutes",
    )
    parser.add_argument("--device", choices=tuple(_ELEMENTS), default="cpu", help="where")
    parser.add_argument("--elements", type=_elements, metavar="N", help="such as 16M; else 64M on cpu, 256M on cuda")
    parser.add_argument("--repetitions", type=positive, default=15, metavar="N", help="of every peer")
    parser.add_argument("--output", type=Path, metavar="FILE.json", help="else in runs/results")
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        raise InputError("--device cuda needs an NVIDIA GPU and a CUDA build of torch; none was found")
    if options.device == "cuda" and compiled_backend("cuda") is None:
        raise InputError(
            "--device cuda needs NVIDIA's compiler, through cuda-bindings or cupy: pip install cuda-bindings"
        )
    options.elements = options.elements or _ELEMENTS[options.device]
    options.output = options.output or _OUTPUT[options.device]
    check_writable(options.output.parent, "--output")
    return options


if __name__ == "__main__":
    sys.exit(main())
