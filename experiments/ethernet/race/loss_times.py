"""How long each contender takes to a loss: whole trainings, warmup included, one after another in one job.

Few steps have to go over the slow links to know how long all of them take: stretches of them are timed at the rate, all
along the training, and those between run over links without a limit. `experiments.ethernet` starts it under mpirun.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import numpy as np
import torch

from experiments.common.command_line import Parser, freeze_step, positive, rate
from experiments.common.results import write_json
from experiments.ethernet.race.contenders import CONTENDERS
from experiments.ethernet.race.shaping import shape_together
from experiments.ethernet.race.stopwatch import Interface, Stopwatch
from experiments.tasks.language import MaskedLanguageTask
from experiments.tasks.sizes import SIZES
from experiments.tasks.tokens import Tokens
from experiments.training.plans import Plan
from experiments.training.trainer import Trainer
from thinwire import comm as communication
from thinwire.comm import Communicator

__all__ = ["Clock", "Kind", "main"]

_TIMEOUT = 300.0
_STRETCH = 4
"""Steps timed one after another; the first of a stretch only settles."""


class Kind(NamedTuple):
    """Steps that take the same time: of one stage, and sending the same bytes."""

    stage: str
    bytes_sent: int


@dataclass
class Clock:
    """How long steps take at the links' rate, by kind, and how many there were of each.

    Attributes:
        timed: seconds of the timed steps, the slowest rank's.
        done: all steps.
    """

    timed: dict[Kind, list[float]] = field(default_factory=dict)
    done: Counter[Kind] = field(default_factory=Counter)

    def seconds(self, done: Counter[Kind]) -> float:
        """What so many steps of each kind take. A kind too rare to be timed takes what the nearest in bytes does."""
        return sum(count * mean(self.timed[self._timed_like(kind)]) for kind, count in done.items())

    def by_stage(self) -> dict[str, float]:
        """Mean seconds of a step, by stage, over all that were done."""
        stages = dict.fromkeys(kind.stage for kind in self.done)
        of_stage = {name: Counter({k: n for k, n in self.done.items() if k.stage == name}) for name in stages}
        return {name: self.seconds(done) / done.total() for name, done in of_stage.items()}

    def _timed_like(self, kind: Kind) -> Kind:
        return min(self.timed, key=lambda one: (abs(one.bytes_sent - kind.bytes_sent), one.stage != kind.stage))


def main(arguments: Sequence[str]) -> None:
    """On every rank: trains with every contender, and writes losses and seconds on the way."""
    options = _parse(arguments)
    torch.set_num_threads(1)
    comm = communication.init(backend="gloo", timeout=_TIMEOUT, quiet=True)
    with np.load(options.tokens) as file:
        tokens = Tokens(int(file["vocabulary"]), file["training"], file["validation"], None)
    task = MaskedLanguageTask(tokens, SIZES[options.model], options.batch_size, dropout=0.0)
    runs = {name: _train(name, task, options, comm) for name in options.contenders}
    if comm.rank == 0:
        write_json(options.output, {"ranks": comm.size, "steps": options.steps, "runs": runs})
    comm.close()


def _train(name: str, task: MaskedLanguageTask, options: argparse.Namespace, comm: Communicator) -> dict[str, Any]:
    """One contender's curve: steps, validation losses, and seconds and bytes until then."""
    plan = _plan(options)
    learner = CONTENDERS[name].build(task.build_model(plan.seed), plan, comm)
    trainer = Trainer(task, plan, learner, comm)
    clock = Clock()
    timed_every = _STRETCH if CONTENDERS[name].bursts else options.timed_every
    points: list[tuple[int, float, int, Counter[Kind]]] = []
    for step in range(plan.steps):
        place = step % timed_every
        if place == 0:
            shape_together(comm, options.cluster, options.hosts, options.rate)
        elif place == _STRETCH:
            shape_together(comm, options.cluster, options.hosts, None)
        stage, sent_before = learner.stage, learner.bytes_sent
        stopwatch = Stopwatch(Interface(options.device))
        learner.learn(task.training_loss(learner, plan.seed, step, comm.rank, comm.size))
        kind = Kind(stage, learner.bytes_sent - sent_before)
        clock.done[kind] += 1
        if 0 < place < _STRETCH:
            took = torch.tensor(stopwatch.stop().seconds, dtype=torch.float64)
            comm.all_reduce(took, "max")
            clock.timed.setdefault(kind, []).append(float(took))
        if (step + 1) % plan.evaluate_every == 0 or step + 1 == plan.steps:
            points.append((step + 1, trainer.validate(), learner.bytes_sent, clock.done.copy()))
            if comm.rank == 0:
                print(
                    f"{name}: step {step + 1}, loss {points[-1][1]:.3f}, {learner.stage}", file=sys.stderr, flush=True
                )
    shape_together(comm, options.cluster, options.hosts, None)
    return {
        "steps": [point[0] for point in points],
        "losses": [point[1] for point in points],
        "bytes_sent": [point[2] for point in points],
        "seconds": [clock.seconds(point[3]) for point in points],
        "seconds_a_step": clock.by_stage(),
        "kinds": [
            {**kind._asdict(), "steps": steps, "timed_seconds": clock.timed.get(kind, [])}
            for kind, steps in clock.done.items()
        ],
        "frozen_at": learner.frozen_at,
    }


def _plan(options: argparse.Namespace) -> Plan:
    return Plan(
        steps=options.steps,
        warmup_steps=max(1, options.steps // 10),
        learning_rate=options.learning_rate,
        weight_decay=0.01,
        freeze_step=options.freeze_step,
        evaluate_every=max(1, options.steps // 30),
        seed=0,
        local_step_scaler=max(1, options.steps // 5),
    )


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = Parser("experiments.ethernet.race.loss_times", "Races to a loss; see experiments.ethernet.")
    parser.add_argument("--model", choices=tuple(SIZES), required=True)
    parser.add_argument("--batch-size", type=positive, required=True)
    parser.add_argument("--contenders", nargs="+", choices=tuple(CONTENDERS), required=True)
    parser.add_argument("--tokens", type=Path, required=True, help="an .npz file")
    parser.add_argument("--steps", type=positive, required=True)
    parser.add_argument("--learning-rate", type=rate, required=True)
    parser.add_argument("--freeze-step", type=freeze_step, required=True)
    parser.add_argument("--timed-every", type=positive, required=True, help=f"steps; of those {_STRETCH} at the rate")
    parser.add_argument("--rate", type=rate, help="of the links, in Mb/s")
    parser.add_argument("--cluster", help="whose links to shape; none: leave the network as it is")
    parser.add_argument("--hosts", type=positive, required=True)
    parser.add_argument("--device", required=True)
    parser.add_argument("--output", type=Path, required=True)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main(sys.argv[1:])
