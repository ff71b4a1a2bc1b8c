"""One model on several meshes of stages, replicas and tensor parallel parts: the loss, the bytes that averaging
gradients over replicas costs, and whether replicas stay the same to the bit.

    python -m experiments.convergence.meshes --mesh 2 2 2
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

import thinwire
from experiments.common.command_line import Parser, positive
from experiments.common.launching import launch
from experiments.common.machine import describe
from experiments.common.results import OUTPUT, check_writable, read_json, write_json
from experiments.tasks.corpus import load
from experiments.tasks.next_character import Text, share_text
from thinwire.comm import Communicator

__all__ = ["CONTENDERS", "main"]

_MODULE = "experiments.convergence.meshes"
_LENGTH, _WINDOWS, _MICRO_BATCHES, _EVALUATED = 64, 4, 4, 8
_RATE = 2e-3

_ADAMW = {"optimizer": {"type": "AdamW", "params": {"lr": _RATE}}}


def _stage_3(weights: str, gradients: str, node_size: int) -> dict[str, Any]:
    return {"stage": 3, "weights_codec": weights, "gradients_codec": gradients, "node_size": node_size}


CONTENDERS: dict[str, dict[str, Any]] = {
    "AdamW": _ADAMW,
    "AdamW, int4": {**_ADAMW, "communication_codec": "int4"},
    "1-bit Adam": {"optimizer": {"type": "OneBitAdam", "params": {"lr": _RATE}}},
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
    contenders: list[str]
    output: Path


def main(arguments: Sequence[str] | None = None) -> int:
    """Trains, prints a line a contender and adds to the JSON; the exit code."""
    given = sys.argv[1:] if arguments is None else arguments
    return launch(_MODULE, _parse, _work, given, default_ranks=2)


def _work(comm: Communicator, settings: _Settings) -> None:
    text = share_text(comm, load, _LENGTH)
    for name in settings.contenders:
        started = time.perf_counter()
        run = {"contender": name, "mesh": list(settings.mesh), **_train(comm, settings, text, name)}
        if comm.rank == 0:
            print(f"{name:12} on {settings.mesh}: {run}, {time.perf_counter() - started:.0f} s", flush=True)
            start = {"steps": settings.steps, "rate": _RATE, "machine": describe(), "runs": []}
            found = read_json(settings.output) if settings.output.exists() else start
            found["runs"].append(run)
            write_json(settings.output, found)


def _train(comm: Communicator, settings: _Settings, text: Text, name: str) -> dict[str, Any]:
    stages, _, parts = settings.mesh
    torch.manual_seed(0)
    off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0}
    size = GPT2Config(n_embd=64, n_layer=4, n_head=4, vocab_size=text.kinds, n_positions=_LENGTH, **off)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": _WINDOWS,
        "gradient_accumulation_steps": _MICRO_BATCHES,
        "gradient_clipping": 1.0,
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {"warmup_num_steps": settings.steps // 10, "total_num_steps": settings.steps},
        },
        **CONTENDERS[name],
    }
    if name == "1-bit Adam":
        params = {**config["optimizer"]["params"], "freeze_step": settings.steps // 5}
        config["optimizer"] = {**config["optimizer"], "params": params}
    if stages > 1:
        config["pipeline"] = {"stages": stages}
    if parts > 1:
        config["tensor_parallel"] = {"autotp_size": parts}
    engine, optimizer, _, _ = thinwire.initialize(model=GPT2LMHeadModel(size), config=config)
    assert optimizer is not None
    batches = _batches(text.training, np.random.default_rng(engine.comm.rank))
    for _ in range(settings.steps):
        engine.train_batch(batches)
    held_out = _batches(text.validation, np.random.default_rng(1))
    loss = torch.stack([engine.eval_batch(held_out) for _ in range(_EVALUATED)]).mean()
    sent = torch.tensor(float(optimizer.bytes_sent))
    comm.all_reduce(sent)
    found = {"loss": float(loss), "sent": int(sent)}
    if "stage 3" not in name:  # whose ranks hold other parts
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


def _batches(text: Any, random: np.random.Generator) -> Iterator[dict[str, Tensor]]:
    while True:
        starts = torch.from_numpy(random.integers(0, len(text) - _LENGTH, _WINDOWS))
        tokens = torch.from_numpy(text)[starts[:, None] + torch.arange(_LENGTH)].long()
        yield {"input_ids": tokens, "labels": tokens}


def _parse(arguments: Sequence[str]) -> _Settings:
    parser = Parser(_MODULE, "Trains one GPT on a mesh of pipeline stages, replicas and tensor parallel parts.")
    parser.add_argument("--mesh", nargs=3, type=positive, default=[1, 2, 1], metavar=("STAGES", "REPLICAS", "PARTS"))
    parser.add_argument("--steps", type=positive, default=300)
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=[*CONTENDERS][:3], metavar="NAME")
    parser.add_argument("--output", type=Path, default=OUTPUT / "meshes.json", help="the JSON file")
    options: argparse.Namespace = parser.parse_args(arguments)
    check_writable(options.output.parent, "--output")
    stages, replicas, parts = options.mesh
    ranks = stages * replicas * parts
    return _Settings(ranks, (stages, replicas, parts), options.steps, options.contenders, options.output)


if __name__ == "__main__":
    sys.exit(main())
