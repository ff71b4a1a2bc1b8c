"""The Triton kernels: in Triton's interpreter against the dense definition, and compiled for GPUs that are not here."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from thinwire.sparse_attn.kernels.triton import launch, packed
from thinwire.sparse_attn.layouts.named import Custom
from thinwire.sparse_attn.pattern import Pattern

GROUPS = ("joined_and_split_blocks", "masks_and_dropout", "long_rows", "nothing_leaks", "packed_blocks")
SHARED_MEMORY = 163 << 10  # bytes that a program may have on sm_80
NO_DEVICE = -1  # Triton keeps what it compiled by device: no real one must get this


@pytest.fixture(scope="module")
def interpreted() -> subprocess.CompletedProcess[str]:
    """All groups in one process: importing torch and Triton takes as long as most of them."""
    command = [sys.executable, "-m", "tests.sparse_attn.kernels.triton_program"]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.mark.parametrize("group", GROUPS)
def test_in_the_interpreter(interpreted: subprocess.CompletedProcess[str], group: str) -> None:
    assert interpreted.returncode == 0, interpreted.stderr
    assert f"{group} held" in interpreted.stdout.splitlines(), interpreted.stderr


@pytest.fixture(scope="module")
def compiled() -> Iterator[dict[str, list[Any]]]:
    """What launches have compiled so far for an sm_80 that is not here, by the kernel's name; nothing is run."""
    kernels: dict[str, list[Any]] = {}
    run = JITFunction.run

    def compile_only(function, *arguments, grid, warmup, **settings):
        kernel = run(function, *arguments, grid=grid, warmup=True, **settings)
        kernels.setdefault(function.__name__, []).append(kernel)
        return kernel

    driver.set_active(
        SimpleNamespace(
            get_current_device=lambda: NO_DEVICE,
            get_current_stream=lambda device: 0,
            get_current_target=lambda: GPUTarget("cuda", 80, 32),
        )
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JITFunction, "run", compile_only)
        yield kernels
    driver.set_active(None)  # whoever comes next finds the machine's own


@pytest.fixture(scope="module")
def attention(compiled: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """Forward and backward with every mask there is, over rows and columns long enough to be shared out."""
    blocks = torch.eye(140, dtype=torch.bool)
    blocks[-1], blocks[:, 0] = True, True
    q, k, v, d_out = torch.randn(4, 1, 1, 2240, 64, dtype=torch.bfloat16)
    index, seed = Custom(blocks, 16).index(2240), torch.zeros(1, dtype=torch.int64)
    biases = torch.zeros(1, 2240), torch.zeros(1, 1, 2240, 2240)
    pattern = Pattern(index, *biases, seed, causal=True, scale=0.125, dropout_p=0.1)
    out, lse = launch.forward(q, k, v, pattern)
    launch.backward(d_out, q, k, v, out, lse, pattern, needs_d_bias=True)
    return compiled


@pytest.mark.parametrize("kernel", ["forward", "merge", "queries", "keys", "add_parts"])
def test_compiles_for_sm_80(attention: dict[str, list[Any]], kernel: str) -> None:
    fits_sm_80(attention[f"{kernel}_kernel"])


def test_packed_blocks_compile_for_sm_80(compiled: dict[str, list[Any]]) -> None:
    """Products and softmaxes of the largest blocks, with every mask there is."""
    index = Custom(torch.ones(1, 2, 2).bool(), 128).index(256)
    for dtype in (torch.bfloat16, torch.float32):
        a = torch.randn(1, 1, 256, 64, dtype=dtype)
        blocks = packed.sampled(a, a.mT, index)
        for transposed in (False, True):
            packed.expanded(blocks, a, index, transposed=transposed)
        packed.softmax(blocks, 0.1, torch.zeros(1, 4, 128, 128), torch.zeros(1, 256), index, blocks)
        packed.softmax_backward(blocks, blocks, index)
    for kernel in ("sampled", "expanded", "softmax", "softmax_backward"):
        assert len(compiled[f"{kernel}_kernel"]) >= 2
        fits_sm_80(compiled[f"{kernel}_kernel"])


def fits_sm_80(kernels: list[Any]) -> None:
    for one in kernels:
        assert one.asm["cubin"]
        assert one.metadata.shared <= SHARED_MEMORY


class Pair(NamedTuple):
    first: Any
    second: Any


def turned() -> type[tuple[Any, ...]]:
    class Pair(NamedTuple):
        second: Any
        first: Any

    return Pair


@triton.jit
def subtract_kernel(pair, target):
    tl.store(target, pair.first - pair.second)


def test_code_compiled_earlier_is_not_taken_for_fields_in_another_order(compiled: dict[str, list[Any]]) -> None:
    target = torch.empty(1, dtype=torch.int32)
    for pair in (Pair(5, 3), Pair(7, 2), turned()(3, 5)):
        subtract_kernel.device_caches.clear()  # as a new process would
        subtract_kernel[(1,)](pair, target)
    hashes = [one.hash for one in compiled["subtract_kernel"]]
    assert hashes[0] == hashes[1] != hashes[2]
