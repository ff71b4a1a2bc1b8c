"""How long collectives take beside the line: the seconds in which a rank's link carries the bytes that it has to send.

`experiments.ethernet.collectives` starts it under mpirun.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from experiments.common.command_line import Parser, positive
from experiments.common.results import write_json
from experiments.ethernet.race.shaping import add_link_arguments, shape_together
from thinwire import comm as communication
from thinwire.comm import Communicator, Work
from thinwire.comm.traffic import sent_bytes

__all__ = ["COLLECTIVES", "WAYS", "line_seconds", "main"]

COLLECTIVES = ("all_to_all", "all_gather", "all_reduce")
WAYS = ("waiting", "behind")
"""What the caller does meanwhile: waits, or stays away from the communicator for most of the line's time."""

_AWAY = 0.9
"""Of the line's time. Who stayed away for longer would not see when a transfer ended."""
_TIMEOUT = 120.0


def line_seconds(collective: str, nbytes: int, ranks: int, megabits: float) -> float:
    """In which a link of so many 10⁶ bits a second carries what one rank sends, headers left out.

    `nbytes`: to or from one peer; of an all-reduce, of each rank's shard.
    """
    whole = nbytes if collective == "all_gather" else nbytes * ranks
    return 8e-6 * sent_bytes(collective, whole, ranks) / megabits


def main(arguments: Sequence[str]) -> None:
    """On every rank: times all settings at every rate, and writes the slowest rank's seconds over the line's."""
    options = _parse(arguments)
    torch.set_num_threads(1)
    comm = communication.init(backend=options.backend, timeout=_TIMEOUT, quiet=True)
    found = []
    for rate in options.rates:
        shape_together(comm, options.cluster, options.hosts, rate)
        found += [_measure(comm, rate, *setting, options.repetitions) for setting in _settings(options)]
        if comm.rank == 0:
            print(f"{options.backend} at {rate} Mb/s measured", file=sys.stderr, flush=True)
    if comm.rank == 0:
        write_json(options.output, {"ranks": comm.size, "found": found})
    comm.close()


def _settings(options: argparse.Namespace) -> list[tuple[str, int, int, str]]:
    kilobytes = [1000 * one for one in options.kilobytes]
    return list(product(options.collectives, kilobytes, options.in_flight, options.ways))


def _measure(
    comm: Communicator, rate: int, collective: str, nbytes: int, together: int, way: str, repetitions: int
) -> dict[str, Any]:
    """Times `together` collectives of `nbytes` a peer in all, started at once."""
    each = nbytes // together // 4
    line = line_seconds(collective, 4 * each * together, comm.size, rate)
    away = _AWAY * line if way == "behind" else 0.0
    times = []
    # The first connects the ranks.
    for number in range(repetitions + 1):
        tensors = [_tensors(collective, each, comm.size) for _ in range(together)]
        comm.barrier()
        started = time.perf_counter()
        works = [_start(comm, collective, *pair) for pair in tensors]
        time.sleep(away)
        for work in works:
            work.wait()
        took = torch.tensor(time.perf_counter() - started, dtype=torch.float64)
        comm.all_reduce(took, "max")
        if number:
            times.append(float(took) / line)
    setting = {"rate": rate, "collective": collective, "bytes_a_peer": nbytes, "in_flight": together, "way": way}
    return {**setting, "of_the_lines_time": median(times), "each": times}


def _tensors(collective: str, each: int, ranks: int) -> tuple[Tensor, Tensor]:
    whole = torch.ones(each * ranks)
    return whole, torch.ones(each) if collective == "all_gather" else torch.ones(each * ranks)


def _start(comm: Communicator, collective: str, output: Tensor, input: Tensor) -> Work:
    if collective == "all_to_all":
        return comm.all_to_all(output, input, async_op=True)
    if collective == "all_gather":
        return comm.all_gather(output, input, async_op=True)
    return comm.all_reduce(output, async_op=True)


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = Parser("experiments.ethernet.race.collective_times", "Times collectives beside the line.")
    parser.add_argument("--backend", choices=("gloo", "mpi"), required=True)
    parser.add_argument("--collectives", nargs="+", choices=COLLECTIVES, required=True)
    parser.add_argument("--kilobytes", nargs="+", type=positive, required=True, help="to one peer, 1000 bytes each")
    parser.add_argument("--in-flight", nargs="+", type=positive, required=True, help="collectives that share them")
    parser.add_argument("--ways", nargs="+", choices=WAYS, required=True, help="what the caller does meanwhile")
    parser.add_argument("--rates", nargs="+", type=positive, required=True, help="of the links, in Mb/s")
    parser.add_argument("--repetitions", type=positive, required=True)
    add_link_arguments(parser)
    parser.add_argument("--output", type=Path, required=True)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main(sys.argv[1:])
