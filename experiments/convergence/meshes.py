"""One model on several meshes of stages, replicas and tensor parallel parts: the loss, the bytes that averaging
gradients over replicas costs, and whether replicas stay the same to the bit.

    python -m experiments.convergence.meshes --mesh 2 2 2
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

import thinwire
from experiments.common.command_line import Parser, positive, rate
from experiments.common.launching import launch
from experiments.common.machine import describe
from experiments.common.results import OUTPUT, check_writable, read_json, write_json
from experiments.tasks.corpus import load
from experiments.tasks.next_character import Text, share_text
from experiments.training.sweep import best_rate
from thinwire.comm import Communicator

__all__ = ["CONTENDERS", "main"]

_MODULE = "experiments.convergence.meshes"
_LENGTH, _WINDOWS, _EVALUATED = 64, 16, 8  # windows a replica a step

_ADAMW = {"optimizer": {"type": "AdamW"}}


def _stage_3(weights: str, gradients: str, node_size: int) -> dict[str, Any]:
    return {"stage": 3, "weights_codec": weights, "gradients_codec": gradients, "node_size": node_size}


CONTENDERS: dict[str, dict[str, Any]] = {
    "AdamW": _ADAMW,
    "AdamW, int4": {**_ADAMW, "communication_codec": "int4"},
    "1-bit Adam": {"optimizer": {"type": "OneBitAdam"}},
    "stage 3": {**_ADAMW, "zero_optimization": {"stage": 3}},
    "stage 3, int8": {**_ADAMW, "zero_optimization": _stage_3("int8", "int8", 1)},
    "stage 3, int8 and int4, nodes of 2": {**_ADAMW, "zero_optimization": _stage_3("int8", "int4", 2)},
    "stage 3, int4, nodes of 2": {**_ADAMW, "zero_optimization": _stage_3("int4", "int4", 2)},
}
"""By name: the configuration's part."""


@dataclass(frozen=True)
class _Settings:
    ranks: int
    mesh: tuple[int, int, int]  # stages, replicas, parts
    steps: int
    width: int
    micro_batches: int
    rates: list[float]
    seeds: int
    contenders: list[str]
    output: Path


@dataclass(frozen=True)
class _Run:
    contender: str
    mesh: tuple[int, int, int]
    width: int
    steps: int
    rate: float
    seed: int


def main(arguments: Sequence[str] | None = None) -> int:
    """Trains, prints a line a contender and adds to the JSON; the exit code."""
    given = sys.argv[1:] if arguments is None else arguments
    return launch(_MODULE, _parse, _work, given, default_ranks=2)


def _work(comm: Communicator, settings: _Settings) -> None:
    text = share_text(comm, load, _LENGTH)
    for name in settings.contenders:

        def loss(peak: float, seed: int = 0, name: str = name) -> float:
            run = _Run(name, settings.mesh, settings.width, settings.steps, peak, seed)
            return _once(comm, settings, text, run)

        losses = {peak: loss(peak) for peak in settings.rates}
        best = best_rate(losses)
        for seed in range(1, settings.seeds):
            loss(best, seed)


def _once(comm: Communicator, settings: _Settings, text: Text, run: _Run) -> float:
    """The loss of a run, from the file where it has it; else it trains, and adds to the file."""
    described = {**asdict(run), "mesh": [*run.mesh]}
    mine = comm.rank == 0 and settings.output.exists() and read_json(settings.output)["runs"]
    runs = json.loads(comm.all_gather_bytes(json.dumps(mine or []).encode(), "read the runs so far")[0])
    for done in runs:
        if described.items() <= done.items():
            return float(done["loss"])
    started = time.perf_counter()
    done = {**described, **_train(comm, settings, text, run)}
    if comm.rank == 0:
        print(f"{done}, {time.perf_counter() - started:.0f} s", flush=True)
        write_json(settings.output, {"machine": describe(), "runs": [*runs, done]})
    return float(done["loss"])


def _train(comm: Communicator, settings: _Settings, text: Text, run: _Run) -> dict[str, Any]:
    stages, _, parts = settings.mesh
    torch.manual_seed(run.seed)
    off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0}
    size = GPT2Config(n_embd=run.width, n_layer=4, n_head=4, vocab_size=text.kinds, n_positions=_LENGTH, **off)
    windows = _WINDOWS // settings.micro_batches
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": windows,
        "gradient_accumulation_steps": settings.micro_batches,
        "gradient_clipping": 1.0,
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {"warmup_num_steps": run.steps // 10, "total_num_steps": run.steps},
        },
        **CONTENDERS[run.contender],
    }
    freeze = {"freeze_step": run.steps // 5} if run.contender == "1-bit Adam" else {}
    config["optimizer"] = {**config["optimizer"], "params": {"lr": run.rate, **freeze}}
    if stages > 1:
        config["pipeline"] = {"stages": stages}
    if parts > 1:
        config["tensor_parallel"] = {"autotp_size": parts}
    engine, optimizer, _, _ = thinwire.initialize(model=GPT2LMHeadModel(size), config=config)
    assert optimizer is not None
    batches = _batches(text.training, windows, [run.seed, engine.comm.rank])
    for _ in range(run.steps):
        engine.train_batch(batches)
    held_out = _batches(text.validation, windows, [1])
    loss = torch.stack([engine.eval_batch(held_out) for _ in range(_EVALUATED)]).mean()
    sent = torch.tensor(float(optimizer.bytes_sent), dtype=torch.float64)
    comm.all_reduce(sent)
    found = {"loss": float(loss), "sent": int(sent)}
    if "stage 3" not in run.contender:  # whose ranks hold other parts
        found["replicas_alike"] = _alike(comm, engine.comm, optimizer)
    engine.close()
    return found


def _alike(comm: Communicator, replicas: Communicator, optimizer: Any) -> bool:
    """Whether ranks that hold the same of the model hold the same bits of it, all over the job."""
    bits = hashlib.sha256()
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            local = getattr(parameter, "_local_tensor", parameter).detach()
            bits.update(local.contiguous().view(torch.uint8).numpy().tobytes())
    differ = torch.tensor(float(len({*replicas.all_gather_bytes(bits.digest(), "compare replicas")}) > 1))
    comm.all_reduce(differ)
    return not differ


def _batches(text: Any, windows: int, seed: list[int]) -> Iterator[dict[str, Tensor]]:
    random = np.random.default_rng(seed)
    while True:
        starts = torch.from_numpy(random.integers(0, len(text) - _LENGTH, windows))
        tokens = torch.from_numpy(text)[starts[:, None] + torch.arange(_LENGTH)].long()
        yield {"input_ids": tokens, "labels": tokens}


def _parse(arguments: Sequence[str]) -> _Settings:
    parser = Parser(_MODULE, "Trains one GPT on a mesh of pipeline stages, replicas and tensor parallel parts.")
    parser.add_argument("--mesh", nargs=3, type=positive, default=[1, 2, 1], metavar=("STAGES", "REPLICAS", "PARTS"))
    parser.add_argument("--steps", type=positive, default=300)
    parser.add_argument("--width", type=positive, default=64, help="of the GPT's 4 layers")
    parser.add_argument("--micro-batches", type=positive, default=4, help=f"of a step's {_WINDOWS} windows")
    parser.add_argument("--rates", nargs="+", type=rate, default=[2e-3], help="tried with the first seed")
    parser.add_argument("--seeds", type=positive, default=1, help="run at the best rate")
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=[*CONTENDERS][:3], metavar="NAME")
    parser.add_argument("--output", type=Path, default=OUTPUT / "meshes.json", help="the JSON file")
    options: argparse.Namespace = parser.parse_args(arguments)
    check_writable(options.output.parent, "--output")
    stages, replicas, parts = options.mesh
    mesh = (stages, replicas, parts)
    return _Settings(
        stages * replicas * parts,
        mesh,
        options.steps,
        options.width,
        options.micro_batches,
        options.rates,
        options.seeds,
        options.contenders,
        options.output,
    )


if __name__ == "__main__":
    sys.exit(main())
