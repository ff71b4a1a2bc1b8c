"""1-bit Adam on sharded state against 1-bit Adam on whole state: the same losses, replicas that stay equal, clipping by
the averaged gradient's norm, and checkpoints for any number of ranks."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import thinwire
from tests.optim.training import exchange_comm, loss_of, make_model, same, snapshot, weights
from tests.zero.saved import Saved, join, save
from thinwire.comm import Communicator, threads
from thinwire.zero import ReplicaDriftError

FREEZE = 15


def build(comm: Communicator, model: nn.Module, stage: int, **options) -> thinwire.OneBitAdam:
    options = {
        "lr": 3e-3,
        "freeze_step": FREEZE,
        "bucket_bytes": 1000,
        "block_size": 64,
        "on_drift": "raise",
        "resync_interval": 7,
    } | options
    return thinwire.OneBitAdam(
        model.parameters(), stage=stage, comm=comm, named_parameters=model.named_parameters(), **options
    )


def train(optimizer, model: nn.Module, steps, accumulation: int = 1, scale: float = 1.0) -> list[float]:
    losses = []
    for step in steps:
        optimizer.zero_grad()
        total = 0.0
        for micro in range(accumulation):
            loss = loss_of(model, optimizer.comm.rank, step * accumulation + micro) / accumulation
            if micro < accumulation - 1:
                with optimizer.no_sync():
                    (scale * loss).backward()
            else:
                (scale * loss).backward()
            total += loss.item()
        optimizer.step()
        losses.append(total)
    return losses


def run(ranks: int, stage: int, steps: int, accumulation: int = 1, **options) -> list[tuple[Tensor, list[float]]]:
    def body(comm: Communicator) -> tuple[Tensor, list[float]]:
        model = make_model()
        losses = train(build(comm, model, stage, **options), model, range(steps), accumulation)
        return weights(model), losses

    return threads.run(body, ranks)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_stages_1_and_2_give_the_same_bits_and_nearly_those_of_stage_0(ranks: int) -> None:
    def whole(comm: Communicator) -> list[float]:
        model = make_model()
        optimizer = thinwire.OneBitAdam(
            model.parameters(), lr=3e-3, freeze_step=FREEZE, comm=comm, block_size=64, bucket_bytes=1000
        )
        return train(optimizer, model, range(90))

    of_stage = [run(ranks, stage, 90) for stage in (1, 2)]
    for of_rank in of_stage:
        for mine, _ in of_rank:
            assert torch.equal(mine, of_stage[0][0][0])
    mean = sum(sum(losses[-40:]) for _, losses in of_stage[0]) / 40 / ranks
    expected = sum(sum(losses[-40:]) for losses in threads.run(whole, ranks)) / 40 / ranks
    # 8 bits of preconditioner and another order of buckets are the difference.
    assert mean == pytest.approx(expected, rel=0.03)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("stage", [1, 2])
def test_16_bit_replicas_stay_equal_on_all_ranks_and_near_the_master_weights(dtype: torch.dtype, stage: int) -> None:
    def body(comm: Communicator) -> tuple[Tensor, Saved | None]:
        model = make_model()
        optimizer = build(comm, model, stage, param_dtype=dtype)
        train(optimizer, model, range(FREEZE + 25))
        return weights(model), save(comm, optimizer)

    outcomes = threads.run(body, 3)
    assert all(torch.equal(mine, outcomes[0][0]) for mine, _ in outcomes)
    saved = join([part for _, part in outcomes])
    sizes = {name: parameter.numel() for name, parameter in make_model().named_parameters()}
    masters = torch.cat([saved.read("master", name, 0, numel) for name, numel in sizes.items()])
    # Four steps since the last copy of the master weights: at most that many units in the last place.
    bits = 2.0**-8 if dtype == torch.bfloat16 else 2.0**-11
    torch.testing.assert_close(outcomes[0][0], masters, rtol=5 * bits, atol=1e-5)


def test_accumulation_is_as_one_larger_batch() -> None:
    def body(comm: Communicator, shares: int) -> Tensor:
        model = make_model()
        optimizer = build(comm, model, 1)
        for step in range(FREEZE + 10):
            optimizer.zero_grad()
            losses = [loss_of(model, comm.rank, 4 * step + part) / 4 for part in range(4)]
            if shares == 1:
                sum(losses).backward()
            else:
                for part, loss in enumerate(losses):
                    if part < 3:
                        with optimizer.no_sync():
                            loss.backward()
                    else:
                        loss.backward()
            optimizer.step()
        return weights(model)

    once = threads.run(lambda comm: body(comm, 1), 2)[0]
    # A sign that the last bit decides moves a weight by a whole step, 3e-3.
    torch.testing.assert_close(threads.run(lambda comm: body(comm, 4), 2)[0], once, rtol=0, atol=1e-2)


@pytest.mark.parametrize("stage", [1, 2])
def test_clipping_uses_the_averaged_gradients_norm(stage: int) -> None:
    def body(comm: Communicator) -> None:
        model, other = make_model(), make_model()
        optimizer = build(comm, model, stage, max_norm=0.05)
        for step in range(FREEZE + 12):
            other.load_state_dict(model.state_dict())
            other.zero_grad()
            for rank in range(comm.size):
                (loss_of(other, rank, step) / comm.size).backward()
            exact = float(nn.utils.get_total_norm([parameter.grad for parameter in other.parameters()]))
            train(optimizer, model, [step])
            assert optimizer.frozen == (step >= FREEZE - 1)
            # Frozen: an estimate with a standard deviation of 0.55%.
            assert optimizer.last_step.grad_norm == pytest.approx(exact, rel=1e-5 if step < FREEZE else 0.03)

    threads.run(body, 2)


def test_a_clipped_spike_moves_the_momentum_and_the_residuals_as_if_it_had_been_small() -> None:
    """Spike times clip: what is sent, and what is remembered, must be near what the small gradient gives."""

    def body(comm: Communicator, spike: float) -> tuple[Tensor, float]:
        model = make_model()
        optimizer = build(comm, model, 1, max_norm=1e-3, resync_interval=1000)
        train(optimizer, model, range(FREEZE + 3))
        optimizer.zero_grad()
        (spike * loss_of(model, comm.rank, 999)).backward()
        optimizer.step()
        residual = torch.cat(list(optimizer.rank_tensors().values()))
        return weights(model), float(residual.norm())

    plain = threads.run(lambda comm: body(comm, 1.0), 2)
    spiked = threads.run(lambda comm: body(comm, 1e6), 2)
    for (_, residual), (_, spiked_residual) in zip(plain, spiked, strict=True):
        assert spiked_residual == pytest.approx(residual, rel=0.5)
    # One step of 3e-3 an element at most lies between two models that were equal before it.
    assert float((plain[0][0] - spiked[0][0]).abs().max()) < 1.5e-2


@pytest.mark.parametrize("dtype", [None, torch.float16])
def test_an_overflow_on_one_rank_skips_the_step_and_leaves_everything_untouched(dtype: torch.dtype | None) -> None:
    def body(comm: Communicator) -> None:
        model = make_model()
        optimizer = build(comm, model, 2, param_dtype=dtype, reversible=True)
        optimizer.loss_scale = 64.0
        train(optimizer, model, range(FREEZE + 4), scale=64.0)
        before = snapshot(model, optimizer)
        optimizer.zero_grad()
        (loss_of(model, comm.rank, 500) * (math.inf if comm.rank == 1 else 64.0)).backward()
        optimizer.step()
        assert not optimizer.last_step.applied
        assert same(before, snapshot(model, optimizer))
        losses = train(optimizer, model, range(501, 505), scale=64.0)
        assert optimizer.last_step.applied
        assert all(math.isfinite(loss) for loss in losses)

    threads.run(body, 3)


def test_without_reversible_residuals_stay_finite_after_an_overflow() -> None:
    def body(comm: Communicator) -> None:
        model = make_model()
        optimizer = build(comm, model, 1, param_dtype=torch.bfloat16)
        train(optimizer, model, range(FREEZE + 4))
        optimizer.zero_grad()
        (loss_of(model, comm.rank, 500) * math.nan).backward()
        optimizer.step()
        assert not optimizer.last_step.applied
        assert all(bool(residual.isfinite().all()) for residual in optimizer.rank_tensors().values())
        losses = train(optimizer, model, range(501, 520))
        assert sum(losses) / len(losses) < 0.2

    threads.run(body, 2)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_resume_on_the_same_ranks_is_bit_identical(dtype: torch.dtype | None) -> None:
    for at in (FREEZE - 4, FREEZE + 11):

        def first(comm: Communicator, at: int = at):
            model = make_model()
            optimizer = build(comm, model, 2, param_dtype=dtype)
            train(optimizer, model, range(at))
            return save(comm, optimizer), train(optimizer, model, range(at, at + 30))

        outcomes = threads.run(first, 3)
        saved = join([part for part, _ in outcomes])

        def second(comm: Communicator, saved: Saved = saved, at: int = at) -> list[float]:
            model = make_model(seed=9)
            optimizer = build(comm, model, 2, param_dtype=dtype)
            optimizer.load(saved)
            return train(optimizer, model, range(at, at + 30))

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


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_resume_on_other_ranks_keeps_the_mean_of_the_residuals(ranks: int) -> None:
    def first(comm: Communicator):
        model = make_model()
        optimizer = build(comm, model, 1, param_dtype=torch.bfloat16)
        train_shared(optimizer, model, range(FREEZE + 40))
        return save(comm, optimizer), train_shared(optimizer, model, range(60, 100))

    parts, (expected, *_) = zip(*threads.run(first, 4), strict=True)
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


def test_drift_is_an_error_or_is_repaired() -> None:
    def body(comm: Communicator, on_drift: str) -> Tensor:
        model = make_model()
        optimizer = build(comm, model, 1, param_dtype=torch.bfloat16, on_drift=on_drift, resync_interval=5)
        train(optimizer, model, range(FREEZE + 2))
        if comm.rank == 1:
            with torch.no_grad():
                model[0].weight[0, 0] += 1.0
        train(optimizer, model, range(FREEZE + 2, FREEZE + 5))
        return weights(model)

    with pytest.raises(ReplicaDriftError, match=r"ranks \[1\] differ from rank 0's after step 20"):
        threads.run(lambda comm: body(comm, "raise"), 3)
    with pytest.warns(RuntimeWarning, match="repaired from the owners' master weights"):
        of_rank = threads.run(lambda comm: body(comm, "repair"), 3)
    assert all(torch.equal(mine, of_rank[0]) for mine in of_rank)


def test_auto_freezes_both_stages_at_the_same_step() -> None:
    def body(comm: Communicator, stage: int) -> int | None:
        model = make_model()
        # Next to no learning rate: gradients whose variance settles.
        optimizer = build(comm, model, stage, freeze_step="auto", betas=(0.9, 0.99), lr=1e-6)
        train(optimizer, model, range(250))
        return optimizer.frozen_at

    taken = {step for stage in (1, 2) for step in threads.run(lambda comm, s=stage: body(comm, s), 2)}
    assert len(taken) == 1
    assert taken.pop() is not None


def test_masked_coordinates_stay_and_do_not_blur_their_blocks() -> None:
    def body(comm: Communicator) -> None:
        model = make_model()
        mask = torch.ones(37, 6)
        mask[5:] = 0.0
        first, *rest = model.parameters()
        optimizer = thinwire.OneBitAdam(
            [{"params": [first], "exp_avg_mask": mask}, {"params": rest}],
            lr=3e-3,
            freeze_step=FREEZE,
            comm=comm,
            block_size=64,
            stage=1,
        )
        train(optimizer, model, range(FREEZE))
        held = first.detach()[5:].clone()
        moving = first.detach()[:5].clone()
        train(optimizer, model, range(FREEZE, FREEZE + 10))
        assert torch.equal(first.detach()[5:], held)
        assert not torch.equal(first.detach()[:5], moving)

    threads.run(body, 2)


def test_one_bit_goes_each_way_once_frozen() -> None:
    def body(comm: Communicator) -> tuple[int, int]:
        model = nn.Linear(1000, 500)
        optimizer = thinwire.OneBitAdam(model.parameters(), freeze_step=2, comm=comm, stage=2)
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(1, 1000)).square().sum().backward()
            optimizer.step()
        assert optimizer.frozen
        before, calls = optimizer.bytes_sent, exchange_comm(optimizer).traffic.calls
        optimizer.zero_grad()
        model(torch.ones(1, 1000)).square().sum().backward()
        optimizer.step()
        return optimizer.bytes_sent - before, exchange_comm(optimizer).traffic.calls - calls

    for sent, calls in threads.run(body, 4):
        assert sent <= 1.05 * 2 * 3 / 4 * 500_500 / 8
        assert calls == 2


def test_other_optimizers_states_are_refused() -> None:
    from thinwire.zero import ShardedOptimizer

    def body(comm: Communicator) -> None:
        model = make_model()
        adamw = ShardedOptimizer(model.parameters(), torch.optim.AdamW, comm=comm)
        train(adamw, model, range(2))
        saved = join([save(comm, adamw)])
        onebit = thinwire.OneBitAdam(model.parameters(), comm=comm, freeze_step=1, stage=1)
        with pytest.raises(ValueError, match="saved by AdamW with 1 parameter groups, this is OneBitAdam"):
            onebit.load(saved)
        onebit.load_weights(saved)
        train(onebit, model, range(3))
        frozen = join([save(comm, onebit)])
        with pytest.raises(ValueError, match="build the same optimizer"):
            adamw.load(frozen)

    threads.run(body, 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"freeze_step": 0}, "freeze_step must be"),
        ({"resync_interval": 0}, "resync_interval must be"),
        ({"block_size": 100}, "block_size must be"),
        ({"on_drift": "ignore"}, "on_drift must be"),
        ({"stage": 3}, "stage must be 0, 1 or 2"),
        ({"betas": (0.9, 1.0)}, "beta"),
    ],
)
def test_bad_options(options: dict, message: str) -> None:
    def body(comm: Communicator) -> None:
        with pytest.raises(ValueError, match=message):
            build(comm, make_model(), **({"stage": 1} | options))

    threads.run(body, 2)


@pytest.mark.parametrize("how", ["overflow", "dropped"])
def test_a_step_that_is_not_taken_leaves_nothing_behind(how) -> None:
    """A residual that was not kept starts again from zero, however large the gradients were that it had taken in."""

    def body(comm: Communicator) -> None:
        model = make_model()
        optimizer = build(comm, model, 1)
        train(optimizer, model, range(FREEZE + 4))
        before = [parameter.detach().clone() for parameter in model.parameters()]
        train(optimizer, model, [FREEZE + 4])
        usual = max(
            float((new.detach() - old).abs().max()) for new, old in zip(model.parameters(), before, strict=True)
        )
        optimizer.zero_grad()
        loss = 1e6 * loss_of(model, comm.rank, 99)
        if how == "overflow" and comm.rank == 0:
            loss = loss + 0 * next(model.parameters()).flatten()[0] * math.inf
        loss.backward()
        if how == "overflow":
            optimizer.step()
            assert not optimizer.last_step.applied
        optimizer.zero_grad()
        before = [parameter.detach().clone() for parameter in model.parameters()]
        train(optimizer, model, range(FREEZE + 5, FREEZE + 8))
        moved = max(
            float((new.detach() - old).abs().max()) for new, old in zip(model.parameters(), before, strict=True)
        )
        assert moved < 20 * usual

    threads.run(body, 2)


def test_what_a_frozen_stage_cannot_do_is_refused() -> None:
    weight = nn.Parameter(torch.ones(4, 3))
    with pytest.raises(ValueError, match="no maximize"):
        thinwire.OneBitAdam([{"params": [weight], "maximize": True}], stage=1)
    with pytest.raises(ValueError, match=r"exp_avg_mask of shape \(4, 2\) does not broadcast"):
        thinwire.OneBitAdam([{"params": [weight], "exp_avg_mask": torch.ones(4, 2)}], stage=1)
    with pytest.raises(ValueError, match="reversible=False does not go with max_norm"):
        thinwire.OneBitAdam([weight], max_norm=1.0, reversible=False, stage=1)


def test_ranks_with_other_settings_are_told() -> None:
    def body(comm: Communicator) -> None:
        with pytest.raises(ValueError, match="freeze_step"):
            thinwire.OneBitAdam([nn.Parameter(torch.ones(3))], freeze_step=5 + comm.rank, comm=comm, stage=1)

    threads.run(body, 2)
