"""Adam without bias correction in the engine, and in its checkpoints."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.engine.tiny import loss_of, make_engine, make_model, settings, train
from thinwire.comm import Communicator, threads
from thinwire.zero.optimizer import AdamW


def config(stage: int, corrects: bool, kind: str = "AdamW") -> dict[str, Any]:
    params = {"lr": 1e-2, "weight_decay": 0.1, "bias_correction": corrects}
    return settings(stage, optimizer={"type": kind, "params": params})


def by_one_process(ranks: int, steps: int) -> list[float]:
    model = make_model()
    optimizer = AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    losses = []
    for step in range(steps):
        total = 0.0
        for rank in range(ranks):
            loss = loss_of(model, rank, step) / ranks
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


@pytest.mark.parametrize(("stage", "kind"), [(0, "AdamW"), (1, "Adam"), (2, "AdamW")])
def test_the_configuration_says_whether_moments_are_corrected(stage: int, kind: str) -> None:
    def body(comm: Communicator, corrects: bool) -> list[float]:
        return train(make_engine(comm, config(stage, corrects, kind)), range(8))

    found = threads.run(lambda comm: body(comm, False), 2)[0]
    assert found == pytest.approx(by_one_process(2, 8), rel=1e-5)
    assert threads.run(lambda comm: body(comm, True), 2)[0] != pytest.approx(found, rel=1e-3)


@pytest.mark.parametrize("stage", [0, 2])
def test_a_checkpoint_goes_on_without_correction(stage: int, tmp_path: Any) -> None:
    def before(comm: Communicator) -> list[float]:
        engine = make_engine(comm, config(stage, False))
        losses = train(engine, range(3))
        engine.save_checkpoint(tmp_path)
        losses += train(engine, range(3, 6))
        engine.close()
        return losses[3:]

    def after(comm: Communicator) -> list[float]:
        engine = make_engine(comm, config(1, False), seed=5)
        engine.load_checkpoint(tmp_path)
        found = train(engine, range(3, 6))
        engine.close()
        return found

    expected = threads.run(before, 2)[0]
    assert torch.tensor(threads.run(after, 2)[0]).allclose(torch.tensor(expected), rtol=1e-6)
