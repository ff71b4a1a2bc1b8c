"""How long each contender takes to a loss: whole trainings, warmup included, one after another in one job.

Few steps have to go over the slow links to know how long all of them take: stretches of them are timed at the rate, all
along the training, and those between run over links without a limit. `experiments.ethernet` starts it under mpirun.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from experiments.common.command_line import Parser, freeze_step, positive, rate
from experiments.common.results import write_json
from experiments.ethernet.race.contenders import CONTENDERS
from experiments.ethernet.race.kinds import Clock, Kind, by_kind, records
from experiments.ethernet.race.shaping import add_link_arguments, shape_together
from experiments.tasks.language import MaskedLanguageTask
from experiments.tasks.sizes import SIZES
from experiments.tasks.tokens import Tokens
from experiments.training.learners import Learner
from experiments.training.plans import Plan
from experiments.training.trainer import Trainer
from thinwire import comm as communication
from thinwire.comm import Communicator

__all__ = ["TIMEOUT", "add_arguments", "load_task", "main", "mean_over_ranks", "plan_of", "timed_step"]

TIMEOUT = 300.0
"""Of the communicator, in seconds: a step over slow links takes some."""
_STRETCH = 4
"""Steps timed one after another; the first of a stretch only settles."""


def main(arguments: Sequence[str]) -> None:
    """On every rank: trains with every contender, and writes losses and seconds on the way."""
    options = _parse(arguments)
    torch.set_num_threads(1)
    comm = communication.init(backend="gloo", timeout=TIMEOUT, quiet=True)
    task = load_task(options)
    runs = {name: _train(name, task, options, comm) for name in options.contenders}
    if comm.rank == 0:
        write_json(options.output, {"ranks": comm.size, "steps": options.steps, "runs": runs})
    comm.close()


def _train(name: str, task: MaskedLanguageTask, options: argparse.Namespace, comm: Communicator) -> dict[str, Any]:
    """One contender's curve: steps, validation losses, and seconds and bytes until then."""
    plan = plan_of(options, options.freeze_step, max(1, options.steps // 30))
    learner = CONTENDERS[name].build(task.build_model(plan.seed), plan, comm)
    trainer = Trainer(task, plan, learner, comm)
    timed: list[tuple[Kind, float]] = []
    done: Counter[Kind] = Counter()
    timed_every, stretch = options.timed_every, _STRETCH
    if CONTENDERS[name].bursts:
        timed_every = stretch = plan.steps
    points: list[tuple[int, float, int, Counter[Kind]]] = []
    for step in range(plan.steps):
        place = step % timed_every
        if place == 0:
            shape_together(comm, options.cluster, options.hosts, options.rate)
        elif place == stretch:
            shape_together(comm, options.cluster, options.hosts, None)
        kind, seconds = timed_step(learner, task, plan, step, comm)
        done[kind] += 1
        if 0 < place < stretch:
            timed.append((kind, seconds))
        if (step + 1) % plan.evaluate_every == 0 or step + 1 == plan.steps:
            points.append((step + 1, trainer.validate(), learner.bytes_sent, done.copy()))
            if comm.rank == 0:
                print(
                    f"{name}: step {step + 1}, loss {points[-1][1]:.3f}, {learner.stage}", file=sys.stderr, flush=True
                )
    shape_together(comm, options.cluster, options.hosts, None)
    clock = Clock(by_kind(mean_over_ranks(timed, comm)), done)
    return {
        "steps": [point[0] for point in points],
        "losses": [point[1] for point in points],
        "bytes_sent": [point[2] for point in points],
        "seconds": [clock.seconds(point[3]) for point in points],
        "seconds_a_step": clock.by_stage(),
        "kinds": records(clock),
        "frozen_at": learner.frozen_at,
    }


def timed_step(
    learner: Learner, task: MaskedLanguageTask, plan: Plan, step: int, comm: Communicator
) -> tuple[Kind, float]:
    """One step, its kind, and its seconds on this rank."""
    stage, sent_before = learner.stage, learner.bytes_sent
    started = time.perf_counter()
    learner.learn(task.training_loss(learner, plan.seed, step, comm.rank, comm.size))
    seconds = time.perf_counter() - started
    return Kind(stage, learner.bytes_sent - sent_before), seconds


def mean_over_ranks(timed: Sequence[tuple[Kind, float]], comm: Communicator) -> list[tuple[Kind, float]]:
    """Timed steps with the mean of all ranks' seconds, to which each brings its own of the same steps.

    Ranks wait for one another inside steps, and so all take as long in the end. To ask each other after every step
    would be time off the clock, in which what is under way behind the next steps would arrive. Collective.
    """
    seconds = torch.tensor([one for _, one in timed], dtype=torch.float64)  # [timed steps]
    comm.all_reduce(seconds)
    return [(kind, total / comm.size) for (kind, _), total in zip(timed, seconds.tolist(), strict=True)]


def load_task(options: argparse.Namespace) -> MaskedLanguageTask:
    """What everybody learns, from the tokens that `options` name."""
    with np.load(options.tokens) as file:
        tokens = Tokens(int(file["vocabulary"]), file["training"], file["validation"], None)
    return MaskedLanguageTask(tokens, SIZES[options.model], options.batch_size, dropout=0.0)


def plan_of(options: argparse.Namespace, freeze_step: int | Literal["auto"], evaluate_every: int) -> Plan:
    """How all contenders train for the steps that `options` say."""
    return Plan(
        steps=options.steps,
        warmup_steps=max(1, options.steps // 10),
        learning_rate=options.learning_rate,
        weight_decay=0.01,
        freeze_step=freeze_step,
        evaluate_every=evaluate_every,
        seed=0,
        local_step_scaler=max(1, options.steps // 5),
    )


def add_arguments(parser: Parser) -> None:
    """What `options` hold of the trainings and of the links."""
    parser.add_argument("--model", choices=tuple(SIZES), required=True)
    parser.add_argument("--batch-size", type=positive, required=True)
    parser.add_argument("--contenders", nargs="+", choices=tuple(CONTENDERS), required=True)
    parser.add_argument("--tokens", type=Path, required=True, help="an .npz file")
    parser.add_argument("--steps", type=positive, required=True)
    parser.add_argument("--learning-rate", type=rate, required=True)
    parser.add_argument("--rate", type=rate, help="of the links, in Mb/s")
    add_link_arguments(parser)
    parser.add_argument("--output", type=Path, required=True)


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = Parser("experiments.ethernet.race.loss_times", "Races to a loss; see experiments.ethernet.")
    add_arguments(parser)
    parser.add_argument("--freeze-step", type=freeze_step, required=True)
    parser.add_argument("--timed-every", type=positive, required=True, help=f"steps; of those {_STRETCH} at the rate")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main(sys.argv[1:])
