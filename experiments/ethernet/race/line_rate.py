"""Whether the race is fair: how near torch's own all-reduce comes to what the links can carry."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from experiments.common.command_line import Parser, positive
from experiments.common.results import write_json
from thinwire import comm as communication
from thinwire.comm.traffic import sent_bytes

__all__ = ["main"]

_TIMEOUT = 120.0


def main(arguments: Sequence[str]) -> None:
    """On every rank: times Gloo's fp32 all-reduce, and writes the slowest rank's seconds."""
    parser = Parser("experiments.ethernet.race.line_rate", "Times torch's all-reduce.")
    parser.add_argument("--megabytes", type=positive, default=100)
    parser.add_argument("--repetitions", type=positive, default=5)
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    comm = communication.init(backend="gloo", timeout=_TIMEOUT, quiet=True)
    nbytes = options.megabytes * 10**6
    data = torch.ones(nbytes // 4)
    seconds = []
    # The first one connects the ranks.
    for number in range(options.repetitions + 1):
        comm.barrier()
        started = time.perf_counter()
        dist.all_reduce(data)
        took = torch.tensor(time.perf_counter() - started, dtype=torch.float64)
        comm.all_reduce(took, "max")
        data.fill_(1.0)
        if number:
            seconds.append(float(took))
    if comm.rank == 0:
        sent = sent_bytes("all_reduce", nbytes, comm.size)
        write_json(options.output, {"bytes": nbytes, "bytes_sent": sent, "seconds": seconds, "ranks": comm.size})
    comm.close()


if __name__ == "__main__":
    main(sys.argv[1:])
