"""Sharded 0/1 Adam saved and loaded in the middle of both phases, on the same ranks bit for bit, on others as nearly as
their number allows; and weights that somebody else writes."""

from __future__ import annotations

import pickle

import pytest
import torch
from torch import Tensor

import thinwire
from tests.optim.training import make_model, weights
from tests.optim.zero_one.test_sharded_zero_one_adam import A_BUCKET_EACH, assert_same, build, path
from tests.zero.saved import Saved, join, save
from tests.zero.training import train
from thinwire.comm import Communicator, threads

MOMENTS = (12, 30, 73)  # compressed gradients; frozen and in sync; between two syncs


@pytest.mark.parametrize(
    ("dtype", "saved_stage", "stage", "at"),
    [
        *((None, 1, 1, at) for at in MOMENTS),
        (torch.bfloat16, 1, 1, 73),
        (None, 0, 1, 12),
        (None, 1, 0, 73),
    ],
)
def test_resume_on_the_same_ranks_is_bit_identical(dtype, saved_stage: int, stage: int, at: int) -> None:
    options = {"param_dtype": dtype, "resync_interval": 9, "weight_decay": 0.1}
    if saved_stage != stage:
        options |= A_BUCKET_EACH  # else the stages' buckets differ

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
        assert optimizer.in_sync == (at != 73)
        return path(optimizer, model, range(at, at + 12))

    for mine, (_, theirs) in zip(threads.run(second, 3), outcomes, strict=True):
        assert_same(mine, theirs)


@pytest.mark.parametrize(("ranks", "at"), [(1, 12), (2, 30), (4, 12), (1, 73), (4, 73)])
def test_resume_on_other_ranks_keeps_what_the_average_depends_on(ranks: int, at: int) -> None:
    def first(comm: Communicator):
        model = make_model()
        optimizer = build(comm, model, weight_decay=0.1)
        train(optimizer, model, range(at))
        return save(comm, optimizer)

    parts = threads.run(first, 3)
    saved = join(parts)

    def second(comm: Communicator) -> tuple:
        model = make_model(seed=9)
        optimizer = build(comm, model, weight_decay=0.1, bucket_bytes=5000)
        optimizer.load(saved)
        resumed = save(comm, optimizer)
        train(optimizer, model, range(at, at + 6))
        optimizer.synchronize_weights()
        return resumed, weights(model)

    outcomes = threads.run(second, ranks)
    assert all(torch.equal(mine, outcomes[0][1]) for _, mine in outcomes)
    resumed = join([part for part, _ in outcomes])
    sizes = {name: parameter.numel() for name, parameter in make_model().named_parameters()}
    for kind in saved.kinds():
        for name, numel in sizes.items():
            assert torch.equal(resumed.read(kind, name, 0, numel), saved.read(kind, name, 0, numel)), kind
    for key in (key for key, one in parts[0][1].items() if one.is_floating_point()):
        mean = torch.stack([own[key] for _, own, _ in parts]).mean(dim=0)
        for rank in range(ranks):
            torch.testing.assert_close(resumed.read_rank(key, rank), mean, rtol=1e-5, atol=1e-9)


def test_fp32_state_serves_16_bit_weights_and_the_other_way_round() -> None:
    def first(comm: Communicator, dtype):
        model = make_model()
        optimizer = build(comm, model, param_dtype=dtype)
        train(optimizer, model, range(73))
        return save(comm, optimizer)

    def second(comm: Communicator, saved: Saved, dtype) -> list[float]:
        model = make_model(seed=9)
        optimizer = build(comm, model, param_dtype=dtype)
        optimizer.load(saved)
        return train(optimizer, model, range(73, 85))

    for saved_dtype, dtype in ((None, torch.bfloat16), (torch.bfloat16, None)):
        saved = join(threads.run(lambda comm, dtype=saved_dtype: first(comm, dtype), 2))
        losses = threads.run(lambda comm, saved=saved, dtype=dtype: second(comm, saved, dtype), 2)[0]
        assert sum(losses) / len(losses) < 0.15  # that of a new model is 0.9


def test_weights_alone_and_a_fresh_start() -> None:
    """Weights of the last sync are what is saved; loading only them ends local progress, and a reset begins anew."""

    def body(comm: Communicator) -> tuple[Tensor, Tensor, Tensor]:
        model, fresh = make_model(), make_model(seed=3)
        optimizer, other = build(comm, model), build(comm, fresh)
        train(optimizer, model, range(73))
        saved = join(comm_gather(comm, save(comm, optimizer)))
        train(optimizer, model, range(73, 74))
        optimizer.load_weights(saved)
        assert optimizer.in_sync
        at_sync = weights(model)
        optimizer.reset_state()
        assert optimizer.steps == 0
        assert not optimizer.frozen
        other.load_weights(saved)
        train(optimizer, model, range(40))
        train(other, fresh, range(40))
        return at_sync, weights(model), weights(fresh)

    outcomes = threads.run(body, 2)
    assert torch.equal(outcomes[0][0], outcomes[1][0])
    for _, again, fresh in outcomes:
        assert torch.equal(again, fresh)


def comm_gather(comm: Communicator, mine: tuple) -> list[tuple]:
    """What every rank has, on every rank."""
    return [pickle.loads(raw) for raw in comm.all_gather_bytes(pickle.dumps(mine))]


@pytest.mark.parametrize("at", [10, 30])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_weights_that_somebody_writes_in_sync_are_taken_over(dtype, at: int) -> None:
    def body(comm: Communicator) -> None:
        model = make_model()
        optimizer = build(comm, model, param_dtype=dtype, resync_interval=1)
        train(optimizer, model, range(at))
        with torch.no_grad():
            model[0].weight.zero_()
        before = weights(model)
        train(optimizer, model, range(at, at + 2))
        assert float((weights(model) - before).abs().max()) < 0.1

    threads.run(body, 2)


def test_weights_that_somebody_writes_between_syncs_are_an_error() -> None:
    def body(comm: Communicator) -> None:
        model = make_model()
        optimizer = build(comm, model)
        train(optimizer, model, range(73))
        model.load_state_dict(model.state_dict())  # what was there: nothing to say
        train(optimizer, model, range(73, 74))
        with torch.no_grad():
            model[0].weight.zero_()
        with pytest.raises(RuntimeError, match=r"'0.weight', shape \(37, 6\), was changed between local steps"):
            optimizer.synchronize_weights()

    threads.run(body, 2)


def test_states_of_other_optimizers_are_refused() -> None:
    def body(comm: Communicator) -> None:
        model = make_model()
        optimizer, other = build(comm, model), thinwire.OneBitAdam(model.parameters(), comm=comm, stage=1)
        with pytest.raises(ValueError, match="saved by OneBitAdam"):
            optimizer.load(join([save(comm, other)]))
        with pytest.raises(ValueError, match="saved by ZeroOneAdam"):
            other.load(join([save(comm, optimizer)]))

    threads.run(body, 1)
