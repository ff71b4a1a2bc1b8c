"""0/1 Adam is the paper's algorithm, sends nothing on local steps, and is bit for bit the same on every rank after a
sync."""

import warnings

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import thinwire
from tests.launching import on_threads
from tests.optim.training import loss_of, make_model, same, snapshot, through_a_file, train, weights
from tests.optim.zero_one.reference import SCHEDULE, ReferenceZeroOneAdam, make_zero_one
from thinwire.comm import threads
from thinwire.optim.adam import bound_updates
from thinwire.optim.step import AdamSettings, Send
from thinwire.optim.zero_one import ZeroOneSchedule

UNUSUAL = {"weight_decay": 2.0, "betas": (0.8, 0.99), "eps": 1e-6}


@pytest.mark.parametrize(
    ("world_size", "growth", "compress", "options"),
    [
        (1, 1.0, "update", UNUSUAL),
        (2, 1.0, "momentum", UNUSUAL),
        (2, 40.0, "update", {}),
        (3, 1.0, "momentum", {}),
        (3, 40.0, "update", UNUSUAL),
        (5, 1.0, "update", {}),
    ],
)
def test_equals_the_algorithm_in_float64_over_120_steps(world_size, growth, compress, options) -> None:
    numel, steps = 300, 120
    rng = np.random.default_rng(world_size)
    start = rng.standard_normal(numel).astype(np.float32)
    gradients = (rng.standard_normal((steps, world_size, numel)) + 0.3).astype(np.float32)
    gradients[20:] *= growth  # of which the variance knows too little, or nothing: updates meet their bound
    settings = {"lr": 1e-2, "block_size": 64, "compress": compress} | SCHEDULE | options
    reference = ReferenceZeroOneAdam(start, world_size, **settings)
    expected = []
    for payloads in gradients:
        reference.step(payloads.astype(np.float64))
        expected.append(reference.weights.copy())
    assert set(reference.kinds) == set("ecls")

    def rank(comm):
        weight = nn.Parameter(torch.from_numpy(start.copy()))
        optimizer = thinwire.ZeroOneAdam([weight], comm=comm, **settings)
        found, in_sync = [], []
        for payloads in gradients:
            weight.grad = torch.from_numpy(payloads[comm.rank])
            optimizer.step()
            found.append(weight.detach().double().numpy())
            in_sync.append(optimizer.in_sync)
        return found, in_sync

    results = threads.run(rank, world_size)
    for number, (found, in_sync) in enumerate(results):
        assert in_sync == [kind != "l" for kind in reference.kinds]
        for step in range(steps):
            moved = np.linalg.norm(expected[step][number] - start)
            rounding = 1e-7 * np.linalg.norm(start)  # of weights to fp32, which no optimizer escapes
            assert np.linalg.norm(found[step] - expected[step][number]) <= 1e-5 * moved + rounding, step
    for step in np.flatnonzero(results[0][1]):
        assert all(np.array_equal(found[step], results[0][0][step]) for found, _ in results)


def test_an_update_is_bounded_bit_for_bit_below_its_bound_and_never_hides_what_is_not_finite() -> None:
    settings = AdamSettings(1e-3, 0.9, 0.99, 1e-8, 0.0, True, False)
    updates = torch.cat([torch.randn(1000), torch.tensor([0.0, 7.0, -7.0, float("inf"), -float("inf"), float("nan")])])
    bounded = updates.clone()
    bound_updates(bounded, settings, ranks=9)
    assert torch.equal(bounded[:1001], updates[:1001].clamp(-3.0, 3.0))
    assert bounded[1001:1003].tolist() == [3.0, -3.0]
    assert bool(bounded[1003:].isnan().all())


def trained(comm, steps, **options):
    model = make_model()
    optimizer = make_zero_one(model, comm, **options)
    return model, optimizer, train(model, optimizer, range(steps))


SHORT = {"var_freeze_step": 5, "local_step_scaler": 1, "local_step_clipper": 4}


@on_threads(2)
def test_between_syncs_the_state_brings_a_ranks_own_weights_whatever_the_model_held(comm) -> None:
    model, optimizer, _ = trained(comm, 73)
    assert not optimizer.in_sync
    resumed = make_model(seed=5)
    again = make_zero_one(resumed, comm)
    again.load_state_dict(through_a_file(optimizer.state_dict()))
    assert torch.equal(weights(resumed), weights(model))


@on_threads(2)
def test_a_resume_may_change_the_schedule(comm) -> None:
    model, optimizer, _ = trained(comm, 40)
    again = make_zero_one(model, comm, local_step_clipper=1)
    again.load_state_dict(optimizer.state_dict())
    again.synchronize_weights()
    seen = []
    train(model, again, range(40, 60), lambda step: seen.append(again.in_sync))
    assert all(seen)


@pytest.mark.parametrize("compress", ["update", "momentum"])
@on_threads(1)
def test_a_sync_of_one_rank_without_compression_moves_nothing_and_ends_in_the_mean_momentum(comm, compress) -> None:
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


def momentum_of(optimizer):
    return torch.cat([entry["exp_avg"].flatten() for entry in optimizer.state.values()])


def test_an_overflow_in_a_sync_after_local_steps_keeps_them_for_the_next_sync() -> None:
    def rank(comm):
        model, optimizer, _ = trained(comm, 15, **SHORT)
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


def test_scalers_that_came_apart_in_local_steps_still_give_one_result() -> None:
    def rank(comm):
        model = make_model()
        optimizer = make_zero_one(model, comm, **SHORT)
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


@pytest.mark.parametrize("stage", [0, 1])
@on_threads(2)
def test_weights_changed_between_local_steps_are_an_error_and_put_back_they_are_not(comm, stage: int) -> None:
    model, optimizer, _ = trained(comm, 73, stage=stage)
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
    with pytest.raises(RuntimeError, match=r"shape \(37,\), was changed between local steps"):
        train(model, optimizer, range(74, 80))


scalers = st.integers(1, 12)


@given(scalers, scalers, st.integers(1, 20), st.integers(1, 150))
def test_kinds_are_those_of_counters(var_update_scaler, local_step_scaler, local_step_clipper, freeze_step) -> None:
    schedule = ZeroOneSchedule(var_update_scaler, local_step_scaler, local_step_clipper)
    interval, counter, updates = 1, 0, 0
    local_interval, local_counter = 1, 0
    for step in range(1, 300):
        frozen_at = freeze_step if step > freeze_step else None
        kind = schedule.send(step, updates, frozen_at)
        if frozen_at is None:
            assert kind is (Send.COMPRESSED if step % interval else Send.EXACT)
            if kind is Send.EXACT:
                updates += 1
                counter += 1
            if counter == var_update_scaler:
                interval, counter = 2 * interval, 0
        else:
            assert kind is (Send.LOCAL if step % local_interval else Send.SYNC)
            local_counter += 1
            if local_counter == local_step_scaler:
                local_interval, local_counter = min(2 * local_interval, local_step_clipper), 0


def test_deepspeeds_defaults_far_into_a_run() -> None:
    schedule = ZeroOneSchedule(16, 32_678, 16)
    assert [schedule.variance_interval(updates) for updates in (0, 15, 16, 31, 32, 160)] == [1, 1, 2, 2, 4, 1024]
    assert [schedule.local_interval(steps) for steps in (0, 32_677, 32_678, 4 * 32_678, 10**9)] == [1, 1, 2, 16, 16]
