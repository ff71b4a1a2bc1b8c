"""Real ranks of which one fails or differs, over Gloo and MPI, 1-bit and at stage 3: nobody hangs, nobody goes on
alone, and where all come to their end they have the same weights.

``python -m tests.chaos.launched rank BACKEND FORM FAULT ODD MOMENT`` is one rank of a trial.
"""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import warnings
from dataclasses import dataclass

import pytest
import torch

from tests.chaos.harness import each_seed, tell
from tests.chaos.kills import digest_of
from tests.engine.tiny import loss_of, make_engine, settings
from tests.launching import Jobs, find_mpirun
from thinwire import comm as communication
from thinwire.comm import Communicator, launch
from thinwire.engine import Engine

RANKS = 3
STEPS = 12
FREEZE = 4
TIMEOUT = 6.0
"""Seconds of each collective, after which ranks that wait for one that does not come give up."""

_ONE_BIT = {"type": "OneBitAdam", "params": {"lr": 3e-3, "freeze_step": FREEZE, "block_size": 64}}
_ADAMW = {"type": "AdamW", "params": {"lr": 1e-2}}
FORMS = {"onebit-0": (0, _ONE_BIT), "onebit-1": (1, _ONE_BIT), "adamw-2": (2, _ADAMW), "adamw-3": (3, _ADAMW)}
FAULTS = ("none", "killed", "raises", "stopped", "another rate", "a step less", "another thinwire")
SILENT_DEATHS = ("killed", "stopped")


@dataclass(frozen=True)
class Trial:
    """Rank `odd` does what `fault` says in step `moment`."""

    backend: str
    form: str
    fault: str
    odd: int
    moment: int

    @classmethod
    def random(cls, seed: str, backends: tuple[str, ...]) -> Trial:
        """The one of a seed."""
        source = random.Random(seed)
        return cls(
            source.choice(backends),
            source.choice(list(FORMS)),
            source.choice(FAULTS),
            source.randrange(RANKS),
            source.randrange(1, STEPS - 1),
        )

    @property
    def arguments(self) -> list[str]:
        return [self.backend, self.form, self.fault, str(self.odd), str(self.moment)]


def backends() -> tuple[str, ...]:
    """Those that this machine has."""
    try:
        find_mpirun()
    except pytest.skip.Exception:
        return ("gloo",)
    return "gloo", "mpi"


# What one rank does


def live(trial: Trial) -> None:
    """Train, and say what weights there are in the end, or which error there was."""
    rank = int(os.environ.get("RANK", os.environ.get("OMPI_COMM_WORLD_RANK", "0")))
    odd = rank == trial.odd
    if odd and trial.fault == "another thinwire":
        launch.__version__ = "0.0.1"
    try:
        world = communication.init(timeout=TIMEOUT, quiet=True)
        digest = _train(world, trial, odd)
    except Exception as error:
        if odd and trial.fault == "raises" and isinstance(error, ZeroDivisionError):
            raise
        text = " ".join(str(error).split())[:300]
        tell(f"error {rank} {type(error).__name__}: {text}")
        raise
    tell(f"ended {rank} {digest}")


def _train(world: Communicator, trial: Trial, odd: bool) -> str:
    stage, optimizer = FORMS[trial.form]
    engine = make_engine(world, settings(stage, optimizer=optimizer))
    for step in range(STEPS):
        if odd and step == trial.moment and not _misbehave(engine, trial.fault):
            continue
        engine.backward(loss_of(engine, world.rank, step))
        engine.step()
    world.barrier()
    return "sharded" if stage == 3 else digest_of(engine)


def _misbehave(engine: Engine, fault: str) -> bool:
    """Do what is wrong; whether the step is taken all the same."""
    if fault == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    if fault == "raises":
        raise ZeroDivisionError("a bug of the user")
    if fault == "another rate":
        engine.optimizer.param_groups[0]["lr"] *= 2
    return fault != "a step less"


# The trial


def faults(trial: Trial, python: str = sys.executable) -> list[str]:
    """What is wrong with how the ranks of a trial ended."""
    jobs, program = Jobs(python), ("-m", "tests.chaos.launched", "rank", *trial.arguments)
    quiet = {"TORCH_CPP_LOG_LEVEL": "ERROR"}
    try:
        if trial.backend == "mpi":
            done = [jobs.mpirun(RANKS, *program, **quiet)]
        else:
            done = jobs.orphans(RANKS, *program, victim=trial.odd if trial.fault == "stopped" else -1, **quiet)
    except subprocess.TimeoutExpired as error:
        return [f"processes hang: {error}"]
    lines = "".join(one.stdout for one in done).splitlines()
    ended = [line.split()[2] for line in lines if re.match(r"ended \d ", line)]
    errors = [line for line in lines if re.match(r"error \d ", line)]
    if trial.fault == "none":
        unharmed = len(ended) == RANKS and len(set(ended)) == 1
        return [] if unharmed else [f"unharmed, it ends with {ended} and {errors}"]
    if ended:
        return [f"{len(ended)} ranks come to their end, with {ended}, others with {errors}"]
    if any(one.returncode == 0 for one in done):
        return [f"exit codes {[one.returncode for one in done]}"]
    return _faults_of_errors(trial, errors)


def _faults_of_errors(trial: Trial, errors: list[str]) -> list[str]:
    silent = trial.fault in (*SILENT_DEATHS, "raises")
    if trial.backend == "mpi" and silent:
        return []  # mpirun ends all ranks as soon as it sees one end
    missing = RANKS - silent - len(errors)
    by_gloo = trial.form == "adamw-3" and trial.fault == "a step less"  # which aborts where FSDP2's messages mismatch
    if missing and not by_gloo:
        return [f"{missing} ranks end without a word; {errors}"]
    wanted = {"another rate": "differ", "another thinwire": "install the same version"}.get(trial.fault, "")
    return [] if all(wanted in error for error in errors) else [f"no word of {wanted!r} in {errors}"]


@each_seed
def run(seed: str) -> list[str]:
    trial = Trial.random(seed, backends())
    return [f"{trial}: {fault}" for fault in faults(trial)]


if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    _, _, backend, form, fault, odd, moment = sys.argv
    live(Trial(backend, form, fault, int(odd), int(moment)))
