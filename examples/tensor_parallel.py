"""Tensor parallelism inside a machine, 1-bit Adam between machines.

    torchrun --nproc-per-node 2 examples/tensor_parallel.py
    torchrun --nproc-per-node 4 examples/tensor_parallel.py

Every two ranks hold a model together. Those that hold the same part of it average over mesh["dp"], and nobody else.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers import GPT2Config, GPT2LMHeadModel

import thinwire

LENGTH, DIGITS = 17, 10
SIZES = {"vocab_size": DIGITS, "n_positions": LENGTH, "n_embd": 64, "n_layer": 2, "n_head": 4}


def main() -> None:
    """Learn to count, by steps that each sequence shows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=120)
    steps = parser.parse_args().steps
    mesh = init_device_mesh("cpu", (int(os.environ["WORLD_SIZE"]) // 2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)  # the same model everywhere, of which every rank then keeps its part
    whole = GPT2LMHeadModel(GPT2Config(**SIZES, bos_token_id=0, eos_token_id=0))
    model = thinwire.parallel.parallelize(whole, mesh["tp"])
    optimizer = thinwire.OneBitAdam(
        model.named_parameters(), lr=2e-3, freeze_step=max(1, steps // 5), max_norm=1.0, mesh=mesh["dp"]
    )
    draws = torch.Generator().manual_seed(mesh.get_local_rank("dp"))  # the ranks of one model see the same samples
    for step in range(steps):
        start, pace = (torch.randint(DIGITS, (32, 1), generator=draws) for _ in range(2))
        digits = (start + pace * torch.arange(LENGTH)) % DIGITS
        loss = model(input_ids=digits, labels=digits).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0 and (step + 1) % max(1, steps // 4) == 0:
            print(f"step {step + 1:4}  loss {loss.item():.3f}  {'1 bit' if optimizer.frozen else 'exact'}")
    optimizer.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
