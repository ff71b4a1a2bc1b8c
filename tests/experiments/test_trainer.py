"""The training loop and its optimizers; findings, sweeps and pictures follow from its numbers."""

from dataclasses import replace
from math import inf, log, nan
from typing import Any

import pytest
import torch
from torch import nn

from experiments.training.baseline import AveragedLamb
from experiments.training.findings import compare, headline
from experiments.training.learners import EngineLearner, LoopLearner
from experiments.training.optimizers import COMPRESSED, ENGINE, OPTIMIZERS, engine_section
from experiments.training.plans import Plan
from experiments.training.sweep import best_rate, sweep
from experiments.training.trainer import StepReport, Trainer
from tests.experiments.helpers import PLAN, LineTask, engine_config, outcome
from tests.launching import on_threads
from thinwire import OneBitLamb
from thinwire.comm import Communicator, threads
from thinwire.comm.traffic import sent_bytes
from thinwire.engine import load_config


def run(comm: Communicator, optimizer: str, plan: Plan = PLAN, kind: str = "loop") -> tuple[Trainer, list[StepReport]]:
    task = LineTask()
    model = task.build_model(plan.seed)
    if kind == "loop":
        learner = LoopLearner(model, plan, optimizer, comm)
    else:
        config = engine_config(optimizer, int(kind[-1]), plan)
        learner = EngineLearner(model, plan, config, comm)
    trainer = Trainer(task, plan, learner, comm)
    reports = []
    while not trainer.finished:
        reports.append(trainer.advance())
    return trainer, reports


def test_adamw_sends_what_a_ring_all_reduce_sends_and_is_validated_on_time_and_at_the_end() -> None:
    elements = sum(parameter.numel() for parameter in LineTask().build_model(0).parameters())
    trainer, reports = threads.run(lambda comm: run(comm, "adamw", replace(PLAN, evaluate_every=5)), 3)[0]
    assert trainer.curve.steps == [5, 10, 12]
    assert [report.step for report in reports if report.validation_loss is not None] == [5, 10, 12]
    a_step = -(-2 * 2 * 4 * elements // 3)
    assert [report.bytes_sent for report in reports] == [a_step] * PLAN.steps
    assert trainer.outcome.bytes_sent == PLAN.steps * a_step
    assert {report.stage for report in reports} == {"exact"}


@pytest.mark.parametrize("kind", ["loop", "stage 1"])
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


@pytest.mark.parametrize("name", ENGINE)
def test_the_engine_takes_the_section_of_what_it_knows(name: str) -> None:
    section = engine_section(name, 0.5, 7, weight_decay=0.125)
    config = load_config({"train_batch_size": 4, "optimizer": section}, 2)
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


@pytest.mark.parametrize("ranks", [1, 3])
@on_threads("ranks")
def test_lamb_is_the_warmup_of_1_bit_lamb(comm: Communicator, ranks: int) -> None:
    ends = []
    for make in (AveragedLamb, lambda layers, comm, **options: OneBitLamb(layers, comm=comm, **options)):
        random = torch.Generator().manual_seed(7)
        layers = [nn.Parameter(torch.randn(size, generator=random)) for size in (5, 70)]
        layers.append(nn.Parameter(torch.zeros(1)))  # a layer without a norm
        optimizer = make(layers, comm, lr=0.02, weight_decay=0.1, max_coeff=3.0)
        random.manual_seed(comm.rank)
        for _ in range(40):
            for layer in layers:
                layer.grad = torch.randn(layer.shape, generator=random)
            optimizer.step()
        ends.append(layers)
    plain, onebit = ends
    for mine, warmup in zip(plain, onebit, strict=True):
        torch.testing.assert_close(warmup, mine, rtol=1e-3, atol=1e-5)


def test_a_run_that_diverged_says_so() -> None:
    diverged = outcome(float("nan"), frozen_at=3)
    finding = compare([outcome(2.0)] * 2, [diverged, outcome(2.0, frozen_at=3)])
    assert finding.claim == "diverged"
    assert not finding.same_loss


@pytest.mark.parametrize(("onebit", "same"), [(2.15, True), (2.25, False)])
def test_several_seeds_allow_one_standard_deviation(onebit: float, same: bool) -> None:
    finding = compare([outcome(1.8), outcome(2.2), outcome(2.0)], [outcome(onebit, frozen_at=2)] * 3)
    assert finding.exact_deviation == pytest.approx(0.2)
    assert finding.same_loss is same


def test_a_headline_says_the_fewest_bytes_and_the_worst_loss() -> None:
    better = compare([outcome(2.0, 3200)], [outcome(1.9, 100, frozen_at=20)])
    worse = compare([outcome(2.0, 3200)], [outcome(2.06, 800, frozen_at=20)])
    one = "1-bit Adam sends 32x fewer bytes and ends 5.0% below AdamW's loss"
    assert headline("1-bit Adam", "AdamW", [better], 3) == one
    assert headline("1-bit Adam", "AdamW", [better], 1) == f"{one} (one seed)"
    both = headline("1-bit Adam", "AdamW", [better, worse], 3)
    assert both == "1-bit Adam sends 4.0x to 32x fewer bytes and ends at most 3.0% above AdamW's loss"
    diverged = compare([outcome(2.0)], [outcome(float("nan"), frozen_at=3)])
    assert headline("1-bit Adam", "AdamW", [better, diverged], 3) == "1-bit Adam diverged"


@pytest.mark.parametrize(("best", "tried"), [(0.004, []), (0.001, [0.0005, 0.001]), (0.016, [0.016, 0.032])])
def test_a_best_rate_at_an_end_is_followed(best: float, tried: list[float]) -> None:
    losses = sweep(lambda rate: abs(log(rate / best)), (0.002, 0.004, 0.008))
    assert best_rate(losses) == best
    assert list(losses) == sorted({*tried, 0.002, 0.004, 0.008})


def test_what_breaks_down_is_never_the_best() -> None:
    assert best_rate({0.1: nan, 0.2: 3.0, 0.3: -inf}) == 0.2
    assert sweep(lambda rate: 1.0 if rate < 0.3 else nan, (0.1, 0.2, 0.4)).keys() >= {0.05, 0.1, 0.2, 0.4}
