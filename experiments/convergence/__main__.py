"""Do 1-bit optimizers learn as well as the exact ones? On text and on digits, over several seeds, drawn with bands.

Starts its ranks by itself (`python -m experiments.convergence`), or runs unchanged under a launcher.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from experiments.common import machine
from experiments.common.command_line import Parser, positive
from experiments.common.errors import on_every_rank
from experiments.common.launching import launch
from experiments.common.results import OUTPUT, check_writable, write_json
from experiments.convergence.plots import draw
from experiments.convergence.subjects import SUBJECTS, Subject
from experiments.tasks.corpus import load
from experiments.training import findings
from experiments.training.learners import LoopLearner
from experiments.training.optimizers import OPTIMIZERS, PARENTS
from experiments.training.plans import Plan
from experiments.training.reporting import train_to_end
from experiments.training.trainer import Outcome, Trainer
from thinwire.comm import Communicator

__all__ = ["main", "parse", "study"]

_NAME = "convergence"
_DEFAULT_RANKS = 4
_DEFAULT_OPTIMIZERS = tuple(one for one in PARENTS if one not in ("onebit-lion", "onebit-muon"))
"""1-bit Lion has a study of its own, `experiments.lion`: at the rate that Lion has here text is not learned. 1-bit Muon
is in `experiments.frontier`."""
_RATES_TO_TRY = {
    "adamw": (5e-4, 1e-3, 2e-3),
    "lamb": (3e-3, 1e-2, 3e-2),
    "lion": (1e-4, 3e-4, 1e-3, 3e-3),
    "muon": (2e-3, 5e-3, 1e-2),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line, on the ranks it asks for or a launcher started; returns the exit code."""
    given = sys.argv[1:] if arguments is None else arguments
    return launch("experiments.convergence", parse, study, given, _DEFAULT_RANKS)


def study(comm: Communicator, options: argparse.Namespace) -> None:
    """Trains every task with every optimizer and seed, and writes the numbers and the picture.

    With `--tune`, trains the exact optimizers at several learning rates instead: how the plans' rates were chosen.

    Raises:
        InputError: on every rank, for a corpus that cannot be used.
    """
    subjects = {name: SUBJECTS[name](comm, options.corpus) for name in options.task}
    if options.steps is not None:
        subjects = {name: _shortened(subject, options.steps) for name, subject in subjects.items()}
    if options.tune:
        losses = {
            exact: {name: _tune(subject, exact, comm) for name, subject in subjects.items()}
            for exact in dict.fromkeys(PARENTS[onebit] for onebit in options.optimizer)
        }
        content = {"final_loss_by_learning_rate": losses}
        on_every_rank(comm, lambda: _write(options.output, f"{_NAME}_tuning", content, comm))
        return
    runs = {name: _run_all(subject, options.optimizer, options.seeds, comm) for name, subject in subjects.items()}
    on_every_rank(comm, lambda: _write_results(options.output, subjects, runs, comm))


def _run_all(subject: Subject, onebit: Sequence[str], seeds: int, comm: Communicator) -> dict[str, list[Outcome]]:
    """Outcomes by optimizer, each of `onebit` after its parent, one a seed."""
    paired = dict.fromkeys(optimizer for one in onebit for optimizer in (PARENTS[one], one))
    return {
        optimizer: [
            _run(subject, replace(subject.plan_of(optimizer), seed=seed), optimizer, comm, f"seed {seed}")
            for seed in range(seeds)
        ]
        for optimizer in paired
    }


def _tune(subject: Subject, optimizer: str, comm: Communicator) -> dict[str, float]:
    plans = {rate: replace(subject.plan_of(optimizer), learning_rate=rate) for rate in _RATES_TO_TRY[optimizer]}
    return {str(rate): _run(subject, plan, optimizer, comm, f"rate {rate}").final_loss for rate, plan in plans.items()}


def _run(subject: Subject, plan: Plan, optimizer: str, comm: Communicator, variant: str) -> Outcome:
    learner = LoopLearner(subject.task.build_model(plan.seed), plan, optimizer, comm)
    return train_to_end(
        Trainer(subject.task, plan, learner, comm),
        f"{subject.unit}, {OPTIMIZERS[optimizer].label}, {variant}",
        items_a_step=comm.size * subject.rank_items,
        unit=subject.unit,
    )


def _shortened(subject: Subject, steps: int) -> Subject:
    return replace(subject, plans={name: _with_steps(plan, steps) for name, plan in subject.plans.items()})


def _with_steps(plan: Plan, steps: int) -> Plan:
    """The plan with its stages in proportion: a run shorter than its warmup would never send one bit."""
    freeze_step = plan.freeze_step
    return replace(
        plan,
        steps=steps,
        warmup_steps=steps // 10,
        freeze_step=freeze_step if freeze_step == "auto" else max(1, freeze_step * steps // plan.steps),
        local_step_scaler=max(1, steps // 10),
        evaluate_every=max(1, steps // 30),
    )


def _write_results(
    output: Path, subjects: dict[str, Subject], runs: dict[str, dict[str, list[Outcome]]], comm: Communicator
) -> None:
    """JSON, picture and a summary, on rank 0."""
    if comm.rank:
        return
    found = {
        (name, onebit): findings.compare(task[PARENTS[onebit]], task[onebit])
        for name, task in runs.items()
        for onebit in task
        if onebit in PARENTS
    }
    tasks = {
        name: {
            "description": subject.description,
            "plans": {optimizer: asdict(subject.plan_of(optimizer)) for optimizer in runs[name]},
            "findings": {onebit: asdict(finding) for (task, onebit), finding in found.items() if task == name},
            "reference_loss": subject.reference_loss,
            "runs": {
                optimizer: [asdict(outcome) for outcome in outcomes] for optimizer, outcomes in runs[name].items()
            },
        }
        for name, subject in subjects.items()
    }
    content = _write(output, _NAME, {"tasks": tasks}, comm)
    draw(content, output / f"{_NAME}.png")
    for (name, onebit), finding in found.items():
        print(f"{subjects[name].description}: {OPTIMIZERS[onebit].label}: {finding.claim}")
    print(f"Written: {output / _NAME}.json and .png", flush=True)


def _write(output: Path, name: str, content: dict[str, Any], comm: Communicator) -> dict[str, Any]:
    """Writes the JSON on rank 0; what it holds."""
    content = {"ranks": comm.size, "backend": comm.backend, "machine": machine.describe(), **content}
    if comm.rank == 0:
        write_json(output / f"{name}.json", content)
    return content


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Reads and checks the command line; raises `InputError` for what cannot be used."""
    parser = Parser(
        "experiments.convergence",
        "Trains 1-bit optimizers and their exact parents over several seeds, and draws them.",
        "about an hour on 2 cores",
    )
    parser.add_argument("--task", nargs="+", choices=tuple(SUBJECTS), default=tuple(SUBJECTS), help="what to learn")
    parser.add_argument(
        "--optimizer",
        nargs="+",
        choices=tuple(PARENTS),
        default=_DEFAULT_OPTIMIZERS,
        help="beside what it was made from; all but 1-bit Lion, which has a study of its own",
    )
    parser.add_argument("--corpus", nargs="+", type=Path, metavar="FILE", help="UTF-8 text; else the standard library")
    parser.add_argument("--seeds", type=positive, default=3, metavar="N", help="runs for each optimizer")
    parser.add_argument("--steps", type=positive, metavar="N", help="of every task; else each task's own")
    parser.add_argument("--ranks", type=positive, metavar="N", help=f"else the launcher's, or {_DEFAULT_RANKS}")
    parser.add_argument("--tune", action="store_true", help="only try learning rates, with the exact ones")
    parser.add_argument("--output", type=Path, default=OUTPUT, metavar="DIR", help="for the picture and the JSON")
    options = parser.parse_args(arguments)
    if options.corpus:
        load(options.corpus)
    check_writable(options.output, "--output")
    return options


if __name__ == "__main__":
    sys.exit(main())
