"""ZeRO stages 0 to 2 against one process that sees all ranks' data: the same weights, whatever the stage, the number of
ranks, the optimizer class and the buckets."""

import copy
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_model
from torch import Tensor, nn

import thinwire
from tests.launching import on_threads
from tests.optim.training import batch, loss_of, make_model, weights
from tests.refusing import refused
from tests.zero.saved import join, save
from tests.zero.training import ADAMW, MOMENTUM, SGD, build, by_one_process, train
from thinwire.comm import Communicator, threads
from thinwire.zero import ShardedOptimizer


@pytest.mark.parametrize(("ranks", "options"), [(1, ADAMW), (2, SGD), (3, MOMENTUM), (4, ADAMW)])
def test_every_stage_gives_the_weights_of_one_process(ranks: int, options: dict) -> None:
    def body(comm: Communicator, stage: int) -> Tensor:
        model = make_model()
        optimizer = build(comm, model, stage, **options)
        train(optimizer, model, range(15))
        return weights(model)

    expected = by_one_process(ranks, 15, **options)
    of_stage = [threads.run(lambda comm, stage=stage: body(comm, stage), ranks) for stage in (0, 1, 2)]
    assert all(torch.equal(mine, of_stage[0][0]) for of_rank in of_stage for mine in of_rank)
    torch.testing.assert_close(of_stage[0][0], expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize(("stage", "ranks"), [(0, 3), (1, 1), (1, 3), (2, 3)])
def test_accumulation_and_clipping_are_those_of_one_process(stage: int, ranks: int) -> None:
    def body(comm: Communicator) -> Tensor:
        model = make_model()
        optimizer = build(comm, model, stage, max_norm=0.05, **SGD)
        train(optimizer, model, range(10), accumulation=3)
        return weights(model)

    expected = by_one_process(ranks, 10, accumulation=3, max_norm=0.05, **SGD)
    for mine in threads.run(body, ranks):
        torch.testing.assert_close(mine, expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_parameters_follow_fp32_masters_of_the_unrounded_values(dtype: torch.dtype) -> None:
    def body(comm: Communicator, stage: int) -> Tensor:
        model = make_model()
        before = weights(model)
        optimizer = build(comm, model, stage, param_dtype=dtype, **ADAMW)
        assert {parameter.dtype for parameter in model.parameters()} == {dtype}
        if comm.size == 1:
            saved = join([save(comm, optimizer)])
            master_weights = [saved.read("master", name, 0, one.numel()) for name, one in model.named_parameters()]
            assert torch.equal(torch.cat(master_weights), before)
        train(optimizer, model, range(10))
        return weights(model)

    for ranks in (1, 3):
        of_stage = [threads.run(lambda comm, s=stage: body(comm, s), ranks) for stage in (0, 1, 2)]
        assert all(torch.equal(mine, of_stage[0][0]) for of_rank in of_stage for mine in of_rank)


class Awkward(nn.Module):
    """Tied, empty, frozen, unused and mixed-dtype parameters."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)

        def tensor(*shape: int, dtype: torch.dtype = torch.float32) -> nn.Parameter:
            return nn.Parameter(torch.randn(*shape, generator=generator).to(dtype) * 0.3)

        self.first = tensor(6, 13)
        self.tied = self.first
        self.empty = tensor(0, 5)
        self.frozen = tensor(13, 13).requires_grad_(False)
        self.narrow = tensor(13, 7, dtype=torch.bfloat16)
        self.never = tensor(3)
        self.sometimes = tensor(7)
        self.only_on_rank_0 = tensor(7)

    def forward(self, inputs: Tensor, step: int, rank: int) -> Tensor:
        hidden = (inputs @ self.first @ self.frozen).tanh() @ self.narrow.float()
        hidden = hidden + (inputs @ self.tied).sum(1, keepdim=True) + self.empty.sum()
        if step % 2:
            hidden = hidden + self.sometimes
        if rank == 0:
            hidden = hidden + self.only_on_rank_0
        return hidden.square().mean()


def values(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().float().clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize(("stage", "ranks"), [(0, 3), (1, 1), (1, 2), (2, 3)])
def test_awkward_parameters(stage: int, ranks: int) -> None:
    def body(comm: Communicator) -> dict[str, Tensor]:
        model = Awkward()
        optimizer = build(comm, model, stage, **ADAMW)
        for step in range(8):
            optimizer.zero_grad()
            model(batch(comm.rank, step)[0], step, comm.rank).backward()
            optimizer.step()
        assert model.tied is model.first
        return values(model)

    model = Awkward()
    start = values(model)
    half = model.narrow
    master = nn.Parameter(half.detach().float())
    others = [parameter for name, parameter in model.named_parameters() if name not in ("narrow", "frozen")]
    optimizer = torch.optim.AdamW([*others, master], lr=3e-3, weight_decay=0.1)
    for step in range(8):
        optimizer.zero_grad()
        half.grad = None
        for rank in range(ranks):
            (model(batch(rank, step)[0], step, rank) / ranks).backward()
        master.grad = half.grad.float()
        optimizer.step()
        half.data.copy_(master.data)
    expected = values(model)
    for mine in threads.run(body, ranks):
        for name in ("frozen", "never", "empty"):
            assert torch.equal(mine[name], start[name])
        for name, value in mine.items():
            # bf16 gradients are rounded once more where ranks are averaged
            tolerance = 4e-3 if name == "narrow" else 2e-3 if ranks > 1 else 1e-6
            torch.testing.assert_close(value, expected[name], rtol=0, atol=tolerance, msg=name)


@pytest.mark.parametrize("stage", [0, 1, 2])
@on_threads(3)
def test_without_a_gradient_or_with_one_that_is_not_finite_all_skip_the_step(comm: Communicator, stage: int) -> None:
    model = make_model()
    optimizer = build(comm, model, stage)
    before = weights(model)
    optimizer.step()  # without a gradient
    assert not optimizer.last_step.applied
    assert torch.equal(weights(model), before)
    train(optimizer, model, range(3))
    before = weights(model)
    optimizer.zero_grad()
    (loss_of(model, comm.rank, 3) * (math.inf if comm.rank == 1 else 1.0)).backward()
    optimizer.step()
    assert not optimizer.last_step.applied
    assert not math.isfinite(optimizer.last_step.grad_norm)
    assert torch.equal(weights(model), before)
    train(optimizer, model, range(4, 6))
    assert optimizer.last_step.applied
    assert not torch.equal(weights(model), before)


def test_edits_are_noticed_after_a_backward_that_has_failed() -> None:
    model = make_model()
    optimizer = build(threads.single(10.0), model, 1)

    def fail(_: Tensor) -> None:
        raise OSError("the backward has failed")

    failing = model[0].weight.register_hook(fail)
    refused(OSError, "has failed", loss_of(model, 0, 0).backward)
    failing.remove()
    optimizer.zero_grad()
    loss_of(model, 0, 1).backward()
    model[0].weight.grad.mul_(2.0)
    refused(RuntimeError, r"0\.weight.* was changed", optimizer.step)


@pytest.mark.parametrize(("stage", "alike"), [(0, True), (1, False), (2, False)])
def test_zero_grad_drops_gradients_that_have_left_also_on_some_ranks_only(stage: int, alike: bool) -> None:
    """Rank 0's backward fills a bucket, which leaves; all of rank 1's buckets still wait for more, unless alike."""

    def body(comm: Communicator) -> Tensor:
        model = make_model()
        optimizer = build(comm, model, stage)
        train(optimizer, model, range(2))
        optimizer.zero_grad()
        (model if comm.rank == 0 or alike else model[0])(batch(comm.rank, 77)[0]).sum().backward()
        optimizer.zero_grad()
        train(optimizer, model, range(2, 5))
        return weights(model)

    first, second = threads.run(body, 2)
    assert torch.equal(first, second)
    torch.testing.assert_close(first, by_one_process(2, 5, **ADAMW), rtol=0, atol=2e-6)


# Refusals, in words that say what to do


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"stage": 3}, "stage must be 0, 1 or 2"),
        ({"stage": True}, "stage must be 0, 1 or 2, got True"),
        ({"param_dtype": torch.float64}, "param_dtype must be"),
        ({"bucket_bytes": 0}, "bucket_bytes must be"),
        ({"max_norm": -1.0}, "max_norm must be"),
        ({"max_norm": "1"}, "max_norm must be a number of at least 0, which does not clip, or None, got '1'"),
        ({"lr": -1.0}, "learning rate"),
        ({"rest_codec": "int4"}, "rest_codec='int4' needs codec="),
        ({"optimizer_class": "AdamW"}, "optimizer_class must be an optimizer class, .* got 'AdamW'"),
        ({"optimizer_class": torch.optim.Adafactor}, "Adafactor cannot be sharded: its variance is factored"),
        ({"optimizer_class": torch.optim.Muon}, "pass thinwire.optim.Muon"),
        ({"optimizer_class": thinwire.OneBitAdam}, "OneBitAdam communicates by itself"),
    ],
)
@on_threads(2)
def test_bad_options_are_refused_on_every_rank(comm: Communicator, change: dict, message: str) -> None:
    options = {"stage": 1, "comm": comm} | ADAMW | (change if comm.rank == 1 else {})
    expected = message if comm.rank == 1 else "rank 1 could not build its optimizer"
    refused((ValueError, TypeError), expected, ShardedOptimizer, make_model().parameters(), **options)


@on_threads(2)
def test_ranks_that_differ_are_refused(comm: Communicator) -> None:
    with pytest.raises(ValueError, match="rank 1 and rank 0 differ: stage is 2 against 1"):
        build(comm, make_model(), stage=1 + comm.rank)
    with pytest.raises(ValueError, match="rank 1 and rank 0 differ: parameter 0 has shape"):
        build(comm, nn.Linear(3 + comm.rank, 2), stage=1)


def test_wrong_use_is_an_error_that_says_what_to_do() -> None:
    model, comm = make_model(), threads.single(10.0)
    optimizer = build(comm, model, 1, **ADAMW, max_norm=None)
    assert optimizer.max_norm == 0.0
    loss_of(model, 0, 0).backward()
    refused(RuntimeError, "second backward", loss_of(model, 0, 0).backward)
    optimizer.zero_grad()
    refused(RuntimeError, "build a new one", optimizer.add_param_group, {"params": [nn.Parameter(torch.zeros(1))]})
    refused(TypeError, "cannot be copied or pickled", copy.deepcopy, optimizer)
    refused(ValueError, "nothing to optimize", ShardedOptimizer, [torch.zeros(2)], comm=comm, **ADAMW)
    one, other = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    with pytest.raises(ValueError, match="two parameters are named 'a'"):
        ShardedOptimizer([one, other], named_parameters=[("a", one), ("a", other)], **ADAMW)
    frozen = nn.Linear(2, 2)
    frozen.weight.requires_grad_(False)
    optimizer = build(comm, frozen, 1)
    frozen.weight.requires_grad_(True)
    frozen(torch.ones(1, 2)).sum().backward()
    refused(RuntimeError, "require gradients now", optimizer.step)


def test_every_parameter_is_saved_by_what_saves_one_tensor_of_a_storage(tmp_path: Path) -> None:
    model = make_model()
    optimizer = build(threads.single(10.0), model, 1)
    moved = next(model.parameters())
    moved.data = moved.detach().clone()
    loss_of(model, 0, 0).backward()
    optimizer.step()  # moves it back
    storages = [one.untyped_storage().data_ptr() for one in model.state_dict().values() if one.numel()]
    assert len({*storages}) == len(storages)
    save_model(model, str(tmp_path / "all.safetensors"))
    assert load_file(tmp_path / "all.safetensors").keys() == model.state_dict().keys()
