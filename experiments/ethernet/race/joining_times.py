"""How long a newcomer of an elastic job takes to its first counted step, and what the others lose meanwhile.

`experiments.ethernet.joining` starts it under mpirun, one rank a host; its workers are none of mpirun's to the job.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
from torch import nn

import thinwire
from experiments.common.command_line import Parser, positive
from experiments.common.results import write_json
from experiments.ethernet.race.shaping import add_link_arguments, shape_together
from thinwire import comm as communication
from thinwire.comm.elastic import serve

__all__ = ["main"]

_WIDTH = 1024
_PORT = 29_531
_STEPS = 6
"""That are timed before the newcomer comes, and taken after it has joined; two go before."""


def main(arguments: Sequence[str]) -> None:
    """On every rank: is a worker, the last one from when the others have taken some steps; rank 0 writes seconds."""
    options = _parse(arguments)
    torch.set_num_threads(1)
    comm = communication.init(backend="mpi", timeout=600.0, quiet=True)
    shape_together(comm, options.cluster, options.hosts, options.megabits)
    for name in [name for name in os.environ if name.startswith(("OMPI_", "PMI", "PRTE_"))]:
        del os.environ[name]  # elastic workers refuse mpirun, which ends all if one dies
    place = serve(f"{options.address}:{_PORT}") if comm.rank == 0 else None
    comm.barrier()
    is_new = comm.rank == comm.size - 1
    model = nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH) for _ in range(options.layers)))
    gradients = [torch.randn_like(one) for one in model.parameters()]
    torch.optim.SGD(model.parameters(), lr=1.0)  # the first optimizer has torch import the rest of itself
    if is_new:
        os.nice(19)  # its processor is its own: beside it the others lose what they send, and not what it computes
        comm.barrier()
    began = time.time()
    optimizer = thinwire.OneBitAdam(
        model.named_parameters(),
        lr=1e-5,
        freeze_step=1 if options.frozen else 1_000_000,
        warmup_wire=options.warmup_wire,
        elastic=thinwire.Elastic(comm.size - 1, address=f"{options.address}:{_PORT}"),
    )
    workers = optimizer._home.workers  # type: ignore[attr-defined]
    ends: list[float] = []  # of steps
    together = 0
    while together < _STEPS:
        if len(ends) == 2 + _STEPS and not is_new:
            comm.barrier()
            ends.append(time.time())
        together += len(workers.dealt_to) == comm.size
        time.sleep(options.seconds)
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter.grad = gradient
        optimizer.step()
        optimizer.zero_grad()
        ends.append(time.time())
    state = sum(one.nbytes for one in workers._state.tensors())
    optimizer.synchronize_weights()
    told = comm.all_gather_bytes(json.dumps([began, ends[0]]).encode(), "say when it joined")
    if comm.rank == 0:
        write_json(options.output, _judged(ends, *json.loads(told[-1]), state, options.megabits))
    comm.barrier()
    del place
    comm.close()


def _judged(ends: Sequence[float], began: float, counted: float, state: int, megabits: int) -> dict[str, Any]:
    """What one of the others saw; `counted`: the end of the newcomer's first step."""
    took = [(end, end - before) for before, end in pairwise(ends)]
    plain = median(seconds for _, seconds in took[1 : 1 + _STEPS])
    meanwhile = [seconds for end, seconds in took[2 + _STEPS :] if end <= counted]
    return {
        "state, MB": state / 1e6,
        "link carries it in, s": 8e-6 * state / megabits,
        "from its start to its first counted step, s": counted - began,
        "step before, s": plain,
        "mean step meanwhile, s": mean(meanwhile),
        "longest step meanwhile, s": max(meanwhile),
        "steps meanwhile": len(meanwhile),
    }


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = Parser("experiments.ethernet.race.joining_times", "Times a newcomer of an elastic job.")
    parser.add_argument("--megabits", type=positive, required=True, help="of every link")
    parser.add_argument("--layers", type=positive, required=True, help=f"linear ones of {_WIDTH} x {_WIDTH}")
    parser.add_argument("--seconds", type=float, required=True, help="of each step, for an accelerator")
    parser.add_argument("--frozen", action="store_true", help="else it comes in the warmup")
    parser.add_argument("--warmup-wire", choices=("fp32", "int4"), default="fp32", help="how that sends gradients")
    parser.add_argument("--address", required=True, help="of the first host")
    parser.add_argument("--output", type=Path, required=True)
    add_link_arguments(parser)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main(sys.argv[1:])
