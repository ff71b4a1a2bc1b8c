"""A process forks in the midst of training: the child drops, closes and leaves what it has got without a hang, or uses
it and gets an error that says so; the parent goes on as if nothing had been.

``python -m tests.chaos.forks rank FORM COUNT SEED`` is one rank of a job of so many trials, one after another.
"""

import gc
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.utils.data import DataLoader

import thinwire
from tests.chaos.harness import Outcome, digest, raised_by_us, tell
from tests.launching import Jobs
from tests.optim.training import loss_of, make_model
from thinwire import comm as communication
from thinwire.zero import ShardedOptimizer

RANKS = 2
FREEZE = 3
LONGEST_CHILD_SECONDS = 30.0
REFUSED, HARMLESS, WRONG = 40, 41, 42
"""Exit codes of a child: it had an error that names the fork, none, or something else."""

ONE_BIT: dict[str, Any] = {"lr": 3e-3, "freeze_step": FREEZE, "block_size": 64}


class Program:
    """What a rank trains, and what a fork of it does with that."""

    def __init__(self, form: str) -> None:
        self.world = communication.init(timeout=60.0, quiet=True)
        self.model = make_model()
        name, stage = form.split("-")
        parameters = self.model.parameters()
        self.optimizer: Any
        if name == "sharded":
            self.optimizer = ShardedOptimizer(parameters, torch.optim.AdamW, stage=int(stage), lr=1e-2, block_size=8)
        elif name == "diloco":
            self.optimizer = thinwire.DiLoCo(parameters, torch.optim.AdamW, lr=1e-2, every=4)
        else:
            self.optimizer = thinwire.OneBitAdam(parameters, stage=int(stage), **ONE_BIT)
        self.number = 0

    def backward(self) -> None:
        loss_of(self.model, self.world.rank, self.number).backward()

    def finish(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.number += 1

    # What a child does

    def nothing(self) -> None:
        pass

    def drop(self) -> None:
        del self.optimizer, self.model, self.world
        gc.collect()

    def close(self) -> None:
        self.optimizer.close()
        self.optimizer.close()
        self.world.close()

    def step(self) -> None:
        self.optimizer.step()

    def step_with_gradients_set(self) -> None:
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self.optimizer.step()

    def meet(self) -> None:
        self.world.barrier()

    def synchronize(self) -> None:
        self.optimizer.synchronize_weights()
        self.optimizer.zero_grad()


LEAVES = ("nothing", "drop", "close")
USES = ("step", "step_with_gradients_set", "meet", "synchronize")
FORMS = ("onebit-0", "onebit-1", "onebit-2", "sharded-0", "sharded-1", "sharded-2", "diloco-0")


def in_child(program: Program, act: str, leave: str) -> NoReturn:
    """Do it, and end as `leave` says: at once, or as a script ends."""
    code = HARMLESS
    try:
        getattr(program, act)()
    except RuntimeError as error:
        code = REFUSED if raised_by_us(error) and "fork" in str(error) else WRONG
        if code == WRONG:
            traceback.print_exc()
    except BaseException:
        traceback.print_exc()
        code = WRONG
    if leave == "at once":
        os._exit(code)
    sys.exit(code)


def fork(program: Program, act: str, leave: str) -> int:
    """The exit code of a fork of this process; -1 of one that hangs."""
    child = os.fork()
    if child == 0:
        in_child(program, act, leave)
    return ended(child)


def ended(child: int) -> int:
    deadline = time.monotonic() + LONGEST_CHILD_SECONDS
    while time.monotonic() < deadline:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return -1


def by_multiprocessing(program: Program, act: str, leave: str) -> int:
    process = multiprocessing.get_context("fork").Process(target=in_child, args=(program, act, leave))
    process.start()
    process.join(LONGEST_CHILD_SECONDS)
    if process.exitcode is None:
        process.kill()
        process.join()
        return -1
    return process.exitcode


def by_loader(program: Program, act: str, leave: str) -> int:
    """Workers that hold the program, as a data set may that is a member of a trainer."""
    data = _Data(program)
    return HARMLESS if sum(len(batch) for batch in DataLoader(data, 2, num_workers=2)) == len(data) else WRONG


class _Data(torch.utils.data.Dataset[Tensor]):
    def __init__(self, program: Program) -> None:
        self.program = program

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Tensor:
        return torch.ones(1)


def by_subprocess(program: Program, act: str, leave: str) -> int:
    """With a function that Python calls in the child, before it becomes another program."""
    return HARMLESS if subprocess.run(["true"], preexec_fn=gc.collect, timeout=30).returncode == 0 else WRONG


WAYS: dict[str, Callable[[Program, str, str], int]] = {
    "os.fork": fork,
    "multiprocessing": by_multiprocessing,
    "loader": by_loader,
    "subprocess": by_subprocess,
}


def one(program: Program, source: random.Random) -> str:
    """A trial between other steps: what is wrong with it."""
    way = source.choice(("os.fork", "os.fork", "os.fork", *WAYS))
    act, leave = source.choice(LEAVES + USES), source.choice(("at once", "as a script"))
    moment = source.choice(("between steps", "after backward"))
    for _ in range(source.randrange(3)):
        program.backward()
        program.finish()
    if moment == "after backward":
        program.backward()
    code: int | None = None
    if program.world.rank in source.choice(((0,), (1,), (0, 1))):
        code = WAYS[way](program, act, leave)
    if moment == "after backward":
        program.finish()
    uses = act in USES and way in ("os.fork", "multiprocessing") and code is not None
    wanted = (None, REFUSED) if uses else (None, HARMLESS)
    return "" if code in wanted else f"{moment}, by {way}, a child that does {act} and ends {leave} has {code}"


def live(form: str, count: int, seed: str) -> None:
    """Say of each trial what is wrong, and in the end what weights there are."""
    program, source = Program(form), random.Random(seed)
    for _ in range(count):
        tell(f"tried {one(program, source)}")
    program.optimizer.synchronize_weights()
    tell(f"ended {digest(program.model)}")


def of_form(form: str, count: int, seed: int, python: str = sys.executable) -> list[str]:
    try:
        done = Jobs(python).torchrun(RANKS, "-m", "tests.chaos.forks", "rank", form, str(count), str(seed))
    except subprocess.TimeoutExpired as error:
        return [f"processes hang: {error}"]
    lines = done.stdout.splitlines()
    found = [line for line in lines if line.startswith("tried ") and line != "tried "]
    ends = {line for line in lines if line.startswith("ended ")}
    if done.returncode or len(ends) != 1:
        found.append(f"exit code {done.returncode}, {ends}: {done.stderr[-2000:]}")
    return found


def run(count: int, seed: int, python: str = sys.executable) -> Outcome:
    outcome = Outcome()
    for number, form in enumerate(FORMS):
        share = (count + len(FORMS) - 1 - number) // len(FORMS)
        if share:
            outcome.note(f"{seed}: {form}: {fault}" for fault in of_form(form, share, seed, python))
            outcome.tried += share - 1
    return outcome


if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    _, _, form, count, seed = sys.argv
    live(form, int(count), seed)
