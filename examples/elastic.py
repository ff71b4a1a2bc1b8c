"""DiLoCo whose workers come and go.

    python -m thinwire meet 127.0.0.1:29400 &
    export THINWIRE_MEETING=127.0.0.1:29400
    python examples/elastic.py & python examples/elastic.py & python examples/elastic.py &

Kill one of the three, and start a fourth whenever you like: the job goes on, and all end with the same weights.
With --together the ranks of a torchrun are one worker, as of a whole host:

    torchrun --standalone --nproc-per-node=2 --max-restarts=3 examples/elastic.py --together
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
parser.add_argument("--together", action="store_true", help="make the ranks that were started together one worker")
arguments = parser.parse_args()

torch.manual_seed(0)
inputs = torch.randn(20_000, 16)
data = TensorDataset(inputs, inputs.mean(1, keepdim=True).mul(4).sin())
model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1))
elastic = thinwire.Elastic(workers=arguments.workers)
node = thinwire.comm.init() if arguments.together else None
optimizer = thinwire.DiLoCo(model.named_parameters(), torch.optim.AdamW, lr=0.01, every=20, elastic=elastic, comm=node)
print(f"process {os.getpid()} is in the job, at step {optimizer.steps}", flush=True)

# A rate that follows from optimizer.steps is right for whoever joins late, too.
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1 - optimizer.steps / STEPS)
batches = iter(DataLoader(data, batch_size=32, sampler=thinwire.ElasticSampler(optimizer, len(data))))

while optimizer.steps < STEPS:
    samples, targets = next(batches)
    loss = (model(samples) - targets).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    schedule.step()
    time.sleep(arguments.pause)
    if optimizer.steps % 50 == 0:
        print(f"step {optimizer.steps}: loss {loss.item():.3f}, {optimizer.workers} workers", flush=True)

optimizer.synchronize()  # all leave with the same weights
with torch.no_grad():
    error = (model(data.tensors[0]) - data.tensors[1]).square().mean().item()
print(f"after {optimizer.steps} steps: error {error:.4f}", flush=True)
