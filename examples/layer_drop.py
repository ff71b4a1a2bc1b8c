"""Progressive layer drop: later layers are left out more and more often, which saves their forward and backward.

    python examples/layer_drop.py
    torchrun --nproc-per-node 2 examples/layer_drop.py

What differs from training without: a schedule, `drop_layers`, and `update_state` before each step.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn

import thinwire
from thinwire.pld import ProgressiveLayerDrop, drop_layers

WIDTH, LENGTH, LAYERS = 32, 16, 8


class Sorter(nn.Module):
    """Says for each number of a row its place in order."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, norm_first=True, batch_first=True)
        self.embedding = nn.Linear(1, WIDTH)
        self.encoder = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, numbers: Tensor) -> Tensor:
        """[batch, length] to [batch, length], places from 0 to 1."""
        places: Tensor = self.head(self.encoder(self.embedding(numbers.unsqueeze(-1)))).squeeze(-1)
        return places


def main() -> None:
    """Train, and say which part of the forwards each layer ran in."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    arguments = parser.parse_args()

    comm = thinwire.comm.init()
    torch.manual_seed(0)
    model = Sorter()
    # Any optimizer goes with it, the 1-bit ones too; this one is exact, on state that the ranks share out.
    optimizer = thinwire.ShardedOptimizer(model.named_parameters(), torch.optim.AdamW, lr=1e-3, stage=1, comm=comm)
    schedule = ProgressiveLayerDrop(theta=0.5, gamma="auto", total_steps=arguments.steps)
    drop = drop_layers(model, schedule, seed=1)

    draws = torch.Generator().manual_seed(comm.rank)
    for step in range(arguments.steps):
        schedule.update_state(step)
        numbers = torch.randn(16, LENGTH, generator=draws)
        places = numbers.argsort(dim=1).argsort(dim=1) / (LENGTH - 1)
        loss = nn.functional.mse_loss(model(numbers), places)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if comm.rank == 0 and (step + 1) % max(1, arguments.steps // 4) == 0:
            print(f"step {step + 1:4}  loss {loss.item():.4f}  theta {schedule.get_theta():.2f}")
    if comm.rank == 0:
        print("layers ran in", " ".join(f"{rate:.0%}" for rate in drop.keep_rates), "of the forwards")


if __name__ == "__main__":
    main()
