"""1-bit LAMB by name: the engine trains with it, reports its memory, saves and resumes on both sides of the freeze."""

from __future__ import annotations

import math

import pytest
import torch

from tests.engine.tiny import make_engine, settings, train
from thinwire import OneBitLamb
from thinwire.comm import threads
from thinwire.engine import NonFiniteError
from thinwire.zero.memory import live_tensor_bytes

LAMB = {
    "type": "OneBitLamb",
    "params": {"lr": 1e-2, "freeze_step": 8, "block_size": 64, "max_coeff": 0.5, "factor_threshold": 0.2},
}


def lamb(stage: int, **changes):
    return settings(stage, optimizer=LAMB, thinwire={"resync_interval": 5}, **changes)


@pytest.mark.parametrize(("stage", "precision"), [(0, {}), (1, {}), (1, {"bf16": {"enabled": True}})])
def test_it_trains(stage, precision) -> None:
    def body(comm):
        engine = make_engine(comm, lamb(stage, gradient_clipping=1.0, gradient_accumulation_steps=2, **precision))
        assert isinstance(engine.optimizer, OneBitLamb)
        warmup = train(engine, range(8))
        without = 3 if stage == 0 else 2  # have no gradients; stage 0 counts the one that does not train too
        assert max(engine.optimizer.get_lamb_coeffs()[without:]) <= 0.5
        frozen = train(engine, range(8, 28))
        assert engine.optimizer.frozen
        assert sum(frozen[-5:]) < 0.9 * sum(warmup[:5])
        return engine.module.state_dict()

    weights = threads.run(body, 3)
    assert all(torch.equal(weights[0][name], other[name]) for other in weights for name in other)


def test_a_loss_that_is_not_finite_once_frozen() -> None:
    def body(comm):
        engine = make_engine(comm, lamb(1))
        train(engine, range(10))
        engine.backward(engine(torch.ones(6, 16)).mean() * (math.nan if comm.rank == 1 else 1))
        with pytest.raises(NonFiniteError, match="step 11: the loss was not finite on rank 1"):
            engine.step()
        assert all(math.isfinite(loss) for loss in train(engine, range(11, 14)))

    threads.run(body, 2)


@pytest.mark.parametrize("stage", [2, 3])
def test_higher_stages_are_refused(stage) -> None:
    with pytest.raises(ValueError, match=f"{stage} does not go with OneBitLamb"):
        make_engine(None, lamb(stage))


def test_stage_1_holds_less_than_stage_0() -> None:
    def body(comm, stage, steps):
        engine = make_engine(comm, lamb(stage, bf16={"enabled": True}))
        train(engine, range(steps))
        return sum(live_tensor_bytes(engine.module, engine.optimizer).values())

    for steps in (2, 10):
        whole, sharded = (
            max(threads.run(lambda comm, stage=stage, steps=steps: body(comm, stage, steps), 4)) for stage in (0, 1)
        )
        assert sharded < 0.8 * whole
