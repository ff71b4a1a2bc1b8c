"""One rank of a job over Gloo whose tensors are on the fake device, as several processes share one GPU: rank 0 prints
that all ranks hold the same weights."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist

from tests.fake_device import NAME, load
from tests.fake_device.training_cases import SUBJECTS, train
from thinwire.comm import TorchCommunicator


def main() -> None:
    torch.set_num_threads(1)
    load()
    dist.init_process_group(f"cpu:gloo,{NAME}:gloo")
    comm = TorchCommunicator()
    subject = next(one for one in SUBJECTS if str(one) == sys.argv[1])
    mine = train(subject, NAME, torch.float32, {}, comm)
    everyone = mine.new_empty(comm.size * mine.numel())
    comm.all_gather(everyone, mine)
    assert all(torch.equal(one, mine) for one in everyone.view(comm.size, -1)), "ranks hold different weights"
    if comm.rank == 0:
        print(f"{comm.size} ranks agree", flush=True)
    comm.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
