"""What 0/1 Adam sends and when, and what its local steps do with overflows, scalers and written weights."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from torch import nn

import thinwire
from tests.optim.training import buckets_of, exchange_comm, loss_of, make_model, same, snapshot, train, weights
from tests.optim.zero_one.training import make_zero_one
from thinwire.comm import threads


def sent_by_step(optimizer, model, steps):
    """Collectives, on any communicator of this rank, that each step of training calls."""
    counts = []

    def calls():
        return exchange_comm(optimizer).traffic.calls + optimizer.comm.traffic.calls

    before = calls()

    def count(step):
        counts.append(calls() - before - sum(counts))

    train(model, optimizer, steps, count)
    return counts


def test_local_steps_send_nothing_at_all() -> None:
    def rank(comm):
        model = make_model()
        optimizer = make_zero_one(model, comm, var_freeze_step=4, local_step_scaler=4, bucket_bytes=600)
        in_sync = []
        counts = []
        for step in range(40):
            counts += sent_by_step(optimizer, model, [step])
            in_sync.append(optimizer.in_sync)
        buckets = len(buckets_of(optimizer))
        assert buckets > 1
        assert counts[4:] == [0 if not one else 2 * buckets for one in in_sync[4:]]
        return in_sync

    for in_sync in threads.run(rank, 3):
        assert in_sync[:8] == [True] * 8  # the variance moves for four steps, then the interval is 1 for four more
        assert [step for step in range(9, 41) if in_sync[step - 1]] == [10, 12, 16, 20, 25, 30, 35, 40]


def test_bytes_of_a_run_are_a_fraction_of_1_bit_adams() -> None:
    def rank(comm):
        sent = []
        for one_bit in (True, False):
            weight = nn.Parameter(torch.zeros(100_003))
            shared = {"comm": comm, "block_size": 2048}
            if one_bit:
                optimizer = thinwire.OneBitAdam([weight], freeze_step=20, **shared)
            else:
                options = {"var_freeze_step": 60, "local_step_scaler": 20, "local_step_clipper": 16}
                optimizer = thinwire.ZeroOneAdam([weight], var_update_scaler=4, **options, **shared)
            generator = torch.Generator().manual_seed(comm.rank)
            for _ in range(200):
                weight.grad = torch.randn(100_003, generator=generator)
                optimizer.step()
            sent.append(optimizer.bytes_sent)
            assert optimizer.bytes_uncompressed == 200 * round(2 * 100_003 * 4 / 2)
        return sent[1] / sent[0]

    # 1-bit Adam: 20 exact steps, 180 of a bit. 0/1 Adam: 15 exact, 45 of a bit, then 47 syncs in 140 steps.
    assert max(threads.run(rank, 2)) < 0.75


@pytest.mark.parametrize("compress", ["update", "momentum"])
def test_a_sync_of_one_rank_without_compression_moves_nothing_and_ends_in_the_mean_momentum(compress) -> None:
    def rank(comm):
        model = make_model()
        rates = {"lr": 1e-2, "weight_decay": 0.5}
        optimizer = make_zero_one(model, comm, codec="none", compress=compress, **rates)
        train(model, optimizer, range(75))
        momenta = []
        train(model, optimizer, range(75, 78), lambda _: momenta.append(momentum_of(optimizer)))
        assert not optimizer.in_sync
        before = weights(model).clone()
        optimizer.synchronize_weights()
        torch.testing.assert_close(weights(model), before, rtol=1e-6, atol=1e-6)
        decay = 1 - 1e-2 * 0.5  # what an earlier step has moved shrinks with the weights
        shares = torch.tensor([decay**2 / (1 - 0.9**76), decay / (1 - 0.9**77), 1 / (1 - 0.9**78)])
        mean = (torch.stack(momenta) * shares[:, None]).sum(dim=0) / shares.sum()
        torch.testing.assert_close(momentum_of(optimizer), mean, rtol=1e-5, atol=1e-7)

    threads.run(rank, 1)


def momentum_of(optimizer):
    return torch.cat([entry["exp_avg"].flatten() for entry in optimizer.state.values()])


def test_an_overflow_in_a_sync_after_local_steps_keeps_them_for_the_next_sync() -> None:
    def rank(comm):
        model = make_model()
        optimizer = make_zero_one(model, comm, var_freeze_step=5, local_step_scaler=1, local_step_clipper=4)
        train(model, optimizer, range(15))
        assert not optimizer.in_sync
        before = snapshot(model, optimizer)
        optimizer.zero_grad()
        (loss_of(model, comm.rank, 15) * (float("inf") if comm.rank == 0 else 1.0)).backward()
        optimizer.step()
        assert same(before, snapshot(model, optimizer))
        train(model, optimizer, [16])
        assert optimizer.in_sync
        return weights(model)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        results = threads.run(rank, 2)
    assert torch.equal(*results)


def test_an_overflow_in_a_local_step_leaves_that_rank_out_of_it() -> None:
    def rank(comm):
        model = make_model()
        optimizer = make_zero_one(model, comm, var_freeze_step=5, local_step_scaler=1, local_step_clipper=4)
        train(model, optimizer, range(13))
        before = weights(model).clone()
        optimizer.zero_grad()
        (loss_of(model, comm.rank, 13) * (float("nan") if comm.rank == 1 else 1.0)).backward()
        optimizer.step()
        stayed = torch.allclose(before, weights(model), atol=1e-6)
        train(model, optimizer, range(14, 16))
        assert optimizer.in_sync
        return stayed, optimizer.left_out_steps, optimizer.skipped_steps, weights(model)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        results = threads.run(rank, 3)
    assert [result[:3] for result in results] == [(False, 0, 0), (True, 1, 0), (False, 0, 0)]
    assert all(torch.equal(result[3], results[0][3]) for result in results)
    assert bool(torch.isfinite(results[0][3]).all())
    assert ["adds nothing on rank 1" in str(one.message) for one in caught if one.category is RuntimeWarning] == [True]


def test_scalers_that_came_apart_in_local_steps_still_give_one_result() -> None:
    def rank(comm):
        model = make_model()
        optimizer = make_zero_one(model, comm, var_freeze_step=5, local_step_scaler=1, local_step_clipper=4)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**6, growth_interval=1000)
        for step in range(40):
            optimizer.zero_grad()
            bad = step in (17, 23) and comm.rank == 1  # step 24 is a sync
            scaler.scale(loss_of(model, comm.rank, step) * (float("inf") if bad else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()
        optimizer.synchronize_weights()
        return scaler.get_scale(), optimizer.left_out_steps, optimizer.skipped_steps, weights(model)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        first, second = threads.run(rank, 2)
    assert (first[0], second[0]) == (2.0**6, 2.0**4)
    assert (first[1:3], second[1:3]) == ((0, 1), (1, 1))
    assert torch.equal(first[3], second[3])
    assert bool(torch.isfinite(first[3]).all())


def test_a_learning_rate_of_zero_moves_nothing_and_breaks_nothing() -> None:
    def rank(comm):
        model = make_model()
        optimizer = make_zero_one(model, comm, var_freeze_step=5, local_step_scaler=2, local_step_clipper=4)
        train(model, optimizer, range(20))
        optimizer.synchronize_weights()
        before = weights(model).clone()
        optimizer.param_groups[0]["lr"] = 0.0
        train(model, optimizer, range(20, 40))
        assert torch.equal(weights(model), before)
        optimizer.param_groups[0]["lr"] = 1e-3
        losses = train(model, optimizer, range(40, 60))
        optimizer.synchronize_weights()
        return weights(model), np.isfinite(losses).all()

    first, second = threads.run(rank, 2)
    assert torch.equal(first[0], second[0])
    assert first[1]


def test_learning_rates_may_change_between_backward_and_step() -> None:
    def rank(comm, late):
        model = make_model()
        optimizer = make_zero_one(model, comm)
        for step in range(70):
            optimizer.zero_grad()
            rate = 3e-3 * (1 - step / 100)
            if not late:
                optimizer.param_groups[0]["lr"] = rate
            loss_of(model, comm.rank, step).backward()
            optimizer.param_groups[0]["lr"] = rate
            optimizer.step()
        return weights(model)

    for late, early in threads.run(lambda comm: (rank(comm, True), rank(comm, False)), 2):
        assert torch.equal(late, early)


def test_weights_changed_between_local_steps_are_an_error_and_put_back_they_are_not() -> None:
    def rank(comm):
        model = make_model()
        optimizer = make_zero_one(model, comm)
        train(model, optimizer, range(73))
        assert not optimizer.in_sync
        own = weights(model).clone()
        state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        with torch.no_grad():
            model[0].bias.zero_()
        model.load_state_dict(state)
        train(model, optimizer, [73])
        assert not torch.equal(weights(model), own)
        with torch.no_grad():
            model[0].bias.add_(1.0)
        optimizer.zero_grad()
        loss_of(model, comm.rank, 74).backward()
        with pytest.raises(RuntimeError, match=r"shape \(37,\), was changed between local steps"):
            optimizer.step()

    threads.run(rank, 2)
