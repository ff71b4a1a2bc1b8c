"""A plain PyTorch loop with 1-bit Adam: a model of the characters of Python's own source.

    python examples/plain_loop.py
    torchrun --nproc-per-node 2 examples/plain_loop.py
    mpirun -n 2 python examples/plain_loop.py

What differs from a loop with torch.optim.AdamW under DistributedDataParallel: the optimizer's class, and no wrapper.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor, nn

import thinwire

LENGTH = 64  # characters in a sample
CHARACTERS = 128


def source_text() -> Tensor:
    """A few modules of the standard library, as int64 codes of characters."""
    modules = sorted(Path(argparse.__file__).parent.glob("a*.py"))
    text = "".join(module.read_text(errors="ignore") for module in modules)
    return torch.tensor(list(text.encode("ascii", "ignore")))


class CharacterModel(nn.Module):
    """The next character of each, given those before."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(CHARACTERS, width)
        self.recurrent = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, CHARACTERS)

    def forward(self, codes: Tensor) -> Tensor:
        """[batch, length] to logits, [batch, length, 128]."""
        hidden, _ = self.recurrent(self.embedding(codes))
        logits: Tensor = self.head(hidden)
        return logits


def main() -> None:
    """Train, and say now and then how it goes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--width", type=int, default=128)
    arguments = parser.parse_args()

    comm = thinwire.comm.init()
    torch.manual_seed(0)
    model = CharacterModel(arguments.width)
    # Compression begins after a fifth of the steps, once the variance has settled.
    optimizer = thinwire.OneBitAdam(
        model.named_parameters(), comm=comm, lr=3e-3, freeze_step=max(1, arguments.steps // 5), max_norm=1.0
    )
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, arguments.steps)

    text = source_text()
    draws = torch.Generator().manual_seed(comm.rank)  # every rank has samples of its own
    for step in range(arguments.steps):
        starts = torch.randint(len(text) - LENGTH, (16, 1), generator=draws)
        samples = text[starts + torch.arange(LENGTH + 1)]
        logits = model(samples[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), samples[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if comm.rank == 0 and (step + 1) % max(1, arguments.steps // 6) == 0:
            print(f"step {step + 1:4}  loss {loss.item():.3f}  {'1 bit' if optimizer.frozen else 'exact'}")


if __name__ == "__main__":
    main()
