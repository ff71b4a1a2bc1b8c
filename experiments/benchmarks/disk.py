"""Training with optimizer state and gradients on a disk, in a quarter of the memory that the state alone would take;
and, sharded at stage 3, with parameters there too, of a model that is never whole in one memory.

Every rank is a process that may have so many bytes of private memory, and no more (RLIMIT_DATA), beyond what it has
once torch has been used: touched or not, stacks of threads too. The same job in memory, without the limit, gives the
weights and the times to compare with; with the limit it cannot begin. Memory that is freed goes back at once.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from experiments.common import machine
from experiments.common.command_line import Parser, positive
from experiments.common.errors import InputError, refuse
from experiments.common.launching import launch, refuse_launchers
from experiments.common.peak_memory import RETURNING, status_bytes
from experiments.common.results import OUTPUT, check_writable, read_json, write_json
from thinwire import ShardedOptimizer, initialize
from thinwire.comm import Communicator, threads
from thinwire.plan import PlanError
from thinwire.plan.probing import Stopwatch, disk_rates
from thinwire.zero.synchronized_optimizer import SynchronizedOptimizer

__all__ = ["CASES", "Residual", "main"]

_MODULE = "experiments.benchmarks.disk"
_STATE_BYTES = 12  # of an element: fp32 weight and two moments
_TIMES_LARGER = 4
_BUCKET_BYTES = 4 << 20
_STACK_BYTES = 1 << 20
_RATE = 1e-4
_NEW = 2  # first steps, which make the state, and learn how many backwards a step has
CASES = {
    "memory": (2, False, False),
    "memory, limited": (2, False, True),
    "disk, limited": (2, True, True),
    "stage 3, memory": (3, False, False),
    "parameters too": (3, True, True),
}
"""The stage, whether all of it that may be is on the disk, and whether memory is limited. What is on the disk is
compared with its stage's run in memory."""


class _Matrices(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.wide = nn.Parameter(torch.empty(4 * width, width, dtype=torch.bfloat16))
        self.narrow = nn.Parameter(torch.empty(width, 4 * width, dtype=torch.bfloat16))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw new weights."""
        for weight in (self.wide, self.narrow):
            nn.init.normal_(weight, std=weight.shape[1] ** -0.5)


class Residual(nn.Module):
    """x + W2 gelu(W1 norm(x)) of fp32 [tokens, width], with bf16 weights; the arithmetic is fp32, fast on every CPU."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weights = _Matrices(width)

    def forward(self, hidden: Tensor) -> Tensor:
        """Done again in backward, so that no fp32 weight is kept for it."""
        result: Tensor = checkpoint(self._forward, hidden, use_reentrant=False)
        return result

    def _forward(self, hidden: Tensor) -> Tensor:
        normed = functional.layer_norm(hidden.float(), hidden.shape[-1:])
        inner = functional.gelu(functional.linear(normed, self.weights.wide.float()))
        return hidden + functional.linear(inner, self.weights.narrow.float())


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs every case on every number of ranks, prints a table and writes JSON; the exit code."""
    given = sys.argv[1:] if arguments is None else arguments
    if "--case" in given:
        return launch(_MODULE, _parse, _train, given, 1)
    try:
        refuse_launchers()
        options = _parse(given)
        if options.steps <= _NEW:
            raise InputError(f"--steps {options.steps} leaves none to measure after the first {_NEW}: give more")
        check_writable(options.output.parent, "--output")
        check_writable(options.folder, "--folder")
        _disk_rate(options.folder)
    except (InputError, PlanError) as error:
        return refuse(_MODULE, InputError(f"{error}"))
    elements = _elements(options)
    sizes = f"{_STATE_BYTES * elements / 1e9:.2f} GB of state, {_allowed(options) / 1e9:.2f} allowed a rank"
    print(f"{elements / 1e6:.0f} M elements, {sizes}")
    print(f"{'ranks':>5} {'':16} {'peak GB':>8} {'step s':>7} {'disk GB':>8} {'GB/s':>5} {'over':>5} weights")
    content = {"machine": machine.describe(), "elements": elements, "allowed_bytes": _allowed(options)}
    results: dict[str, Any] = {}
    for ranks in options.several_ranks:
        results[f"{ranks}"] = _compare(options, ranks, given)
        write_json(options.output, {**content, "ranks": results})
    print(f"Written: {options.output}")
    return 0


def _compare(options: argparse.Namespace, ranks: int, given: Sequence[str]) -> dict[str, Any]:
    """What each case measured, or how it ended; of the disk its step's time over the larger of the other two."""
    found: dict[str, Any] = {}
    for case in options.cases:
        stage, on_disk, _ = CASES[case]
        plain = "memory" if stage < 3 else "stage 3, memory"
        rates = [_disk_rate(options.folder)] if on_disk else []
        one = found[case] = _run(case, ranks, given)
        if "error" in one:
            print(f"{ranks:5} {case:16} ended: {one['error'][-75:]}", flush=True)
            continue
        step, same, columns = median(one["seconds"][_NEW:]), "", f"{'':20}"
        if on_disk:
            one["disk_bytes_per_second"] = rate = (rates[0] + _disk_rate(options.folder)) / 2
            nbytes = median(one["disk_bytes"][_NEW:])
            least = max(nbytes / rate, median(found[plain]["seconds"][_NEW:]))
            one["over_the_larger"] = step / least
            one["same_weights"] = one["weights"] == found[plain]["weights"]
            columns = f"{nbytes / 1e9:8.2f} {rate / 1e9:5.2f} {step / least:5.2f}"
            same = "the same" if one["same_weights"] else "OTHERS"
        print(f"{ranks:5} {case:16} {one['peak_bytes'] / 1e9:8.2f} {step:7.2f} {columns} {same}", flush=True)
    return found


def _run(case: str, ranks: int, given: Sequence[str]) -> dict[str, Any]:
    """A job of its own."""
    with tempfile.TemporaryDirectory() as folder:
        output = f"{folder}/case.json"
        command = [sys.executable, "-m", _MODULE, *given, "--case", case, "--ranks", f"{ranks}", "--output", output]
        environment = {**os.environ, **RETURNING}
        ended = subprocess.run(command, capture_output=True, text=True, env=environment, preexec_fn=_limit_stacks)
        if ended.returncode:
            return {"exit_code": ended.returncode, "error": (ended.stderr.splitlines() or [""])[-1]}
        return read_json(Path(output))


def _limit_stacks() -> None:
    """Have threads reserve less than the usual 8 MiB, of which they use a small part."""
    resource.setrlimit(resource.RLIMIT_STACK, (_STACK_BYTES, resource.getrlimit(resource.RLIMIT_STACK)[1]))


def _train(comm: Communicator, options: argparse.Namespace) -> None:
    """Writes what one case took: of the slowest rank, of the largest, and bytes of all together. Collective."""
    stage, on_disk, limited = CASES[options.case]
    _use_torch(comm)
    if stage == 3:
        _engine(comm, options, layers=2, width=64, disk=None)
    data, before = status_bytes("VmData"), status_bytes("VmRSS")
    if limited:
        resource.setrlimit(resource.RLIMIT_DATA, (data + _allowed(options),) * 2)
    torch.manual_seed(0)
    if stage == 3:
        engine = _engine(comm, options, options.layers, options.width, options.folder if on_disk else None)
        train = _Training(engine, engine.backward, engine.optimizer)
    else:
        model = nn.Sequential(*[Residual(options.width) for _ in range(options.layers)])
        settings = {"stage": 2, "max_norm": options.max_norm, "bucket_bytes": _BUCKET_BYTES, "lr": _RATE, "fused": True}
        offload = options.folder if on_disk else False
        sharded = ShardedOptimizer(model.parameters(), torch.optim.AdamW, comm=comm, offload=offload, **settings)
        train = _Training(model, Tensor.backward, sharded)
    seconds, moved = [], []
    for step in range(options.steps):
        generator = torch.Generator().manual_seed(comm.size * step + comm.rank)
        hidden = torch.randn(options.tokens, options.width, generator=generator)
        comm.barrier()
        started, bytes_before = time.perf_counter(), _disk_bytes()
        train.backward(functional.layer_norm(train.model(hidden), hidden.shape[-1:]).sub(hidden).square().mean())
        train.optimizer.step()
        train.optimizer.zero_grad()
        comm.barrier()
        seconds.append(time.perf_counter() - started)
        moved.append(_disk_bytes() - bytes_before)
    weights = hashlib.sha256()
    for one in train.optimizer.saved_slices():
        if one.kind == "weight":
            weights.update(one.values().view(torch.int16).numpy().data)
    parts = comm.all_gather_bytes(weights.digest(), "compare weights")
    peak = torch.tensor([status_bytes("VmHWM") - before])
    both = torch.tensor(moved)
    comm.all_reduce(peak, "max")
    comm.all_reduce(both)
    train.optimizer.close()
    if comm.rank == 0:
        measured = {"seconds": seconds, "disk_bytes": both.tolist(), "peak_bytes": int(peak)}
        write_json(options.output, {**measured, "weights": b"".join(parts).hex()})


class _Training(NamedTuple):
    model: Callable[[Tensor], Tensor]
    backward: Callable[[Tensor], object]
    optimizer: SynchronizedOptimizer


def _engine(comm: Communicator, options: argparse.Namespace, layers: int, width: int, disk: Path | None) -> Any:
    """Of stage 3, with a model that is built without memory; on a disk if there is one."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Sequential(*[Residual(width) for _ in range(layers)]))
    there = {"device": "nvme", "nvme_path": f"{disk}"} if disk is not None else {"device": "none"}
    zero = {"stage": 3, "offload_optimizer": there, "offload_param": there}
    config = {
        "train_micro_batch_size_per_gpu": options.tokens,
        "optimizer": {"type": "AdamW", "params": {"lr": _RATE, "weight_decay": 0.01, "fused": True}},
        "bf16": {"enabled": True},
        "gradient_clipping": options.max_norm,
        "zero_optimization": zero,
    }
    return initialize(model=model, config=config, comm=comm)[0]


def _use_torch(comm: Communicator) -> None:
    """Have torch import and start what it does at first use."""
    small = Residual(8)
    torch.optim.AdamW(small.parameters(), fused=True).zero_grad()
    small(torch.ones(1, 8)).sum().backward()
    comm.barrier()


def _disk_rate(folder: Path) -> float:
    """Bytes a second, half of them read and half written."""
    return disk_rates(Stopwatch(threads.single(60.0), torch.device("cpu")), folder, 1).both


def _disk_bytes() -> int:
    """What this process has read of disks and written to them."""
    lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(lines["read_bytes"]) + int(lines["write_bytes"])


def _elements(options: argparse.Namespace) -> int:
    return 8 * int(options.width) ** 2 * int(options.layers)


def _allowed(options: argparse.Namespace) -> int:
    return _STATE_BYTES * _elements(options) // _TIMES_LARGER


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = Parser(_MODULE, "Trains in a quarter of the memory of an optimizer's state, on a disk.", "five minutes")
    parser.add_argument("--folder", type=Path, default=OUTPUT.parent / "disk", metavar="FOLDER", help="of an NVMe disk")
    parser.add_argument("--width", type=positive, default=512, metavar="N", help="of the model")
    parser.add_argument("--layers", type=positive, default=80, metavar="N", help="of 8 width^2 elements each")
    parser.add_argument("--tokens", type=positive, default=64, metavar="N", help="of a rank and step")
    parser.add_argument(
        "--max-norm", type=float, default=2.0, metavar="NORM", help="to clip at; 1 clips all steps of 1 rank"
    )
    parser.add_argument("--steps", type=positive, default=5, metavar="N", help="of every case, at least 3")
    parser.add_argument("--several-ranks", type=positive, nargs="+", default=[1, 2], metavar="N", help="processes")
    parser.add_argument("--cases", nargs="+", choices=tuple(CASES), default=list(CASES), help="of those, in order")
    parser.add_argument("--case", choices=tuple(CASES), help=argparse.SUPPRESS)
    parser.add_argument("--ranks", type=positive, help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path, default=OUTPUT / "disk.json", metavar="FILE.json", help="of figures")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
