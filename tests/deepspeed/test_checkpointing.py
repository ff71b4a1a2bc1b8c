"""Activation checkpointing call by call: the same results and gradients, whatever goes in and out, and the same random
numbers in both runs."""

import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.pairwise import pairwise
from tests.refusing import refused
from thinwire.deepspeed import checkpointing


@pytest.fixture(autouse=True)
def defaults() -> Iterator[None]:
    """What is set belongs to the process, other tests' too."""
    yield
    checkpointing.configure()
    checkpointing.get_cuda_rng_tracker().reset()


class Counted(nn.Module):
    """Counts its runs, and returns what is no tensor too."""

    def __init__(self, other: Any) -> None:
        super().__init__()
        self.inner = nn.Linear(7, 7)
        self.other = other
        self.runs = 0

    def forward(self, x: Tensor, mask: Tensor | None = None, *, factor: float = 1.0) -> tuple[Any, ...]:
        self.runs += 1
        hidden = nn.functional.dropout(torch.tanh(self.inner(x)), 0.4)
        out = hidden if mask is None else hidden * mask
        return x.detach() * 2, out * factor, self.other


def run(module: Counted, x: Tensor, mask: Tensor | None, *, checkpointed: bool) -> tuple[list[Tensor], Any]:
    x = x.clone().requires_grad_()
    module.zero_grad()
    torch.manual_seed(3)
    call = checkpointing.checkpoint if checkpointed else lambda function, *args, **kwargs: function(*args, **kwargs)
    plain, out, other = call(module, x, mask, factor=1.5)
    out.square().sum().backward()
    assert x.grad is not None
    found = [plain, out, x.grad, *(p.grad.clone() for p in module.parameters() if p.grad is not None), torch.rand(2)]
    return found, other


MASKS, OTHERS = (None, torch.arange(7) > 2, (torch.arange(7) > 2).float()), (None, 2.5, (None, True, torch.arange(3.0)))


@pytest.mark.parametrize(("mask", "other", "in_cpu"), pairwise(list(MASKS), list(OTHERS), [False, True]))
def test_the_same_to_the_bit(mask: Tensor | None, other: Any, in_cpu: bool) -> None:
    torch.manual_seed(1)
    module, x = Counted(other), torch.randn(5, 7)
    expected, returned = run(module, x, mask, checkpointed=False)
    assert module.runs == 1
    checkpointing.configure(checkpoint_in_cpu=in_cpu)
    found, also_returned = run(module, x, mask, checkpointed=True)
    assert module.runs == 3
    assert returned is also_returned
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_parameters_alone_need_gradients() -> None:
    module, x = Counted(None), torch.randn(5, 7)
    checkpointing.non_reentrant_checkpoint(module, x)[1].sum().backward()
    assert module.runs == 2
    assert module.inner.weight.grad is not None
    with torch.no_grad():
        checkpointing.checkpoint(module, x)
    assert module.runs == 3
    outputs: list[Tensor] = []
    returned = checkpointing.CheckpointFunction.apply(module, outputs, x)
    returned[1].sum().backward()
    assert module.runs == 5
    assert all(one is other for one, other in zip(outputs, returned, strict=True))


def test_named_random_states_are_replayed() -> None:
    weight = torch.ones(400, requires_grad=True)
    drawn = []

    def layer(weight: Tensor) -> Tensor:
        with checkpointing.get_cuda_rng_tracker().fork():
            dropped = nn.functional.dropout(weight.exp(), 0.5)
        drawn.append(dropped.detach())
        return dropped

    checkpointing.model_parallel_cuda_manual_seed(5)
    after_seed = torch.rand(1)
    torch.manual_seed(5)
    assert torch.equal(after_seed, torch.rand(1))
    out = checkpointing.checkpoint(layer, weight)
    between = checkpointing.checkpoint(layer, weight)  # draws on, before the first one's backward
    (out.sum() + between.sum()).backward()
    first, second = drawn  # what runs again stops before it is noted
    assert not torch.equal(first, second)
    assert weight.grad is not None
    torch.testing.assert_close(weight.grad, first + second)
    following = checkpointing.checkpoint(layer, weight)
    assert not any(torch.equal(following, one) for one in (first, second))


def test_random_states_are_told_apart() -> None:
    states = checkpointing.RandomStates()
    states.add("one", 1)
    for error, name, seed in ((ValueError, "one", 2), (ValueError, "two", 1)):
        refused(error, "was added", states.add, name, seed)
    with pytest.raises(KeyError, match="no state 'model-parallel-rng'"), states.fork():
        pass
    before = torch.get_rng_state()
    with states.fork("one"):
        drawn = torch.rand(3)
    assert torch.equal(torch.get_rng_state(), before) or torch.cuda.is_available()
    with states.fork("one"):
        assert not torch.equal(torch.rand(3), drawn)


def test_configuring(tmp_path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"activation_checkpointing": {"cpu_checkpointing": True, "profile": False}}))
    checkpointing.configure(None, deepspeed_config=file)
    assert checkpointing.is_configured()
    assert checkpointing._process.checkpoint_in_cpu
    checkpointing.configure(None, deepspeed_config=file, checkpoint_in_cpu=False, synchronize=True)
    assert not checkpointing._process.checkpoint_in_cpu
    assert checkpointing._process.synchronize
    single = SimpleNamespace(get_model_parallel_rank=lambda: 0, get_model_parallel_world_size=lambda: 1)
    with pytest.warns(RuntimeWarning, match="partition_activations, contiguous_checkpointing: accepted"):
        checkpointing.configure(single, partition_activations=True, contiguous_checkpointing=True)
    double = SimpleNamespace(get_model_parallel_rank=lambda: 0, get_model_parallel_world_size=lambda: 2)
    refused(ValueError, "groups of 2 ranks", checkpointing.configure, double)
    refused(ValueError, "synchronize is 'yes', expected true or false", checkpointing.configure, synchronize="yes")
