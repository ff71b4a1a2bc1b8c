"""A pipeline of torch's over thin wires: activations in 8 bits between two stages, 1-bit Adam between their replicas.

    torchrun --nproc-per-node 2 examples/pipeline.py
    torchrun --nproc-per-node 4 examples/pipeline.py

Two stages, and half as many replicas as ranks. What differs from torch's own pipelines: two classes.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed import init_device_mesh
from torch.distributed.pipelining import Schedule1F1B

import thinwire
from thinwire.parallel import CompressedStage

LENGTH, CHARACTERS, STAGES, MICRO_BATCHES = 64, 128, 2, 4


def source_text() -> Tensor:
    """A module of the standard library, as int64 codes of characters."""
    return torch.tensor(list(Path(argparse.__file__).read_text().encode("ascii", "ignore")))


class Recurrent(nn.GRU):
    """Its outputs alone, without its last state."""

    def forward(self, hidden: Tensor) -> Tensor:  # type: ignore[override]
        """[batch, length, width] to the same."""
        return super().forward(hidden)[0]


def loss_of(logits: Tensor, following: Tensor) -> Tensor:
    """Of a micro-batch."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), following.flatten())


def main() -> None:
    """Train; the last stage of the first replica says how it goes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--width", type=int, default=128)
    arguments = parser.parse_args()

    comm = thinwire.comm.init(backend="gloo")
    mesh = init_device_mesh("cpu", (STAGES, comm.size // STAGES), mesh_dim_names=("pp", "dp"))
    index, replica = mesh.get_local_rank("pp"), mesh.get_local_rank("dp")
    torch.manual_seed(index)  # replicas of a stage begin alike
    width = arguments.width
    recurrent = Recurrent(width, width, batch_first=True)
    parts = ([nn.Embedding(CHARACTERS, width), recurrent], [recurrent, nn.Linear(width, CHARACTERS)])
    module = nn.Sequential(*parts[index])
    stage = CompressedStage(module, index, STAGES, torch.device("cpu"), group=mesh.get_group("pp"), activations="int8")
    schedule = Schedule1F1B(stage, MICRO_BATCHES, loss_fn=loss_of)
    freeze = max(1, arguments.steps // 5)
    optimizer = thinwire.OneBitAdam(module.named_parameters(), mesh=mesh["dp"], lr=3e-3, freeze_step=freeze)

    text = source_text()
    draws = torch.Generator().manual_seed(replica)  # both stages of a replica draw the same samples
    for step in range(arguments.steps):
        starts = torch.randint(len(text) - LENGTH, (16, 1), generator=draws)
        samples = text[starts + torch.arange(LENGTH + 1)]
        losses: list[Tensor] = []
        with optimizer.no_sync():  # gradients are whole after the last micro-batch: step() sends them
            schedule.step(*[samples[:, :-1]][index:], target=samples[:, 1:] if index else None, losses=losses)
        optimizer.step()
        optimizer.zero_grad()
        if index == 1 and replica == 0 and (step + 1) % max(1, arguments.steps // 6) == 0:
            loss = torch.stack(losses).mean()
            print(f"step {step + 1:4}  loss {loss:.3f}  {'1 bit' if optimizer.frozen else 'exact'}")


if __name__ == "__main__":
    main()
