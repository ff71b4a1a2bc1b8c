"""The training loop: what it counts, what it reports, and that ranks stay together."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from experiments.training.learners import EngineLearner, Learner, LoopLearner
from experiments.training.optimizers import COMPRESSED, OPTIMIZERS
from experiments.training.plans import Plan
from experiments.training.trainer import StepReport, Trainer
from tests.experiments.helpers import PLAN, LineTask, engine_config
from thinwire.comm import Communicator, threads

LEARNERS = ("loop", "stage 0", "stage 1", "stage 2")
ADAMS = ("adamw", "onebit-adam")


def pairs() -> list[tuple[str, str]]:
    """Every optimizer in a loop of its own, and in the engine at the stages that shard it."""
    stages = {"adamw": (0, 1, 2)} | {name: one.stages for name, one in COMPRESSED.items()}
    return [
        *((name, "loop") for name in OPTIMIZERS),
        *((name, f"stage {stage}") for name, of_it in stages.items() for stage in of_it),
    ]


def run(
    comm: Communicator, optimizer: str, plan: Plan = PLAN, kind: str = "loop", accumulation: int = 1
) -> tuple[Trainer, list[StepReport]]:
    task = LineTask()
    model = task.build_model(plan.seed)
    learner: Learner
    if kind == "loop":
        learner = LoopLearner(model, plan, optimizer, comm)
    else:
        config = engine_config(optimizer, int(kind[-1]), plan) | {"gradient_accumulation_steps": accumulation}
        learner = EngineLearner(model, plan, config, comm)
    trainer = Trainer(task, plan, learner, comm)
    reports = []
    while not trainer.finished:
        reports.append(trainer.advance())
    return trainer, reports


@pytest.mark.parametrize(("optimizer", "kind"), pairs())
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_all_ranks_end_with_the_same_weights_and_curve(optimizer: str, ranks: int, kind: str) -> None:
    trainers = threads.run(lambda comm: run(comm, optimizer, kind=kind)[0], ranks)
    for other in trainers[1:]:
        assert other.curve == trainers[0].curve
        pairs = zip(other.learner.module.parameters(), trainers[0].learner.module.parameters(), strict=True)
        assert all(torch.equal(mine, theirs) for mine, theirs in pairs)


@pytest.mark.parametrize("kind", ["loop", "stage 1"])
@pytest.mark.parametrize("optimizer", ADAMS)
def test_it_learns(optimizer: str, kind: str) -> None:
    plan = replace(PLAN, steps=150, freeze_step=40)
    losses = threads.run(lambda comm: run(comm, optimizer, plan, kind)[0].curve.losses, 2)[0]
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize("optimizer", ["lamb", "onebit-lamb"])
def test_lamb_learns_with_the_same_weights_on_all_ranks(optimizer: str) -> None:
    plan = replace(PLAN, steps=150, freeze_step=60, learning_rate=0.02)
    trainers = threads.run(lambda comm: run(comm, optimizer, plan)[0], 3)
    assert trainers[0].curve.losses[-1] < 0.5 * trainers[0].curve.losses[0]
    assert trainers[0].outcome.frozen_at == (60 if optimizer == "onebit-lamb" else None)
    assert all(other.curve == trainers[0].curve for other in trainers)


@pytest.mark.parametrize("kind", LEARNERS[1:])
def test_the_engine_learns_what_a_loop_by_hand_learns(kind: str) -> None:
    by_hand, engine = (
        threads.run(lambda comm, one=one: run(comm, "adamw", kind=one)[0], 2)[0] for one in ("loop", kind)
    )
    assert engine.curve.losses == pytest.approx(by_hand.curve.losses, rel=1e-5)
    assert engine.curve.steps == by_hand.curve.steps


def test_a_step_takes_as_many_batches_as_it_accumulates() -> None:
    trainer, reports = threads.run(lambda comm: run(comm, "adamw", kind="stage 1", accumulation=3), 2)[0]
    assert isinstance(trainer.learner, EngineLearner)
    assert trainer.learner.engine.micro_steps == 3 * PLAN.steps
    assert trainer.learner.engine.global_steps == len(reports) == PLAN.steps


def test_adamw_sends_what_a_ring_all_reduce_sends() -> None:
    elements = sum(parameter.numel() for parameter in LineTask().build_model(0).parameters())
    trainer, reports = threads.run(lambda comm: run(comm, "adamw"), 3)[0]
    a_step = -(-2 * 2 * 4 * elements // 3)
    assert [report.bytes_sent for report in reports] == [a_step] * PLAN.steps
    assert trainer.outcome.bytes_sent == PLAN.steps * a_step
    assert {report.stage for report in reports} == {"exact"}


@pytest.mark.parametrize("kind", LEARNERS)
def test_onebit_adam_reports_its_stages(kind: str) -> None:
    trainer, reports = threads.run(lambda comm: run(comm, "onebit-adam", kind=kind), 2)[0]
    stages = [report.stage for report in reports]
    assert stages[0] == "warmup"
    assert stages[3:] == ["1-bit"] * 9
    assert trainer.outcome.frozen_at == 3
    assert trainer.outcome.last_step_bytes == reports[-1].bytes_sent < reports[0].bytes_sent
    assert trainer.outcome.bytes_sent == sum(report.bytes_sent for report in reports)


def test_diloco_is_validated_at_its_outer_weights_and_sends_at_outer_steps_only() -> None:
    def shown(comm: Communicator) -> tuple[Trainer, list[StepReport], list[torch.Tensor]]:
        task, plan = LineTask(), replace(PLAN, steps=14, evaluate_every=6)
        learner = LoopLearner(task.build_model(plan.seed), plan, "diloco", comm, every=4, overlap=0, codec="none")
        trainer = Trainer(task, plan, learner, comm)
        reports, seen = [], []
        while not trainer.finished:
            reports.append(trainer.advance())
            own = torch.nn.utils.parameters_to_vector(learner.module.parameters())
            with learner.evaluating():
                seen += [own, torch.nn.utils.parameters_to_vector(learner.module.parameters())]
        return trainer, reports, seen

    (trainer, reports, first), (_, _, second) = threads.run(shown, 2)
    assert [one.step for one in reports if one.bytes_sent] == [4, 8, 12, 14]  # and the last, so that all end alike
    assert {one.stage for one in reports} == {"local"}
    assert trainer.curve.steps == [6, 12, 14]
    assert torch.equal(torch.stack(first[1::2]), torch.stack(second[1::2]))
    assert not torch.equal(first[2 * 5], second[2 * 5])
    assert torch.equal(first[-2], first[-1])


def test_validation_happens_on_time_and_at_the_end() -> None:
    plan = replace(PLAN, evaluate_every=5)
    trainer, reports = threads.run(lambda comm: run(comm, "adamw", plan), 1)[0]
    assert trainer.curve.steps == [5, 10, 12]
    assert [report.step for report in reports if report.validation_loss is not None] == [5, 10, 12]


@pytest.mark.parametrize("kind", ["loop", "stage 2"])
def test_both_optimizers_are_the_same_before_the_freeze(kind: str) -> None:
    plan = replace(PLAN, freeze_step=PLAN.steps)
    adamw, onebit = (
        threads.run(lambda comm, name=name: run(comm, name, plan, kind)[0].curve.losses, 2)[0] for name in ADAMS
    )
    assert onebit == pytest.approx(adamw, rel=1e-5)


def test_learning_rate_rises_and_falls_linearly() -> None:
    plan = replace(PLAN, steps=10, warmup_steps=4, learning_rate=1.0)
    rates = [plan.rate_at(step) for step in range(10)]
    assert rates[:4] == pytest.approx([0.25, 0.5, 0.75, 1.0])
    assert rates[4:] == pytest.approx([1.0, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6])


def test_the_engine_follows_the_plans_rates() -> None:
    def rates(comm: Communicator) -> list[float]:
        task = LineTask()
        learner = EngineLearner(task.build_model(0), PLAN, engine_config("adamw", 1), comm)
        trainer = Trainer(task, PLAN, learner, comm)
        seen = []
        while not trainer.finished:
            seen.append(learner.engine.get_lr()[0])
            trainer.advance()
        return seen

    assert threads.run(rates, 1)[0] == pytest.approx([PLAN.rate_at(step) for step in range(PLAN.steps)])
