"""What steps of pipelines take over shaped links, with stages that wait in place of computing, so that ranks that share
cores do not slow each other down. `experiments.ethernet.pipelines` starts it under mpirun.

Tensors, packets, schedules and optimizers are real: a stage gives on what it got once its time is over.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleMulti

import thinwire
from experiments.common.command_line import Parser, positive
from experiments.common.results import write_json
from experiments.ethernet.race.shaping import add_link_arguments, shape_together
from thinwire import comm as communication
from thinwire.comm import Communicator
from thinwire.parallel import CompressedStage
from thinwire.parallel.pipeline import places_of_stages, schedule_class

__all__ = ["COMPUTING", "MICRO_BATCHES", "WIRES", "Waits", "main", "seconds_together"]

COMPUTING = "+computing"
"""Behind the name of a schedule: with stages that compute."""
MICRO_BATCHES = 8
WIRES: dict[str, tuple[torch.dtype, str | None, str | None]] = {
    "fp32": (torch.float32, None, None),
    "bf16": (torch.bfloat16, None, None),
    "int8": (torch.bfloat16, "int8", "int8"),
    "int4-int8": (torch.bfloat16, "int4", "int8"),
    "int4": (torch.bfloat16, "int4", "int4"),
}
"""By name: the activations' dtype, and the codecs of them and of their gradients; None: torch's own stages."""
EAGER = "+eager"
"""Behind the name of a wire: with the schedule that runs further ahead, in place of 1F1B."""

_TIMEOUT = 300.0


class Waits(torch.autograd.Function):
    """Gives on what it got, forward and backward, once its times are over."""

    @staticmethod
    def forward(ctx: Any, given: Tensor, ahead: float, back: float) -> Tensor:
        """Takes `ahead` seconds, and backward `back`."""
        ctx.back = back
        time.sleep(ahead)
        return given.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        """The gradient, later."""
        time.sleep(ctx.back)
        return gradient, None, None


class _Weighs(torch.autograd.Function):
    """One weight; the gradient of many comes with a step's last micro-batch."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, stage: _Stage, back: float) -> Tensor:
        ctx.stage, ctx.back = stage, back
        return weight[:1].clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None, None]:  # type: ignore[override]
        time.sleep(ctx.back)
        ctx.stage.backwards += 1
        due = len(ctx.stage.gradient) == 1 or ctx.stage.backwards % MICRO_BATCHES == 0
        return (ctx.stage.gradient.clone() if due else None), None, None


class _Stage(nn.Module):
    """Takes `seconds` forward, and as long for each half of backward: of activations, and of weights."""

    def __init__(self, seconds: float, first: bool, weights: int) -> None:
        super().__init__()
        self.seconds, self.first, self.backwards = seconds, first, 0
        self.weight = nn.Parameter(torch.ones(weights))
        self.gradient = torch.randn(weights)

    def forward(self, given: Tensor) -> Tensor:
        """Any shape to the same."""
        # Torch has a first stage compute all of its backward as that of weights.
        hidden = Waits.apply(given, self.seconds, self.seconds)
        weight = _Weighs.apply(self.weight, self, self.seconds * (1 + self.first))
        return hidden * weight.to(hidden.dtype)


class _Real(nn.Module):
    """Three layers that compute."""

    def __init__(self, width: int) -> None:
        super().__init__()
        layers = [nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(3)]
        self.layers = nn.Sequential(*layers)

    def forward(self, given: Tensor) -> Tensor:
        """[rows, width] to the same."""
        return self.layers(given)


class _Timed:
    """Counts the seconds that a stage computes, by kind."""

    def __init__(self, stage: Any) -> None:
        self.seconds: dict[str, list[float]] = {"forward": [], "backward": []}
        for name in ("forward_one_chunk", "backward_one_chunk", "backward_weight_one_chunk"):
            setattr(stage, name, self._timed(getattr(stage, name), name.partition("_")[0]))

    def _timed(self, call: Callable[..., Any], kind: str) -> Callable[..., Any]:
        def timed(*given: Any, **options: Any) -> Any:
            started = time.perf_counter()
            result = call(*given, **options)
            self.seconds[kind].append(time.perf_counter() - started)
            return result

        return timed


class _Pipeline:
    """Stages of one rank, and a step of them."""

    def __init__(
        self, name: str, group: dist.ProcessGroup, make: Callable[[bool], nn.Module], wire: str, shape: Sequence[int]
    ) -> None:
        kind, (dtype, ahead, back) = schedule_class(name), WIRES[wire]
        rank, size = group.rank(), group.size()
        places = places_of_stages(kind, size)
        count = sum(map(len, places))
        self.modules = [make(number == 0) for number in places[rank]]
        stages: list[Any] = []
        for number, module in zip(places[rank], self.modules, strict=True):
            if ahead is None:
                stages.append(PipelineStage(module, number, count, torch.device("cpu"), group=group))
            else:
                codecs: dict[str, Any] = {"activations": ahead, "gradients": back}
                stages.append(CompressedStage(module, number, count, torch.device("cpu"), group=group, **codecs))
        self.timed = [_Timed(stage) for stage in stages]
        given: Any = stages if issubclass(kind, PipelineScheduleMulti) else stages[0]
        self._schedule = kind(given, MICRO_BATCHES, loss_fn=lambda out, target: out.float().mean(), scale_grads=False)
        batch = torch.randn(MICRO_BATCHES * shape[0], *shape[1:], dtype=dtype)
        self._given = (batch,) if 0 in places[rank] else ()
        self._target = batch if count - 1 in places[rank] else None

    def step(self) -> None:
        """One global batch."""
        self._schedule.step(*self._given, target=self._target, return_outputs=False)

    def busy(self) -> float:
        """Seconds that it has computed since it was last asked."""
        total = sum(sum(one) for timed in self.timed for one in timed.seconds.values())
        self.spent = {kind: mean(self.timed[0].seconds[kind] or [0.0]) for kind in ("forward", "backward")}
        for timed in self.timed:
            for one in timed.seconds.values():
                one.clear()
        return total


def seconds_together(comm: Communicator, step: Callable[[], None]) -> float:
    """Seconds of a step, of the rank that took longest."""
    comm.barrier()
    started = time.perf_counter()
    step()
    taken = torch.tensor(time.perf_counter() - started)
    comm.all_reduce(taken, "max")
    return float(taken)


def _bubbles(options: argparse.Namespace, comm: Communicator) -> list[dict[str, Any]]:
    found = []
    for name in options.schedules:
        real = name.endswith(COMPUTING)
        shape = (options.rows, 512) if real else (4, 8)
        make = (lambda first: _Real(512)) if real else (lambda first: _Stage(options.seconds, first, 1))
        torch.manual_seed(0)
        group: Any = dist.group.WORLD
        pipeline = _Pipeline(name.removesuffix(COMPUTING), group, make, "fp32", shape)
        pipeline.step()
        pipeline.busy()
        steps = []
        for _ in range(options.steps):
            taken = seconds_together(comm, pipeline.step)
            busy = torch.tensor(pipeline.busy())
            comm.all_reduce(busy, "mean")
            steps.append({"idle": 1 - float(busy) / taken, "step": taken, **pipeline.spent})
        middle = sorted(steps, key=lambda one: one["idle"])[len(steps) // 2]
        found.append({"schedule": name, **middle})
        _say(comm, f"{name} on {comm.size} stages: {middle['step']:.3f} s a step")
    return found


def _wires(options: argparse.Namespace, comm: Communicator) -> list[dict[str, Any]]:
    """Stages take as long as makes bf16 wait for `options.waits` of its step, once that is measured."""
    mesh = init_device_mesh("cpu", (comm.size // options.replicas, options.replicas), mesh_dim_names=("pp", "dp"))
    slots, part = 3 * (MICRO_BATCHES + comm.size // options.replicas - 1), options.waits
    seconds, found = options.seconds, []
    for number, wire in enumerate(("bf16", *options.wires)):
        group = mesh.get_group("pp")
        schedule, codecs = "Eager1F1B" if wire.endswith(EAGER) else "1F1B", wire.removesuffix(EAGER)
        pipeline = _Pipeline(schedule, group, partial(_Stage, seconds, weights=options.weights), codecs, options.shape)
        step = pipeline.step
        shape_together(comm, options.cluster, options.hosts, None)
        if options.replicas > 1:
            step = _with_replicas(pipeline, mesh, exact=WIRES[codecs][1] is None)
        step()
        step()  # the second of a 1-bit optimizer is its first frozen one
        shape_together(comm, options.cluster, options.hosts, options.megabits)
        step()
        taken = median(seconds_together(comm, step) for _ in range(options.steps))
        if number:
            found.append({"wire": wire, "step": taken, "computing": seconds * slots})
        else:
            seconds = (taken - seconds * slots) * (1 - part) / part / slots
        _say(comm, f"{wire} at {options.megabits} Mb/s: {taken:.3f} s a step")
    shape_together(comm, options.cluster, options.hosts, None)
    return found


def _with_replicas(pipeline: _Pipeline, mesh: Any, *, exact: bool) -> Callable[[], None]:
    (module,) = pipeline.modules
    if exact:
        adam = torch.optim.AdamW(module.parameters(), lr=1e-4, fused=True)
        group, (weight,) = mesh.get_group("dp"), list(module.parameters())

        def step() -> None:
            pipeline.step()
            assert weight.grad is not None
            rounded = weight.grad.to(torch.bfloat16)
            dist.all_reduce(rounded, group=group)
            weight.grad.copy_(rounded).div_(group.size())
            adam.step()
            adam.zero_grad()

        return step
    optimizer = thinwire.OneBitAdam(module.named_parameters(), lr=1e-4, freeze_step=1, mesh=mesh["dp"])

    def step_in_a_bit() -> None:
        with optimizer.no_sync():
            pipeline.step()
        optimizer.step()
        optimizer.zero_grad()

    return step_in_a_bit


def _say(comm: Communicator, text: str) -> None:
    if comm.rank == 0:
        print(text, file=sys.stderr, flush=True)


_TASKS: Mapping[str, Callable[[argparse.Namespace, Communicator], list[dict[str, Any]]]] = {
    "bubbles": _bubbles,
    "wires": _wires,
}


def main(arguments: Sequence[str]) -> None:
    """On every rank: measures, and writes the seconds of a step."""
    options = _parse(arguments)
    torch.set_num_threads(1)
    comm = communication.init(backend="gloo", timeout=_TIMEOUT, quiet=True)
    found = _TASKS[options.task](options, comm)
    if comm.rank == 0:
        write_json(options.output, {"found": found})
    comm.barrier()
    comm.close()


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = Parser("experiments.ethernet.race.pipeline_times", "Times steps of pipelines.")
    parser.add_argument("--task", choices=_TASKS, required=True)
    parser.add_argument("--schedules", nargs="+", default=[])
    parser.add_argument("--wires", nargs="+", choices=[*WIRES, *(f"{one}{EAGER}" for one in WIRES)], default=[])
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--steps", type=positive, default=3)
    parser.add_argument("--rows", type=positive, default=256)
    parser.add_argument("--shape", nargs=3, type=positive, default=(4, 256, 1024))
    parser.add_argument("--replicas", type=positive, default=1)
    parser.add_argument("--weights", type=positive, default=1)
    parser.add_argument("--megabits", type=float)
    parser.add_argument("--waits", type=float, default=0.7)
    add_link_arguments(parser)
    parser.add_argument("--output", type=Path, required=True)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main(sys.argv[1:])
