"""What steps of stage 3 take, and send between hosts, over shaped links: exact ones beside those through codecs.
`experiments.ethernet.shards` starts it under mpirun.

Layers wait in place of computing, as ranks share cores; weights, gradients, packets and AdamW are real.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from experiments.common.command_line import Parser, positive
from experiments.common.results import write_json
from experiments.ethernet.race.pipeline_times import Waits, seconds_together
from experiments.ethernet.race.shaping import add_link_arguments, shape_together
from experiments.ethernet.race.stopwatch import Interface
from thinwire import comm as communication
from thinwire.comm import Communicator
from thinwire.compress import fsdp_hooks

__all__ = ["CONTENDERS", "EXACT", "main"]

EXACT = "bf16"
CONTENDERS: dict[str, dict[str, Any] | None] = {
    "torch": None,
    EXACT: {"gradients": "bf16", "residuals": False},
    "int8-int4-by-node": {"weights": "int8", "gradients": "int4"},
    "int4-int4-by-node": {"weights": "int4", "gradients": "int4"},
    "int8-int8": {"weights": "int8", "gradients": "int8"},
}
"""By name: what `fsdp_hooks` gets; None: torch's own collectives, over Gloo an all-reduce in place of a reduce-scatter.
`EXACT` reduces in bf16 by an all-to-all, of which a rank sends what it does of a ring, but more leaves a host."""

_TIMEOUT = 600.0


class _Layer(nn.Module):
    """A matrix that takes `seconds` forward and twice that backward."""

    def __init__(self, width: int, seconds: float) -> None:
        super().__init__()
        self.linear, self.seconds = nn.Linear(width, width, bias=False), seconds

    def forward(self, given: Tensor) -> Tensor:
        """Any shape to the same."""
        waited: Tensor = Waits.apply(given, self.seconds, 2 * self.seconds)
        return given + self.linear(waited)


class _Trained:
    """A model at stage 3, and a step of it."""

    def __init__(self, options: argparse.Namespace, comm: Communicator, name: str, seconds: float) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(*(_Layer(options.width, seconds) for _ in range(options.layers)))
        mesh, bf16 = init_device_mesh("cpu", (comm.size,)), torch.bfloat16
        for layer in (*model, model):
            fully_shard(layer, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=bf16, reduce_dtype=bf16))
        hooks = CONTENDERS[name]
        if hooks is not None:
            fsdp_hooks(model, **hooks, node_size=comm.size // options.hosts if "by-node" in name else 1)
        assert isinstance(model, FSDPModule)
        self._model, self._given = model, torch.randn(4, options.width)
        self._adam = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step(self) -> None:
        """One batch."""
        self._model(self._given).float().square().mean().backward()
        self._adam.step()
        self._adam.zero_grad()


def _race(options: argparse.Namespace, comm: Communicator) -> list[dict[str, Any]]:
    """Layers wait for as long as has links make the exact step longer by `options.waits` of it, once that is measured.
    What a step takes where nothing limits them is its own work: ranks share cores."""
    interface, seconds, found = Interface(options.device), 0.0, []
    for number, name in enumerate((EXACT, *options.contenders)):
        shape_together(comm, options.cluster, options.hosts, None)
        trained = _Trained(options, comm, name, seconds)
        for _ in range(2):  # copies inside nodes are made by the first, and kept by the second
            trained.step()
        work = median(seconds_together(comm, trained.step) for _ in range(options.steps))
        shape_together(comm, options.cluster, options.hosts, options.megabits)
        times, sent = [], []
        for _ in range(options.steps):
            before = interface.sent()
            times.append(seconds_together(comm, trained.step))
            # Of all hosts: each has as many ranks, which read the same counter.
            counted = torch.tensor(float(interface.sent() - before), dtype=torch.float64)
            comm.all_reduce(counted, "mean")
            sent.append(float(counted))
        if number:
            found.append({"name": name, "step": median(times), "each": times, "work": work, "sent": median(sent)})
        else:
            wire = median(times) - work
            seconds = max(0.0, wire * (1 - options.waits) / options.waits - work) / (3 * options.layers)
        if comm.rank == 0:
            print(f"{name}: {median(times):.3f} s a step", file=sys.stderr, flush=True)
    shape_together(comm, options.cluster, options.hosts, None)
    return found


def main(arguments: Sequence[str]) -> None:
    """On every rank: measures, and writes seconds and bytes of a step."""
    options = _parse(arguments)
    torch.set_num_threads(1)
    comm = communication.init(backend="gloo", timeout=_TIMEOUT, quiet=True)
    found = _race(options, comm)
    if comm.rank == 0:
        write_json(options.output, {"found": found})
    comm.barrier()
    comm.close()


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = Parser("experiments.ethernet.race.shard_times", "Times steps of stage 3.")
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, required=True)
    parser.add_argument("--layers", type=positive, required=True)
    parser.add_argument("--width", type=positive, required=True)
    parser.add_argument("--steps", type=positive, required=True)
    parser.add_argument("--waits", type=float, required=True)
    parser.add_argument("--megabits", type=float, required=True)
    add_link_arguments(parser)
    parser.add_argument("--output", type=Path, required=True)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main(sys.argv[1:])
