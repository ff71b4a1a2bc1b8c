"""What 0/1 Adam sends and when; skipped, accumulated, scaled and missing gradients; what is refused."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from torch import nn

import thinwire
from tests.optim.training import buckets_of, exchange_comm, loss_of, make_model, same, snapshot, train, weights
from tests.optim.zero_one.training import SCHEDULE, make_zero_one
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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_it_learns_and_agrees_after_every_sync(dtype) -> None:
    def rank(comm):
        model = make_model(seed=comm.rank, dtype=dtype)
        optimizer = make_zero_one(model, comm)
        seen = []
        losses = train(model, optimizer, range(200), lambda step: seen.append((optimizer.in_sync, weights(model))))
        assert np.mean(losses[-20:]) < 0.8 * np.mean(losses[:10])
        return seen

    results = threads.run(rank, 3)
    for (in_sync, first), *others in zip(*results, strict=True):
        alike = all(torch.equal(first, other) for _, other in others)
        assert alike == in_sync


@pytest.mark.parametrize("options", [{}, {"weight_decay": 0.1, "lr": 0.02, "betas": (0.8, 0.99), "eps": 1e-6}])
def test_while_every_step_is_exact_it_is_adamw_bit_for_bit(options) -> None:
    def rank(comm):
        model, twin = make_model(), make_model()
        optimizer = make_zero_one(
            model, comm, **options, compress="momentum", var_freeze_step=100, var_update_scaler=100
        )
        adamw = torch.optim.AdamW(twin.parameters(), **({"lr": 3e-3, "weight_decay": 0.0} | options), foreach=True)
        for step in range(30):
            by_rank = [
                torch.autograd.grad(loss_of(twin, other, step), list(twin.parameters())) for other in range(comm.size)
            ]
            for parameter, *gradients in zip(twin.parameters(), *by_rank, strict=True):
                parameter.grad = sum(gradients) / comm.size
            train(model, optimizer, [step])
            adamw.step()
        return torch.equal(weights(model), weights(twin))

    assert threads.run(rank, 3) == [True] * 3


def test_synchronize_weights_makes_all_ranks_alike_and_costs_nothing_where_they_are() -> None:
    def rank(comm):
        model = make_model()
        optimizer = make_zero_one(model, comm, bucket_bytes=600)
        train(model, optimizer, range(73))
        before = weights(model).clone()
        assert not optimizer.in_sync
        optimizer.synchronize_weights()
        assert optimizer.in_sync
        moved = (weights(model) - before).abs().max()
        assert 0 < moved < 0.1
        seen = weights(model).clone()
        calls = exchange_comm(optimizer).traffic.calls
        optimizer.synchronize_weights()
        assert exchange_comm(optimizer).traffic.calls == calls
        losses = train(model, optimizer, range(73, 200))
        assert np.isfinite(losses).all()
        optimizer.synchronize_weights()
        return seen, weights(model)

    results = threads.run(rank, 3)
    assert all(torch.equal(a, b) for result in results for a, b in zip(result, results[0], strict=True))


def test_synchronize_weights_between_backward_and_step_is_an_error() -> None:
    def rank(comm):
        model = make_model()
        optimizer = make_zero_one(model, comm)
        loss_of(model, comm.rank, 0).backward()
        with pytest.raises(RuntimeError, match=r"call step\(\) first"):
            optimizer.synchronize_weights()
        optimizer.step()

    threads.run(rank, 2)


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


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("steps", [3, 8, 27, 36])  # before an exact step, a compressed one, and syncs
def test_one_rank_overflows_all_skip_and_nothing_changes(bad, steps) -> None:
    def rank(comm):
        model = make_model()
        optimizer = make_zero_one(model, comm, bucket_bytes=400, local_step_clipper=1)
        train(model, optimizer, range(steps))
        before = snapshot(model, optimizer)
        optimizer.zero_grad()
        (loss_of(model, comm.rank, 6) * (bad if comm.rank == 1 else 1.0)).backward()
        optimizer.step()
        after = snapshot(model, optimizer)
        train(model, optimizer, range(steps, steps + 20))
        return same(before, after), optimizer.skipped_steps, weights(model)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        results = threads.run(rank, 3)
    assert [result[:2] for result in results] == [(True, 1)] * 3
    assert all(torch.equal(result[2], results[0][2]) for result in results)
    messages = [str(one.message) for one in caught if one.category is RuntimeWarning]
    assert len(messages) == 1
    assert f"step {steps + 1} was skipped on every rank" in messages[0]


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


def test_a_scaler_gives_the_weights_of_no_scaler() -> None:
    def rank(comm):
        results = []
        for scaled in (True, False):
            model = make_model()
            optimizer = make_zero_one(model, comm)
            # Powers of two leave every bit of a gradient but its exponent.
            scaler = torch.amp.GradScaler("cpu", init_scale=2.0**6, growth_interval=9, enabled=scaled)
            for step in range(70):
                optimizer.zero_grad()
                scaler.scale(loss_of(model, comm.rank, step)).backward()
                scaler.step(optimizer)
                scaler.update()
            results.append(weights(model))
        torch.testing.assert_close(results[0], results[1], rtol=1e-4, atol=1e-5)

    threads.run(rank, 2)


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


def test_accumulation_in_no_sync_equals_one_large_batch() -> None:
    def rank(comm):
        results = []
        for accumulate in (True, False):
            model = make_model()
            optimizer = make_zero_one(model, comm, codec="none")
            for step in range(60):
                optimizer.zero_grad()
                halves = [2 * step, 2 * step + 1]
                if accumulate:
                    with optimizer.no_sync():
                        (loss_of(model, comm.rank, halves[0]) / 2).backward()
                    (loss_of(model, comm.rank, halves[1]) / 2).backward()
                else:
                    sum(loss_of(model, comm.rank, half) / 2 for half in halves).backward()
                optimizer.step()
            results.append((weights(model), optimizer.bytes_sent))
        torch.testing.assert_close(results[0][0], results[1][0], rtol=1e-3, atol=1e-4)
        return results[0][1] == results[1][1]

    assert threads.run(rank, 2) == [True, True]


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


def test_groups_keep_their_rates_and_a_frozen_parameter_stays() -> None:
    def rank(comm):
        model = make_model()
        groups = [
            {"params": [p for p in model.parameters() if p.dim() > 1], "lr": 0.0, "weight_decay": 0.1},
            {"params": [p for p in model.parameters() if p.dim() == 1], "lr": 1e-2},
        ]
        optimizer = thinwire.ZeroOneAdam(groups, block_size=64, comm=comm, **SCHEDULE)
        before = [p.detach().clone() for p in model.parameters()]
        train(model, optimizer, range(50))
        moved = [not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)]
        assert moved == [p.dim() == 1 for p in model.parameters()]
        optimizer.synchronize_weights()
        bias = model[0].bias.detach().clone()
        model[0].bias.requires_grad_(False)
        train(model, optimizer, range(50, 80))
        assert torch.equal(model[0].bias, bias)
        optimizer.synchronize_weights()
        return weights(model)

    assert torch.equal(*threads.run(rank, 2))


def test_add_param_group_begins_with_exact_steps_while_the_others_go_on_locally() -> None:
    def rank(comm):
        model = make_model()
        optimizer = thinwire.ZeroOneAdam(model[0].parameters(), lr=3e-3, block_size=64, comm=comm, **SCHEDULE)
        train(model, optimizer, range(60))
        model.zero_grad()
        optimizer.add_param_group({"params": model[2].parameters(), "lr": 1e-3})
        train(model, optimizer, range(60, 170))
        optimizer.synchronize_weights()
        assert [group.clock.frozen_at for group in optimizer._home.groups] == [25, 25]
        return weights(model)

    results = threads.run(rank, 3)
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("steps", [4, 9, 60])
def test_a_parameter_without_a_gradient_on_any_rank(steps) -> None:
    def rank(comm):
        model = make_model()
        unused = nn.Parameter(torch.ones(3))
        optimizer = thinwire.ZeroOneAdam([*model.parameters(), unused], block_size=64, comm=comm, **SCHEDULE)
        train(model, optimizer, range(steps))
        assert torch.equal(unused, torch.ones(3))
        optimizer.synchronize_weights()
        return weights(model)

    assert torch.equal(*threads.run(rank, 2))


def test_coordinates_without_variance_stay_and_mask_holds() -> None:
    def rank(comm):
        embedding = nn.Embedding(10, 8)
        embedding.weight.data.normal_(generator=torch.Generator().manual_seed(0))
        mask = torch.ones(1, 8)
        mask[0, 6:] = 0
        groups = [{"params": embedding.parameters(), "exp_avg_mask": mask}]
        optimizer = thinwire.ZeroOneAdam(groups, lr=0.1, block_size=64, comm=comm, **SCHEDULE)
        before = embedding.weight.detach().clone()
        for step in range(70):
            optimizer.zero_grad()
            (embedding(torch.tensor([0, 1, 2 + step % 2])) - 1).square().sum().backward()
            optimizer.step()
        moved = embedding.weight != before
        assert moved[:4, :6].all()
        assert not moved[4:].any()
        assert not moved[:, 6:].any()
        return embedding.weight.abs().max().item()

    assert max(threads.run(rank, 2)) < 5


def test_empty_and_scalar_parameters_on_one_rank_and_on_three() -> None:
    def rank(comm):
        scalar, empty = nn.Parameter(torch.tensor(2.0)), nn.Parameter(torch.empty(0, 3))
        options = {"var_freeze_step": 3, "local_step_scaler": 2, "local_step_clipper": 3}
        optimizer = thinwire.ZeroOneAdam([empty, scalar], lr=0.1, block_size=64, comm=comm, **options)
        for _ in range(18):
            optimizer.zero_grad()
            (scalar**2 + empty.sum()).backward()
            optimizer.step()
        return scalar.item()

    alone, together = threads.run(rank, 1), threads.run(rank, 3)
    assert together == [together[0]] * 3
    assert abs(alone[0]) < 2


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


def test_weights_loaded_while_in_sync_are_kept() -> None:
    def rank(comm):
        model = make_model()
        optimizer = make_zero_one(model, comm, lr=1e-4)
        train(model, optimizer, range(73))
        optimizer.synchronize_weights()
        other = make_model(seed=9)
        model.load_state_dict(other.state_dict())
        train(model, optimizer, range(73, 80))
        return (weights(model) - weights(other)).abs().max().item()

    assert max(threads.run(rank, 2)) < 0.02


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"var_freeze_step": 0}, "var_freeze_step must be a whole number of at least 1, got 0"),
        ({"var_freeze_step": "auto"}, "var_freeze_step must be a whole number"),
        ({"var_update_scaler": 0}, "var_update_scaler must be a whole number of at least 1, got 0"),
        ({"local_step_scaler": 1.5}, "local_step_scaler must be a whole number of at least 1, got 1.5"),
        ({"local_step_clipper": True}, "local_step_clipper must be a whole number"),
        ({"compress": "gradient"}, "compress must be 'update' or 'momentum'"),
        ({"amsgrad": True}, "amsgrad"),
        ({"lr": -1.0}, "lr must be at least 0"),
        ({"codec": "sign2"}, "codec must be"),
    ],
)
def test_bad_options_are_refused(options, message) -> None:
    def rank(comm):
        with pytest.raises(ValueError, match=message):
            make_zero_one(make_model(), comm, **options)

    threads.run(rank, 2)


@pytest.mark.parametrize("name", ["var_freeze_step", "var_update_scaler", "local_step_scaler", "local_step_clipper"])
def test_ranks_that_differ_are_told_on_every_rank(name) -> None:
    def rank(comm):
        with pytest.raises(ValueError, match=f"rank 1 and rank 0 differ: {name} is 8 against 7 on rank 0"):
            make_zero_one(make_model(), comm, **{name: 7 + comm.rank})

    threads.run(rank, 2)


def test_learning_rates_that_differ_between_ranks_are_an_error_at_the_next_look() -> None:
    def rank(comm):
        model = make_model()
        optimizer = make_zero_one(model, comm)
        train(model, optimizer, range(3))
        optimizer.param_groups[0]["lr"] *= 1 + comm.rank
        with pytest.raises(ValueError, match="rank 1 has learning rates"):
            train(model, optimizer, range(3, 30))

    threads.run(rank, 2)


def test_leaving_out_is_refused_as_its_agreement_would_be_a_message() -> None:
    def rank(comm):
        model = make_model()
        optimizer = make_zero_one(model, comm)
        with pytest.raises(RuntimeError, match="an optimizer with local steps leaves no parameters out"):
            optimizer.leave_out([model[0].weight])

    threads.run(rank, 2)


def test_by_nodes_it_learns_and_agrees_after_every_sync() -> None:
    def rank(comm):
        model = make_model()
        optimizer = make_zero_one(model, comm, nodes=[0, 0, 1])
        seen = []
        losses = train(model, optimizer, range(100), lambda step: seen.append((optimizer.in_sync, weights(model))))
        assert np.mean(losses[-10:]) < np.mean(losses[:5])
        return seen

    results = threads.run(rank, 3)
    for (in_sync, first), *others in zip(*results, strict=True):
        assert all(torch.equal(first, other) for _, other in others) == in_sync
