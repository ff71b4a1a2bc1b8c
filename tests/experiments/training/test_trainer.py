"""The training loop and the optimizers it knows: what it counts and reports, and that ranks stay together."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import thinwire
from experiments.common.errors import InputError
from experiments.training.baseline import AveragedLamb
from experiments.training.checkpoints import RunCheckpoints
from experiments.training.learners import EngineLearner, Learner, LoopLearner
from experiments.training.optimizers import COMPRESSED, ENGINE, OPTIMIZERS, build, engine_section
from experiments.training.plans import Plan
from experiments.training.trainer import StepReport, Trainer
from tests.experiments.helpers import PLAN, LineTask, engine_config
from tests.optim.lamb.reference import ReferenceOneBitLamb
from thinwire import OneBitLamb
from thinwire.comm import Communicator, threads
from thinwire.comm.traffic import sent_bytes
from thinwire.engine import load_config

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
@pytest.mark.parametrize("ranks", [2])
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


@pytest.mark.parametrize("kind", LEARNERS[1:])
def test_the_engine_learns_what_a_loop_by_hand_learns(kind: str) -> None:
    by_hand, engine = (
        threads.run(lambda comm, one=one: run(comm, "adamw", kind=one)[0], 2)[0] for one in ("loop", kind)
    )
    assert engine.curve.losses == pytest.approx(by_hand.curve.losses, rel=1e-5)
    assert engine.curve.steps == by_hand.curve.steps


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


def groups() -> list[dict[str, object]]:
    return [{"params": [nn.Parameter(torch.ones(65, 3))], "weight_decay": 0.25}]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_is_built_as_the_plan_says(name: str) -> None:
    optimizer = build(name, groups(), PLAN, threads.single(60.0))
    assert optimizer.param_groups[0]["lr"] == PLAN.learning_rate
    assert optimizer.param_groups[0]["weight_decay"] == 0.25
    assert optimizer.bytes_sent == 0
    if name in COMPRESSED:
        assert type(optimizer) is getattr(thinwire, COMPRESSED[name].class_name)


@pytest.mark.parametrize("name", ENGINE)
def test_the_engine_takes_the_section_of_what_it_knows(name: str) -> None:
    section = engine_section(name, 0.5, 7, weight_decay=0.125)
    config = load_config({"train_batch_size": 4, "optimizer": section}, 2)
    assert config.optimizer is not None
    assert config.optimizer.type == OPTIMIZERS[name].class_name
    assert config.optimizer.params["lr"] == 0.5
    assert config.optimizer.params["weight_decay"] == 0.125
    if name in COMPRESSED and COMPRESSED[name].freeze_option is not None:
        assert config.optimizer.params[COMPRESSED[name].freeze_option] == 7


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


SIZES = (5, 70, 1)
OPTIONS = {"lr": 0.02, "weight_decay": 0.1, "max_coeff": 3.0}


@pytest.mark.parametrize("ranks", [1, 3])
def test_lamb_is_the_algorithm_and_the_warmup_of_1_bit_lamb(ranks: int) -> None:
    rng = np.random.default_rng()
    start = [rng.standard_normal(size).astype(np.float32) for size in SIZES]
    start[2][:] = 0  # a layer without a norm
    gradients = [[rng.standard_normal((ranks, size)).astype(np.float32) for size in SIZES] for _ in range(40)]
    reference = ReferenceOneBitLamb(start, ranks, freeze_step=1000, block_size=64, **OPTIONS)
    for of_step in gradients:
        reference.step([of_layer.astype(np.float64) for of_layer in of_step])

    def rank(comm: Communicator) -> list[list[Tensor]]:
        ends = []
        for make in (AveragedLamb, lambda layers, comm, **options: OneBitLamb(layers, comm=comm, **options)):
            layers = [nn.Parameter(torch.from_numpy(layer.copy())) for layer in start]
            optimizer = make(layers, comm, **OPTIONS)
            for of_step in gradients:
                for layer, workers in zip(layers, of_step, strict=True):
                    layer.grad = torch.from_numpy(workers[comm.rank].copy())
                optimizer.step()
            ends.append([layer.detach() for layer in layers])
        return ends

    for plain, onebit in threads.run(rank, ranks):
        for expected, mine, warmup in zip(reference.weights, plain, onebit, strict=True):
            torch.testing.assert_close(mine.double(), torch.from_numpy(expected), rtol=1e-3, atol=1e-5)
            torch.testing.assert_close(warmup, mine, rtol=1e-3, atol=1e-5)


SETTINGS = {"model": "line", "steps": PLAN.steps}


def start(comm: Communicator, optimizer: str, stage: int = 1) -> tuple[Trainer, EngineLearner]:
    task = LineTask()
    learner = EngineLearner(task.build_model(PLAN.seed), PLAN, engine_config(optimizer, stage), comm)
    return Trainer(task, PLAN, learner, comm), learner


def train(
    comm: Communicator, optimizer: str, folder: Path, until: int, *, stage: int = 1, resume: bool = False
) -> tuple[Trainer, list[torch.Tensor]]:
    """Trains to a step and saves there, on a folder that all ranks share."""
    trainer, learner = start(comm, optimizer, stage)
    checkpoints = RunCheckpoints(folder, comm, SETTINGS)
    assert checkpoints.load(trainer, learner) is resume
    while trainer.step < until:
        trainer.advance()
    checkpoints.save(trainer, learner)
    return trainer, [parameter.detach().clone() for parameter in learner.module.parameters()]


@pytest.mark.parametrize("optimizer", ENGINE)
@pytest.mark.parametrize("stop", [7])
def test_a_resumed_run_is_the_uninterrupted_one(tmp_path: Path, optimizer: str, stop: int) -> None:
    whole = threads.run(lambda comm: train(comm, optimizer, tmp_path / "whole", PLAN.steps), 2)
    threads.run(lambda comm: train(comm, optimizer, tmp_path / "parts", stop), 2)
    resumed = threads.run(lambda comm: train(comm, optimizer, tmp_path / "parts", PLAN.steps, resume=True), 2)
    for (one, mine), (other, theirs) in zip(whole, resumed, strict=True):
        assert one.curve == other.curve
        assert one.bytes_sent == other.bytes_sent
        assert one.outcome.frozen_at == other.outcome.frozen_at
        assert all(map(torch.equal, mine, theirs))


def test_a_run_goes_on_at_another_stage_and_on_other_ranks(tmp_path: Path) -> None:
    threads.run(lambda comm: train(comm, "adamw", tmp_path, 5, stage=2), 2)
    trainer, _ = threads.run(lambda comm: train(comm, "adamw", tmp_path, PLAN.steps, stage=0, resume=True), 3)[0]
    assert trainer.curve.steps == [2, 4, 6, 8, 10, 12]


def test_a_checkpoint_of_another_run_is_refused(tmp_path: Path) -> None:
    threads.run(lambda comm: train(comm, "adamw", tmp_path, 2), 2)

    def work(comm: Communicator) -> None:
        checkpoints = RunCheckpoints(tmp_path, comm, {**SETTINGS, "steps": 99})
        with pytest.raises(InputError, match="steps was 12 and is now 99"):
            checkpoints.load(*start(comm, "adamw"))

    threads.run(work, 2)


def test_a_checkpoint_of_another_optimizer_is_refused(tmp_path: Path) -> None:
    threads.run(lambda comm: train(comm, "adamw", tmp_path, 2), 2)

    def work(comm: Communicator) -> None:
        with pytest.raises(InputError, match="--resume cannot continue"):
            RunCheckpoints(tmp_path, comm, SETTINGS).load(*start(comm, "onebit-adam"))

    threads.run(work, 2)
