"""1-bit Adam is AdamW until the freeze, the paper's algorithm after it, and bit for bit the same on every rank."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import thinwire
from tests.optim.adam.reference import ReferenceOneBitAdam
from tests.optim.training import loss_of, make_model, make_optimizer, train, weights
from thinwire.comm import threads
from thinwire.compress.kernels import adam_reference
from thinwire.compress.kernels.adam_reference import AdamFactors, AdamStep

STEPS = 50


@pytest.mark.parametrize("options", [{}, {"weight_decay": 0.1, "lr": 0.02, "betas": (0.8, 0.99), "eps": 1e-6}])
def test_the_warmup_is_adamw(options) -> None:
    """To the bit as the kernels' specification has it, and torch's within two roundings a step."""

    def rank(comm):
        model, twin, specified = make_model(), make_model(), make_model()
        settings = {"lr": 3e-3, "weight_decay": 0.0, "betas": (0.9, 0.999), "eps": 1e-8} | options
        optimizer = make_optimizer(model, comm, **options, freeze_step=1000)
        adamw = torch.optim.AdamW(twin.parameters(), **settings)
        moments = [[torch.zeros_like(one) for one in specified.parameters()] for _ in range(2)]
        for step in range(STEPS):
            by_rank = [gradients_of(twin, other, step) for other in range(comm.size)]
            for parameter, gradient in zip(model.parameters(), by_rank[comm.rank], strict=True):
                parameter.grad = gradient.clone()
            optimizer.step()
            averages = [sum(gradients) / comm.size for gradients in zip(*by_rank, strict=True)]  # in rank order
            for parameter, average in zip(twin.parameters(), averages, strict=True):
                parameter.grad = average
            adamw.step()
            specified_step(list(specified.parameters()), averages, *moments, settings, step + 1)
        assert torch.equal(weights(model), weights(specified))
        bound = 2 * STEPS * 2**-24 * float(weights(twin).abs().max())
        torch.testing.assert_close(weights(model), weights(twin), rtol=0, atol=bound)

    threads.run(rank, 1)
    threads.run(rank, 3)


@torch.no_grad()
def specified_step(parameters, averages, momenta, variances, settings, step) -> None:
    beta1, beta2 = settings["betas"]
    factors = AdamFactors(
        gain=1 - beta1,
        beta2=beta2,
        square_gain=1 - beta2,
        correction=(1 - beta2**step) ** 0.5,
        eps=settings["eps"],
        decay=1 - settings["lr"] * settings["weight_decay"],
        rate=settings["lr"] / (1 - beta1**step),
    )
    adam_reference.plain_adam_step(AdamStep(factors, averages, momenta, variances, parameters))


def gradients_of(model, rank, step):
    return torch.autograd.grad(loss_of(model, rank, step), list(model.parameters()))


@pytest.mark.parametrize("compress", ["update", "momentum"])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_equals_the_algorithm_in_float64_over_100_steps(world_size, compress) -> None:
    numel, steps, freeze_step, block_size = 300, 100, 20, 64
    rng = np.random.default_rng(world_size)
    start = rng.standard_normal(numel).astype(np.float32)
    gradients = (rng.standard_normal((steps, world_size, numel)) + 0.3).astype(np.float32)
    gradients[:, :, 7] = 0.0  # a coordinate whose variance stays 0
    reference = ReferenceOneBitAdam(
        start, world_size, lr=1e-3, freeze_step=freeze_step, block_size=block_size, compress=compress
    )
    for payloads in gradients:
        reference.step(payloads.astype(np.float64))

    def rank(comm):
        weight = nn.Parameter(torch.from_numpy(start.copy()))
        optimizer = thinwire.OneBitAdam(
            [weight], freeze_step=freeze_step, block_size=block_size, compress=compress, comm=comm
        )
        for payloads in gradients:
            weight.grad = torch.from_numpy(payloads[comm.rank])
            optimizer.step()
        return weight.detach().double().numpy()

    for result in threads.run(rank, world_size):
        moved, expected = result - start, reference.weights - start
        # The reference knows nothing of coordinates held still inside a block, so that block is left out.
        assert result[7] == start[7]
        assert np.linalg.norm((moved - expected)[64:]) <= 1e-5 * np.linalg.norm(expected[64:])


def test_coordinates_without_variance_stay_without_any_mask() -> None:
    def rank(comm):
        embedding = nn.Embedding(10, 8)
        optimizer = thinwire.OneBitAdam(embedding.parameters(), lr=0.1, freeze_step=3, block_size=64, comm=comm)
        before = embedding.weight.detach().clone()
        for step in range(20):
            optimizer.zero_grad()
            rows = torch.tensor([0, 1, 2 + step % 2])
            (embedding(rows) - 1).square().sum().backward()
            optimizer.step()
        moved = (embedding.weight != before).any(dim=1)
        return moved.tolist()

    assert threads.run(rank, 2) == [[True] * 4 + [False] * 6] * 2


def test_exp_avg_mask_holds_momentum_at_zero_once_frozen() -> None:
    def rank(comm):
        weight = nn.Parameter(torch.ones(4, 8))
        mask = torch.ones(1, 8)
        mask[0, 5:] = 0
        groups = [{"params": [weight], "exp_avg_mask": mask}]
        optimizer = thinwire.OneBitAdam(groups, lr=0.1, freeze_step=4, block_size=64, comm=comm)
        for step in range(12):
            optimizer.zero_grad()
            (weight * (comm.rank + 1)).sum().backward()
            optimizer.step()
            if step == 3:
                at_freeze = weight.detach().clone()
        return (weight != at_freeze).all(dim=0).tolist(), float(optimizer.state[weight]["exp_avg"][:, 5:].abs().max())

    assert threads.run(rank, 2) == [([True] * 5 + [False] * 3, 0.0)] * 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_parameters_keep_fp32_master_weights_and_agree(dtype) -> None:
    def rank(comm):
        model = make_model(dtype=dtype)
        optimizer = make_optimizer(model, comm, lr=1e-3)
        losses = train(model, optimizer, range(80))
        for parameter in model.parameters():
            master = optimizer.state[parameter]["master"]
            assert master.dtype == torch.float32
            assert torch.equal(master.to(dtype), parameter)
        return weights(model), np.mean(losses[:10]) > np.mean(losses[-10:])

    results = threads.run(rank, 2)
    assert torch.equal(results[0][0], results[1][0])
    assert results[0][1]


def test_coordinates_with_a_small_variance_do_not_amplify_the_bits() -> None:
    # In one block, gradients of very different size: the paper's momentum gives each the block's scale, and the small
    # ones' weights fly; updates have one size.
    sizes = torch.logspace(-4, 0, 64)

    def farthest(comm, compress):
        weight = nn.Parameter(torch.zeros(64))
        optimizer = thinwire.OneBitAdam([weight], lr=1e-2, freeze_step=30, compress=compress, block_size=64, comm=comm)
        generator = torch.Generator().manual_seed(comm.rank)
        for _ in range(200):
            weight.grad = sizes * (weight.detach() + 0.3 * torch.randn(64, generator=generator))
            optimizer.step()
        return weight.detach().abs().max().item()

    for update, momentum in threads.run(lambda comm: (farthest(comm, "update"), farthest(comm, "momentum")), 2):
        assert update < 1
        assert momentum > 5 * update


def test_a_unit_that_wakes_up_after_the_freeze_does_not_move_the_others() -> None:
    def rank(comm):
        weight = nn.Parameter(torch.zeros(128))
        optimizer = thinwire.OneBitAdam([weight], lr=1e-2, freeze_step=30, block_size=64, comm=comm)
        generator = torch.Generator().manual_seed(comm.rank)
        for step in range(80):
            weight.grad = torch.randn(128, generator=generator)
            weight.grad[5] *= 1e-12 if step < 30 else 1.0
            optimizer.step()
        return weight.detach().abs().max().item()

    assert max(threads.run(rank, 2)) < 1


@pytest.mark.parametrize("codec", ["stat2", "int4", "fp8", "int8", "bf16", "none"])
def test_other_codecs_train_too(codec) -> None:
    def rank(comm):
        model = make_model()
        optimizer = make_optimizer(model, comm, codec=codec)
        losses = train(model, optimizer, range(60))
        return weights(model), np.mean(losses[-10:]) < np.mean(losses[:10])

    results = threads.run(rank, 3)
    assert all(torch.equal(result[0], results[0][0]) and result[1] for result in results)


def test_bf16_on_the_warmup_wire_halves_its_bytes() -> None:
    def sent(comm, wire):
        model = nn.Linear(400, 400)
        optimizer = make_optimizer(model, comm, freeze_step=100, warmup_wire=wire)
        model(torch.randn(4, 400)).sum().backward()
        optimizer.step()
        return optimizer.bytes_sent

    fp32, bf16 = threads.run(lambda comm: (sent(comm, "fp32"), sent(comm, "bf16")), 2)[0]
    assert bf16 == pytest.approx(fp32 / 2, rel=1e-3)


def test_parameters_that_need_no_gradient_cost_nothing_until_they_do() -> None:
    def rank(comm):
        model = make_model()
        model[0].requires_grad_(False)
        before = weights(model[0]).clone()
        optimizer = make_optimizer(model, comm)
        train(model, optimizer, range(15))
        assert torch.equal(weights(model[0]), before)
        assert "exp_avg" not in optimizer.state.get(model[0].weight, {})
        model[0].requires_grad_(True)
        train(model, optimizer, range(15, 40))
        assert not torch.equal(weights(model[0]), before)
        assert [group.clock.frozen_at for group in optimizer._home.groups] == [10, 10]
        return weights(model)

    first, second = threads.run(rank, 2)
    assert torch.equal(first, second)


def test_buckets_leave_during_backward_in_the_order_gradients_arrive() -> None:
    def rank(comm):
        model = make_model()
        by_kind = [
            {"params": [p for p in model.parameters() if p.dim() > 1]},
            {"params": [p for p in model.parameters() if p.dim() == 1]},
        ]
        optimizer = thinwire.OneBitAdam(by_kind, freeze_step=2, block_size=64, bucket_bytes=256, comm=comm)
        train(model, optimizer, range(3))
        launched = []
        model[0].weight.register_hook(
            lambda _: launched.append(optimizer._home._synchronizer.watcher._pipeline.started)
        )
        train(model, optimizer, [3])
        return launched[0], len(optimizer._home._layout.buckets)

    for launched, buckets in threads.run(rank, 2):
        assert buckets >= 4
        # When the first layer's gradient is computed, the later layers' buckets have left.
        assert launched >= buckets - 2
