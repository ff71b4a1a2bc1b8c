"""BERT in bf16 on the GPUs present: 1-bit Adam, warming up and frozen, and the engine's ZeRO stages beside DDP with
NCCL's bf16 hook. Tokens a second, memory, and from a profile what a step launches, waits for and hides."""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

from experiments.common import machine
from experiments.common.command_line import Parser, positive
from experiments.common.errors import InputError, refuse
from experiments.common.results import OUTPUT, check_writable, write_json
from experiments.gpu.profiles import read_profile
from experiments.tasks.sizes import SIZES, BertSize
from thinwire import OneBitAdam
from thinwire import comm as communication
from thinwire.optim import CapturedStep

__all__ = ["main"]

_VOCABULARY, _LENGTH = 30522, 128
_FREEZE_STEP = 4
_WARM_UP = 8  # frozen steps before time is taken: kernels are compiled, and steps captured
_PROFILED = 3

Step = Callable[[Tensor], Tensor]
Build = Callable[[nn.Module], Step]


@dataclass(frozen=True)
class Measured:
    """Of one system, in its frozen stage where it has one; memory in bytes, at its peak, on rank 0."""

    milliseconds: float
    tokens_a_second: float
    peak_memory: int
    loss: float
    profile: dict[str, Any]


class Bert(nn.Module):
    """A masked language model of BERT's shape, in torch's own layers, which need no other package."""

    def __init__(self, size: BertSize) -> None:
        super().__init__()
        self.tokens = nn.Embedding(_VOCABULARY, size.width)
        nn.init.normal_(self.tokens.weight, std=0.02)
        self.places = nn.Parameter(torch.zeros(_LENGTH, size.width))
        layer = nn.TransformerEncoderLayer(
            size.width, size.heads, 4 * size.width, dropout=0.0, activation="gelu", batch_first=True
        )
        self.layers = nn.TransformerEncoder(layer, size.layers, enable_nested_tensor=False)

    def forward(self, inputs: Tensor, labels: Tensor) -> Tensor:
        """The mean cross-entropy of `labels`, int64 [sequences, length]."""
        hidden = self.layers(self.tokens(inputs) + self.places)
        return nn.functional.cross_entropy((hidden @ self.tokens.weight.T).flatten(0, 1).float(), labels.flatten())


def main(arguments: Sequence[str] | None = None) -> int:
    """Starts a rank a GPU, measures, and writes JSON; the exit code."""
    given = sys.argv[1:] if arguments is None else arguments
    try:
        options = _parse(given)
    except InputError as error:
        return refuse("experiments.gpu.training", error)
    if options.device == "cuda" and "RANK" not in os.environ:
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=gpu"]
        os.execv(sys.executable, [sys.executable, *launcher, "-m", "experiments.gpu.training", *given])
    _join(options.device)
    try:
        _measure_all(options)
    finally:
        dist.destroy_process_group()
    return 0


def _measure_all(options: argparse.Namespace) -> None:
    content: dict[str, Any] = {"machine": machine.describe(), "model": options.model, "ranks": dist.get_world_size()}
    content["batch_size"] = options.batch_size
    if options.device == "cuda":
        content["gpu"] = torch.cuda.get_device_name()
    systems: dict[str, Any] = {}
    for name, build in _systems(options.batch_size, options.device).items():
        systems[name] = asdict(_measure(build, options))
        if dist.get_rank() == 0:  # after each, so that what a crash leaves is whole
            write_json(options.output, content | {"systems": systems})
            one = systems[name]
            print(f"{name:28} {one['milliseconds']:9.2f} ms {one['tokens_a_second']:12.0f} tokens/s", flush=True)


def _measure(build: Build, options: argparse.Namespace) -> Measured:
    cuda = options.device == "cuda"
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    torch.manual_seed(0)
    step = build(Bert(SIZES[options.model]).to(options.device))
    generator = torch.Generator().manual_seed(1 + dist.get_rank())
    shape = (options.batch_size, _LENGTH)
    batches = [torch.randint(_VOCABULARY, shape, generator=generator).to(options.device) for _ in range(4)]
    wait = torch.cuda.synchronize if cuda else lambda: None
    for number in range(_FREEZE_STEP + _WARM_UP):
        loss = step(batches[number % 4])
    wait()
    started = time.perf_counter()
    for number in range(options.steps):
        loss = step(batches[number % 4])
    wait()
    seconds = (time.perf_counter() - started) / options.steps
    last = float(loss)  # now: a captured step's is memory that the next one writes
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    with profile(activities=activities) as recorded:
        for number in range(_PROFILED):
            step(batches[number % 4])
        wait()
    tokens = options.batch_size * _LENGTH * dist.get_world_size() / seconds
    peak = torch.cuda.max_memory_allocated() if cuda else 0
    return Measured(1e3 * seconds, tokens, peak, last, read_profile(recorded, _PROFILED))


def _ddp(model: nn.Module) -> Step:
    device = next(model.parameters()).device
    wrapped = DistributedDataParallel(model)
    if device.type == "cuda":  # which DDP refuses elsewhere
        wrapped.register_comm_hook(None, bf16_compress_hook)
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-4, fused=True)

    def step(batch: Tensor) -> Tensor:
        optimizer.zero_grad()
        with torch.autocast(device.type, torch.bfloat16):
            loss: Tensor = wrapped(batch, batch.roll(1, dims=1))
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def _onebit(stage: int, freeze_step: int = _FREEZE_STEP, captures: bool = False) -> Build:
    def build(model: nn.Module) -> Step:
        model = model.to(torch.bfloat16)
        comm = communication.TorchCommunicator()
        optimizer = OneBitAdam(model.parameters(), lr=1e-4, freeze_step=freeze_step, stage=stage, comm=comm)

        def work(batch: Tensor) -> Tensor:
            loss: Tensor = model(batch, batch.roll(1, dims=1))
            loss.backward()
            return loss.detach()

        def step(batch: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss = work(batch)
            optimizer.step()
            return loss

        return CapturedStep(optimizer, work) if captures else step

    return build


def _engine(stage: int, batch_size: int) -> Build:
    def build(model: nn.Module) -> Step:
        from thinwire import initialize  # which needs pydantic

        config = {
            "train_micro_batch_size_per_gpu": batch_size,
            "bf16": {"enabled": True},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "fused": True}},
            "zero_optimization": {"stage": stage, "overlap_comm": stage > 0},
        }
        engine, *_ = initialize(model=model, config=config, comm=communication.TorchCommunicator())

        def step(batch: Tensor) -> Tensor:
            loss: Tensor = engine(batch, batch.roll(1, dims=1))
            engine.backward(loss)
            engine.step()
            return loss.detach()

        return step

    return build


def _systems(batch_size: int, device: str) -> dict[str, Build]:
    """What is measured, by its name: the engine where its package is, CUDA graphs on CUDA."""
    engine = {f"engine, ZeRO-{stage}, AdamW": _engine(stage, batch_size) for stage in (0, 1, 2)}
    return {
        "DDP, bf16 hook, fused AdamW": _ddp,
        **(engine if importlib.util.find_spec("pydantic") else {}),
        "1-bit Adam, warming up": _onebit(0, freeze_step=1 << 30),
        "1-bit Adam, frozen": _onebit(0),
        **({"1-bit Adam, frozen, captured": _onebit(0, captures=True)} if device == "cuda" else {}),
        "1-bit Adam, ZeRO-1, frozen": _onebit(1),
    }


def _join(device: str) -> None:
    """Join the ranks that torchrun started, or be alone."""
    if "RANK" in os.environ:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("cpu:gloo,cuda:nccl")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = Parser("experiments.gpu.training", "Measures BERT's training steps on the GPUs present.")
    parser.add_argument("--model", choices=tuple(SIZES), default="base", help="which BERT")
    parser.add_argument("--batch-size", type=positive, default=128, metavar="N", help="sequences of 128 tokens a GPU")
    parser.add_argument("--steps", type=positive, default=30, metavar="N", help="timed, of each system")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: alone, to try it out")
    output = OUTPUT / "gpu" / "train_bert.json"
    parser.add_argument("--output", type=Path, default=output, metavar="FILE.json", help="where to write")
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        raise InputError("there is no NVIDIA GPU, or torch is not a CUDA build: try it out with --device cpu")
    check_writable(options.output.parent, "--output")
    return options


if __name__ == "__main__":
    sys.exit(main())
