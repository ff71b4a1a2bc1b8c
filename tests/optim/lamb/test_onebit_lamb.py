"""1-bit LAMB is LAMB until the freeze, the paper's algorithm after it, and bit for bit the same on every rank; sharded,
it is that of stage 0 but for two roundings at the freeze, however layers are cut, in fewer bytes."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import thinwire
from tests.launching import on_threads
from tests.optim.lamb.reference import ReferenceOneBitLamb, layers_and_gradients
from tests.optim.subject import Subject
from tests.optim.training import buckets_of, make_model, train, weights
from thinwire.comm import threads
from thinwire.compress import make_codec
from thinwire.compress.exchange import zero_held
from thinwire.optim import lamb as lamb
from thinwire.optim.lamb import Lamb, LambSettings, Layer, trust_ratio
from thinwire.optim.storage import quantize, table

UNUSUAL = {"weight_decay": 0.3, "betas": (0.8, 0.9), "factor_threshold": 0.03}


@pytest.mark.parametrize(
    ("world_size", "compress", "options"),
    [
        (1, "update", {}),
        (1, "momentum", UNUSUAL),
        (2, "update", UNUSUAL),
        (2, "momentum", {}),
        (3, "update", {}),
        (3, "momentum", UNUSUAL),
        (5, "update", UNUSUAL),
    ],
)
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


def test_every_rank_has_the_same_bits_although_their_norms_differ(monkeypatch) -> None:
    exact = lamb.square_norms

    def like_other_hardware(tensors):
        return exact(tensors) * (1 + 1e-3 * torch.rand(()))  # every rank draws a number of its own

    monkeypatch.setattr(lamb, "square_norms", like_other_hardware)

    def rank(comm):
        model = make_model(seed=comm.rank)  # rank 0's weights are broadcast
        optimizer = Subject("OneBitLamb", 0).build(model, comm, weight_decay=0.1)
        losses = train(model, optimizer, range(60))
        return weights(model), optimizer.get_lamb_coeffs(), np.mean(losses[-10:]) < np.mean(losses[:10])

    first, *others = threads.run(rank, 3)
    assert first[2]
    for other in others:
        assert torch.equal(other[0], first[0])
        assert other[1] == first[1]


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


@on_threads(2)
def test_groups_have_bounds_of_their_own_and_so_have_later_ones(comm) -> None:
    small, large = nn.Parameter(torch.full((9,), 100.0)), nn.Parameter(torch.full((9,), 100.0))
    groups = [{"params": [small], "max_coeff": 0.3}, {"params": [large], "max_coeff": 7.0}]
    optimizer = thinwire.OneBitLamb(groups, freeze_step=5, block_size=64, comm=comm)
    for _ in range(3):
        small.grad, large.grad = torch.ones(9), torch.ones(9)
        optimizer.step()
    late = nn.Parameter(torch.full((9,), 100.0))
    optimizer.add_param_group({"params": [late], "max_coeff": 1.0})
    small.grad, large.grad, late.grad = torch.ones(9), torch.ones(9), torch.ones(9)
    optimizer.step()
    assert optimizer.get_lamb_coeffs() == [0.3, 7.0, 1.0]


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


# On sharded state


DECAYED = {"weight_decay": 0.3, "betas": (0.8, 0.9), "factor_threshold": 0.03, "bias_correction": False}


class _RoundedLamb(Lamb):
    def freeze(self, groups, clock, agree, precondition) -> None:
        momenta = [[momentum.clone() for momentum in members["exp_avg"]] for members in groups]

        def precondition_in_8_bits() -> None:
            precondition()
            for members, before in zip(groups, momenta, strict=True):
                for momentum, exact, denominator in zip(
                    members["exp_avg"], before, members["denominator"], strict=True
                ):
                    inverse = _in_8_bits(1 / denominator)
                    denominator.copy_(1 / inverse)
                    torch.mul(exact, inverse, out=momentum)

        super().freeze(groups, clock, agree, precondition_in_8_bits)


def _in_8_bits(inverse: torch.Tensor) -> torch.Tensor:
    moving = inverse[inverse > 0]
    if not moving.numel():
        return inverse
    low, high = moving.min().view(1), moving.max().view(1)
    return table(low, high)[0][quantize(inverse, float(low), float(high)).int()]


class RoundedOneBitLamb(thinwire.OneBitLamb):
    """With the two roundings that sharded state makes at the freeze, so that the rest can be compared to the last bits:
    the preconditioner in 8 bits, and the momentum as packets whose losses the owners remember."""

    def __init__(self, params, *, comm, block_size, **options) -> None:
        super().__init__(params, comm=comm, block_size=block_size, **options)
        self._home._layout._make_algorithm = lambda: _RoundedLamb("update")
        self._codec = make_codec(options.get("codec", "sign1"), block_size)

    def step(self, closure=None) -> None:
        super().step(closure)
        if self.last_step.applied and self.frozen_at == self.steps:
            self._pack_momenta()

    @torch.no_grad()
    def _pack_momenta(self) -> None:
        for bucket in buckets_of(self):
            shards, numel, momentum = bucket.layout.world_size, bucket.layout.numel, bucket.state["exp_avg"]
            packets = torch.zeros(shards, self._codec.packet_bytes(bucket.layout.shard), dtype=torch.uint8)
            lost = momentum.clone()
            self._codec.encode(lost, None, packets, numel)
            self._codec.decode(packets, momentum, numel)
            bucket.compressed.owner_residual.copy_(lost.view(shards, -1)[self.comm.rank])
            if bucket.zero_variance is not None:
                zero_held(momentum, bucket.zero_variance, slice(0, momentum.numel()))
                bucket.compressed.hold_zero(bucket.zero_variance)


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


@pytest.mark.parametrize(
    ("world_size", "bucket_bytes", "options"),
    [
        (1, 700, {"codec": "none"}),
        (2, 1 << 20, DECAYED),
        (3, 700, DECAYED),
        (3, 1 << 20, DECAYED | {"codec": "stat2"}),
        (4, 700, {"codec": "stat2"}),
        (4, 700, {"nodes": [0, 1, 0, 1]}),
    ],
)
def test_is_stage_0_where_that_rounds_alike_at_the_freeze(world_size, bucket_bytes, options) -> None:
    """Layers of magnitudes 1 to 1e-4, smaller than a block or cut by shards; two of them are left out of some steps."""
    start, gradients = layers_and_gradients(world_size, 30, seed=world_size)
    common = {"lr": 1e-2, "freeze_step": 12, "block_size": 64, "bucket_bytes": bucket_bytes} | options

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
        # Norms of cut layers are sums in another order: a few units of fp32's last place, on each of 30 steps.
        np.testing.assert_allclose(coefficients, expected_coefficients, rtol=3e-6)
        assert (mine - expected).norm() <= 3e-6 * (expected - begin).norm()
