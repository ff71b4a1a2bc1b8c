"""``python -m tests.engine.meshes_job FOLDER``: four ranks save on one mesh, load on another; ``FOLDER MESH``: the last
rank is killed in a step."""

import contextlib
import json
import os
import signal
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.parallel.training import RATE, batches, gpt2
from tests.refusing import refused
from thinwire import comm, initialize
from thinwire.engine import CheckpointError

PROGRAM = ("-m", "tests.engine.meshes_job")
ROWS, BEFORE = 3, 3
OPTIMIZERS: dict[str, Any] = {
    "AdamW": {"type": "AdamW", "params": {"lr": RATE, "weight_decay": 0.01}},
    "OneBitAdam": {"type": "OneBitAdam", "params": {"lr": RATE, "freeze_step": 2}},
}
MESHES = {"pp2xdp2": (2, 1), "dp2xtp2": (1, 2), "pp2xtp2": (2, 2), "tp4": (1, 4), "pp4": (4, 1), "dp4": (1, 1)}


def build(optimizer: str, stages: int, cut: int, replicas: int, **config: Any) -> Any:
    parts = {"pipeline": {"stages": stages}, "tensor_parallel": {"autotp_size": cut}} if stages * cut > 1 else {}
    settings = {
        "train_micro_batch_size_per_gpu": 4 * ROWS // (replicas * stages),
        "gradient_accumulation_steps": stages,
        "optimizer": OPTIMIZERS[optimizer],
        "gradient_clipping": 1.0,
        **parts,
        **config,
    }
    model = gpt2()
    model.transformer.h[2].mlp.requires_grad_(False)  # type: ignore[union-attr, operator]
    return initialize(model=model, config=settings)[0]


def stream(micro_batches: int, replicas: int, rank: int, skipped: int) -> Iterator[dict[str, Tensor]]:
    """Of four streams a replica's share, from the step `skipped` on: every mesh sees the same in a step."""
    mine = [batches(number) for number in range(rank, 4, replicas)]
    for one in mine:
        for _ in range(skipped):
            next(one)
    while True:
        step = [next(one) for one in mine]
        for number in range(micro_batches):
            given = step[number::micro_batches]
            yield {name: torch.cat([one[name] for one in given]) for name in given[0]}


def losses(engine: Any, skipped: int, steps: int) -> list[float]:
    taken = stream(engine.gradient_accumulation_steps(), engine.comm.size, engine.comm.rank, skipped)
    return [float(engine.train_batch(taken)) for _ in range(steps)]


def on(mesh: str, optimizer: str) -> Any:
    stages, cut = MESHES[mesh]
    return build(optimizer, stages, cut, 4 // (stages * cut), zero_optimization={"stage": int(stages == 2)})


def main(folder: str) -> None:
    """A job goes from mesh to mesh and takes a step on each, with the losses of one process: the folder's losses.json.
    It begins as one process saved it, `alone`, or where its optimizer freezes, from its first step."""
    expected = json.loads((Path(folder) / "losses.json").read_text())
    for optimizer, tolerance, meshes in (("AdamW", 1e-5, [*MESHES]), ("OneBitAdam", 0.01, ["pp2xdp2", "dp2xtp2"])):
        saved, steps, own = ("alone", BEFORE, 0.0) if optimizer == "AdamW" else ("", 0, 0.0)
        for mesh in [meshes[0], *meshes]:
            engine, repeated = on(mesh, optimizer), saved == f"{optimizer}-{mesh}"
            warned = saved and not repeated and optimizer != "AdamW"
            with pytest.warns(match="another part of the model") if warned else contextlib.nullcontext():
                if saved:
                    engine.load_checkpoint(folder, saved)
            assert engine.global_steps == steps
            if not saved:
                losses(engine, 0, BEFORE)
                steps = BEFORE
            if not repeated:
                saved, steps = f"{optimizer}-{mesh}", steps + 1
                found = losses(engine, steps - 1, 1)
                assert found == pytest.approx([expected[steps - 1]], rel=tolerance), (saved, found)
                assert engine.save_checkpoint(folder, saved, exclude_frozen_parameters=mesh == "pp4")
            found = losses(engine, steps, 1)
            assert found == pytest.approx([expected[steps]], rel=tolerance), (mesh, saved, found)
            assert not repeated or found == own, (saved, found, own)
            own = found
        whole = engine.whole_state_dict()
        if dist.get_rank() == 0:
            assert {*whole} == {name for name, _ in gpt2().named_parameters()}
    path = Path(folder) / "AdamW-pp2xtp2" / "rank-00003.safetensors"
    comm.init().barrier()
    if dist.get_rank() == 0:
        path.write_bytes(path.read_bytes()[:-1])
    comm.init().barrier()
    refused(CheckpointError, "rank-00003.safetensors has", engine.load_checkpoint, folder, "AdamW-pp2xtp2")


def lose(folder: str, mesh: str) -> None:
    """The last rank is killed in the backward of a step, after one that was saved."""
    engine = on(mesh, "AdamW")
    losses(engine, 0, 1)
    assert engine.save_checkpoint(folder)
    if dist.get_rank() == dist.get_world_size() - 1:
        parameter = next(engine.module.parameters())
        parameter.register_hook(lambda gradient: os.kill(os.getpid(), signal.SIGKILL))
    losses(engine, 1, 1)


if __name__ == "__main__":
    comm.init(backend="gloo", timeout=60.0)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    (lose if sys.argv[2:] else main)(*sys.argv[1:])
