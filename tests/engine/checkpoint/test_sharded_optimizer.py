"""A job on a sharded optimizer goes on where another number of ranks has stopped."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from tests.engine.checkpoint.jobs import missing
from thinwire.comm import Communicator, threads
from thinwire.engine.checkpoint.manifest import ModelDescription
from thinwire.engine.checkpoint.store import CheckpointStore, Snapshot
from thinwire.zero import ShardedOptimizer

STEPS, SAVED_AT = 8, 3


class Job:
    """A small model on the same data on every rank, so that the number of ranks changes nothing but rounding."""

    def __init__(self, comm: Communicator, folder: Path, stage: int, param_dtype: torch.dtype | None) -> None:
        generator = torch.Generator().manual_seed(5)
        self.model = nn.Sequential(nn.Linear(7, 37), nn.Tanh(), nn.Linear(37, 3))
        for parameter in self.model.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator) / 3
        self.inputs, self.targets = torch.randn(16, 7, generator=generator), torch.randn(16, 3, generator=generator)
        self.optimizer = ShardedOptimizer(
            self.model.parameters(),
            torch.optim.AdamW,
            stage=stage,
            comm=comm,
            named_parameters=self.model.named_parameters(),
            param_dtype=param_dtype,
            lr=0.02,
        )
        self.store = CheckpointStore(folder, comm)
        self.comm = comm

    def run(self, steps: range) -> list[float]:
        losses = []
        for step in steps:
            if step == SAVED_AT:
                assert self.store.save(f"step-{step}", self.snapshot())
            self.optimizer.zero_grad()
            dtype = next(self.model.parameters()).dtype
            loss = nn.functional.mse_loss(self.model(self.inputs.to(dtype)).float(), self.targets)
            loss.backward()
            self.optimizer.step()
            losses.append(loss.item())
        return losses

    def snapshot(self) -> Snapshot:
        return Snapshot(
            self.optimizer.saved_slices(),
            ModelDescription.of(self.model.named_parameters()),
            rank_tensors=self.optimizer.rank_tensors(),
            shared={"optimizer": self.optimizer.counters()},
        )

    def resume(self) -> list[float]:
        with self.store.load(description=ModelDescription.of(self.model.named_parameters())) or missing() as checkpoint:
            self.optimizer.load(checkpoint)
        return self.run(range(SAVED_AT, STEPS))


@pytest.mark.parametrize("resumed_on", [1, 2, 3, 8])
@pytest.mark.parametrize(("stage", "param_dtype"), [(1, None), (2, torch.bfloat16)])
def test_four_ranks_save_and_others_continue(
    tmp_path: Path, stage: int, param_dtype: torch.dtype | None, resumed_on: int
) -> None:
    whole = threads.run(lambda comm: Job(comm, tmp_path, stage, param_dtype).run(range(STEPS)), 4)[0]
    resumed = threads.run(lambda comm: Job(comm, tmp_path, stage, param_dtype).resume(), resumed_on)
    tolerance = 1e-5 if param_dtype is None else 1e-2
    for losses in resumed:
        assert losses == pytest.approx(whole[SAVED_AT:], rel=tolerance)
    assert whole[-1] < 0.8 * whole[SAVED_AT]
