"""0/1 Adam by name: the engine trains with it, evaluates on weights that all ranks have, skips, saves and resumes."""

from __future__ import annotations

import math
import warnings

import pytest
import safetensors.torch
import torch

from tests.engine.tiny import make_engine, settings, train
from tests.optim.zero_one.training import SCHEDULE
from thinwire.comm import threads
from thinwire.engine import NonFiniteError

PARAMS = (
    {"lr": 3e-3, "block_size": 64, "weight_decay": 0.01} | SCHEDULE | {"var_freeze_step": 10, "local_step_scaler": 4}
)
"""Frozen after step 10; from step 15 on local steps between syncs, at even steps, then at 20, 24, 30, ..."""


def zero_one(stage: int = 1, **changes):
    optimizer = {"type": "zerooneadam", "params": PARAMS}
    return settings(stage, optimizer=optimizer, **changes)


@pytest.mark.parametrize(
    ("stage", "precision"),
    [(0, {}), (1, {}), (1, {"bf16": {"enabled": True}}), (1, {"fp16": {"enabled": True, "initial_scale_power": 8}})],
)
def test_it_trains_and_evaluates_on_weights_in_sync(stage: int, precision: dict) -> None:
    def body(comm):
        engine = make_engine(comm, zero_one(stage, gradient_accumulation_steps=2, **precision))
        first = train(engine, range(5))
        train(engine, range(5, 17))
        assert engine.optimizer.frozen
        assert not engine.optimizer.in_sync
        own = {name: value.clone() for name, value in engine.module.state_dict().items()}
        assert engine.eval() is engine.module
        assert not engine.module.training
        common = {name: value.clone() for name, value in engine.module.state_dict().items()}
        engine.train()
        assert engine.module.training
        last = train(engine, range(17, 45))
        assert sum(last[-5:]) < 0.8 * sum(first)
        return own, common

    outcomes = threads.run(body, 2)
    for name, expected in outcomes[0][1].items():
        assert all(torch.equal(common[name], expected) for _, common in outcomes)
    assert any(not torch.equal(own[name], outcomes[0][0][name]) for own, _ in outcomes for name in own)


def test_what_is_exported_between_two_syncs_is_what_all_ranks_have(tmp_path) -> None:
    def body(comm):
        engine = make_engine(comm, zero_one())
        train(engine, range(17))
        engine.save_16bit_model(tmp_path, "model.safetensors")
        return {name: value.clone() for name, value in engine.module.state_dict().items()}

    exported = None
    for weights in threads.run(body, 2):
        exported = exported or safetensors.torch.load_file(tmp_path / "model.safetensors")
        assert all(torch.equal(weights[name].bfloat16(), value) for name, value in exported.items())


def test_losses_that_are_not_finite() -> None:
    """In a step that sends, an error on every rank; in a local step that rank's own affair."""

    def body(comm):
        engine = make_engine(comm, zero_one())
        train(engine, range(15))
        for expected in (True, False):
            engine.backward(engine(torch.ones(6, 16)).mean() * (math.nan if comm.rank == 1 else 1))
            if expected:
                with pytest.raises(NonFiniteError, match="step 16: the loss was not finite on rank 1"):
                    engine.step()
            train(engine, [15]) if expected else engine.step()
            assert engine.was_step_applied()
            assert engine.get_global_grad_norm() is None
        assert engine.optimizer.left_out_steps == comm.rank
        assert all(math.isfinite(loss) for loss in train(engine, range(18, 22)))

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        threads.run(body, 2)
    assert sum("adds nothing on rank 1" in str(one.message) for one in caught) == 1
