"""What 1-bit Adam on sharded state saves, and who can take it up: any number of ranks, and no other optimizer."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import thinwire
from tests.optim.adam.sharded import FREEZE, build
from tests.optim.training import loss_of, make_model, train
from tests.zero.saved import Saved, join, save
from thinwire.comm import Communicator, threads
from thinwire.zero import ShardedOptimizer


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_resume_on_the_same_ranks_is_bit_identical(dtype: torch.dtype | None) -> None:
    for at in (FREEZE - 4, FREEZE + 11):

        def first(comm: Communicator, at: int = at):
            model = make_model()
            optimizer = build(comm, model, 2, param_dtype=dtype)
            train(model, optimizer, range(at))
            return save(comm, optimizer), train(model, optimizer, range(at, at + 30))

        outcomes = threads.run(first, 3)
        saved = join([part for part, _ in outcomes])

        def second(comm: Communicator, saved: Saved = saved, at: int = at) -> list[float]:
            model = make_model(seed=9)
            optimizer = build(comm, model, 2, param_dtype=dtype)
            optimizer.load(saved)
            return train(model, optimizer, range(at, at + 30))

        assert threads.run(second, 3) == [losses for _, losses in outcomes]


def train_shared(optimizer, model: nn.Module, steps) -> list[float]:
    """Train on the same 24 batches a step, however many ranks share them."""
    shares = 24 // optimizer.comm.size
    losses = []
    for step in steps:
        optimizer.zero_grad()
        total = torch.zeros(())
        for share in range(shares):
            loss = loss_of(model, optimizer.comm.rank * shares + share, step) / shares
            total += loss.detach()
            if share < shares - 1:
                with optimizer.no_sync():
                    loss.backward()
            else:
                loss.backward()
        optimizer.comm.all_reduce(total, "mean")
        optimizer.step()
        losses.append(float(total))
    return losses


@pytest.fixture(scope="module")
def of_four_ranks() -> list[tuple]:
    """What each of four ranks saves, and its losses from there on."""

    def first(comm: Communicator):
        model = make_model()
        optimizer = build(comm, model, 1, param_dtype=torch.bfloat16)
        train_shared(optimizer, model, range(FREEZE + 40))
        return save(comm, optimizer), train_shared(optimizer, model, range(60, 100))

    return threads.run(first, 4)


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_resume_on_other_ranks_keeps_the_mean_of_the_residuals(ranks: int, of_four_ranks: list[tuple]) -> None:
    parts, (expected, *_) = zip(*of_four_ranks, strict=True)
    saved = join(list(parts))

    def second(comm: Communicator):
        model = make_model(seed=9)
        optimizer = build(comm, model, 2, param_dtype=torch.bfloat16, bucket_bytes=500)
        optimizer.load(saved)
        assert optimizer.frozen
        resumed = save(comm, optimizer)
        return resumed, train_shared(optimizer, model, range(60, 100))

    outcomes = threads.run(second, ranks)
    joined = join([part for part, _ in outcomes])
    for name, parameter in make_model().named_parameters():
        for kind in ("weight", "master", "preconditioner"):
            assert torch.equal(
                joined.read(kind, name, 0, parameter.numel()), saved.read(kind, name, 0, parameter.numel())
            )
        key = f"worker_residual.{name}"
        before = torch.stack([own[key].float() for _, own, _ in parts]).mean(dim=0)
        after = torch.stack([part[1][key].float() for part, _ in outcomes]).mean(dim=0)
        torch.testing.assert_close(after, before, rtol=2**-7, atol=1e-7)
        # What blocks cut elsewhere cannot say of u goes into the owner's residual.
        total = [
            one.read("momentum", name, 0, parameter.numel()) + one.read("owner_residual", name, 0, parameter.numel())
            for one in (joined, saved)
        ]
        torch.testing.assert_close(total[0], total[1], rtol=1e-5, atol=1e-6)
    # Other ranks compress other means: the noise differs, and with so small a model the loss by a few percent.
    assert sum(outcomes[0][1]) == pytest.approx(sum(expected), rel=0.05)


def test_other_optimizers_states_are_refused() -> None:
    def body(comm: Communicator) -> None:
        model = make_model()
        adamw = ShardedOptimizer(model.parameters(), torch.optim.AdamW, comm=comm)
        train(model, adamw, range(2))
        saved = join([save(comm, adamw)])
        onebit = thinwire.OneBitAdam(model.parameters(), comm=comm, freeze_step=1, stage=1)
        with pytest.raises(ValueError, match="saved by AdamW with 1 parameter groups, this is OneBitAdam"):
            onebit.load(saved)
        onebit.load_weights(saved)
        train(model, onebit, range(3))
        frozen = join([save(comm, onebit)])
        with pytest.raises(ValueError, match="build the same optimizer"):
            adamw.load(frozen)

    threads.run(body, 1)
