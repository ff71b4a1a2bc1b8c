"""How long a step of each contender takes, at each link rate: all in one job, taking turns, so that whatever else the
machine does hits them alike. `experiments.ethernet` starts it under mpirun."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from math import isfinite
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from experiments.common.command_line import Parser, positive
from experiments.common.results import write_json
from experiments.ethernet.race.contenders import BASELINE, CONTENDERS
from experiments.ethernet.race.data_parallel import AloneLearner
from experiments.ethernet.race.findings import ALONE, rate_of_waiting
from experiments.ethernet.race.shaping import shape_together
from experiments.ethernet.race.stopwatch import Interface, Reading, Stopwatch
from experiments.tasks.batches import random_batch
from experiments.tasks.models import build_bert
from experiments.tasks.sizes import SIZES
from experiments.training.learners import Learner
from experiments.training.plans import Plan
from thinwire import comm as communication
from thinwire.comm import Communicator
from thinwire.plan import probe

__all__ = ["main"]

_TIMEOUT = 300.0
_VOCABULARY, _LENGTH = 4096, 32
_PLAN = Plan(
    steps=1_000_000, warmup_steps=1, learning_rate=1e-4, weight_decay=0.01, freeze_step=2, evaluate_every=1, seed=0
)
_FIRST_STEPS = 13
"""Steps that are not measured: kernels compile, DDP lays its buckets, 1-bit Adam freezes, PowerSGD begins."""
_STEPS_A_TURN = 2
_COMPUTING_ROUNDS = 9
_FEWEST_ROUNDS = 3

Turn = dict[str, float]
"""Of one contender, a step: what `_summary` returns."""


def main(arguments: Sequence[str]) -> None:
    """On every rank: measures, and writes the turns by link rate and contender."""
    options = _parse(arguments)
    torch.set_num_threads(1)
    comm = communication.init(backend="gloo", timeout=_TIMEOUT, quiet=True)
    alone = AloneLearner(_model(options), _PLAN)
    learners: dict[str, Learner] = {ALONE: alone}
    learners |= {name: CONTENDERS[name].build(_model(options), _PLAN, comm) for name in options.contenders}
    for learner in learners.values():
        for step in range(_FIRST_STEPS):
            _advance(learner, options.batch_size, comm.rank, step)
    measured: dict[str, Any] = {"ranks": comm.size, "shapes": [list(one.shape) for one in alone.module.parameters()]}
    measured["computing"] = _time_computing(alone, options, comm, comm.size)
    measured["computing_one_rank"] = _time_computing(alone, options, comm, 1)
    if options.balanced:
        measured["balanced"] = _balanced(learners, measured["computing"]["backward"], options, comm)
    else:
        measured |= _at_rates(learners, options, comm)
    if comm.rank == 0:
        write_json(options.output, measured)
    comm.close()


def _at_rates(learners: Mapping[str, Learner], options: argparse.Namespace, comm: Communicator) -> dict[str, Any]:
    """All learners' turns, and what `thinwire probe` measures of the links, by rate."""
    turns: dict[str, dict[str, list[Turn]]] = {}
    probes: dict[str, Any] = {}
    for rate in _rates(options, turns, comm):
        shape_together(comm, options.cluster, options.hosts, rate)
        if options.probe_seconds:
            probes[str(rate)] = probe(comm, options.probe_seconds).model_dump()
        turns[str(rate)] = _measure(learners, options, comm)
        if comm.rank == 0:
            print(f"step times at {rate} Mb/s measured", file=sys.stderr, flush=True)
    return {"turns": turns, "probes": probes}


def _balanced(
    learners: Mapping[str, Learner], backward_seconds: float, options: argparse.Namespace, comm: Communicator
) -> dict[str, Any]:
    """Each learner's turns at the rate at which the wire is busy for as long as backward takes."""
    found = {}
    for name in options.contenders:
        pair = {one: learners[one] for one in (ALONE, name)}
        sent_before = learners[name].bytes_sent
        _advance(learners[name], options.batch_size, comm.rank, _FIRST_STEPS)
        bits = 8.0 * (learners[name].bytes_sent - sent_before)
        rate = _rank_0s(bits / (1e6 * backward_seconds), comm)
        shape_together(comm, options.cluster, options.hosts, rate)
        found[name] = {"megabits": rate, "turns": _measure(pair, options, comm)}
        if comm.rank == 0:
            print(f"{name} measured at {rate:.0f} Mb/s", file=sys.stderr, flush=True)
    return found


def _model(options: argparse.Namespace) -> Any:
    return build_bert(SIZES[options.model], _VOCABULARY, _LENGTH, 0.0, seed=0)


def _rank_0s(value: float, comm: Communicator) -> float:
    """Ranks' figures are the same up to rounding and noise: rank 0's decides."""
    agreed = torch.tensor(value, dtype=torch.float64)
    comm.broadcast(agreed)
    return float(agreed)


def _time_computing(
    alone: AloneLearner, options: argparse.Namespace, comm: Communicator, ranks: int
) -> dict[str, float]:
    """Seconds of a step's forward, backward and update on the slowest of the first `ranks`, which compute at once, with
    nobody to talk to, while the others wait; medians."""
    rounds = []
    for step in range(_COMPUTING_ROUNDS):
        comm.barrier()
        seconds = torch.zeros(3)
        if comm.rank < ranks:
            started = time.perf_counter()
            total, count = alone(*_batch(options.batch_size, comm.rank, step))
            loss = total / count
            forward = time.perf_counter()
            loss.backward()
            backward = time.perf_counter()
            alone.update()
            seconds = torch.tensor([forward - started, backward - forward, time.perf_counter() - backward])
        comm.all_reduce(seconds, "max")
        rounds.append(seconds)
    medians = torch.stack(rounds).median(0).values
    return dict(zip(("forward", "backward", "update"), medians.tolist(), strict=True))


def _rates(
    options: argparse.Namespace, turns: Mapping[str, Mapping[str, Sequence[Turn]]], comm: Communicator
) -> Iterator[int | None]:
    """The rates asked for, then the one at which the baseline waits as long as in the paper; None is unshaped."""
    if not options.cluster:
        yield None
        return
    yield from options.rates
    if not options.waiting:
        return
    waits = rate_of_waiting({float(rate): by_name[BASELINE] for rate, by_name in turns.items()}, options.waiting)
    found = _rank_0s(waits, comm)
    if isfinite(found) and (rate := round(found)) not in options.rates:
        yield rate


def _measure(learners: Mapping[str, Learner], options: argparse.Namespace, comm: Communicator) -> dict[str, list[Turn]]:
    """Rounds of a turn each, for about `options.seconds`."""
    turns: dict[str, list[Turn]] = {name: [] for name in learners}
    started = time.perf_counter()
    step = _FIRST_STEPS
    interface = Interface(options.device)
    while True:
        for name, learner in learners.items():
            comm.barrier()
            counted = learner.bytes_sent
            stopwatch = Stopwatch(interface)
            for number in range(_STEPS_A_TURN):
                _advance(learner, options.batch_size, comm.rank, step + number)
            turns[name].append(_summary(stopwatch.stop(), learner.bytes_sent - counted, comm))
        step += _STEPS_A_TURN
        over = torch.tensor(float(time.perf_counter() - started > options.seconds))
        comm.broadcast(over)
        if over and len(turns[ALONE]) >= _FEWEST_ROUNDS:
            return turns


def _summary(reading: Reading, counted_bytes: int, comm: Communicator) -> Turn:
    """Of all ranks, a step: the slowest one's seconds, mean waiting and processor time, the busiest link's bytes."""
    readings = [Reading(**json.loads(one)) for one in comm.all_gather_bytes(json.dumps(asdict(reading)).encode())]
    whole = {
        "seconds": max(one.seconds for one in readings),
        "waited": sum(one.waited for one in readings) / len(readings),
        "cpu": sum(one.cpu for one in readings) / len(readings),
        "interface_bytes": max(max(one.sent, one.received) for one in readings),
        "counted_bytes": counted_bytes,
    }
    return {name: value / _STEPS_A_TURN for name, value in whole.items()}


def _advance(learner: Learner, sequences: int, rank: int, step: int) -> None:
    total, count = learner(*_batch(sequences, rank, step))
    learner.learn(total / count)


def _batch(sequences: int, rank: int, step: int) -> tuple[Tensor, Tensor]:
    return random_batch(sequences, _LENGTH, _VOCABULARY, seed=1000 * step + rank)


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = Parser("experiments.ethernet.race.step_times", "Measures steps; see experiments.ethernet.")
    parser.add_argument("--model", choices=tuple(SIZES), required=True)
    parser.add_argument("--batch-size", type=positive, required=True)
    parser.add_argument("--contenders", nargs="+", choices=tuple(CONTENDERS), required=True)
    parser.add_argument("--rates", nargs="+", type=positive, default=[], help="Mb/s")
    parser.add_argument("--waiting", type=float, default=0.94, help="of its step, by fp32; 0: no such rate")
    parser.add_argument("--seconds", type=positive, required=True, help="a rate")
    parser.add_argument("--probe-seconds", type=int, default=20, help="of thinwire probe, a rate; 0: none")
    parser.add_argument("--balanced", action="store_true", help="each contender where wire and backward take as long")
    parser.add_argument("--cluster", help="whose links to shape; none: leave the network as it is")
    parser.add_argument("--hosts", type=positive, required=True)
    parser.add_argument("--device", required=True)
    parser.add_argument("--output", type=Path, required=True)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main(sys.argv[1:])
