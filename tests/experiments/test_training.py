"""The training loop: what it counts, what it reports, and that ranks stay together."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from experiments.training import OPTIMIZERS, Plan, StepReport, Trainer
from tests.experiments.helpers import PLAN, LineTask
from thinwire.comm import Communicator, threads


def run(comm: Communicator, optimizer: str, plan: Plan = PLAN) -> tuple[Trainer, list[StepReport]]:
    trainer = Trainer(LineTask(), plan, optimizer, comm)
    reports = []
    while not trainer.finished:
        reports.append(trainer.advance())
    return trainer, reports


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_all_ranks_end_with_the_same_weights_and_curve(optimizer: str, ranks: int) -> None:
    trainers = threads.run(lambda comm: run(comm, optimizer)[0], ranks)
    for other in trainers[1:]:
        assert other.curve == trainers[0].curve
        pairs = zip(other.model.parameters(), trainers[0].model.parameters(), strict=True)
        assert all(torch.equal(mine, theirs) for mine, theirs in pairs)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_it_learns(optimizer: str) -> None:
    plan = replace(PLAN, steps=150, freeze_step=40)
    losses = threads.run(lambda comm: run(comm, optimizer, plan)[0].curve.losses, 2)[0]
    assert losses[-1] < 0.5 * losses[0]


def test_adamw_sends_what_a_ring_all_reduce_sends() -> None:
    elements = sum(parameter.numel() for parameter in LineTask().build_model(0).parameters())
    trainer, reports = threads.run(lambda comm: run(comm, "adamw"), 3)[0]
    a_step = -(-2 * 2 * 4 * elements // 3)
    assert [report.bytes_sent for report in reports] == [a_step] * PLAN.steps
    assert trainer.outcome.bytes_sent == PLAN.steps * a_step
    assert {report.stage for report in reports} == {"exact"}


def test_onebit_adam_reports_its_stages() -> None:
    trainer, reports = threads.run(lambda comm: run(comm, "onebit-adam"), 2)[0]
    assert [report.stage for report in reports] == ["warmup"] * 2 + ["1-bit"] * 10
    assert trainer.outcome.frozen_at == 3
    assert trainer.outcome.last_step_bytes == reports[-1].bytes_sent < reports[0].bytes_sent
    assert trainer.outcome.bytes_sent == sum(report.bytes_sent for report in reports)


def test_validation_happens_on_time_and_at_the_end() -> None:
    plan = replace(PLAN, evaluate_every=5)
    trainer, reports = threads.run(lambda comm: run(comm, "adamw", plan), 1)[0]
    assert trainer.curve.steps == [5, 10, 12]
    assert [report.step for report in reports if report.validation_loss is not None] == [5, 10, 12]


def test_both_optimizers_are_the_same_before_the_freeze() -> None:
    plan = replace(PLAN, freeze_step=PLAN.steps)
    adamw, onebit = (
        threads.run(lambda comm, name=name: run(comm, name, plan)[0].curve.losses, 2)[0] for name in OPTIMIZERS
    )
    assert onebit == pytest.approx(adamw, rel=1e-5)


def test_learning_rate_rises_and_falls_linearly() -> None:
    plan = replace(PLAN, steps=10, warmup_steps=4, learning_rate=1.0)
    rates = [plan.rate_at(step) for step in range(10)]
    assert rates[:4] == pytest.approx([0.25, 0.5, 0.75, 1.0])
    assert rates[4:] == pytest.approx([1.0, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6])
