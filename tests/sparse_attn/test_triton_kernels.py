"""The Triton kernels: in Triton's interpreter against the dense definition, and compiled for GPUs that are not here."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl

from experiments.benchmarks.triton_compiling import compiling_for, resources
from experiments.benchmarks.triton_resources import compile_attention, compile_packed
from tests.sparse_attn import triton_program
from thinwire.sparse_attn.kernels.triton import launch, packed
from thinwire.sparse_attn.layouts.named import Custom

PROGRAM = triton_program.__name__
GROUPS = [name for name, one in vars(triton_program).items() if getattr(one, "__module__", "") == PROGRAM]
GROUPS = [name for name in GROUPS if not name.startswith("_")]
MAKE = {"nothing_leaks": "programs"}
SHARED_MEMORY = 163 << 10  # bytes that a program may have on sm_80


@pytest.fixture(scope="module")
def interpreted(request: pytest.FixtureRequest) -> Iterator[subprocess.Popen[str]]:
    """All groups that are selected in one process: importing torch and Triton takes as long as most of them."""
    specs = [getattr(item, "callspec", None) for item in request.session.items if item.path == Path(__file__)]
    groups = [spec.params["group"] for spec in specs if spec is not None and "group" in spec.params]
    command = [sys.executable, "-m", PROGRAM, *groups]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as program:
        yield program
        program.kill()


@pytest.mark.parametrize(
    "group", [pytest.param(one, marks=getattr(pytest.mark, MAKE.get(one, "kernels"))) for one in GROUPS]
)
def test_in_the_interpreter(interpreted: subprocess.Popen[str], group: str) -> None:
    """Each waits for its own group's line, so that the time a test may take is a group's."""
    said = []
    for line in interpreted.stdout:
        said.append(line)
        if line in (f"{group} held\n", f"{group} failed\n"):
            break
    assert said[-1:] == [f"{group} held\n"], "".join(said)


@pytest.fixture(scope="module")
def compiled() -> Iterator[dict[str, list[Any]]]:
    """What launches have compiled so far for an sm_80 that is not here, by the kernel's name; nothing is run."""
    with compiling_for(8) as kernels:
        yield kernels


@pytest.fixture(scope="module")
def attention(compiled: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """Forward and backward as BERT trains, with padding and dropout."""
    compile_attention(torch.bfloat16, 64, 64, "BERT")
    return compiled


@pytest.mark.kernels
@pytest.mark.parametrize("kernel", ["forward", "queries", "keys"])
def test_attention_for_sm_80_keeps_its_sums_in_registers(attention: dict[str, list[Any]], kernel: str) -> None:
    for one in attention[f"{kernel}_kernel"]:
        used = resources(one)
        assert used.spills == 0
        assert used.shared <= SHARED_MEMORY


@pytest.mark.kernels
def test_packed_blocks_compile_for_sm_80(compiled: dict[str, list[Any]]) -> None:
    """Products and softmaxes of the largest blocks, with every mask there is."""
    for dtype in (torch.bfloat16, torch.float32):
        compile_packed(dtype, 128)
    for kernel in ("sampled", "expanded", "softmax", "softmax_backward"):
        assert len(compiled[f"{kernel}_kernel"]) >= 2
        for one in compiled[f"{kernel}_kernel"]:
            assert resources(one).shared <= SHARED_MEMORY


def test_launches_run_on_the_gpu_that_holds_their_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[torch.device] = []

    @contextmanager
    def current(device: torch.device) -> Iterator[None]:
        entered.append(device)
        yield

    monkeypatch.setattr(torch.cuda, "device", current)
    there = SimpleNamespace(is_cuda=True, device=torch.device("cuda", 1))
    with launch.guard(there):
        assert entered == [there.device]
    with launch.guard(torch.zeros(1)):
        assert len(entered) == 1
    guarded: list[torch.Tensor] = []
    monkeypatch.setattr(launch, "guard", lambda tensor: guarded.append(tensor) or nullcontext())
    q = torch.zeros(1, 1, 0, 16)
    pattern = SimpleNamespace(bias=None)
    launch.forward(q, q, q, pattern)
    launch.backward(q, q, q, q, q, q, pattern, needs_d_bias=False)
    index = Custom(torch.zeros(1, 1, 1, dtype=torch.bool), 16).index(16)
    packed.sampled(q, q.mT, index)
    packed.expanded(torch.zeros(0, 0, 16, 16), q[:0], index, transposed=False)
    packed.softmax(q, 1.0, None, None, index, q)
    packed.softmax_backward(q, q, index)
    assert len(guarded) == 6


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
