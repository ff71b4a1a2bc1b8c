"""Ranks that hold a model together, in stages, replicas and parts, of which one fails in the middle of a step: all
others end with an error that names who is lost, and the last checkpoint is resumed.

``python -m tests.chaos.meshes MESH FAULT ODD MOMENT FOLDER`` is one rank of a trial.
"""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tests.chaos.harness import each_seed, tell
from tests.engine.parts_job import CONFIG, MICRO_BATCHES
from tests.launching import Jobs
from tests.parallel.training import batches, gpt2
from thinwire import comm as communication
from thinwire import initialize
from thinwire.engine import Engine

RANKS, STEPS, FREEZE = 4, 4, 2
TIMEOUT = 8.0
"""Seconds of each collective, after which ranks that wait for one that does not come give up."""

MESHES = {"pp dp": (2, 1), "dp tp": (1, 2), "pp tp": (2, 2), "pp": (4, 1), "pp ahead": (4, 1), "pp dp ahead": (2, 1)}
"""By name: stages, and parts of each; the rest are replicas. Those ahead run Eager1F1B, with packets between."""

FAULTS = ("none", "killed", "raises", "stopped")
_ONE_BIT = {"type": "OneBitAdam", "params": {"lr": 2e-3, "freeze_step": FREEZE}}


@dataclass(frozen=True)
class Trial:
    """Rank `odd` does what `fault` says in its forward number `moment` through a layer."""

    mesh: str
    fault: str
    odd: int
    moment: int

    @classmethod
    def random(cls, seed: str) -> Trial:
        """The one of a seed."""
        source = random.Random(seed)
        mesh, fault = source.choice(list(MESHES)), source.choice(FAULTS)
        layers = 4 // MESHES[mesh][0]  # of a stage
        return cls(mesh, fault, source.randrange(RANKS), source.randrange(1, STEPS * MICRO_BATCHES * layers))


# What one rank does


def live(trial: Trial, folder: str) -> None:
    """Train and save after each step, from the last checkpoint on; say how it ended."""
    rank = int(os.environ["RANK"])
    try:
        communication.init(timeout=TIMEOUT, quiet=True)
        engine = _engine(trial, rank == trial.odd)
        if os.listdir(folder):
            engine.load_checkpoint(folder)
        began = engine.global_steps
        stream, loss = batches(engine.comm.rank), torch.zeros(())
        for step in range(STEPS):
            found = [next(stream) for _ in range(MICRO_BATCHES)]
            if step >= began:
                loss = engine.train_batch(iter(found))
                engine.save_checkpoint(folder)
    except Exception as error:
        text = " ".join(str(error).split())
        tell(f"error {rank} {type(error).__name__}: {text[:1000]}")
        raise
    tell(f"ended {rank} {began} {float(loss):.6f}")


def _engine(trial: Trial, odd: bool) -> Engine:
    stages, parts = MESHES[trial.mesh]
    model, calls = gpt2(), [0]

    def misbehave(layer: nn.Module, given: Any) -> None:
        calls[0] += 1
        if odd and calls[0] == trial.moment:
            if trial.fault == "raises":
                raise ZeroDivisionError("a bug of the user")
            os.kill(os.getpid(), {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}.get(trial.fault, 0))

    for layer in model.transformer.h:
        layer.register_forward_pre_hook(misbehave)
    config = {**CONFIG, "optimizer": _ONE_BIT, "gradient_clipping": 1.0}
    ahead = {"schedule": "Eager1F1B", "activations": "int8", "gradients": "int8"} if "ahead" in trial.mesh else {}
    config |= {"pipeline": {"stages": stages, **ahead}, "tensor_parallel": {"autotp_size": parts}}
    return initialize(model=model, config=config)[0]


# The trial


def faults(trial: Trial, python: str = sys.executable) -> list[str]:
    """What is wrong with how the ranks of a trial ended, and with how they resume."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            lines = _lines(trial, folder, python)
            resumed = _lines(Trial(trial.mesh, "none", -1, 0), folder, python)
        except subprocess.TimeoutExpired as error:
            return [f"processes hang: {error}"]
    ended = [line.split()[2:] for line in lines if re.match(r"ended \d ", line)]
    errors = {int(line.split()[1]): line for line in lines if re.match(r"error \d ", line)}
    again = [line.split()[2:] for line in resumed if re.match(r"ended \d ", line)]
    found = list[str]()
    if len(again) != RANKS or len({tuple(one) for one in again}) != 1:
        found.append(f"they resume to {again}: {resumed}")
    if trial.fault == "none":
        return found if len(ended) == RANKS else [*found, f"unharmed, they end with {ended} and {errors}"]
    if ended:
        found.append(f"{len(ended)} ranks come to their end, others with {errors}")
    silent = {rank for rank in range(RANKS) if rank not in errors} - {trial.odd}
    if silent:
        found.append(f"{silent} end without a word: {lines}")
    # Rank 0 serves the store by which others find out who is lost.
    named = rf"rank {trial.odd} did not answer" + ("|job's store" if trial.odd == 0 else "")
    nameless = [text for rank, text in errors.items() if rank != trial.odd and not re.search(named, text)]
    return found + [f"rank {trial.odd} is not named in {text}" for text in nameless]


def _lines(trial: Trial, folder: str, python: str) -> list[str]:
    victim = trial.odd if trial.fault == "stopped" else -1
    arguments = ("-m", "tests.chaos.meshes", trial.mesh, trial.fault, str(trial.odd), str(trial.moment), folder)
    done = Jobs(python).orphans(RANKS, *arguments, victim=victim, TORCH_CPP_LOG_LEVEL="ERROR")
    return "".join(one.stdout for one in done).splitlines()


@each_seed
def run(seed: str) -> list[str]:
    trial = Trial.random(seed)
    return [f"{trial}: {fault}" for fault in faults(trial)]


if __name__ == "__main__":
    torch.set_num_threads(1)

    warnings.simplefilter("ignore")
    _, mesh, fault, odd, moment, folder = sys.argv
    live(Trial(mesh, fault, int(odd), int(moment)), folder)
