"""The engine: ZeRO stages, precision, accumulation, schedule and checkpoints from one configuration file.

    torchrun --nproc-per-node 2 examples/engine.py --config examples/engine.json --checkpoints /tmp/checkpoints

Started again it goes on where the last checkpoint was saved.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor, nn

import thinwire


def batch(rank: int, step: int, count: int) -> tuple[Tensor, Tensor]:
    """Points, and whether they lie inside a ring: another batch for every rank and step."""
    generator = torch.Generator().manual_seed(1_000_003 * rank + step)
    points = torch.randn(count, 2, generator=generator)
    radius = points.norm(dim=1)
    return points, ((radius > 0.7) & (radius < 1.5)).long()


def main() -> None:
    """Train up to --steps, from the last checkpoint where there is one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=Path(__file__).with_suffix(".json"))
    parser.add_argument("--checkpoints", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=200)
    arguments = parser.parse_args()

    comm = thinwire.comm.init()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 2))
    engine, *_ = thinwire.initialize(model=model, comm=comm, config=arguments.config)
    if any(arguments.checkpoints.glob("*")):
        engine.load_checkpoint(arguments.checkpoints)

    while engine.global_steps < arguments.steps:
        for _ in range(engine.gradient_accumulation_steps()):
            points, inside = batch(comm.rank, engine.micro_steps, engine.train_micro_batch_size_per_gpu())
            loss = nn.functional.cross_entropy(engine(points), inside)
            engine.backward(loss)
            engine.step()
        if engine.global_steps % 50 == 0:
            engine.save_checkpoint(arguments.checkpoints)
            if comm.rank == 0:
                print(f"step {engine.global_steps:4}  loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
