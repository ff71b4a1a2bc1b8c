"""Activation checkpointing call by call: the same results and gradients, whatever goes in and out, and the same random
numbers in both runs; and the loss that computes its blocks of rows again."""

import json
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.pairwise import pairwise
from tests.refusing import refused
from thinwire.deepspeed import checkpointing
from thinwire.deepspeed.runtime.chunked_cross_entropy import (
    ChunkedCausalLMLoss,
    chunked_cross_entropy,
    install_chunked_causal_lm_loss,
)


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


class Largest(TorchDispatchMode):
    """Finds the elements of the largest fp32 tensor that operations return."""

    elements = 0

    def __torch_dispatch__(self, call: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = call(*args, **kwargs or {})
        found = [one.numel() for one in tree_leaves(out) if isinstance(one, Tensor) and one.dtype == torch.float32]
        self.elements = max(self.elements, *found, 0)
        return out


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
def test_cross_entropy_in_blocks_is_torchs_in_value_and_derivatives(reduction: str) -> None:
    draws = torch.Generator().manual_seed(0)
    logits = torch.randn(9, 13, dtype=torch.float64, generator=draws).mul(6).requires_grad_()
    target = torch.tensor([3, -100, 0, 12, -100, 5, 5, 1, 7])
    in_blocks = partial(chunked_cross_entropy, target=target, reduction=reduction, block_rows=4)
    expected = functional.cross_entropy(logits, target, reduction=reduction)
    torch.testing.assert_close(in_blocks(logits), expected, rtol=1e-14, atol=1e-14)
    given = torch.autograd.grad(in_blocks(logits).sum(), logits)
    torch.testing.assert_close(given, torch.autograd.grad(expected.sum(), logits), rtol=1e-13, atol=1e-14)
    assert torch.autograd.gradgradcheck(in_blocks, logits)


def test_cross_entropy_in_blocks_never_holds_all_logits_in_fp32() -> None:
    logits = torch.zeros(64, 100, dtype=torch.bfloat16, requires_grad=True)
    with Largest() as seen:
        chunked_cross_entropy(logits, torch.zeros(64, dtype=torch.int64), block_rows=8).backward()
    assert seen.elements == 8 * 100
    assert logits.grad.dtype == torch.bfloat16


def test_a_model_takes_the_loss_in_blocks() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 31, "n_positions": 16, "n_embd": 8, "n_layer": 1, "n_head": 2}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).eval()
    tokens = torch.arange(24).view(2, 12)
    labels = tokens.masked_fill(tokens % 5 == 0, -100)
    for number in (None, torch.tensor(50)):
        stock = model(input_ids=tokens, labels=labels, num_items_in_batch=number).loss
        expected = torch.autograd.grad(stock, model.transformer.wte.weight)
        own = model.loss_function
        loss = install_chunked_causal_lm_loss(model, block_rows=5)
        assert model.loss_function is loss
        refused(ValueError, "stock Hugging Face ForCausalLMLoss", install_chunked_causal_lm_loss, model)
        found = model(input_ids=tokens, labels=labels, num_items_in_batch=number).loss
        torch.testing.assert_close(found, stock)
        torch.testing.assert_close(torch.autograd.grad(found, model.transformer.wte.weight), expected)
        model.loss_function = own
    refused(ValueError, "block_rows is at least 1, not 0", install_chunked_causal_lm_loss, model, block_rows=0)
    refused(TypeError, "whole number of rows", ChunkedCausalLMLoss, 0.5)
    refused(ValueError, "backend 'fast'", ChunkedCausalLMLoss, backend="fast")
    refused(NotImplementedError, "needs CUDA logits and Triton", ChunkedCausalLMLoss, backend="triton")
    refused(ValueError, "got neither", loss, torch.zeros(1, 2, 3), None, 3)
    refused(ValueError, r"got \[2, 3\] and \[3\]", chunked_cross_entropy, torch.zeros(2, 3), torch.zeros(3))
    refused(ValueError, "not 'max'", chunked_cross_entropy, torch.zeros(2, 3), torch.zeros(2), reduction="max")
