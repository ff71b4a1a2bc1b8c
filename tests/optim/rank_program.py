"""One rank of a real launch: some bodies on the first rank alone, then all on all, in a communicator of their own."""

from __future__ import annotations

import sys

import torch

import thinwire
from tests.compress import bodies
from tests.optim.diloco import tower


def main() -> None:
    torch.set_num_threads(1)
    comm = thinwire.comm.init(timeout=600.0)
    several = (*bodies.ANYWHERE, *bodies.SEVERAL, *tower.ALL)
    for size, chosen in ((1, bodies.ANYWHERE), (comm.size, several)):
        part = comm.split(0 if comm.rank < size else None)
        if part is not None:
            for body in chosen:
                body(part)
            part.close()
        comm.barrier()
    if "ddp" in sys.argv:
        for body in bodies.BESIDE_DDP:
            body(comm)
    if comm.rank == 0:
        print(f"all held on {comm.backend} with up to {comm.size} ranks")


if __name__ == "__main__":
    main()
