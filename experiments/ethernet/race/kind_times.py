"""How long the steps of each kind take over links of one rate: a short training of each contender, whose stages are as
short, so that all kinds come. `experiments.ethernet` starts it under mpirun."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from math import isclose
from typing import Any

import torch

from experiments.common.command_line import Parser
from experiments.common.results import write_json
from experiments.ethernet.race.contenders import CONTENDERS
from experiments.ethernet.race.kinds import Clock, Kind, by_kind, records
from experiments.ethernet.race.loss_times import (
    TIMEOUT,
    add_arguments,
    load_task,
    mean_over_ranks,
    plan_of,
    timed_step,
)
from experiments.ethernet.race.shaping import shape_together
from experiments.tasks.language import MaskedLanguageTask
from thinwire import comm as communication
from thinwire.comm import Communicator

__all__ = ["firsts", "main"]

_UNTIMED = 4
"""First steps: the links settle, DDP lays its buckets."""
_FROZEN_FROM = 4
"""1-bit optimizers freeze and PowerSGD begins after this part of the steps: one in so many."""


def main(arguments: Sequence[str]) -> None:
    """On every rank: times every contender's steps, and writes them by kind."""
    options = _parse(arguments)
    torch.set_num_threads(1)
    comm = communication.init(backend="gloo", timeout=TIMEOUT, quiet=True)
    task = load_task(options)
    shape_together(comm, options.cluster, options.hosts, options.rate)
    kinds = {name: _time_kinds(name, task, options, comm) for name in options.contenders}
    if comm.rank == 0:
        write_json(options.output, {"ranks": comm.size, "kinds": kinds})
    comm.close()


def _time_kinds(
    name: str, task: MaskedLanguageTask, options: argparse.Namespace, comm: Communicator
) -> list[dict[str, Any]]:
    """One contender's."""
    # Validations would add exchanges that steps do not have.
    plan = plan_of(options, max(1, options.steps // _FROZEN_FROM), evaluate_every=options.steps)
    learner = CONTENDERS[name].build(task.build_model(plan.seed), plan, comm)
    comm.barrier()
    steps = [timed_step(learner, task, plan, step, comm) for step in range(plan.steps)]
    steps = mean_over_ranks(steps, comm)
    if comm.rank == 0:
        print(f"{name}: {plan.steps} steps at {options.rate} Mb/s timed", file=sys.stderr, flush=True)
    unsettled = {*range(_UNTIMED), *firsts([kind for kind, _ in steps])}
    settled = [pair for step, pair in enumerate(steps) if step not in unsettled]
    return records(Clock(by_kind(settled), Counter(kind for kind, _ in steps)))


def firsts(kinds: Sequence[Kind]) -> set[int]:
    """The steps before which there was none like them, of one stage and about as many bytes: there kernels compile."""
    seen: list[Kind] = []
    found = set()
    for step, kind in enumerate(kinds):
        if not any(one.stage == kind.stage and isclose(one.bytes_sent, kind.bytes_sent, rel_tol=0.01) for one in seen):
            found.add(step)
        seen.append(kind)
    return found


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = Parser("experiments.ethernet.race.kind_times", "Times steps by kind; see experiments.ethernet.")
    add_arguments(parser)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main(sys.argv[1:])
