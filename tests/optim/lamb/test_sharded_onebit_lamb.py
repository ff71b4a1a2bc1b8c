"""1-bit LAMB on sharded state is that of stage 0 but for the freeze's two roundings: the same weights and coefficients,
on any number of ranks, through any checkpoint, in fewer bytes."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import thinwire
from tests.optim.lamb.reference import ReferenceOneBitLamb
from tests.optim.lamb.rounded_reference import RoundedOneBitLamb
from tests.optim.lamb.training import layers_and_gradients
from tests.optim.training import exchange_comm, loss_of, make_model, train, weights
from tests.zero.saved import join, save
from thinwire.comm import Communicator, threads
from thinwire.zero.memory import live_tensor_bytes

FREEZE = 12
DECAYED = {"weight_decay": 0.3, "betas": (0.8, 0.9), "factor_threshold": 0.03, "bias_correction": False}


def build(comm: Communicator, model: nn.Module, **options) -> thinwire.OneBitLamb:
    options = {
        "lr": 1e-2,
        "freeze_step": FREEZE,
        "bucket_bytes": 1000,
        "block_size": 64,
        "on_drift": "raise",
        "resync_interval": 7,
        "named_parameters": model.named_parameters(),
        "stage": 1,
    } | options
    return thinwire.OneBitLamb(model.parameters(), comm=comm, **options)


def follow(optimizer, parameters: list[nn.Parameter], gradients, left_out=()) -> tuple[Tensor, list[list[float]]]:
    """Step with this rank's part of gradients [step][layer][world_size, numel]: weights, coefficients of all steps."""
    coefficients = []
    for step, layers in enumerate(gradients):
        optimizer.zero_grad()
        present = range(len(layers))
        if left_out and step % 5 == 4:
            optimizer.leave_out([parameters[number] for number in left_out])
            present = [number for number in present if number not in left_out]
        products = [(parameters[n] * torch.from_numpy(layers[n][optimizer.comm.rank])).sum() for n in present]
        torch.stack(products).sum().backward()
        optimizer.step()
        coefficients.append(optimizer.get_lamb_coeffs())
    return torch.cat([parameter.detach().float() for parameter in parameters]), coefficients


@pytest.mark.parametrize(("bucket_bytes", "options"), [(700, {}), (1 << 20, DECAYED)])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_is_stage_0_where_that_rounds_alike_at_the_freeze(world_size, bucket_bytes, options) -> None:
    """Layers of magnitudes 1 to 1e-4, smaller than a block or cut by shards; two of them are left out of some steps."""
    start, gradients = layers_and_gradients(world_size, 50, seed=world_size)
    common = {"lr": 1e-2, "freeze_step": 20, "block_size": 64, "bucket_bytes": bucket_bytes} | options

    def whole(comm):
        parameters = [nn.Parameter(torch.from_numpy(layer.copy())) for layer in start]
        return follow(RoundedOneBitLamb(parameters, comm=comm, **common), parameters, gradients, (0, 1))

    def sharded(comm):
        parameters = [nn.Parameter(torch.from_numpy(layer.copy())) for layer in start]
        optimizer = thinwire.OneBitLamb(parameters, comm=comm, stage=1, **common)
        return follow(optimizer, parameters, gradients, (0, 1))

    expected, expected_coefficients = threads.run(whole, world_size)[0]
    begin = torch.cat([torch.from_numpy(layer) for layer in start])
    of_ranks = threads.run(sharded, world_size)
    for mine, coefficients in of_ranks:
        assert torch.equal(mine, of_ranks[0][0])
        # Norms of cut layers are sums in another order: a few units of fp32's last place, on each of 50 steps.
        np.testing.assert_allclose(coefficients, expected_coefficients, rtol=3e-6)
        assert (mine - expected).norm() <= 3e-6 * (expected - begin).norm()


@settings(max_examples=12, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 200), min_size=1, max_size=5).filter(any),
    world_size=st.integers(1, 4),
    seed=st.integers(0, 1000),
)
def test_the_warmup_is_lamb_however_layers_are_cut(sizes, world_size, seed) -> None:
    rng = np.random.default_rng(seed)
    start = [rng.standard_normal(size).astype(np.float32) for size in sizes]
    gradients = [[rng.standard_normal((world_size, size)).astype(np.float32) for size in sizes] for _ in range(4)]
    common = {"lr": 1e-2, "freeze_step": 100, "block_size": 64, "weight_decay": 0.1}
    reference = ReferenceOneBitLamb(start, world_size, **common)
    expected = [reference.step([layer.astype(np.float64) for layer in layers]) for layers in gradients]

    def rank(comm):
        parameters = [nn.Parameter(torch.from_numpy(layer.copy())) for layer in start]
        optimizer = thinwire.OneBitLamb(parameters, comm=comm, stage=1, bucket_bytes=1200, **common)
        return follow(optimizer, parameters, gradients)

    for mine, coefficients in threads.run(rank, world_size):
        np.testing.assert_allclose(coefficients, expected, rtol=1e-5)
        np.testing.assert_allclose(mine.numpy(), np.concatenate(reference.weights), rtol=0, atol=1e-5)


@pytest.mark.parametrize(("dtype", "world_size"), [(torch.float32, 3), (torch.bfloat16, 2)])
def test_trains_as_well_as_stage_0(dtype, world_size) -> None:
    """Without rounding alike: 8 bits of preconditioner, and in bf16 other rounding of replicas and residuals."""

    def whole(comm):
        model = make_model(dtype=dtype)
        optimizer = thinwire.OneBitLamb(
            model.parameters(), comm=comm, lr=1e-2, freeze_step=FREEZE, block_size=64, weight_decay=0.01
        )
        return train(model, optimizer, range(72))

    def sharded(comm):
        model = make_model(dtype=dtype)
        losses = train(model, optimizer := build(comm, model, weight_decay=0.01), range(72))
        saved = save(comm, optimizer)
        return weights(model), losses, saved

    outcomes = threads.run(sharded, world_size)
    assert all(torch.equal(mine, outcomes[0][0]) for mine, _, _ in outcomes)
    expected = np.mean([losses[-30:] for losses in threads.run(whole, world_size)])
    mean = np.mean([losses[-30:] for _, losses, _ in outcomes])
    assert mean == pytest.approx(expected, rel=0.1)
    assert mean < 0.5 * np.mean([losses[:10] for _, losses, _ in outcomes])
    if dtype != torch.float32:
        saved = join([one for _, _, one in outcomes])
        masters = [saved.read("master", name, 0, p.numel()) for name, p in make_model().named_parameters()]
        # Four steps since replicas were last taken from the master weights, each rounded by up to 2^-7 of the value.
        torch.testing.assert_close(outcomes[0][0], torch.cat(masters), rtol=5 * 2.0**-7, atol=1e-5)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("at", [FREEZE - 4, FREEZE + 11])
def test_a_resume_is_bit_identical(at, dtype) -> None:
    options = {"param_dtype": dtype, "weight_decay": 0.05}

    def first(comm):
        model = make_model()
        optimizer = build(comm, model, **options)
        train(model, optimizer, range(at))
        saved = save(comm, optimizer)
        return saved, train(model, optimizer, range(at, at + 15)), weights(model), optimizer.get_lamb_coeffs()

    outcomes = threads.run(first, 3)
    saved = join([one[0] for one in outcomes])

    def second(comm):
        model = make_model(seed=9)
        optimizer = build(comm, model, **options)
        train(model, optimizer, range(3))
        optimizer.load(saved)
        return train(model, optimizer, range(at, at + 15)), weights(model), optimizer.get_lamb_coeffs()

    for resumed, (_, *expected) in zip(threads.run(second, 3), outcomes, strict=True):
        assert resumed[0] == expected[0]
        assert torch.equal(resumed[1], expected[1])
        assert resumed[2] == expected[2]


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("at", [FREEZE - 4, FREEZE + 11])
def test_another_number_of_ranks_takes_up_everything(at, world_size) -> None:
    def first(comm):
        model = make_model()
        optimizer = build(comm, model)
        losses = train(model, optimizer, range(at))
        return save(comm, optimizer), losses

    parts, before = zip(*threads.run(first, 2), strict=True)
    saved = join(list(parts))

    def second(comm):
        model = make_model(seed=9)
        optimizer = build(comm, model, bucket_bytes=500)
        optimizer.load(saved)
        again = save(comm, optimizer)
        return again, train(model, optimizer, range(at, at + 40)), weights(model)

    outcomes = threads.run(second, world_size)
    again = join([one[0] for one in outcomes])
    assert again.counters()["freeze_groups"] == saved.counters()["freeze_groups"]
    kinds = saved.kinds() - {"momentum", "owner_residual"}  # cut into other blocks, of which only the sum is the same
    assert ("exp_avg_sq_fresh" in kinds) == (at > FREEZE)
    for name, parameter in make_model().named_parameters():
        for kind in kinds:
            numel = 1 if kind.startswith("scalar.") else parameter.numel()
            assert torch.equal(again.read(kind, name, 0, numel), saved.read(kind, name, 0, numel))
    assert all(torch.equal(mine, outcomes[0][2]) for _, _, mine in outcomes)
    assert np.mean([losses[-20:] for _, losses, _ in outcomes]) < 0.4 * np.mean([losses[:4] for losses in before])


def bytes_an_element(comm: Communicator, make, dtype: torch.dtype, *, frozen: bool) -> float:
    """What a rank holds between two steps, its gradients freed, for one layer of 300 x 1000."""
    model = nn.Linear(1000, 300, bias=False).to(dtype)
    optimizer = make(model.parameters(), comm=comm, freeze_step=1 if frozen else 100)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(1, 1000, dtype=dtype)).square().sum().backward()
        optimizer.step()
    optimizer.zero_grad()
    return sum(live_tensor_bytes(model, optimizer).values()) / 300_000


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_are_those_of_the_formula(dtype, frozen) -> None:
    ranks = 4

    def measure(make) -> float:
        return max(threads.run(lambda comm: bytes_an_element(comm, make, dtype, frozen=frozen), ranks))

    sharded = measure(partial(thinwire.OneBitLamb, stage=1))
    size, master = dtype.itemsize, 0 if dtype == torch.float32 else 4
    if frozen:
        every_rank = size + size + 1 + 1 / 8  # weights, worker residual, preconditioner, u
        owner = 4 + 4  # owner residual, fresh variance
    else:
        every_rank, owner = size + size, 8  # weights, the gradients' buffer; moments
    assert sharded == pytest.approx(every_rank + (owner + master) / ranks, rel=0.03)
    assert sharded < 0.65 * measure(thinwire.OneBitLamb)  # 10 of 16 in fp32 before the freeze, less of it elsewhere


def test_a_frozen_step_sends_one_bit_each_way_and_24_bytes_a_layer() -> None:
    def body(comm):
        model = nn.Linear(1000, 500)
        optimizer = thinwire.OneBitLamb(model.parameters(), freeze_step=2, comm=comm, stage=1)
        sent, calls = [], []
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(1, 1000)).square().sum().backward()
            optimizer.step()
            sent.append(optimizer.bytes_sent)
            calls.append(exchange_comm(optimizer).traffic.calls)
        assert optimizer.frozen
        return sent[-1] - sent[-2], calls[-1] - calls[-2]

    for sent, calls in threads.run(body, 4):
        assert sent <= 1.05 * 2 * 3 / 4 * 500_500 / 8
        assert calls == 2 + 2


def test_clipping_scales_the_step() -> None:
    def body(comm, max_norm, factor):
        model = make_model()
        optimizer = build(comm, model, max_norm=max_norm, freeze_step=4)
        for step in range(12):
            optimizer.zero_grad()
            (factor * loss_of(model, comm.rank, step)).backward()
            optimizer.step()
        return weights(model), optimizer.last_step.grad_norm

    # Far above the clip, gradients a thousand times as large are the same step.
    once = threads.run(lambda comm: body(comm, 1e-3, 10.0), 2)[0]
    larger = threads.run(lambda comm: body(comm, 1e-3, 1e4), 2)[0]
    # A sign that the last bit decides moves a weight by a whole step.
    torch.testing.assert_close(larger[0], once[0], rtol=0, atol=0.05)
    assert larger[1] == pytest.approx(1e3 * once[1], rel=0.5)


def test_reset_state_begins_anew() -> None:
    def body(comm):
        model, fresh = make_model(), make_model(seed=3)
        optimizer = build(comm, model)
        train(model, optimizer, range(FREEZE + 5))
        optimizer.reset_state()
        assert not optimizer.frozen
        assert optimizer.get_lamb_coeffs() == [1.0] * 6
        fresh.load_state_dict(model.state_dict())
        again = build(comm, fresh)
        steps = range(FREEZE + 5, 2 * FREEZE + 15)
        assert train(model, optimizer, steps) == train(fresh, again, steps)
        assert again.frozen

    threads.run(body, 2)


def test_layers_without_gradients_groups_and_masks() -> None:
    def body(comm):
        model = make_model()
        unused, empty = nn.Parameter(torch.ones(5)), nn.Parameter(torch.zeros(0, 3))
        first, *rest = model.parameters()
        mask = torch.ones(37, 6)
        mask[5:] = 0.0
        optimizer = thinwire.OneBitLamb(
            [{"params": [first], "exp_avg_mask": mask}, {"params": [*rest, unused, empty], "max_coeff": 0.2}],
            lr=1e-2,
            freeze_step=FREEZE,
            comm=comm,
            block_size=64,
            stage=1,
        )
        train(model, optimizer, range(FREEZE))
        held = first.detach()[5:].clone()
        moving = first.detach()[:5].clone()
        warm = optimizer.get_lamb_coeffs()
        assert max(warm[1:-2]) <= 0.2
        assert warm[0] > 0.2
        train(model, optimizer, range(FREEZE, FREEZE + 10))
        assert torch.equal(first.detach()[5:], held)
        assert not torch.equal(first.detach()[:5], moving)
        assert torch.equal(unused.detach(), torch.ones(5))
        assert all(math.isfinite(coefficient) for coefficient in optimizer.get_lamb_coeffs())

    threads.run(body, 2)


def test_auto_freezes_both_stages_at_one_step() -> None:
    def body(comm, stage):
        model = make_model()
        optimizer = build(comm, model, stage=stage, freeze_step="auto", betas=(0.9, 0.9), lr=1e-6)
        train(model, optimizer, range(60))
        return optimizer.frozen_at

    taken = {step for stage in (0, 1) for step in threads.run(lambda comm, s=stage: body(comm, s), 2)}
    assert len(taken) == 1
    assert taken.pop() is not None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stage": 2}, "stage must be 0 or 1 for OneBitLamb, got 2: once compressed"),
        ({"stage": 3}, "stage must be 0 or 1 for OneBitLamb, got 3: stage 3 shards the model itself"),
        ({"freeze_step": 0}, "freeze_step must be"),
        ({"min_coeff": 2.0, "max_coeff": 1.0}, "min_coeff must be above 0 and at most max_coeff"),
        ({"factor_threshold": 1.0}, "factor_threshold must be"),
        ({"coeff_beta": 1.0}, "coeff_beta must be"),
        ({"eps": 0.0}, "eps must be"),
    ],
)
def test_bad_options_are_refused_on_every_rank(options, message) -> None:
    def body(comm):
        with pytest.raises(ValueError, match=message):
            build(comm, make_model(), **options)

    threads.run(body, 2)


def test_a_group_with_bad_options_and_another_optimizers_state_are_refused() -> None:
    def body(comm):
        model = make_model()
        with pytest.raises(ValueError, match="factor_max at least 1"):
            thinwire.OneBitLamb([{"params": list(model.parameters()), "factor_max": 0.5}], comm=comm, stage=1)
        adam = thinwire.OneBitAdam(model.parameters(), comm=comm, freeze_step=3, stage=1)
        train(model, adam, range(5))
        with pytest.raises(ValueError, match="saved by OneBitAdam"):
            build(comm, model, named_parameters=None).load(join([save(comm, adam)]))

    threads.run(body, 1)
