"""What must hold on any communicator of any size: bodies that a test runs over threads, Gloo and MPI."""

from __future__ import annotations

import io
import itertools

import numpy as np
import torch

from tests.optim.adam.reference import ReferenceExchange
from tests.optim.training import make_model, make_optimizer, train, weights
from thinwire.comm import Communicator
from thinwire.compress import Exchange, make_codec
from thinwire.optim import OneBitAdam, OneBitLamb, OneBitLion, ZeroOneAdam
from thinwire.zero import ShardedOptimizer

BLOCK = 64


def decisive_payloads(size: int, numel: int, steps: int) -> tuple[np.ndarray, np.ndarray]:
    """Random payloads [steps, size, numel] fp32, and what Algorithm 1 makes of them in float64, [steps, numel].

    A value within fp32's rounding of 0 may take either sign, after which two right answers go different ways. So these
    are payloads on which every sign is taken by at least 1e-6 of its block's scale.
    """
    for seed in itertools.count(1000 * size + numel):
        payloads = np.random.default_rng(seed).standard_normal((steps, size, numel)).astype(np.float32)
        reference = ReferenceExchange(numel, size, BLOCK)
        expected = np.stack([reference(step.astype(np.float64)) for step in payloads])
        if reference.closest_call > 1e-6:
            return payloads, expected
    raise AssertionError("unreachable: itertools.count does not end")


def exchange_equals_the_algorithm(
    comm: Communicator, numel: int = 1000, steps: int = 100, part: int | None = None
) -> None:
    """The exchange and Algorithm 1 in float64, over `steps` steps: equal to 1e-6 relative, and alike on every rank."""
    payloads, expected = decisive_payloads(comm.size, numel, steps)
    exchange = Exchange(comm, numel, make_codec("sign1", BLOCK), part=part)
    outputs = np.stack([exchange.average(torch.from_numpy(p[comm.rank]), i).numpy() for i, p in enumerate(payloads)])
    errors = np.linalg.norm(outputs - expected, axis=1) / np.linalg.norm(expected, axis=1)
    assert errors.max() <= 1e-6, f"{errors.max():.1e}"
    assert len(set(comm.all_gather_bytes(outputs.tobytes()))) == 1


def weights_are_bit_identical_after_120_steps(comm: Communicator) -> None:
    """120 steps of 1-bit Adam, 30 of them warmup, in several buckets: every rank ends with the same bits."""
    model = make_model(seed=comm.rank)  # rank 0's weights are broadcast
    optimizer = make_optimizer(model, comm, freeze_step=30, bucket_bytes=400)
    losses = train(model, optimizer, range(120))
    assert optimizer.frozen_at == 30
    assert len(set(comm.all_gather_bytes(weights(model).numpy().tobytes()))) == 1
    assert np.mean(losses[-20:]) < 0.8 * np.mean(losses[:5])


def lamb_weights_are_bit_identical_after_80_steps(comm: Communicator) -> None:
    """80 steps of 1-bit LAMB, 30 of them warmup, in several buckets: every rank ends with the same bits."""
    model = make_model(seed=comm.rank)
    optimizer = OneBitLamb(
        model.parameters(), lr=1e-2, freeze_step=30, weight_decay=0.01, block_size=64, bucket_bytes=400, comm=comm
    )
    losses = train(model, optimizer, range(80))
    assert optimizer.frozen_at == 30
    assert len(set(comm.all_gather_bytes(weights(model).numpy().tobytes()))) == 1
    assert np.mean(losses[-20:]) < 0.8 * np.mean(losses[:5])


def weights_are_bit_identical_over_nodes(comm: Communicator) -> None:
    """60 steps in which every two ranks count as a node, so that the last node of an odd number has one."""
    model = make_model(seed=comm.rank)
    nodes = [rank // 2 for rank in range(comm.size)]
    optimizer = make_optimizer(model, comm, freeze_step=20, bucket_bytes=400, nodes=nodes)
    losses = train(model, optimizer, range(60))
    assert len(set(comm.all_gather_bytes(weights(model).numpy().tobytes()))) == 1
    assert np.mean(losses[-20:]) < np.mean(losses[:5])
    optimizer.close()


def zero_one_weights_are_bit_identical_after_a_sync(comm: Communicator) -> None:
    """70 steps of 0/1 Adam, the last with local steps between two syncs."""
    model = make_model(seed=comm.rank)
    optimizer = ZeroOneAdam(
        model.parameters(),
        lr=3e-3,
        var_freeze_step=20,
        var_update_scaler=3,
        local_step_scaler=10,
        block_size=64,
        bucket_bytes=400,
        comm=comm,
    )
    losses = train(model, optimizer, range(70))
    optimizer.synchronize_weights()
    assert optimizer.in_sync
    assert len(set(comm.all_gather_bytes(weights(model).numpy().tobytes()))) == 1
    assert np.mean(losses[-20:]) < np.mean(losses[:5])
    optimizer.close()


def resume_is_bit_identical(comm: Communicator) -> None:
    """Losses after a checkpoint equal those of the run that went on."""
    model = make_model()
    optimizer = make_optimizer(model, comm)
    train(model, optimizer, range(25))
    file = io.BytesIO()
    torch.save([model.state_dict(), optimizer.state_dict()], file)
    expected = train(model, optimizer, range(25, 60))
    file.seek(0)
    resumed = make_model(seed=3)
    again = make_optimizer(resumed, comm)
    for part, state in zip((resumed, again), torch.load(file, weights_only=True), strict=True):
        part.load_state_dict(state)
    assert train(resumed, again, range(25, 60)) == expected


def stages_are_bit_identical(comm: Communicator) -> None:
    """AdamW on ZeRO stages 0, 1 and 2, and 1-bit Adam with bf16 replicas on 1 and 2: the same bits on every rank and
    stage."""
    for one_bit in (False, True):
        outcomes = set()
        for stage in (1, 2) if one_bit else (0, 1, 2):
            model = make_model(seed=comm.rank)
            settings = {"stage": stage, "comm": comm, "named_parameters": model.named_parameters(), "bucket_bytes": 400}
            if one_bit:
                settings |= {"freeze_step": 20, "block_size": 64, "on_drift": "raise", "resync_interval": 10}
                optimizer = OneBitAdam(model.parameters(), lr=3e-3, param_dtype=torch.bfloat16, **settings)
            else:
                optimizer = ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=3e-3, max_norm=0.5, **settings)
                optimizer.gather_during_forward(model)
            train(model, optimizer, range(40))
            optimizer.wait_for_weights()
            everyone = set(comm.all_gather_bytes(weights(model).numpy().tobytes()))
            assert len(everyone) == 1
            outcomes |= everyone
            optimizer.close()
        assert len(outcomes) == 1


def sharded_lamb_is_bit_identical(comm: Communicator) -> None:
    """1-bit LAMB on sharded state: the same bits on every rank, and coefficients."""
    model = make_model(seed=comm.rank)
    optimizer = OneBitLamb(
        model.parameters(),
        lr=1e-2,
        freeze_step=20,
        weight_decay=0.01,
        block_size=64,
        bucket_bytes=400,
        stage=1,
        comm=comm,
        on_drift="raise",
        resync_interval=10,
    )
    train(model, optimizer, range(50))
    mine = weights(model).numpy().tobytes() + np.array(optimizer.get_lamb_coeffs()).tobytes()
    assert len(set(comm.all_gather_bytes(mine))) == 1
    optimizer.close()


def lion_is_bit_identical(comm: Communicator) -> None:
    """1-bit Lion at stages 0 and 1: it learns, and every rank ends with the same bits."""
    for stage in (0, 1):
        model = make_model(seed=comm.rank)
        optimizer = OneBitLion(
            model.parameters(), lr=1e-3, weight_decay=0.01, block_size=64, bucket_bytes=400, stage=stage, comm=comm
        )
        losses = train(model, optimizer, range(60))
        assert len(set(comm.all_gather_bytes(weights(model).numpy().tobytes()))) == 1
        assert np.mean(losses[-20:]) < 0.8 * np.mean(losses[:5])
        optimizer.close()


ALL = (
    exchange_equals_the_algorithm,
    weights_are_bit_identical_after_120_steps,
    lamb_weights_are_bit_identical_after_80_steps,
    weights_are_bit_identical_over_nodes,
    zero_one_weights_are_bit_identical_after_a_sync,
    resume_is_bit_identical,
    stages_are_bit_identical,
    sharded_lamb_is_bit_identical,
    lion_is_bit_identical,
)
