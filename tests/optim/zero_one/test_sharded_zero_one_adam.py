"""0/1 Adam on sharded state against stage 0: the same bits in fp32, the same weights after a sync, less memory."""

import math
import pickle
import warnings
from functools import partial

import pytest
import torch
from torch import Tensor, nn

import thinwire
from tests.optim.training import exchange_comm, loss_of, make_model, weights
from tests.zero.saved import Saved, join, save
from tests.zero.training import train
from thinwire.comm import Communicator, threads
from thinwire.optim.step import Send
from thinwire.optim.zero_one import ZeroOneSchedule

A_BUCKET_EACH = {"bucket_bytes": 4}
"""A bucket for every parameter: both stages then have the same buckets, in whatever order."""

SCHEDULE = {"var_freeze_step": 15, "var_update_scaler": 3, "local_step_scaler": 6, "local_step_clipper": 5}
STEPS = 47  # every kind of step, local intervals of 1, 2, 4 and 5 among them


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
OTHER_WIRES = {"warmup_wire": "bf16", "codec": "stat2"}
BY_NODE = {"nodes": [0, 0, 1, 1]}


@pytest.mark.parametrize(
    ("ranks", "options", "accumulation"), [(1, DECAYED, 2), (2, OTHER_WIRES, 1), (3, DECAYED, 1), (4, BY_NODE, 1)]
)
def test_every_step_has_the_bits_of_stage_0(ranks: int, options: dict, accumulation: int) -> None:
    def body(comm: Communicator, stage: int) -> list[tuple[bool, Tensor]]:
        model = make_model()
        optimizer = build(comm, model, stage, **A_BUCKET_EACH, **options)
        return path(optimizer, model, accumulation=accumulation)

    expected = threads.run(lambda comm: body(comm, 0), ranks)
    for mine, theirs in zip(threads.run(lambda comm: body(comm, 1), ranks), expected, strict=True):
        assert_same(mine, theirs)
    assert sum(not in_sync for in_sync, _ in expected[0]) > 15


@pytest.mark.parametrize("numel", [1, 300])
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


@pytest.mark.parametrize("stage", [0, 1])
def test_a_local_step_sends_nothing_and_the_others_what_they_should(stage: int) -> None:
    numel = 64 * 100

    def body(comm: Communicator) -> dict[Send, set[tuple[int, int]]]:
        model = nn.Linear(numel, 1, bias=False)
        optimizer = build(comm, model, stage)
        schedule = ZeroOneSchedule(**{name: SCHEDULE[name] for name in SCHEDULE if name != "var_freeze_step"})
        sent: dict[Send, set[tuple[int, int]]] = {kind: set() for kind in Send}
        updates = 0
        for step in range(1, STEPS + 1):
            frozen_at = SCHEDULE["var_freeze_step"] if step > SCHEDULE["var_freeze_step"] else None
            kind = schedule.send(step, updates, frozen_at)
            updates += kind is Send.EXACT
            before = optimizer.bytes_sent, sum(one.traffic.calls for one in (exchange_comm(optimizer), comm))
            model(torch.ones(1, numel)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            after = optimizer.bytes_sent, sum(one.traffic.calls for one in (exchange_comm(optimizer), comm))
            sent[kind].add((after[0] - before[0], after[1] - before[1]))
        assert optimizer.bytes_uncompressed == STEPS * 4 * numel
        return sent

    found = threads.run(body, 2)[0]
    assert found[Send.LOCAL] == {(0, 0)}
    sent = {kind: [one for one, _ in some] for kind, some in found.items()}
    for kind in (Send.COMPRESSED, Send.SYNC):
        # Both legs send half a vector, 64 signs and a scale of 32 bits at a time; a freeze or a longer interval is
        # agreed on in a few bytes.
        assert min(sent[kind]) == pytest.approx(numel / 8 * 1.5, rel=0.05)
        assert max(sent[kind]) == pytest.approx(numel / 8 * 1.5, rel=0.2)
    # Gradients both ways, and if they are sharded denominators one way, half a vector of fp32 each.
    assert max(sent[Send.EXACT]) == pytest.approx((2 + stage) * 4 * numel / 2, rel=0.05)


def test_a_local_step_that_is_not_finite_adds_nothing_on_that_rank_alone() -> None:
    def body(comm: Communicator, stage: int) -> tuple[Tensor, tuple[bool, int, int]]:
        model = make_model()
        optimizer = build(comm, model, stage, **A_BUCKET_EACH)
        train(optimizer, model, range(STEPS))
        before = weights(model).clone()
        optimizer.zero_grad()
        (loss_of(model, comm.rank, 500) * (math.nan if comm.rank == 1 else 1.0)).backward()
        optimizer.step()
        assert not optimizer.in_sync
        stayed = torch.allclose(before, weights(model), atol=1e-6)
        train(optimizer, model, range(STEPS + 1, 55))
        assert bool(weights(model).isfinite().all())
        return weights(model), (stayed, optimizer.left_out_steps, optimizer.skipped_steps)

    found = []
    for stage in (0, 1):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found.append(threads.run(partial(body, stage=stage), 2))
        told = [str(one.message) for one in caught if one.category is RuntimeWarning]
        assert ["local step 48 adds nothing on rank 1" in one for one in told] == [True]
        assert [counts for _, counts in found[-1]] == [(False, 0, 0), (True, 1, 0)]
    assert all(torch.equal(mine, theirs) for (mine, _), (theirs, _) in zip(*found, strict=True))


@pytest.mark.parametrize(("saved_stage", "stage", "at"), [(0, 1, 12), (1, 0, STEPS)])
def test_a_resume_at_the_other_stage_is_bit_identical(saved_stage: int, stage: int, at: int) -> None:
    options = {"resync_interval": 9, "weight_decay": 0.1, **A_BUCKET_EACH}  # else the stages' buckets differ

    def first(comm: Communicator):
        model = make_model()
        optimizer = build(comm, model, saved_stage, **options)
        train(optimizer, model, range(at))
        return save(comm, optimizer), path(optimizer, model, range(at, at + 12))

    outcomes = threads.run(first, 3)
    saved = join([part for part, _ in outcomes])

    def second(comm: Communicator):
        model = make_model(seed=9)
        optimizer = build(comm, model, stage, **options)
        train(optimizer, model, range(27))  # what was there before has to go
        optimizer.load(saved)
        assert optimizer.steps == at
        assert optimizer.in_sync == (at != STEPS)
        return path(optimizer, model, range(at, at + 12))

    for mine, (_, theirs) in zip(threads.run(second, 3), outcomes, strict=True):
        assert_same(mine, theirs)


def test_fp32_state_serves_16_bit_weights_and_the_other_way_round() -> None:
    def first(comm: Communicator, dtype):
        model = make_model()
        optimizer = build(comm, model, param_dtype=dtype)
        train(optimizer, model, range(STEPS))
        return save(comm, optimizer)

    def second(comm: Communicator, saved: Saved, dtype) -> list[float]:
        model = make_model(seed=9)
        optimizer = build(comm, model, param_dtype=dtype)
        optimizer.load(saved)
        return train(optimizer, model, range(STEPS, 60))

    for saved_dtype, dtype in ((None, torch.bfloat16), (torch.bfloat16, None)):
        saved = join(threads.run(lambda comm, dtype=saved_dtype: first(comm, dtype), 2))
        losses = threads.run(lambda comm, saved=saved, dtype=dtype: second(comm, saved, dtype), 2)[0]
        assert sum(losses) / len(losses) < 0.15  # that of a new model is 0.9


def test_weights_alone_are_those_of_the_last_sync_and_end_local_progress() -> None:
    def body(comm: Communicator) -> Tensor:
        model = make_model()
        optimizer = build(comm, model)
        train(optimizer, model, range(STEPS))
        saved = join([pickle.loads(raw) for raw in comm.all_gather_bytes(pickle.dumps(save(comm, optimizer)))])
        train(optimizer, model, range(STEPS, STEPS + 1))
        optimizer.load_weights(saved)
        assert optimizer.in_sync
        return weights(model)

    assert torch.equal(*threads.run(body, 2))
