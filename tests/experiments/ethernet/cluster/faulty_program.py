"""What each rank of `test_faults` runs: a few steps of 1-bit Adam, its losses on the output of rank 0."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
from torch import nn

import thinwire
from thinwire import comm
from thinwire.comm import Communicator

STEPS = 40
FREEZE_STEP = 5
FAULT_AT = 12
"""The step before which the program says that it is time for a fault: frozen, and under way."""


def train(world: Communicator, widths: tuple[int, ...], folder: Path | None, pause: float) -> list[float]:
    """Losses of this rank, step by step."""
    torch.set_num_threads(1)
    width = widths[world.rank % len(widths)]
    model = nn.Sequential(nn.Linear(31, width), nn.Tanh(), nn.Linear(width, 7))
    random = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=random) / 5)
    optimizer = thinwire.OneBitAdam(model.parameters(), lr=1e-2, freeze_step=FREEZE_STEP, comm=world)
    losses = []
    for step in range(STEPS):
        if folder is not None and world.rank == 0 and step == FAULT_AT:
            (folder / "now").touch()
        time.sleep(pause)
        inputs = torch.randn(16, 31, generator=torch.Generator().manual_seed(100 * step + world.rank))
        loss = (model(inputs) - inputs[:, :7]).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main(folder: str, timeout: str, *widths: str) -> None:
    world = comm.init(backend="gloo", timeout=float(timeout), quiet=True)
    losses = train(world, tuple(map(int, widths)), Path(folder), pause=0.05)
    if world.rank == 0:
        print("losses", *(loss.hex() for loss in losses), flush=True)
    world.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
