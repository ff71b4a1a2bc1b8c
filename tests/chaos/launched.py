"""Real ranks of which one fails or differs, over Gloo and MPI, 1-bit and at stage 3: nobody hangs, nobody goes on
alone, and where all come to their end they have the same weights.

``python -m tests.chaos.launched rank BACKEND FORM FAULT ODD MOMENT`` is one rank of a trial.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import warnings
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch

from tests.chaos.harness import Outcome, over_seeds
from tests.chaos.kills import digest_of
from tests.engine.tiny import loss_of, make_engine, settings
from tests.launching import REPOSITORY, environment, free_port
from thinwire import comm as communication
from thinwire.comm import Communicator, launch
from thinwire.engine import Engine

RANKS = 3
STEPS = 12
FREEZE = 4
TIMEOUT = 6.0
"""Seconds of each collective, after which ranks that wait for one that does not come give up."""
LONGEST_SECONDS = 240.0
"""After which a trial hangs: it takes 10 to 30 on a machine that does nothing else."""

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
    return ("gloo", "mpi") if _mpirun() is not None else ("gloo",)


def _mpirun() -> str | None:
    beside_python = Path(sys.executable).with_name("mpirun")
    return str(beside_python) if beside_python.exists() else shutil.which("mpirun")


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
        _tell(f"error {rank} {type(error).__name__}: {text}")
        raise
    _tell(f"ended {rank} {digest}")


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


def _tell(line: str) -> None:
    """A whole line at once: the ranks share one output."""
    os.write(1, f"{line}\n".encode())


# The trial


def faults(trial: Trial, python: str = sys.executable) -> list[str]:
    """What is wrong with how the ranks of a trial ended."""
    with tempfile.TemporaryFile("w+") as output:
        jobs = _start(trial, output, python)
        hung = _wait(trial, jobs)
        output.seek(0)
        lines = output.read().splitlines()
    if hung:
        return [f"{hung} of the processes hang; {lines[-3:]}"]
    ended = {line.split()[2] for line in lines if line.startswith("ended")}
    errors = [line for line in lines if line.startswith("error")]
    finished = sum(line.startswith("ended") for line in lines)
    if trial.fault == "none":
        return [] if finished == RANKS and len(ended) == 1 else [f"unharmed, it ends with {ended} and {errors}"]
    if finished:
        return [f"{finished} ranks come to their end, with {ended}, others with {errors}"]
    if any(job.returncode == 0 for job in jobs):
        return [f"exit codes {[job.returncode for job in jobs]}"]
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


def _start(trial: Trial, output: object, python: str) -> list[subprocess.Popen[bytes]]:
    program = [python, "-m", "tests.chaos.launched", "rank", *trial.arguments]
    quiet = {"TORCH_CPP_LOG_LEVEL": "ERROR"}
    common = {"stdout": output, "stderr": subprocess.DEVNULL, "cwd": REPOSITORY}
    if trial.backend == "mpi":
        launcher = [str(_mpirun()), "--map-by", ":OVERSUBSCRIBE", "-n", str(RANKS)]
        return [subprocess.Popen([*launcher, *program], env=environment(**quiet), **common)]  # type: ignore[call-overload]
    place = {"WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    return [
        subprocess.Popen(program, env=environment(RANK=str(rank), **place, **quiet), **common)  # type: ignore[call-overload]
        for rank in range(RANKS)
    ]


def _wait(trial: Trial, jobs: list[subprocess.Popen[bytes]]) -> int:
    """How many processes do not end, apart from one that was stopped."""
    stopped = trial.odd if trial.fault == "stopped" and trial.backend == "gloo" else None
    hung = 0
    for rank, job in enumerate(jobs):
        if rank == stopped:
            continue
        try:
            job.wait(LONGEST_SECONDS)
        except subprocess.TimeoutExpired:
            hung += 1
    for job in jobs:
        job.kill()
        job.wait()
    return hung


def one(seed: str) -> list[str]:
    trial = Trial.random(seed, backends())
    return [f"{trial}: {fault}" for fault in faults(trial)]


def run(count: int, seed: int) -> Outcome:
    return over_seeds(nullcontext(one), count, seed)


if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    _, _, backend, form, fault, odd, moment = sys.argv
    live(Trial(backend, form, fault, int(odd), int(moment)))
