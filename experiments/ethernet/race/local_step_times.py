"""How long DiLoCo's steps take while a fragment is under way behind them, beside the same steps of the inner optimizer
alone. `experiments.ethernet.local_steps` starts it under mpirun.

The links carry a fragment, both of its legs, in a given part of the steps for which it is under way. Turns are a whole
period long and end when nothing is under way, so that all that a period sends is paid for inside the turn.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import mean, median
from typing import get_args

import torch
from torch import nn

from experiments.common.command_line import Parser, positive, rate
from experiments.common.results import write_json
from experiments.ethernet.race.data_parallel import AloneLearner
from experiments.ethernet.race.shaping import add_link_arguments, shape_together
from experiments.tasks.batches import random_batch
from experiments.tasks.models import build_bert
from experiments.tasks.sizes import SIZES
from experiments.training.learners import Learner, LoopLearner
from experiments.training.plans import Plan
from thinwire import comm as communication
from thinwire.comm import Communicator
from thinwire.compress.codecs import CodecName

__all__ = ["fragment_bytes", "main"]

_TIMEOUT = 300.0
_VOCABULARY, _LENGTH = 4096, 32
_PLAN = Plan(
    steps=1_000_000, warmup_steps=1, learning_rate=1e-4, weight_decay=0.01, freeze_step=2, evaluate_every=10**6, seed=0
)


def main(arguments: Sequence[str]) -> None:
    """On every rank: measures, and writes the seconds of every step of every turn, by rate."""
    options = _parse(arguments)
    torch.set_num_threads(1)
    comm = communication.init(backend="gloo", timeout=_TIMEOUT, quiet=True)
    race = _Race(options, comm)
    found = []
    for fill in (None, *options.fills):
        megabits = None if fill is None else race.rate(fill)
        shape_together(comm, options.cluster, options.hosts, megabits)
        turns = [(race.turn(race.alone), race.turn(race.local)) for _ in range(options.rounds)]
        alone, local = map(list, zip(*turns, strict=True))
        found.append({"fill": fill, "megabits": megabits, "alone": alone, "local": local})
        if comm.rank == 0:
            where = "links without a limit" if megabits is None else f"{megabits:.2f} Mb/s"
            print(f"overlap {options.overlap} over {where} measured", file=sys.stderr, flush=True)
    if comm.rank == 0:
        parameters = sum(one.numel() for one in race.alone.module.parameters())
        write_json(options.output, {"parameters": parameters, "fragment_bytes": race.fragment_bytes, "found": found})
    comm.close()


class _Race:
    """Two learners of one model, and what a fragment of one of them sends.

    Attributes:
        alone: steps and sends nothing.
        local: DiLoCo around the same optimizer.
        fragment_bytes: of both legs, of the fragment that sends most.
    """

    def __init__(self, options: argparse.Namespace, comm: Communicator) -> None:
        """Both take the steps after which a period of DiLoCo's begins with nothing under way. Collective."""
        self._options = options
        self._comm = comm
        self._steps: dict[int, int] = {}
        self.alone = AloneLearner(self._model(), _PLAN)
        self.local = LoopLearner(
            self._model(),
            _PLAN,
            "diloco",
            comm,
            every=options.every,
            overlap=options.overlap,
            codec=options.codec,
            fragments=options.fragments,
            fused=True,
        )
        sent = [0]
        for _ in range(options.every + options.overlap):
            self._advance(self.local)
            sent.append(self.local.bytes_sent)
        self.fragment_bytes = fragment_bytes([after - before for before, after in pairwise(sent)])
        self.turn(self.alone)
        self._alone_seconds = median(self.turn(self.alone))

    def rate(self, fill: float) -> float:
        """The links' rate, in Mb/s, at which a fragment takes `fill` of the steps for which it is under way; rank 0's.
        Collective."""
        seconds = fill * self._options.overlap * self._alone_seconds
        found = torch.tensor(8e-6 * self.fragment_bytes / seconds, dtype=torch.float64)
        self._comm.broadcast(found)
        return float(found)

    def turn(self, learner: Learner) -> list[float]:
        """A period's steps: their seconds, means of all ranks. Collective."""
        self._comm.barrier()
        seconds = []
        for _ in range(self._options.every):
            started = time.perf_counter()
            self._advance(learner)
            seconds.append(time.perf_counter() - started)
        everybodys = [json.loads(one) for one in self._comm.all_gather_bytes(json.dumps(seconds).encode())]
        return [mean(ranks) for ranks in zip(*everybodys, strict=True)]

    def _advance(self, learner: Learner) -> None:
        step = self._steps.get(id(learner), 0)
        self._steps[id(learner)] = step + 1
        batch = random_batch(self._options.batch_size, _LENGTH, _VOCABULARY, seed=1000 * step + self._comm.rank)
        total, count = learner(*batch)
        learner.learn(total / count)

    def _model(self) -> nn.Module:
        return build_bert(SIZES[self._options.model], _VOCABULARY, _LENGTH, 0.0, seed=0)


def fragment_bytes(sent: Sequence[int]) -> int:
    """What the fragment that sends most sends in both of its legs, from the bytes of each step of a first period, in
    which every fragment is sent once and is back before the next one leaves."""
    legs = [nbytes for nbytes in sent if nbytes]
    return max(first + second for first, second in zip(legs[::2], legs[1::2], strict=True))


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = Parser(
        "experiments.ethernet.race.local_step_times", "Times DiLoCo's steps beside steps that send nothing."
    )
    parser.add_argument("--model", choices=tuple(SIZES), required=True)
    parser.add_argument("--batch-size", type=positive, required=True)
    parser.add_argument("--every", type=positive, required=True)
    parser.add_argument("--overlap", type=positive, required=True)
    parser.add_argument("--fragments", type=positive, required=True)
    parser.add_argument("--codec", choices=get_args(CodecName), required=True)
    parser.add_argument("--fills", nargs="+", type=rate, required=True, help="parts of the overlap's steps")
    parser.add_argument("--rounds", type=positive, required=True)
    add_link_arguments(parser)
    parser.add_argument("--output", type=Path, required=True)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main(sys.argv[1:])
