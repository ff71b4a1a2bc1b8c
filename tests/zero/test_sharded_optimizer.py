"""ZeRO stages 0 to 2 against one process that sees all ranks' data: the same weights, whatever the stage, the number of
ranks, the optimizer class and the buckets."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import Tensor, nn

from tests.optim.training import batch, loss_of, make_model, through_a_file, watcher, weights
from tests.zero.saved import join, save
from thinwire.comm import Communicator, threads
from thinwire.zero import ShardedOptimizer

ADAMW = {"optimizer_class": torch.optim.AdamW, "lr": 3e-3, "weight_decay": 0.1}
SGD = {"optimizer_class": torch.optim.SGD, "lr": 0.1, "momentum": 0.9}


class Lion(torch.optim.Optimizer):
    """Somebody else's elementwise optimizer (Chen et al. 2023)."""

    def __init__(self, params, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.99)) -> None:
        super().__init__(params, {"lr": lr, "betas": betas})

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                momentum = state.setdefault("exp_avg", torch.zeros_like(parameter))
                beta1, beta2 = group["betas"]
                parameter.add_(torch.lerp(parameter.grad, momentum, beta1).sign(), alpha=-group["lr"])
                momentum.lerp_(parameter.grad, 1 - beta2)


LION = {"optimizer_class": Lion, "lr": 1e-3}


def build(comm: Communicator, model: nn.Module, stage: int, **options) -> ShardedOptimizer:
    options = {"bucket_bytes": 1000, "block_size": 8} | (options or ADAMW)
    return ShardedOptimizer(
        model.parameters(), stage=stage, comm=comm, named_parameters=model.named_parameters(), **options
    )


def train(optimizer: ShardedOptimizer, model: nn.Module, steps, accumulation: int = 1) -> list[float]:
    losses = []
    for step in steps:
        optimizer.zero_grad()
        total = 0.0
        for micro in range(accumulation):
            loss = loss_of(model, optimizer.comm.rank, step * accumulation + micro) / accumulation
            if micro < accumulation - 1:
                with optimizer.no_sync():
                    loss.backward()
                    optimizer.end_backward()
            else:
                loss.backward()
            total += loss.item()
        optimizer.step()
        losses.append(total)
    return losses


def by_one_process(ranks: int, steps: int, accumulation: int = 1, max_norm: float = 0.0, **options) -> Tensor:
    model = make_model()
    optimizer_class = options.pop("optimizer_class")
    optimizer = optimizer_class(model.parameters(), **options)
    for step in range(steps):
        optimizer.zero_grad()
        for rank in range(ranks):
            for micro in range(accumulation):
                (loss_of(model, rank, step * accumulation + micro) / (ranks * accumulation)).backward()
        if max_norm:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
    return weights(model)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("options", [ADAMW, SGD, LION], ids=["AdamW", "SGD", "Lion"])
def test_every_stage_gives_the_weights_of_one_process(ranks: int, options: dict) -> None:
    def body(comm: Communicator, stage: int) -> Tensor:
        model = make_model()
        optimizer = build(comm, model, stage, **options)
        train(optimizer, model, range(30))
        return weights(model)

    expected = by_one_process(ranks, 30, **options)
    of_stage = [threads.run(lambda comm, stage=stage: body(comm, stage), ranks) for stage in (0, 1, 2)]
    for of_rank in of_stage:
        for mine in of_rank:
            assert torch.equal(mine, of_stage[0][0])
    # Lion's signs turn a difference in the last bit into one of a whole step.
    torch.testing.assert_close(of_stage[0][0], expected, rtol=0, atol=2e-6 if options is not LION else 2.1e-3)


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("ranks", [1, 3])
def test_accumulation_and_clipping_are_those_of_one_process(stage: int, ranks: int) -> None:
    def body(comm: Communicator) -> Tensor:
        model = make_model()
        optimizer = build(comm, model, stage, max_norm=0.05, **SGD)
        train(optimizer, model, range(20), accumulation=3)
        return weights(model)

    expected = by_one_process(ranks, 20, accumulation=3, max_norm=0.05, **SGD)
    for mine in threads.run(body, ranks):
        torch.testing.assert_close(mine, expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_the_reported_norm_is_that_of_the_averaged_gradient(stage: int) -> None:
    def body(comm: Communicator) -> tuple[float, float]:
        model, other = make_model(), make_model()
        optimizer = build(comm, model, stage, max_norm=0.01, **SGD)
        optimizer.loss_scale = 128.0
        (128.0 * loss_of(model, comm.rank, 0)).backward()
        optimizer.step()
        for rank in range(comm.size):
            (loss_of(other, rank, 0) / comm.size).backward()
        expected = nn.utils.clip_grad_norm_(other.parameters(), 0.01)
        torch.optim.SGD(other.parameters(), lr=0.1).step()
        torch.testing.assert_close(weights(model), weights(other), rtol=0, atol=1e-7)
        return optimizer.last_step.grad_norm, float(expected)

    for mine, expected in threads.run(body, 2):
        assert mine == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_parameters_follow_fp32_masters_of_the_unrounded_values(dtype: torch.dtype) -> None:
    def body(comm: Communicator, stage: int) -> Tensor:
        model = make_model()
        before = weights(model)
        optimizer = build(comm, model, stage, param_dtype=dtype, **ADAMW)
        assert {parameter.dtype for parameter in model.parameters()} == {dtype}
        if comm.size == 1:
            saved = join([save(comm, optimizer)])
            assert torch.equal(
                torch.cat([saved.read("master", n, 0, p.numel()) for n, p in model.named_parameters()]), before
            )
        train(optimizer, model, range(30))
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


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_awkward_parameters(stage: int, ranks: int) -> None:
    def body(comm: Communicator) -> dict[str, Tensor]:
        model = Awkward()
        optimizer = build(comm, model, stage, **ADAMW)
        for step in range(8):
            optimizer.zero_grad()
            model(batch(comm.rank, step)[0], step, comm.rank).backward()
            optimizer.step()
        assert model.tied is model.first
        return {name: parameter.detach().float().clone() for name, parameter in model.named_parameters()}

    model = Awkward()
    start = {name: parameter.detach().float().clone() for name, parameter in model.named_parameters()}
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
    expected = {name: parameter.detach().float() for name, parameter in model.named_parameters()}
    for mine in threads.run(body, ranks):
        for name in ("frozen", "never", "empty"):
            assert torch.equal(mine[name], start[name])
        for name, value in mine.items():
            # bf16 gradients are rounded once more where ranks are averaged
            tolerance = 4e-3 if name == "narrow" else 2e-3 if ranks > 1 else 1e-6
            torch.testing.assert_close(value, expected[name], rtol=0, atol=tolerance, msg=name)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_gradient_that_is_not_finite_skips_the_step_everywhere(stage: int) -> None:
    def body(comm: Communicator) -> None:
        model = make_model()
        optimizer = build(comm, model, stage)
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

    threads.run(body, 3)


@pytest.mark.parametrize("saved_stage", [0, 1, 2])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_any_stage_and_number_of_ranks_takes_up_what_another_saved(saved_stage: int, dtype: torch.dtype | None) -> None:
    def first_half(comm: Communicator):
        model = make_model()
        optimizer = build(comm, model, saved_stage, param_dtype=dtype, **ADAMW)
        train(optimizer, model, range(10))
        return save(comm, optimizer)

    saved = join(threads.run(first_half, 4))

    def go_on(comm: Communicator, stage: int) -> Tensor:
        model = make_model(seed=5)
        optimizer = build(comm, model, stage, param_dtype=dtype, **(ADAMW | {"lr": 9.9, "bucket_bytes": 300}))
        optimizer.load(saved)
        assert optimizer.param_groups[0]["lr"] == ADAMW["lr"]
        for step in range(10, 20):
            optimizer.zero_grad()
            # the same 12 batches a step, however many ranks share them
            for share in range(12 // comm.size):
                loss = loss_of(model, comm.rank * (12 // comm.size) + share, step) * comm.size / 12
                if share < 12 // comm.size - 1:
                    with optimizer.no_sync():
                        loss.backward()
                        optimizer.end_backward()
                else:
                    loss.backward()
            optimizer.step()
        return weights(model)

    reference = threads.run(lambda comm: go_on(comm, saved_stage), 4)[0]
    tolerance = 2e-6 if dtype is None else 4e-3
    for ranks in (1, 2, 3, 6):
        for stage in (0, 1, 2):
            for mine in threads.run(lambda comm, s=stage: go_on(comm, s), ranks):
                torch.testing.assert_close(mine, reference, rtol=0, atol=tolerance)


@pytest.mark.parametrize("ranks", [1, 3])
def test_resume_on_the_same_ranks_is_bit_identical(ranks: int) -> None:
    def first_half(comm: Communicator):
        model = make_model()
        optimizer = build(comm, model, 2, param_dtype=torch.bfloat16, **ADAMW)
        train(optimizer, model, range(7))
        return save(comm, optimizer), train(optimizer, model, range(7, 15))

    outcomes = threads.run(first_half, ranks)
    saved = join([part for part, _ in outcomes])

    def second_half(comm: Communicator) -> list[float]:
        model = make_model(seed=1)
        optimizer = build(comm, model, 2, param_dtype=torch.bfloat16, **ADAMW)
        optimizer.load(saved)
        return train(optimizer, model, range(7, 15))

    assert threads.run(second_half, ranks) == [losses for _, losses in outcomes]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"stage": 3}, "stage must be 0, 1 or 2"),
        ({"param_dtype": torch.float64}, "param_dtype must be"),
        ({"bucket_bytes": 0}, "bucket_bytes must be"),
        ({"max_norm": -1.0}, "max_norm must be"),
        ({"lr": -1.0}, "learning rate"),
    ],
)
def test_bad_options_are_refused_on_every_rank(change: dict, message: str) -> None:
    def body(comm: Communicator) -> None:
        options = {"stage": 1, "comm": comm} | ADAMW | (change if comm.rank == 1 else {})
        expected = message if comm.rank == 1 else "rank 1 could not build its optimizer"
        with pytest.raises((ValueError, TypeError), match=expected):
            ShardedOptimizer(make_model().parameters(), **options)

    threads.run(body, 2)


def test_ranks_that_differ_are_refused() -> None:
    def body(comm: Communicator) -> None:
        with pytest.raises(ValueError, match="rank 1 and rank 0 differ: stage is 2 against 1"):
            build(comm, make_model(), stage=1 + comm.rank)
        with pytest.raises(ValueError, match="rank 1 and rank 0 differ: parameter 0 has shape"):
            build(comm, nn.Linear(3 + comm.rank, 2), stage=1)

    threads.run(body, 2)


def test_wrong_use_is_an_error_that_says_what_to_do() -> None:
    model = make_model()
    comm = threads.run(lambda comm: comm, 1)[0]
    optimizer = build(comm, model, 1)
    loss_of(model, 0, 0).backward()
    with pytest.raises(RuntimeError, match="second backward"):
        loss_of(model, 0, 0).backward()
    optimizer.zero_grad()
    with pytest.raises(RuntimeError, match="build a new one"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
    with pytest.raises(ValueError, match="nothing to optimize"):
        ShardedOptimizer([torch.zeros(2)], comm=comm, **ADAMW)
    frozen = nn.Linear(2, 2)
    frozen.weight.requires_grad_(False)
    optimizer = build(comm, frozen, 1)
    frozen.weight.requires_grad_(True)
    frozen(torch.ones(1, 2)).sum().backward()
    with pytest.raises(RuntimeError, match="require gradients now"):
        optimizer.step()


def test_a_step_without_gradients_changes_nothing() -> None:
    def body(comm: Communicator) -> None:
        model = make_model()
        optimizer = build(comm, model, comm.size - 1)
        before = weights(model)
        optimizer.step()
        assert not optimizer.last_step.applied
        assert torch.equal(weights(model), before)

    for ranks in (1, 2, 3):
        threads.run(body, ranks)


def test_zero_grad_after_backward_drops_the_step() -> None:
    def body(comm: Communicator, stage: int) -> Tensor:
        model = make_model()
        optimizer = build(comm, model, stage)
        loss_of(model, comm.rank, 77).backward()
        train(optimizer, model, range(3))
        return weights(model)

    for stage in (0, 1, 2):
        expected = by_one_process(2, 3, **ADAMW)
        for mine in threads.run(lambda comm, s=stage: body(comm, s), 2):
            torch.testing.assert_close(mine, expected, rtol=0, atol=2e-6)


def test_buckets_leave_during_backward() -> None:
    def body(comm: Communicator) -> list[int]:
        model = make_model()
        optimizer = build(comm, model, 2, **(ADAMW | {"bucket_bytes": 4}))
        seen: list[int] = []
        model[0].weight.register_hook(lambda _: seen.append(watcher(optimizer)._pipeline.started))
        train(optimizer, model, range(1))
        return seen

    for seen in threads.run(body, 2):
        assert seen == [4] or seen == [5]


def test_weights_read_in_any_way_are_the_new_ones() -> None:
    def body(comm):
        torch.manual_seed(0)
        model = nn.MultiheadAttention(8, 2, batch_first=True)  # computes with its child's weight without calling it
        optimizer = ShardedOptimizer(
            model.parameters(), torch.optim.SGD, stage=1, comm=comm, bucket_bytes=256, block_size=8, lr=0.1
        )
        optimizer.gather_during_forward(model)
        inputs = torch.ones(2, 3, 8) * (comm.rank + 1)
        model(inputs, inputs, inputs)[0].square().sum().backward()
        optimizer.step()
        waited = set(optimizer._home._parameters._gate._pending)
        assert waited
        read = copy.deepcopy(model).out_proj.weight
        assert not optimizer._home._parameters._gate._pending
        model(inputs, inputs, inputs)[0].square().sum().backward()
        optimizer.step()
        assert optimizer._home._parameters._gate._pending
        model(inputs, inputs, inputs)
        assert not optimizer._home._parameters._gate._pending
        optimizer.zero_grad()
        return read

    weights = threads.run(body, 2)
    assert torch.equal(weights[0], weights[1])


@pytest.mark.parametrize(
    ("saved_stage", "stage", "options"),
    [(0, 0, {}), (1, 1, {}), (2, 2, {}), (0, 2, {}), (2, 1, {}), (1, 0, {}), (1, 1, {"bucket_bytes": 300})],
)
def test_every_rank_saves_and_loads_its_own_state(saved_stage: int, stage: int, options: dict) -> None:
    def body(comm: Communicator) -> tuple[bool, dict]:
        model, resumed = make_model(), make_model(seed=3)
        optimizer, again = build(comm, model, saved_stage), build(comm, resumed, stage, **(ADAMW | options))
        train(optimizer, model, range(5))
        state = optimizer.state_dict()  # not a copy: two optimizers must not share memory
        again.load_state_dict(state)
        state = through_a_file(state)
        train(optimizer, model, range(5, 9))
        train(again, resumed, range(5, 9))
        return torch.equal(weights(model), weights(resumed)), state

    same, states = zip(*threads.run(body, 3), strict=True)
    assert all(same)

    def others_file(comm: Communicator) -> None:
        with pytest.raises(ValueError, match=r"were given the states of ranks \[1, 1, 1\]"):
            build(comm, make_model(), stage).load_state_dict(states[1])

    threads.run(others_file, 3)
    with pytest.raises(ValueError, match="save_checkpoint"):
        build(threads.run(lambda comm: comm, 1)[0], make_model(), stage).load_state_dict(states[1])


def test_copies_are_refused() -> None:
    optimizer = ShardedOptimizer([nn.Parameter(torch.ones(3))], torch.optim.AdamW, lr=0.1)
    with pytest.raises(TypeError, match="cannot be copied or pickled"):
        copy.deepcopy(optimizer)


def test_names_must_differ() -> None:
    one, other = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    with pytest.raises(ValueError, match="two parameters are named 'a'"):
        ShardedOptimizer([one, other], torch.optim.AdamW, named_parameters=[("a", one), ("a", other)], lr=0.1)


def test_parameters_outside_of_the_gated_module_do_not_wait() -> None:
    def body(comm):
        torch.manual_seed(0)
        inner, outer = nn.Linear(8, 8), nn.Linear(8, 8)
        optimizer = ShardedOptimizer(
            [*inner.parameters(), *outer.parameters()],
            torch.optim.SGD,
            comm=comm,
            bucket_bytes=64,
            block_size=8,
            lr=0.1,
        )
        optimizer.gather_during_forward(inner)
        with pytest.raises(RuntimeError, match="was called before"):
            optimizer.gather_during_forward(outer)
        outer(inner(torch.ones(2, 8))).square().sum().backward()
        optimizer.step()
        return [parameter.detach().clone() for parameter in outer.parameters()]

    found = threads.run(body, 2)
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
