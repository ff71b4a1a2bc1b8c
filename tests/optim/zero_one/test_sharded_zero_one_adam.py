"""0/1 Adam on sharded state against that of stage 0: the same bits in fp32, the same weights on every rank after a
sync, less memory, and nothing that one rank decides alone but its local steps."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from torch import Tensor, nn

import thinwire
from tests.optim.training import loss_of, make_model, weights
from tests.optim.zero_one.training import SCHEDULE, make_zero_one
from tests.zero.training import train
from thinwire.comm import Communicator, threads
from thinwire.optim.algorithm import Send
from thinwire.optim.zero_one import ZeroOneSchedule
from thinwire.zero.memory import live_tensor_bytes

A_BUCKET_EACH = {"bucket_bytes": 4}
"""A bucket for every parameter: both stages then have the same buckets, in whatever order."""

STEPS = 75  # every kind of step, local intervals of 1, 2, 4 and 5 among them


def build(comm: Communicator, model: nn.Module, stage: int = 1, **options) -> thinwire.ZeroOneAdam:
    options = {"lr": 3e-3, "block_size": 64, "bucket_bytes": 1200} | SCHEDULE | options
    return thinwire.ZeroOneAdam(
        model.parameters(), stage=stage, comm=comm, named_parameters=model.named_parameters(), **options
    )


def path(optimizer, model: nn.Module, steps=range(STEPS), **how) -> list[tuple[bool, Tensor]]:
    """Whether the ranks are in sync, and this rank's weights, after every step."""
    seen = []
    for step in steps:
        train(optimizer, model, [step], **how)
        seen.append((optimizer.in_sync, weights(model)))
    return seen


def assert_same(found: list[tuple[bool, Tensor]], expected: list[tuple[bool, Tensor]]) -> None:
    for step, ((in_sync, mine), (expected_sync, theirs)) in enumerate(zip(found, expected, strict=True)):
        assert in_sync == expected_sync, step
        assert torch.equal(mine, theirs), step


DECAYED = {"weight_decay": 0.5, "betas": (0.8, 0.99), "eps": 1e-6}


@pytest.mark.parametrize(("ranks", "options", "accumulation"), [(1, DECAYED, 2), (2, {}, 1), (3, DECAYED, 1)])
def test_every_step_has_the_bits_of_stage_0(ranks: int, options: dict, accumulation: int) -> None:
    def body(comm: Communicator, stage: int) -> list[tuple[bool, Tensor]]:
        model = make_model()
        optimizer = build(comm, model, stage, **A_BUCKET_EACH, **options)
        return path(optimizer, model, accumulation=accumulation)

    expected = threads.run(lambda comm: body(comm, 0), ranks)
    for mine, theirs in zip(threads.run(lambda comm: body(comm, 1), ranks), expected, strict=True):
        assert_same(mine, theirs)
    assert sum(not in_sync for in_sync, _ in expected[0]) > 20


@pytest.mark.parametrize("numel", [1, 63, 300, 1000])
def test_odd_sizes_in_one_bucket_give_the_bits_of_stage_0(numel: int) -> None:
    """One flat parameter, gradients that are fixed beforehand and grow until updates meet their bound, coordinates
    without any, and others masked."""
    generator = torch.Generator().manual_seed(numel)
    start = torch.randn(numel, generator=generator)
    gradients = torch.randn(STEPS, 3, numel, generator=generator) * torch.logspace(-3, 1, numel)
    gradients[:, :, 5::17] = 0.0
    gradients[20:] *= 40.0
    mask = torch.ones(numel)
    mask[7::11] = 0.0

    def body(comm: Communicator, stage: int) -> list[Tensor]:
        weight = nn.Parameter(start.clone())
        options = {"lr": 1e-2, "block_size": 64, "weight_decay": 0.1} | SCHEDULE
        group = {"params": [weight], "exp_avg_mask": mask}
        optimizer = thinwire.ZeroOneAdam([group], comm=comm, stage=stage, **options)
        seen = []
        for of_rank in gradients:
            weight.grad = of_rank[comm.rank].clone()
            optimizer.step()
            seen.append(weight.detach().clone())
        return seen

    for mine, theirs in zip(
        threads.run(lambda comm: body(comm, 1), 3), threads.run(lambda comm: body(comm, 0), 3), strict=True
    ):
        assert all(torch.equal(found, expected) for found, expected in zip(mine, theirs, strict=True))


def test_buckets_of_several_parameters_and_accumulation_reach_the_same_loss() -> None:
    def body(comm: Communicator, stage: int) -> list[float]:
        model = make_model()
        return train(build(comm, model, stage, bucket_bytes=900), model, range(90), accumulation=2)

    mine, theirs = (threads.run(lambda comm, s=s: body(comm, s), 2)[0] for s in (1, 0))
    # Blocks of signs share scales with other neighbours; the noise differs, the loss by a few percent.
    assert sum(mine[-30:]) == pytest.approx(sum(theirs[-30:]), rel=0.1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_weights_are_the_same_bits_after_a_sync_and_follow_the_master_weights(dtype: torch.dtype) -> None:
    def whole(comm: Communicator) -> list[float]:
        model = make_model()
        return train(make_zero_one(model, comm), model, range(100))

    def body(comm: Communicator) -> tuple[list[tuple[bool, Tensor]], list[float]]:
        model = make_model()
        optimizer = build(comm, model, param_dtype=dtype, resync_interval=20, weight_decay=0.01)
        seen = path(optimizer, model)
        losses = train(optimizer, model, range(STEPS, 100))
        optimizer.synchronize_weights()
        masters = {
            saved_slice.name: saved_slice for saved_slice in optimizer.saved_slices() if saved_slice.kind == "master"
        }
        for saved_slice in optimizer.saved_slices():
            if saved_slice.kind == "weight":
                master = masters[saved_slice.name].tensor
                # Rounded at random since the last copy of the master weights, 20 to 25 steps ago: a walk of 5 units.
                torch.testing.assert_close(
                    saved_slice.tensor.float(), master, rtol=16 * torch.finfo(dtype).eps, atol=1e-3
                )
        return seen, losses

    outcomes = threads.run(body, 3)
    for step, (in_sync, expected) in enumerate(outcomes[0][0]):
        same = [torch.equal(seen[step][1], expected) for seen, _ in outcomes]
        assert all(same) if in_sync else not all(same)
    mean, expected_mean = (
        sum(sum(losses[-25:]) for losses in of_ranks) / 75
        for of_ranks in ([losses for _, losses in outcomes], threads.run(whole, 3))
    )
    # Weights of 8 bits of precision on a loss of 0.05; the noise of 1-bit steps differs with them.
    assert mean == pytest.approx(expected_mean, rel=0.15)


def live_bytes(ranks: int, steps: int, dtype: torch.dtype | None) -> float:
    """Bytes an element that rank 0 holds after `steps`: weights and state, no gradients."""
    numel = 64 * 60  # shards without padding at 1 to 4 ranks

    def body(comm: Communicator) -> float:
        model = nn.Linear(numel, 1, bias=False)
        optimizer = build(comm, model, param_dtype=dtype, var_update_scaler=1, var_freeze_step=6, local_step_scaler=2)
        for _ in range(steps):
            model(torch.ones(1, numel, dtype=model.weight.dtype)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return sum(live_tensor_bytes(model, optimizer).values()) / numel

    return threads.run(body, ranks)[0]


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize(
    ("dtype", "before", "after"),
    [
        (None, lambda n: 16 + 8 / n, lambda n: 24 + 4 / n),
        (torch.bfloat16, lambda n: 10 + 12 / n, lambda n: 16 + 8 / n),
    ],
)
def test_memory_is_what_its_docstring_says(ranks, dtype, before, after) -> None:
    assert live_bytes(ranks, 4, dtype) == pytest.approx(before(ranks), rel=0.01)
    assert live_bytes(ranks, 11, dtype) == pytest.approx(after(ranks), rel=0.01)


def test_a_local_step_sends_nothing_and_the_others_what_they_should() -> None:
    numel = 64 * 100

    def body(comm: Communicator) -> dict[Send, set[int]]:
        model = nn.Linear(numel, 1, bias=False)
        optimizer = build(comm, model)
        schedule = ZeroOneSchedule(**{name: SCHEDULE[name] for name in SCHEDULE if name != "var_freeze_step"})
        sent: dict[Send, set[int]] = {kind: set() for kind in Send}
        updates = 0
        for step in range(1, STEPS + 1):
            frozen_at = SCHEDULE["var_freeze_step"] if step > SCHEDULE["var_freeze_step"] else None
            kind = schedule.send(step, updates, frozen_at)
            updates += kind is Send.EXACT
            before = optimizer.bytes_sent
            train_on_ones(optimizer, model)
            sent[kind].add(optimizer.bytes_sent - before)
        return sent

    sent = threads.run(body, 2)[0]
    assert sent[Send.LOCAL] == {0}
    for kind in (Send.COMPRESSED, Send.SYNC):
        # Both legs send half a vector, 64 signs and a scale of 32 bits at a time; a freeze or a longer interval is
        # agreed on in a few bytes.
        assert min(sent[kind]) == pytest.approx(numel / 8 * 1.5, rel=0.05)
        assert max(sent[kind]) == pytest.approx(numel / 8 * 1.5, rel=0.2)
    # Gradients both ways and denominators one way, half a vector of fp32 each.
    assert max(sent[Send.EXACT]) == pytest.approx(3 * 4 * numel / 2, rel=0.05)


def train_on_ones(optimizer, model: nn.Module) -> None:
    model(torch.ones(1, model.in_features)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize(
    ("dtype", "at", "dropped"),
    [
        *((None, at, dropped) for at in (3, 10, 27) for dropped in (False, True)),
        (torch.float16, 27, False),
        (None, 72, True),
    ],
)
def test_a_step_that_is_not_taken_leaves_nothing_behind(dtype: torch.dtype | None, at: int, dropped: bool) -> None:
    """Not finite on one rank, or dropped on all, where an exact step, a compressed one, a sync or a local one was due:
    everything goes on as if it had not been."""

    def body(comm: Communicator) -> list[tuple[bool, Tensor]]:
        model = make_model()
        optimizer = build(comm, model, param_dtype=dtype)
        optimizer.loss_scale = 8.0
        train(optimizer, model, range(at), scale=8.0)
        before = weights(model)
        optimizer.zero_grad()
        (loss_of(model, comm.rank, 500) * (math.inf if comm.rank == 1 else 8.0)).backward()
        if not dropped:
            optimizer.step()
            assert not optimizer.last_step.applied
            assert optimizer.last_step.grad_norm == math.inf
        optimizer.zero_grad()
        assert optimizer.steps == at
        assert torch.equal(weights(model), before)
        return path(optimizer, model, range(at, at + 5), scale=8.0)

    def undisturbed(comm: Communicator) -> list[tuple[bool, Tensor]]:
        model = make_model()
        optimizer = build(comm, model, param_dtype=dtype)
        optimizer.loss_scale = 8.0
        train(optimizer, model, range(at), scale=8.0)
        return path(optimizer, model, range(at, at + 5), scale=8.0)

    for mine, theirs in zip(threads.run(body, 3), threads.run(undisturbed, 3), strict=True):
        assert_same(mine, theirs)


def test_a_local_step_that_is_not_finite_adds_nothing_on_that_rank_alone() -> None:
    def body(comm: Communicator, stage: int) -> tuple[Tensor, int]:
        model = make_model()
        optimizer = build(comm, model, stage, **A_BUCKET_EACH)
        train(optimizer, model, range(72))
        optimizer.zero_grad()
        (loss_of(model, comm.rank, 500) * (math.nan if comm.rank == 1 else 1.0)).backward()
        optimizer.step()
        assert not optimizer.in_sync
        train(optimizer, model, range(73, 80))
        return weights(model), optimizer.left_out_steps

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = threads.run(lambda comm: body(comm, 0), 2)
    with pytest.warns(RuntimeWarning, match="local step 73 adds nothing on rank 1"):
        found = threads.run(lambda comm: body(comm, 1), 2)
    assert [left_out for _, left_out in found] == [0, 1]
    assert all(torch.equal(mine, theirs) for (mine, _), (theirs, _) in zip(found, expected, strict=True))


def test_synchronize_weights_is_that_of_stage_0() -> None:
    def body(comm: Communicator, stage: int) -> tuple[Tensor, Tensor]:
        model = make_model()
        optimizer = build(comm, model, stage, **A_BUCKET_EACH)
        train(optimizer, model, range(73))
        assert not optimizer.in_sync
        optimizer.synchronize_weights()
        assert optimizer.in_sync
        met = weights(model)
        sent = optimizer.bytes_sent
        optimizer.synchronize_weights()
        assert optimizer.bytes_sent == sent
        train(optimizer, model, range(73, 90))
        return met, weights(model)

    expected = threads.run(lambda comm: body(comm, 0), 3)
    found = threads.run(lambda comm: body(comm, 1), 3)
    assert all(torch.equal(met, found[0][0]) for met, _ in found)
    for mine, theirs in zip(found, expected, strict=True):
        assert torch.equal(mine[0], theirs[0])
        assert torch.equal(mine[1], theirs[1])


def test_parameters_without_gradients() -> None:
    """On no rank: left alone by an exact step. On some ranks: zero on the others, as for every sharded optimizer."""

    def body(comm: Communicator) -> tuple[list[float], list[float]]:
        used, sometimes, never = (nn.Parameter(torch.ones(5)) for _ in range(3))
        options = {"lr": 1e-2, "block_size": 64, "stage": 1} | SCHEDULE
        optimizer = thinwire.ZeroOneAdam([used, sometimes, never], comm=comm, **options)
        for _ in range(40):
            loss = used.sum() + (sometimes.sum() if comm.rank == 0 else 0.0)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.synchronize_weights()
        return [float(one.detach().mean()) for one in (used, sometimes)], never.detach().tolist()

    outcomes = threads.run(body, 2)
    assert outcomes[0] == outcomes[1]
    assert all(value < 0.8 for value in outcomes[0][0])
    assert outcomes[0][1] == [1.0] * 5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"var_freeze_step": 0}, "var_freeze_step must be"),
        ({"var_update_scaler": 1.5}, "var_update_scaler must be"),
        ({"local_step_scaler": 0}, "local_step_scaler must be"),
        ({"local_step_clipper": True}, "local_step_clipper must be"),
    ],
)
def test_bad_options(options: dict, message: str) -> None:
    def body(comm: Communicator) -> None:
        with pytest.raises(ValueError, match=message):
            build(comm, make_model(), **({"stage": 1} | options))

    threads.run(body, 2)
