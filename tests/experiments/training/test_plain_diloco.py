"""The DiLoCo written by hand is thinwire's without a codec, fragments or overlap."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from experiments.training.learners import LoopLearner
from experiments.training.trainer import Trainer
from tests.experiments.helpers import PLAN, LineTask
from thinwire.comm import Communicator, threads
from thinwire.comm.traffic import sent_bytes

THE_SAME = {"codec": "none", "fragments": 1, "overlap": 0, "mix": 0.0}


@pytest.mark.parametrize("ranks", [1, 3])
def test_it_learns_what_ours_learns(ranks: int) -> None:
    def run(comm: Communicator, name: str, options: dict[str, Any]) -> tuple[Trainer, torch.Tensor]:
        task = LineTask()
        learner = LoopLearner(task.build_model(5), PLAN, name, comm, every=5, outer_lr=0.7, **options)
        trainer = Trainer(task, PLAN, learner, comm)
        while not trainer.finished:
            trainer.advance()
        return trainer, torch.nn.utils.parameters_to_vector(learner.module.parameters())

    plain, *others = threads.run(lambda comm: run(comm, "plain-diloco", {}), ranks)
    ours = threads.run(lambda comm: run(comm, "diloco", THE_SAME), ranks)[0]
    assert plain[0].curve.losses == pytest.approx(ours[0].curve.losses, rel=1e-5)
    outer_steps = 3  # after 5 steps, after 10, and after the last
    assert plain[0].bytes_sent == outer_steps * sent_bytes("all_reduce", 4 * plain[1].numel(), ranks)
    assert all(torch.equal(weights, plain[1]) for _, weights in others)
