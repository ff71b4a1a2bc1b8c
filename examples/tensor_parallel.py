"""Tensor parallelism by torch's own calls inside a machine, 1-bit Adam between machines.

    torchrun --nproc-per-node 2 examples/tensor_parallel.py
    torchrun --nproc-per-node 4 examples/tensor_parallel.py

Every two ranks hold a model together. Those that hold the same part of it average over mesh["dp"], and nobody else.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import thinwire

WIDTH, LENGTH, DIGITS = 64, 16, 10


class Block(nn.Module):
    """Of a decoder; how many heads it has follows from the part of the projections that is here."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        """[batch, length, width] to the same."""
        normed = self.norm_1(hidden)
        heads = [one(normed).unflatten(-1, (-1, 16)).transpose(1, 2) for one in (self.query, self.key, self.value)]
        attended = nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        hidden = hidden + self.out(attended.transpose(1, 2).flatten(2))
        return hidden + self.down(nn.functional.gelu(self.up(self.norm_2(hidden))))


COLUMNS, ROWS = ("query", "key", "value", "up"), ("out", "down")
PLAN = dict.fromkeys(COLUMNS, ColwiseParallel()) | dict.fromkeys(ROWS, RowwiseParallel())


def main() -> None:
    """Learn to count, by steps that each sequence shows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=120)
    steps = parser.parse_args().steps
    mesh = init_device_mesh("cpu", (int(os.environ["WORLD_SIZE"]) // 2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)  # the same model everywhere, of which every rank then keeps its part
    blocks = [parallelize_module(Block(), mesh["tp"], PLAN) for _ in range(2)]
    model = nn.Sequential(nn.Embedding(DIGITS, WIDTH), *blocks, nn.LayerNorm(WIDTH), nn.Linear(WIDTH, DIGITS))
    optimizer = thinwire.OneBitAdam(
        model.named_parameters(), lr=2e-3, freeze_step=max(1, steps // 5), max_norm=1.0, mesh=mesh["dp"]
    )
    draws = torch.Generator().manual_seed(mesh.get_local_rank("dp"))  # the ranks of one model see the same samples
    for step in range(steps):
        start, pace = (torch.randint(DIGITS, (32, 1), generator=draws) for _ in range(2))
        digits = (start + pace * torch.arange(LENGTH + 1)) % DIGITS
        loss = nn.functional.cross_entropy(model(digits[:, :-1]).flatten(0, 1), digits[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0 and (step + 1) % max(1, steps // 4) == 0:
            print(f"step {step + 1:4}  loss {loss.item():.3f}  {'1 bit' if optimizer.frozen else 'exact'}")
    optimizer.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
