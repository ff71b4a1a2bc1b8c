"""One rank of a job that trains on GPUs: backend and optimizer from the command line; rank 0 prints that all ranks
hold the same weights and that they learned."""

from __future__ import annotations

import os
import sys

import torch
from torch import nn

import thinwire
from tests.optim.training import batch, make_model, weights
from thinwire import comm as communication


def train(comm: communication.Communicator, name: str, device: str, steps: int = 40) -> tuple[nn.Module, list[float]]:
    model = make_model().to(device)
    options = {"freeze_step": 10} if name == "OneBitAdam" else {}
    optimizer = getattr(thinwire, name)(
        model.parameters(), lr=3e-3, comm=comm, block_size=64, bucket_bytes=1000, **options
    )
    losses = []
    for step in range(steps):
        inputs, wanted = (one.to(device) for one in batch(comm.rank, step))
        optimizer.zero_grad()
        loss = (model(inputs) - wanted).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    return model, losses


def main() -> None:
    backend, name = sys.argv[1:]
    local = int(os.environ.get("LOCAL_RANK", os.environ.get("OMPI_COMM_WORLD_LOCAL_RANK", "0")))
    torch.cuda.set_device(local % torch.cuda.device_count())
    comm = communication.init(backend=backend)
    model, losses = train(comm, name, "cuda")
    mine = weights(model)
    everyone = mine.new_empty(comm.size * mine.numel())
    comm.all_gather(everyone, mine)
    assert all(torch.equal(one, mine) for one in everyone.view(comm.size, -1)), "ranks hold different weights"
    assert sum(losses[-5:]) < sum(losses[:5]), losses
    if comm.rank == 0:
        print(f"{comm.size} ranks agree over {comm.backend}", flush=True)


if __name__ == "__main__":
    main()
