"""1-bit LAMB is LAMB until the freeze, the paper's algorithm after it, and bit for bit the same on every rank."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import thinwire
from tests.optim.lamb.reference import ReferenceOneBitLamb
from tests.optim.training import loss_of, make_model, same, snapshot, through_a_file, train, weights
from thinwire.comm import threads
from thinwire.optim.lamb import algorithm as lamb
from thinwire.optim.lamb.formulas import LambSettings, Layer, trust_ratio

SIZES = (7, 130, 64, 1, 99)


def make_lamb(model, comm, **options):
    options = {"lr": 1e-2, "freeze_step": 10, "block_size": 64} | options
    return thinwire.OneBitLamb(model.parameters(), comm=comm, **options)


def layers_and_gradients(world_size, steps, seed):
    """Layers of very different magnitude, and gradients [step][layer][world_size, numel] to match."""
    rng = np.random.default_rng(seed)
    start = [rng.standard_normal(size).astype(np.float32) * 10.0**-number for number, size in enumerate(SIZES)]
    magnitudes = 10.0 ** -rng.uniform(0, 4, len(SIZES))
    gradients = [
        [
            (magnitude * (rng.standard_normal((world_size, size)) + 0.3)).astype(np.float32)
            for size, magnitude in zip(SIZES, magnitudes, strict=True)
        ]
        for _ in range(steps)
    ]
    return start, gradients


@pytest.mark.parametrize("options", [{}, {"weight_decay": 0.3, "betas": (0.8, 0.9), "factor_threshold": 0.03}])
@pytest.mark.parametrize("compress", ["update", "momentum"])
@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_equals_the_algorithm_in_float64_over_100_steps(world_size, compress, options) -> None:
    steps = 100
    start, gradients = layers_and_gradients(world_size, steps, seed=world_size)
    settings = {"lr": 1e-2, "freeze_step": 20, "block_size": 64, "compress": compress} | options
    reference = ReferenceOneBitLamb(start, world_size, **settings)
    expected = [reference.step([layer.astype(np.float64) for layer in payloads]) for payloads in gradients]

    def rank(comm):
        parameters = [nn.Parameter(torch.from_numpy(layer.copy())) for layer in start]
        optimizer = thinwire.OneBitLamb(parameters, comm=comm, **settings)
        coefficients = []
        for payloads in gradients:
            for parameter, layer in zip(parameters, payloads, strict=True):
                parameter.grad = torch.from_numpy(layer[comm.rank])
            optimizer.step()
            coefficients.append(optimizer.get_lamb_coeffs())
        return [parameter.detach().double().numpy() for parameter in parameters], coefficients

    for result, coefficients in threads.run(rank, world_size):
        np.testing.assert_allclose(coefficients, expected, rtol=1e-4)
        for mine, wanted, begin in zip(result, reference.weights, start, strict=True):
            assert np.linalg.norm(mine - wanted) <= 1e-4 * np.linalg.norm(wanted - begin)


def test_the_warmup_takes_exact_averages_whatever_the_number_of_ranks() -> None:
    def run(size):
        def rank(comm):
            model = make_model()
            optimizer = make_lamb(model, comm, freeze_step=1000, weight_decay=0.1)
            for step in range(30):
                by_rank = [torch.autograd.grad(loss_of(model, r, step), list(model.parameters())) for r in range(4)]
                share = by_rank[comm.rank :: comm.size]
                for parameter, *gradients in zip(model.parameters(), *share, strict=True):
                    parameter.grad = sum(gradients) / len(gradients)
                optimizer.step()
            return weights(model)

        return threads.run(rank, size)

    (alone,) = run(1)
    for together in (*run(2), *run(4)):
        torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("world_size", [2, 3])
def test_every_rank_has_the_same_bits_although_their_norms_differ(world_size, monkeypatch) -> None:
    exact = lamb.square_norms

    def like_other_hardware(tensors):
        return exact(tensors) * (1 + 1e-3 * torch.rand(()))  # every rank draws a number of its own

    monkeypatch.setattr(lamb, "square_norms", like_other_hardware)

    def rank(comm):
        model = make_model(seed=comm.rank)  # rank 0's weights are broadcast
        optimizer = make_lamb(model, comm, bucket_bytes=400, weight_decay=0.1)
        losses = train(model, optimizer, range(60))
        return weights(model), optimizer.get_lamb_coeffs(), np.mean(losses[-10:]) < np.mean(losses[:10])

    first, *others = threads.run(rank, world_size)
    assert first[2]
    for other in others:
        assert torch.equal(other[0], first[0])
        assert other[1] == first[1]


@pytest.mark.parametrize("stop", [1, 10, 25])
@pytest.mark.parametrize(
    ("freeze_step", "dtype", "compress"),
    [(10, torch.float32, "update"), (10, torch.float32, "momentum"), ("auto", torch.bfloat16, "update")],
)
def test_a_resume_is_bit_identical(stop, freeze_step, dtype, compress) -> None:
    def rank(comm):
        options = {"freeze_step": freeze_step, "compress": compress, "bucket_bytes": 600, "betas": (0.9, 0.95)}
        model = make_model(dtype=dtype)
        optimizer = make_lamb(model, comm, **options)
        train(model, optimizer, range(stop))
        saved = through_a_file([model.state_dict(), optimizer.state_dict()])
        expected = train(model, optimizer, range(stop, stop + 30))

        resumed = make_model(seed=5, dtype=dtype)
        again = make_lamb(resumed, comm, **options)
        resumed.load_state_dict(saved[0])
        again.load_state_dict(saved[1])
        counters = saved[1]["thinwire"]["counters"]
        coefficients = counters["freeze_groups"][0]["scalars"]["coefficients"]
        assert again.get_lamb_coeffs() == [coefficients[name] for name in counters["names"]]
        assert train(resumed, again, range(stop, stop + 30)) == expected
        assert torch.equal(weights(resumed), weights(model))
        assert again.get_lamb_coeffs() == optimizer.get_lamb_coeffs()
        assert again.frozen_at == optimizer.frozen_at

    threads.run(rank, 3)


@pytest.mark.parametrize("new_size", [1, 3])
def test_another_number_of_ranks_restores_all_but_the_residuals(new_size) -> None:
    def first(comm):
        model = make_model()
        optimizer = make_lamb(model, comm)
        train(model, optimizer, range(20))
        return through_a_file([model.state_dict(), optimizer.state_dict()])

    saved_model, saved = threads.run(first, 2)[0]

    def second(comm):
        model = make_model(seed=4)
        optimizer = make_lamb(model, comm)
        model.load_state_dict(saved_model)
        optimizer.load_state_dict(saved)
        state = optimizer.state_dict()
        torch.testing.assert_close(state["state"], saved["state"], rtol=0, atol=0)
        assert state["thinwire"]["counters"] == saved["thinwire"]["counters"]
        train(model, optimizer, range(20, 40))
        return weights(model)

    with pytest.warns(RuntimeWarning, match="saved by rank 0 of 2"):
        first_weights, *others = threads.run(second, new_size)
    assert all(torch.equal(other, first_weights) for other in others)


def test_the_state_holds_what_the_frozen_stage_has_learned() -> None:
    def rank(comm):
        model = make_model()
        optimizer = make_lamb(model, comm)
        train(model, optimizer, range(20))
        state = optimizer.state_dict()
        (of_group,) = state["thinwire"]["counters"]["freeze_groups"]
        layers = of_group["scalars"]["layers"].values()
        assert len(layers) == 6
        assert any(layer["factor"] != 1 for layer in layers)
        assert any(layer["scale"] != 1 for layer in layers)
        assert all(not torch.equal(one["exp_avg_sq_fresh"], one["denominator"]) for one in state["state"].values())

    threads.run(rank, 2)


def test_another_optimizers_state_is_refused() -> None:
    def rank(comm):
        model = make_model()
        adam = thinwire.OneBitAdam(model.parameters(), block_size=64, comm=comm)
        train(model, adam, range(3))
        with pytest.raises(ValueError, match=r"saved by OneBitAdam with 1 parameter groups, this is OneBitLamb with 1"):
            make_lamb(model, comm).load_state_dict(adam.state_dict())

    threads.run(rank, 1)


@pytest.mark.parametrize("freeze_step", [100, 3])
def test_one_rank_overflows_and_nothing_changes_on_any(freeze_step) -> None:
    def rank(comm):
        model = make_model()
        optimizer = make_lamb(model, comm, freeze_step=freeze_step, bucket_bytes=400)
        train(model, optimizer, range(6))
        before = snapshot(model, optimizer)
        optimizer.zero_grad()
        (loss_of(model, comm.rank, 6) * (float("nan") if comm.rank == 1 else 1.0)).backward()
        optimizer.step()
        assert same(before, snapshot(model, optimizer))
        train(model, optimizer, range(7, 20))
        return weights(model)

    with pytest.warns(RuntimeWarning, match="skipped on every rank"):
        first, second = threads.run(rank, 2)
    assert torch.equal(first, second)


@pytest.mark.parametrize("freeze_step", [100, 4])
def test_accumulation_in_no_sync_equals_one_large_batch(freeze_step) -> None:
    def rank(comm):
        results = []
        for accumulate in (True, False):
            model = make_model()
            optimizer = make_lamb(model, comm, freeze_step=freeze_step)
            for step in range(15):
                optimizer.zero_grad()
                if accumulate:
                    with optimizer.no_sync():
                        (loss_of(model, comm.rank, 2 * step) / 2).backward()
                    (loss_of(model, comm.rank, 2 * step + 1) / 2).backward()
                else:
                    (loss_of(model, comm.rank, 2 * step) / 2 + loss_of(model, comm.rank, 2 * step + 1) / 2).backward()
                optimizer.step()
            results.append(weights(model))
        torch.testing.assert_close(*results, rtol=1e-3, atol=1e-3)

    threads.run(rank, 2)


@pytest.mark.parametrize("compress", ["update", "momentum"])
@pytest.mark.parametrize("world_size", [1, 3])
def test_empty_zero_and_scalar_layers_and_layers_without_gradients(world_size, compress) -> None:
    def rank(comm):
        scalar, empty = nn.Parameter(torch.tensor(2.0)), nn.Parameter(torch.empty(0, 3))
        zero, unused = nn.Parameter(torch.zeros(5)), nn.Parameter(torch.ones(4))
        still = nn.Parameter(torch.ones(3, 2))  # its gradient is zero
        late = nn.Parameter(torch.full((70,), 0.5))
        groups = [{"params": [empty, scalar, zero]}, {"params": [unused, still, late], "weight_decay": 0.1}]
        optimizer = thinwire.OneBitLamb(groups, lr=0.05, freeze_step=4, block_size=64, compress=compress, comm=comm)
        for step in range(30):
            optimizer.zero_grad()
            loss = scalar**2 + empty.sum() + (zero - comm.rank - 1).square().sum() + 0 * still.sum()
            if step % 2:
                loss = loss + late.square().sum()
            loss.backward()
            optimizer.step()
            if step == 3:
                assert torch.equal(unused, torch.ones(4))  # without a gradient on any rank: left alone in the warmup
        assert torch.equal(still, still[0, 0].expand(3, 2))
        assert 0 < still[0, 0] < 1  # decay alone moves it
        assert float(zero.detach().norm()) > 0
        assert abs(scalar.item()) < 2
        everything = torch.cat([p.detach().reshape(-1) for p in (scalar, zero, unused, still, late)])
        assert torch.isfinite(everything).all()
        return everything

    first, *others = threads.run(rank, world_size)
    assert all(torch.equal(first, other) for other in others)


def test_only_empty_parameters() -> None:
    def rank(comm):
        empty = nn.Parameter(torch.empty(0))
        optimizer = thinwire.OneBitLamb([empty], freeze_step=2, block_size=64, comm=comm)
        for _ in range(5):
            empty.grad = torch.empty(0)
            optimizer.step()
        return optimizer.frozen, optimizer.get_lamb_coeffs()

    assert threads.run(rank, 2) == [(True, [1.0])] * 2


def test_a_parameter_that_stops_training_stays() -> None:
    def rank(comm):
        model = make_model()
        optimizer = make_lamb(model, comm, freeze_step=3, weight_decay=0.1)
        train(model, optimizer, range(6))
        model[0].requires_grad_(False)
        before = weights(model[0]).clone()
        train(model, optimizer, range(6, 12))
        return torch.equal(before, weights(model[0])), weights(model)

    (stayed, first), (_, second) = threads.run(rank, 2)
    assert stayed
    assert torch.equal(first, second)


def test_exp_avg_mask_holds_layers_coordinates_still_once_frozen() -> None:
    def rank(comm, compress):
        weight = nn.Parameter(torch.ones(4, 8))
        mask = torch.ones(1, 8)
        mask[0, 5:] = 0
        groups = [{"params": [weight], "exp_avg_mask": mask}]
        optimizer = thinwire.OneBitLamb(groups, lr=0.1, freeze_step=4, block_size=64, compress=compress, comm=comm)
        for step in range(12):
            weight.grad = torch.full((4, 8), comm.rank + 1.0)
            optimizer.step()
            if step == 3:
                at_freeze = weight.detach().clone()
        return (weight != at_freeze).all(dim=0).tolist(), float(optimizer.state[weight]["exp_avg"][:, 5:].abs().max())

    for compress in ("update", "momentum"):
        assert threads.run(lambda comm, how=compress: rank(comm, how), 2) == [([True] * 5 + [False] * 3, 0.0)] * 2


def test_groups_have_bounds_of_their_own() -> None:
    def rank(comm):
        small, large = nn.Parameter(torch.full((9,), 100.0)), nn.Parameter(torch.full((9,), 100.0))
        groups = [{"params": [small], "max_coeff": 0.3}, {"params": [large], "max_coeff": 7.0}]
        optimizer = thinwire.OneBitLamb(groups, freeze_step=5, block_size=64, comm=comm)
        for _ in range(3):
            small.grad, large.grad = torch.ones(9), torch.ones(9)
            optimizer.step()
        return optimizer.get_lamb_coeffs()

    assert threads.run(rank, 2) == [[0.3, 7.0]] * 2


def test_a_parameter_group_added_later_freezes_on_its_own() -> None:
    def rank(comm):
        model = make_model()
        optimizer = thinwire.OneBitLamb(model[0].parameters(), lr=1e-2, freeze_step=5, block_size=64, comm=comm)
        train(model, optimizer, range(8))
        model.zero_grad()
        optimizer.add_param_group({"params": model[2].parameters(), "lr": 1e-3, "max_coeff": 1.0})
        train(model, optimizer, range(8, 20))
        return (
            [group.clock.frozen_at for group in optimizer._home.groups],
            len(optimizer.get_lamb_coeffs()),
            weights(model),
        )

    first, second = threads.run(rank, 2)
    assert first[:2] == ([5, 5], 4)
    assert torch.equal(first[2], second[2])


def test_grad_scalers_scale_is_divided_out() -> None:
    def rank(comm):
        results = []
        for scale in (None, 2.0**10):
            model = make_model()
            optimizer = make_lamb(model, comm)
            scaler = torch.amp.GradScaler("cpu", init_scale=scale or 1.0, growth_interval=15, enabled=scale is not None)
            for step in range(40):
                optimizer.zero_grad()
                scaler.scale(loss_of(model, comm.rank, step)).backward()
                scaler.step(optimizer)
                scaler.update()
            results.append(weights(model))
        return torch.equal(*results)

    assert threads.run(rank, 2) == [True, True]


def test_bytes_of_a_frozen_step_are_a_thirty_second_of_fp32() -> None:
    def rank(comm):
        weight = nn.Parameter(torch.ones(1_100_003))
        optimizer = thinwire.OneBitLamb([weight], freeze_step=1, comm=comm)
        for _ in range(2):
            before = optimizer.bytes_sent
            weight.grad = torch.randn(weight.shape)
            optimizer.step()
        return optimizer.bytes_sent - before

    assert max(threads.run(rank, 4)) <= 1.03 * 2 * 3 / 4 * 1_100_003 / 8


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_coeff": 0.001}, "min_coeff must be above 0 and at most max_coeff"),
        ({"min_coeff": 0.0}, "min_coeff must be above 0"),
        ({"max_coeff": float("nan")}, "min_coeff must be"),
        ({"coeff_beta": 1.0}, "coeff_beta must be from 0"),
        ({"factor_min": 1.5}, "factor_min must be"),
        ({"factor_max": 0.9}, "factor_max at least 1"),
        ({"factor_threshold": -0.1}, "factor_threshold must be from 0"),
        ({"freeze_step": 0}, "freeze_step must be"),
        ({"betas": (0.9, 1.0)}, "betas must be"),
        ({"amsgrad": True}, "amsgrad=True"),
        ({"compress": "gradient"}, "compress must be"),
        ({"bucket_bytes": 0}, "bucket_bytes must be"),
    ],
)
def test_bad_options_are_refused_on_every_rank(options, message) -> None:
    def rank(comm):
        with pytest.raises(ValueError, match=message if comm.rank == 1 else "rank 1"):
            make_lamb(make_model(), comm, **(options if comm.rank == 1 else {}))

    threads.run(rank, 2)


@pytest.mark.parametrize("name", ["max_coeff", "factor_threshold", "lr", "coeff_beta"])
def test_ranks_that_disagree_are_refused(name) -> None:
    def rank(comm):
        with pytest.raises(ValueError, match="rank 1 and rank 0 differ"):
            make_lamb(make_model(), comm, **{name: 0.5 + comm.rank / 4})

    threads.run(rank, 2)


POSITIVE = st.floats(1e-30, 1e30)
SETTINGS = LambSettings(1e-3, 0.9, 0.999, 1e-8, 0.0, True, False, 10.0, 0.01, 0.9, 4.0, 0.5, 0.1)


@given(st.lists(st.tuples(st.floats(0, 1e30), st.floats(0, 1)), max_size=60))
def test_the_factor_stays_in_its_bounds_and_moves_slowly(measures) -> None:
    layer = Layer()
    for growth, share in measures:
        before = layer.factor
        coefficient = layer.follow(growth, share, SETTINGS)
        assert coefficient == layer.factor  # no trust ratio was ever seen: c = 1
        assert 0.5 <= layer.factor <= 4.0
        assert 0.9 * before <= layer.factor <= 1.1 * before


@given(st.lists(st.tuples(POSITIVE, POSITIVE), min_size=1, max_size=60))
def test_the_frozen_coefficient_lies_among_the_ratios(norms) -> None:
    layer = Layer()
    ratios = [trust_ratio(weight, update, SETTINGS) for weight, update in norms]
    for ratio in ratios:
        assert 0.01 <= ratio <= 10
        layer.smooth(ratio, SETTINGS)
    assert min(ratios) * (1 - 1e-12) <= layer.frozen_coefficient <= max(ratios) * (1 + 1e-12)


def test_a_zero_norm_has_no_trust_ratio() -> None:
    assert trust_ratio(0.0, 1.0, SETTINGS) is None
    assert trust_ratio(1.0, 0.0, SETTINGS) is None
