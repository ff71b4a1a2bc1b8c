"""One rank of a real launch: two bodies on the first rank alone and all on all, each in a communicator of its own."""

from __future__ import annotations

import sys

import torch

import thinwire
from tests.compress import bodies, ddp_bodies
from tests.optim.diloco import bodies as local_bodies


def main() -> None:
    torch.set_num_threads(1)
    comm = thinwire.comm.init(timeout=600.0)
    for size, chosen in ((1, bodies.SHORT[:2]), (comm.size, (*bodies.SHORT, *local_bodies.ALL))):
        part = comm.split(0 if comm.rank < size else None)
        if part is not None:
            for body in chosen:
                body(part)
            part.close()
        comm.barrier()
    if "ddp" in sys.argv:
        for body in ddp_bodies.ALL:
            body(comm)
    if comm.rank == 0:
        print(f"all held on {comm.backend} with up to {comm.size} ranks")


if __name__ == "__main__":
    main()
