"""1-bit Adam is the paper's algorithm, and bit for bit the same on every rank; sharded it has the same losses, replicas
that stay equal, and residuals that steps which are not taken leave alone. Its warmup: tests/optim/test_warmup.py."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import thinwire
from tests.launching import on_threads
from tests.optim.adam.reference import ReferenceOneBitAdam
from tests.optim.training import loss_of, make_model, make_optimizer, through_a_file, train, weights
from tests.refusing import refused
from thinwire.comm import Communicator, threads
from thinwire.compress.packet_layout import CodecName
from thinwire.zero import ReplicaDriftError
from thinwire.zero.bucket_layout import frozen_state_formula
from thinwire.zero.rank_state import seal


@pytest.mark.parametrize(
    ("stage", "nodes", "compress"),
    [
        (0, [0], "momentum"),
        (0, [0, 1], "update"),
        (0, [0, 1, 2], "momentum"),
        (0, [0, 1, 2, 3], "update"),
        (0, [0, 0, 1, 1], "momentum"),
        (1, [0, 1], "update"),
        (1, [0, 0, 1, 1], "update"),
        (2, [0, 1, 2, 0, 1, 2], "update"),
    ],
)
def test_equals_the_algorithm_in_float64_over_100_steps(stage, nodes, compress) -> None:
    """Its workers are nodes, which add up the gradients of their ranks."""
    numel, steps, freeze_step, block_size = 300, 100, 20, 64
    world_size = len(nodes)
    rng = np.random.default_rng(world_size + 10 * stage)
    start = rng.standard_normal(numel).astype(np.float32)
    gradients = (rng.standard_normal((steps, world_size, numel)) + 0.3).astype(np.float32)
    gradients[:, :, 7] = 0.0  # a coordinate whose variance stays 0
    settings = {"freeze_step": freeze_step, "block_size": block_size, "compress": compress}
    workers = max(nodes) + 1
    reference = ReferenceOneBitAdam(start, workers, lr=1e-3, packs=stage > 0, **settings)
    members = np.equal.outer(np.arange(workers), nodes) * (workers / world_size)
    for payloads in gradients:
        reference.step(members @ payloads.astype(np.float64))

    def rank(comm):
        weight = nn.Parameter(torch.from_numpy(start.copy()))
        optimizer = thinwire.OneBitAdam([weight], comm=comm, stage=stage, nodes=nodes, **settings)
        for payloads in gradients:
            weight.grad = torch.from_numpy(payloads[comm.rank])
            optimizer.step()
        return weight.detach().double().numpy()

    for result in threads.run(rank, world_size):
        moved, expected = result - start, reference.weights - start
        # The reference knows nothing of coordinates held still inside a block, so that block is left out.
        assert result[7] == start[7]
        assert np.linalg.norm((moved - expected)[64:]) <= 1e-5 * np.linalg.norm(expected[64:])


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


def accumulated(model, optimizer, inputs) -> None:
    """The last backward does not reach what was accumulated in `no_sync`."""
    with optimizer.no_sync():
        model(inputs).square().mean().backward()
    model[4].bias.sum().backward()


def two_losses(model, optimizer, inputs) -> None:
    """Over different parameters, each with a backward of its own."""
    hidden = model[:2](inputs)
    hidden.square().mean().backward()
    model[2:](hidden.detach()).square().mean().backward()


def checkpointed(model, optimizer, inputs) -> None:
    hidden = torch.utils.checkpoint.checkpoint(model[:2], inputs.requires_grad_(), use_reentrant=True)
    model[2:](hidden).square().mean().backward()


@pytest.mark.parametrize("backward", [accumulated, two_losses, checkpointed])
def test_unusual_backwards(backward) -> None:
    def rank(comm):
        model = make_model()
        before = weights(model[0])
        optimizer = make_optimizer(model, comm, freeze_step=4, bucket_bytes=256)
        for step in range(10):
            optimizer.zero_grad()
            generator = torch.Generator().manual_seed(10 * step + comm.rank)
            backward(model, optimizer, torch.randn(8, 6, generator=generator))
            optimizer.step()
            assert not torch.equal(weights(model[0]), before)
        return weights(model)

    assert torch.equal(*threads.run(rank, 2))


@on_threads(2)
def test_an_overflow_that_other_ranks_scalers_cannot_see_is_an_error_on_every_rank(comm) -> None:
    model = make_model()
    optimizer = make_optimizer(model, comm)
    scaler = torch.amp.GradScaler("cpu")
    before = weights(model).clone()
    loss = model[:2](torch.randn(4, 6)).sum() * (float("inf") if comm.rank == 1 else 1.0)
    scaler.scale(loss).backward()
    refused(RuntimeError, r"overflowed on ranks \[1\].*took no part in", scaler.step, optimizer)
    assert torch.equal(before, weights(model))


def test_an_overflow_everywhere_with_an_unused_parameter_is_an_ordinary_skip() -> None:
    def rank(comm):
        model = make_model()
        optimizer = make_optimizer(model, comm)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        for step in range(6):
            optimizer.zero_grad()
            inputs = torch.randn(4, 6, generator=torch.Generator().manual_seed(step + comm.rank))
            # Everywhere in the first step; later on one rank, which then ends within backward and reaches all scalers.
            bad = step == 0 or (step == 3 and comm.rank == 1)
            scaler.scale(model[:2](inputs).square().sum() * (float("inf") if bad else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()
        return scaler.get_scale(), optimizer.skipped_steps, weights(model)

    first, second = threads.run(rank, 2)
    assert first[:2] == second[:2] == (2.0**8, 2)
    assert torch.equal(first[2], second[2])


@on_threads(2)
def test_unscaling_before_step_is_an_error_that_says_what_to_do(comm) -> None:
    model = make_model()
    optimizer = make_optimizer(model, comm)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(loss_of(model, comm.rank, 0)).backward()
    scaler.unscale_(optimizer)
    refused(RuntimeError, r"unscale_\(\) was called.*delete the call", scaler.step, optimizer)


@on_threads(2)
def test_a_resume_may_change_the_freeze_step(comm) -> None:
    model = make_model()
    optimizer = make_optimizer(model, comm, freeze_step=50)
    train(model, optimizer, range(6))
    again = make_optimizer(model, comm, freeze_step="auto")
    again.load_state_dict(optimizer.state_dict())
    train(model, again, range(6, 12))
    assert not again.frozen


def settings_in(state):
    return state["thinwire"]["counters"]["settings"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state.pop("thinwire"), "no 'thinwire' entry"),
        (lambda state: state["thinwire"].update(format=99), "has format 99"),
        (lambda state: settings_in(state).update(codec="int8"), "saved with codec='int8'"),
        (lambda state: settings_in(state).update(compress="momentum"), "saved with compress='momentum'"),
        (lambda state: state["state"][2].update(exp_avg=torch.zeros(5)), r"parameter 2 has shape \(5,\)"),
    ],
)
@on_threads(2)
def test_a_state_that_cannot_be_ours_is_refused_and_nothing_changes(comm, change, message) -> None:
    model = make_model()
    optimizer = make_optimizer(model, comm)
    train(model, optimizer, range(15))
    state = through_a_file(optimizer.state_dict())
    change(state)
    if "thinwire" in state and "seal" in state["thinwire"]:
        state["thinwire"]["seal"] = seal(state)  # as if it had been saved so
    twin = make_model()
    twin.load_state_dict(model.state_dict())
    refused(ValueError, message, optimizer.load_state_dict, state)
    before = weights(model).clone()
    train(model, optimizer, range(15, 18))
    assert optimizer.frozen
    assert not torch.equal(before, weights(model))


# On sharded state


FREEZE = 15


def build(comm: Communicator, stage: int, **options) -> tuple[nn.Module, thinwire.OneBitAdam]:
    model = make_model()
    options = {"bucket_bytes": 1000, "on_drift": "raise", "resync_interval": 7, "freeze_step": FREEZE} | options
    return model, make_optimizer(model, comm, stage=stage, named_parameters=model.named_parameters(), **options)


@pytest.mark.parametrize("codec", ["sign1", "stat2"])
def test_stages_1_and_2_give_the_same_bits_and_nearly_those_of_stage_0(codec: CodecName) -> None:
    def body(comm: Communicator, stage: int) -> tuple[Tensor, float]:
        model, optimizer = build(comm, stage, codec=codec)
        losses = train(model, optimizer, range(60))
        return weights(model), sum(losses[-30:])

    whole, first, second = (threads.run(lambda comm, stage=stage: body(comm, stage), 3) for stage in (0, 1, 2))
    assert all(torch.equal(mine, first[0][0]) for mine, _ in (*first, *second))
    # 8 bits of preconditioner and another order of buckets are the difference.
    assert sum(of_rank for _, of_rank in first) == pytest.approx(sum(of_rank for _, of_rank in whole), rel=0.03)


def test_drift_is_an_error_or_is_repaired() -> None:
    def body(comm: Communicator, on_drift: str) -> Tensor:
        model, optimizer = build(comm, 1, param_dtype=torch.bfloat16, on_drift=on_drift, resync_interval=5)
        train(model, optimizer, range(FREEZE + 2))
        if comm.rank == 1:
            with torch.no_grad():
                model[0].weight[0, 0] += 1.0
        train(model, optimizer, range(FREEZE + 2, FREEZE + 5))
        return weights(model)

    with pytest.raises(ReplicaDriftError, match=r"ranks \[1\] differ from rank 0's after step 20"):
        threads.run(lambda comm: body(comm, "raise"), 3)
    with pytest.warns(RuntimeWarning, match="repaired from the owners' master weights"):
        of_rank = threads.run(lambda comm: body(comm, "repair"), 3)
    assert all(torch.equal(mine, of_rank[0]) for mine in of_rank)


@given(parameters=st.integers(0, 10**12), ranks=st.integers(1, 10**4))
def test_formulas(parameters: int, ranks: int) -> None:
    for expected, formula in [
        (5.125 + 8 / ranks, frozen_state_formula(parameters, ranks)),
        (9.125 + 4 / ranks, frozen_state_formula(parameters, ranks, element_bytes=4)),
        (9.125 + 8 / ranks, frozen_state_formula(parameters, ranks, element_bytes=4, fresh_variance=True)),
    ]:
        assert sum(formula.values()) == pytest.approx(parameters * expected)
