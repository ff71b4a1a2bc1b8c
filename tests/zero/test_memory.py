"""Bytes by accounting: every storage once, under its category, whatever holds it; and the formulas beside it."""

from __future__ import annotations

import gc
import threading
import weakref
from collections import deque
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from experiments.common.peak_memory import process_tensor_bytes
from tests.launching import on_threads
from tests.refusing import refused
from tests.zero.training import ADAMW, build
from thinwire.comm import Communicator
from thinwire.zero.bucket_layout import model_state_formula
from thinwire.zero.memory import MemoryReport, in_own_storage, live_tensor_bytes


def on_cpu(*roots: Any) -> dict[str, int]:
    held = live_tensor_bytes(*roots)
    assert {device for _, device in held} <= {"cpu"}
    return {category: nbytes for (category, _), nbytes in held.items()}


def test_a_module_and_its_optimizer() -> None:
    model = nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3))
    optimizer = torch.optim.Adam(model.parameters())
    elements = 5 * 3 + 3 + 3 + 3
    held = {"weights": 4 * elements, "buffers": 4 * (3 + 3) + 8}
    assert on_cpu(model, optimizer) == held
    model(torch.randn(4, 5)).sum().backward()
    optimizer.step()
    held |= {"gradients": 4 * elements, "optimizer state": 8 * elements + 4 * 4}  # a step number of each of four
    assert on_cpu(optimizer, model) == held
    assert on_cpu(optimizer)["weights"] == 4 * elements


def test_tied_weights_and_views_count_once_and_whole() -> None:
    flat = torch.zeros(100, dtype=torch.bfloat16)
    model = nn.Linear(4, 4, bias=False)
    model.weight.data = flat[10:26].view(4, 4)
    model.tied = model.weight
    assert on_cpu(model, flat[:1], {"another": flat.view(10, 10)}) == {"weights": 200}
    model.weight.data = in_own_storage(flat[84:].view(4, 4))
    assert on_cpu(flat[:1], model) == {"weights": 200}


@dataclass
class Slotted:
    __slots__ = ("inside", "unset")
    inside: Any


class Holder:
    def __init__(self) -> None:
        self.worker_residual = torch.zeros(3)
        self._masters = [SimpleNamespace(weights=torch.zeros(5, dtype=torch.float64))]
        self.anything = deque([(torch.zeros(7, dtype=torch.int8), {1: frozenset([torch.zeros(2)])})])
        self.me = self
        self.slotted = Slotted(torch.zeros(1, dtype=torch.uint8))
        hidden = torch.zeros(1000)
        self.function = lambda: hidden
        self.method = self.run
        self.kind = Holder
        self.module = torch
        self.weak = weakref.ref(self.worker_residual)
        self.grad_accumulators = {"a": torch.zeros(11)}

    def run(self) -> None: ...


def test_any_object_is_walked_and_cycles_end() -> None:
    assert on_cpu(Holder()) == {"master weights": 40, "gradients": 44, "residuals": 12, "other": 7 + 8 + 1}


@on_threads(3)
def test_communicators_are_left_out(comm: Communicator) -> None:
    comm.secret = torch.zeros(100)  # type: ignore[attr-defined]
    output = torch.zeros(comm.size * 5)
    work = comm.all_gather(output, torch.ones(5), async_op=True)
    held = on_cpu([comm, work, output])
    work.wait()
    assert held == {"other": 4 * 15}


def test_nothing_without_memory_counts() -> None:
    assert live_tensor_bytes(torch.empty(0), torch.empty(10**9, device="meta"), None, 3, "x", torch.Size([3])) == {}
    assert live_tensor_bytes() == {}
    with FakeTensorMode():
        assert live_tensor_bytes(torch.zeros(100), torch.zeros(100, device="cuda")) == {}


class Wrapped(Tensor):
    """A tensor subclass without memory of its own, as DTensor is."""

    @staticmethod
    def __new__(cls, inner: Tensor) -> Wrapped:
        made = Tensor._make_wrapper_subclass(cls, (1000,), dtype=inner.dtype, requires_grad=True)
        made.inner = inner
        return made

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner"], None

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise NotImplementedError(f"{func} is not needed to count memory")


@pytest.mark.filterwarnings("ignore:Sparse CS[RC] tensor support is in beta state")
def test_tensors_made_of_others() -> None:
    assert on_cpu(Wrapped(torch.zeros(13))) == {"other": 52}
    embedding = nn.Embedding(50, 4, sparse=True)
    embedding(torch.tensor([3, 7])).sum().backward()
    assert on_cpu(embedding) == {"weights": 800, "gradients": 2 * 8 + 2 * 16}
    rows, columns, values = torch.tensor([0, 2, 2, 3]), torch.tensor([0, 1, 1]), torch.ones(3)
    for compressed, shape in ((torch.sparse_csr_tensor, (3, 2)), (torch.sparse_csc_tensor, (2, 3))):
        sparse = compressed(rows, columns, values, shape, check_invariants=True)
        assert on_cpu(sparse) == {"other": 4 * 8 + 3 * 8 + 3 * 4}


@given(shapes=st.lists(st.tuples(st.integers(0, 40), st.sampled_from([torch.float32, torch.bfloat16, torch.int8]))))
def test_the_sum_is_that_of_the_storages(shapes) -> None:
    tensors = [torch.zeros(numel, dtype=dtype) for numel, dtype in shapes]
    views = [tensor[: numel // 2] for tensor, (numel, _) in zip(tensors, shapes, strict=True)]
    expected = sum(tensor.nbytes for tensor in tensors)
    assert sum(on_cpu(views, tensors).values()) == expected
    assert sum(on_cpu(dict(enumerate(views)), tuple(reversed(tensors))).values()) == expected


def test_the_process_knows_its_tensors() -> None:
    gc.collect()  # what earlier tests left must not go away in between
    before = process_tensor_bytes().get("cpu", 0)
    kept = torch.zeros(1_000_003, dtype=torch.uint8)
    views = [kept[:5], kept.view(-1)]
    assert process_tensor_bytes()["cpu"] - before == 1_000_003
    del kept, views
    assert process_tensor_bytes().get("cpu", 0) == before


class Proxy:
    """Pretends to be of another class, as mocks and lazy modules do, by code of its own."""

    __slots__ = ("kind",)

    @property
    def __class__(self):
        raise AssertionError("an object's own code has run")


def test_objects_and_threads_are_left_alone_by_the_search_for_tensors() -> None:
    """CPython cannot resize a tuple that another object refers to, as a list of all objects does."""
    proxy = Proxy()
    proxy.kind = Tensor
    long_to_search = [[] for _ in range(300_000)]
    failures: list[BaseException] = []
    ended = threading.Event()

    def fill_tuples() -> None:
        try:
            while not ended.is_set():
                assert len(tuple(number for number in range(5000))) == 5000
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=fill_tuples)
    thread.start()
    for _ in range(10):
        process_tensor_bytes()
    ended.set()
    thread.join()
    assert failures == []
    del long_to_search


@given(parameters=st.integers(0, 10**12), ranks=st.integers(1, 10**4))
def test_formulas(parameters: int, ranks: int) -> None:
    def each(stage: int, **options: Any) -> float:
        return sum(model_state_formula(stage, parameters, ranks, **options).values())

    fp32 = {"element_bytes": 4}
    for expected, measured in [
        (16, each(0)),
        (4 + 12 / ranks, each(1, element_bytes=2)),
        (2 + 14 / ranks, each(2)),
        (16 / ranks, each(3)),
        (16, each(0, **fp32)),
        (8 + 8 / ranks, each(1, **fp32)),
        (4 + 12 / ranks, each(2, **fp32)),
        (16 / ranks, each(3, **fp32)),
        (8 + 4 / ranks, each(1, state_bytes=4, **fp32)),
    ]:
        assert measured == pytest.approx(parameters * expected)
    for wrong in ({"stage": 4}, {"stage": 1, "element_bytes": 1}):
        refused(ValueError, "formula", model_state_formula, **wrong, parameters=1, world_size=1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stage", [0, 1, 2])
@on_threads(3)
def test_sharded_optimizers_hold_what_the_formula_says(comm: Communicator, stage: int, dtype: torch.dtype) -> None:
    """To 3%: buckets are padded, and a step number is kept for each parameter."""
    model = nn.Sequential(nn.Linear(91, 170), nn.Tanh(), nn.Linear(170, 60))
    optimizer = build(comm, model, stage, **ADAMW, param_dtype=dtype, block_size=16, bucket_bytes=8000)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(3, 91, dtype=dtype)).float().sum().backward()
        optimizer.end_backward()
        optimizer.step()
    parameters = sum(parameter.numel() for parameter in model.parameters())
    formula = model_state_formula(stage, parameters, comm.size, element_bytes=dtype.itemsize)
    report = MemoryReport(live_tensor_bytes(model, optimizer), formula)
    assert report.measured == pytest.approx(report.expected, rel=0.03)
    for category, expected in report.formula.items():
        measured = sum(nbytes for (held, _), nbytes in report.held.items() if held == category)
        assert measured == pytest.approx(expected, rel=0.03)


def test_the_table() -> None:
    report = MemoryReport(
        {("weights", "cuda:0"): 2_020_000, ("master weights", "cpu"): 1_000_000, ("buffers", "cuda:0"): 4_000},
        {"weights": 2_000_000.0, "master weights": 1_000_000.0, "gradients": 0.0},
    )
    heads, *_, total, verdict = report.table().splitlines()
    assert heads.split() == ["MB", "cpu", "cuda:0", "formula"]
    assert total.split() == ["total", "1.000", "2.024", "3.000"]
    assert verdict == "model state 3.020 MB, +0.7% of the formula"
    assert MemoryReport({}, {}).table().splitlines()[-1].split() == ["total", "0.000"]
