"""1-bit Adam whose workers come and go from step to step.

    python -m thinwire meet 127.0.0.1:29400 &
    export THINWIRE_MEETING=127.0.0.1:29400
    python examples/elastic_steps.py & python examples/elastic_steps.py & python examples/elastic_steps.py &

Kill one of the three, and start a fourth whenever you like: no step is lost, each step has 96 samples, and all end with
the same weights.
"""

import argparse
import os
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import thinwire

STEPS = 300

parser = argparse.ArgumentParser()
parser.add_argument("--workers", type=int, default=3, help="with how many the job begins")
parser.add_argument("--pause", type=float, default=0.05, help="seconds a step, as if the model were larger")
arguments = parser.parse_args()

torch.manual_seed(0)
inputs = torch.randn(20_000, 16)
data = TensorDataset(inputs, inputs.mean(1, keepdim=True).mul(4).sin())
model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1))
elastic = thinwire.Elastic(workers=arguments.workers)
optimizer = thinwire.OneBitAdam(model.named_parameters(), lr=0.01, freeze_step=100, elastic=elastic)
print(f"process {os.getpid()} is in the job, at step {optimizer.steps}", flush=True)

# A rate that follows from optimizer.steps is right for whoever joins late, too.
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1 - optimizer.steps / STEPS)
sampler = thinwire.ElasticBatchSampler(optimizer, len(data), batch=96, micro_batch=8)

for step in sampler.steps(DataLoader(data, batch_sampler=sampler)):
    if optimizer.steps == STEPS:  # before a step: a worker may join after the last one
        break
    total = 0.0
    for samples, targets in step:
        loss = step.weight * (model(samples) - targets).square().mean()
        loss.backward()
        total += loss.item()
    optimizer.step()
    optimizer.zero_grad()
    schedule.step()
    time.sleep(arguments.pause)
    if optimizer.steps % 50 == 0:
        print(f"step {optimizer.steps}: loss {total:.3f}, {optimizer.workers} workers", flush=True)

optimizer.synchronize_weights()  # all leave with the same weights
with torch.no_grad():
    error = (model(data.tensors[0]) - data.tensors[1]).square().mean().item()
print(f"after {optimizer.steps} steps: error {error:.4f}", flush=True)
