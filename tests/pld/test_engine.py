"""Dropped layers in the engine: every stage below 3, bf16, accumulation, and a resume from a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.engine.tiny import loss_of, make_engine, settings
from thinwire.comm import Communicator, threads
from thinwire.engine import Engine
from thinwire.pld import LayerDrop, ProgressiveLayerDrop, drop_layers


def train(engine: Engine, schedule: ProgressiveLayerDrop, steps: range) -> None:
    for step in steps:
        schedule.update_state(step)
        for micro in range(engine.gradient_accumulation_steps()):
            engine.backward(loss_of(engine, engine.comm.rank, 10 * step + micro))
            engine.step()


def start(comm: Communicator, config: dict[str, Any]) -> tuple[Engine, ProgressiveLayerDrop, LayerDrop]:
    engine = make_engine(comm, config)
    schedule = ProgressiveLayerDrop(0.3, 1.0)
    return engine, schedule, drop_layers(engine.module, schedule, seed=3)


def weights(engine: Engine) -> Tensor:
    return torch.cat([parameter.detach().float().reshape(-1) for parameter in engine.module.parameters()]).clone()


@pytest.mark.parametrize(
    ("stage", "changes"), [(0, {"gradient_accumulation_steps": 2}), (1, {}), (2, {"bf16": {"enabled": True}})], ids=str
)
def test_ranks_stay_alike(stage: int, changes: dict[str, Any]) -> None:
    def body(comm: Communicator) -> tuple[Tensor, Tensor, list[float]]:
        engine, schedule, drop = start(comm, settings(stage, **changes))
        before = weights(engine)
        train(engine, schedule, range(12))
        return before, weights(engine), drop.keep_rates

    (before, mine, rates), (_, other, other_rates) = threads.run(body, 2)
    assert torch.equal(mine, other)
    assert not torch.equal(mine, before)
    assert rates == other_rates
    assert min(rates) < 1


def test_a_resume_goes_on_to_the_bit(tmp_path: Path) -> None:
    def whole(comm: Communicator) -> Tensor:
        engine, schedule, drop = start(comm, settings(2))
        train(engine, schedule, range(7))
        engine.save_checkpoint(tmp_path, client_state={"layer_drop": drop.state_dict()})
        train(engine, schedule, range(7, 15))
        return weights(engine)

    def resumed(comm: Communicator) -> Tensor:
        engine, schedule, drop = start(comm, settings(2))
        _, client_state = engine.load_checkpoint(tmp_path)
        drop.load_state_dict(client_state["layer_drop"])
        train(engine, schedule, range(schedule.step + 1, 15))
        return weights(engine)

    for expected, mine in zip(threads.run(whole, 2), threads.run(resumed, 2), strict=True):
        assert torch.equal(expected, mine)
