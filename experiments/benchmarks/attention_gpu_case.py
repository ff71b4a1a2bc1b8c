"""One case of the GPU benchmark of attention, in a process of its own: what crashes here loses the rest of this case.

Reads the case as JSON from its argument and prints a line of JSON for every system as soon as it has its figures.
"""

from __future__ import annotations

import importlib
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from experiments.tasks.attention_peers import Attention, compiled_flex_attention
from thinwire.sparse_attn import BigBird, BlockIndex, block_sparse_attention

__all__ = ["FLASH", "FLEX", "HEADS", "OURS", "Case", "Result", "UnavailableError", "systems"]

HEADS = 16
_WARMUP = 3
_CACHE_BYTES = 256 << 20  # more than any GPU's second-level cache holds

OURS = "thinwire"
FLEX = "FlexAttention, compiled"
FLASH = "dense, flash"


@dataclass(frozen=True)
class Case:
    """BigBird over `length` tokens in blocks of `block`, bf16; every system is run `repetitions` times."""

    length: int
    block: int
    head_size: int
    repetitions: int


@dataclass(frozen=True)
class Result:
    """Median milliseconds of one system in one case.

    density: the fraction of all blocks that the sparse ones attend. cold: with nothing in the second-level cache.
    graph: replayed as a CUDA graph. host: how long the processor took to launch it. NaN where it could not be had.
    """

    system: str
    mode: str
    length: int
    block: int
    head_size: int
    density: float
    milliseconds: float
    cold: float = math.nan
    graph: float = math.nan
    host: float = math.nan


class UnavailableError(Exception):
    """Why a system has no figures here."""


def systems(case: Case, index: BlockIndex) -> dict[str, Callable[[], Attention]]:
    """What makes each system; it raises UnavailableError where that cannot be had."""
    return {
        OURS: lambda: _ours(case),
        FLEX: lambda: _flex(case, index, "default"),
        FLASH: lambda: _dense(SDPBackend.FLASH_ATTENTION),
        "dense, cuDNN": lambda: _dense(SDPBackend.CUDNN_ATTENTION),
        "dense, flash-attn": _flash_attn,
        "block_sparse_attn": lambda: _mit_han_lab(case, index),
        "FlexAttention, FLASH": lambda: _flex_flash(case, index),
        "FlexAttention, max-autotune": lambda: _flex(case, index, "max-autotune-no-cudagraphs"),  # tries for a minute
    }


def _ours(case: Case) -> Attention:
    layout = BigBird(HEADS, case.block)
    return lambda q, k, v: block_sparse_attention(q, k, v, layout)


def _flex(case: Case, index: BlockIndex, mode: str, **kernel_options: Any) -> Attention:
    if case.block % 128:
        raise UnavailableError("its tiles are whole blocks of its mask, of 128 tokens")
    return compiled_flex_attention(index, mode=mode, **kernel_options)


def _flex_flash(case: Case, index: BlockIndex) -> Attention:
    _installed("flash_attn")
    _installed("flash_attn.cute")
    if torch.cuda.get_device_capability() < (9, 0):
        raise UnavailableError("it needs sm_90")
    return _flex(case, index, "default", BACKEND="FLASH")


def _dense(backend: SDPBackend) -> Attention:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v)

    return attend


def _flash_attn() -> Attention:
    attend = _installed("flash_attn").flash_attn_func

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = attend(*(one.transpose(1, 2) for one in (q, k, v))).transpose(1, 2)
        return out

    return attention


def _mit_han_lab(case: Case, index: BlockIndex) -> Attention:
    attend = _installed("block_sparse_attn").block_sparse_attn_func
    if case.block != 128:
        raise UnavailableError("it has blocks of 128 tokens only")
    lengths = torch.tensor([0, case.length], dtype=torch.int32, device="cuda")
    kinds = torch.ones(HEADS, dtype=torch.int32, device="cuda")
    mask = index.dense().cuda().expand(HEADS, -1, -1)[None].contiguous()

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rows = (one[0].transpose(0, 1) for one in (q, k, v))
        out: Tensor = attend(*rows, lengths, lengths, kinds, None, mask, case.length, case.length, 0.0)
        return out.transpose(0, 1)[None]

    return attention


def _installed(package: str) -> Any:
    if find_spec(package) is None:
        raise UnavailableError(f"{package} is not installed")
    return importlib.import_module(package)


def measure(case: Case) -> Iterator[dict[str, Any]]:
    """Results of one system after another, and of each that cannot be had why."""
    index = BigBird(HEADS, case.block).index(case.length, device="cuda")
    shape = (1, HEADS, case.length, case.head_size)
    q, k, v, gradient = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    inputs = [one.requires_grad_() for one in (q, k, v)]
    for name, make in systems(case, index).items():
        results, left_out = [], {}
        try:
            attend = make()
            for mode in ("forward", "training"):
                times = _times(_run(attend, inputs, gradient if mode == "training" else None), case.repetitions)
                results.append(Result(name, mode, case.length, case.block, case.head_size, index.density(), **times))
        except UnavailableError as why:
            left_out[name] = str(why)
        except Exception as error:  # one system's fault costs the others nothing
            left_out[name] = f"{type(error).__name__}: {error}"[:300]
        yield {"results": [asdict(one) for one in results], "left_out": left_out}


def _run(attend: Attention, inputs: list[Tensor], gradient: Tensor | None) -> Callable[[], None]:
    def forward() -> None:
        with torch.no_grad():
            attend(*inputs)

    def training() -> None:
        torch.autograd.grad(attend(*inputs), inputs, gradient)

    return forward if gradient is None else training


def _times(run: Callable[[], None], repetitions: int) -> dict[str, float]:
    warm = _medians(run, repetitions, None)
    cold = _medians(run, repetitions, torch.empty(_CACHE_BYTES, dtype=torch.uint8, device="cuda"))
    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        replayed = _medians(graph.replay, repetitions, None)[0]
    except Exception:  # not everything can be captured
        torch.cuda.synchronize()
        replayed = math.nan
    return {"milliseconds": warm[0], "cold": cold[0], "graph": replayed, "host": warm[1]}


def _medians(run: Callable[[], None], repetitions: int, flushed: Tensor | None) -> tuple[float, float]:
    """Milliseconds on the device, and of launching on the host."""
    device, host = [], []
    for repetition in range(_WARMUP + repetitions):
        if flushed is not None:
            flushed.zero_()
        torch.cuda.synchronize()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began = time.perf_counter()
        start.record()
        run()
        end.record()
        launched = time.perf_counter() - began
        torch.cuda.synchronize()
        if repetition >= _WARMUP:
            device.append(start.elapsed_time(end))
            host.append(launched * 1e3)
    return statistics.median(device), statistics.median(host)


if __name__ == "__main__":
    for figures in measure(Case(**json.loads(sys.argv[1]))):
        print(json.dumps(figures), flush=True)
