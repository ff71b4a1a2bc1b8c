"""One rank of a job with tensors on one device: which optimizer, "fake" or "cuda", and over which backend, the command
line says; rank 0 prints that all ranks hold the same weights. Several may share a GPU, as they do the fake device."""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist

from tests.fake_device.cases import SUBJECTS, train
from thinwire import comm as communication


def main() -> None:
    name, device, backend = sys.argv[1:]
    torch.set_num_threads(1)
    if device == "cuda":
        local = int(os.environ.get("LOCAL_RANK", os.environ.get("OMPI_COMM_WORLD_LOCAL_RANK", "0")))
        torch.cuda.set_device(local % torch.cuda.device_count())
        comm = communication.init(backend=backend)
    else:
        from tests.fake_device import load

        load()
        dist.init_process_group(f"cpu:{backend},{device}:{backend}")
        comm = communication.TorchCommunicator()
    subject = next(one for one in SUBJECTS if str(one) == name)
    mine = train(subject, device, torch.float32, {}, comm)
    everyone = mine.new_empty(comm.size * mine.numel())
    comm.all_gather(everyone, mine)
    assert all(torch.equal(one, mine) for one in everyone.view(comm.size, -1)), "ranks hold different weights"
    if comm.rank == 0:
        print(f"{comm.size} ranks agree over {comm.backend}", flush=True)
    comm.close()
    if device != "cuda":
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
