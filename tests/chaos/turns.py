"""Calls that are cut short, and calls in two threads at once.

`interrupts`: an exception comes out of any line of a backward or a step on one rank, as Ctrl+C and handlers of signals
raise it, and the loop goes on: with the step or without it on all ranks alike, or with an error that says what to do.
`threads`: a second thread calls the same optimizer: it takes its turn, or gets an error that says who is at work.
"""

from __future__ import annotations

import random
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch import nn

from tests.chaos.harness import PACKAGE, digest, each_seed, faults, raised_by_us, run_ranks
from tests.optim.subject import FREEZE, SUBJECTS, Subject
from tests.optim.training import loss_of, make_model
from thinwire.comm import Communicator
from thinwire.zero import ShardedOptimizer

STEPS_AFTER = 4
ERRORS: tuple[type[BaseException], ...] = (KeyboardInterrupt, SystemExit, TimeoutError)
TRANSPORT = f"{PACKAGE}/comm/threads.py"
"""Where one rank carries out what all of them wait for: no rank of a real job does."""


@dataclass(frozen=True)
class Exact:
    """ShardedOptimizer at one stage, built as subjects are."""

    stage: int

    def __str__(self) -> str:
        return f"ShardedOptimizer-{self.stage}"

    def build(self, model: nn.Module, comm: Communicator, **options: Any) -> ShardedOptimizer:
        named, given = model.named_parameters(), {"block_size": 8, "lr": 1e-2, **options}
        return ShardedOptimizer(named, torch.optim.AdamW, stage=self.stage, comm=comm, **given)


ALL: list[Subject | Exact] = [*SUBJECTS, *(Exact(stage) for stage in (0, 1, 2))]


def take(model: nn.Module, optimizer: Any, step: int) -> None:
    """A step as it should be."""
    loss_of(model, optimizer.comm.rank, step).backward()
    optimizer.step()
    optimizer.zero_grad()


class Lines:
    """Counts the lines of the library that this thread enters, and raises at one of them."""

    def __init__(self, at: int = 0, error: type[BaseException] = KeyboardInterrupt) -> None:
        self.count, self._at, self._error = 0, at, error
        self.where = ""

    def __call__(self, frame: FrameType, event: str, argument: object) -> Any:
        name = frame.f_code.co_filename
        # An error on the first line of a hook comes out of autograd itself, and leaves `.grad` as that does.
        if not name.startswith(PACKAGE) or name == TRANSPORT or frame.f_code.co_qualname == "GradientHook.__call__":
            return None
        if event == "line":
            self.count += 1
            if self.count == self._at:
                self.where = f"{name.removeprefix(PACKAGE)}:{frame.f_lineno} in {frame.f_code.co_name}"
                sys.settrace(None)
                raise self._error("cut short")
        return self

    def trace(self, body: Callable[[], object]) -> bool:
        """Whether it was cut short."""
        sys.settrace(self)
        try:
            body()
        except self._error:
            return True
        finally:
            sys.settrace(None)
        return False


@dataclass(frozen=True)
class Interrupt:
    """A fraction of the way through a step the rank `odd` gets an error; then it calls zero_grad(), or just goes on."""

    subject: Subject | Exact
    size: int
    odd: int
    moment: int
    fraction: float
    error: type[BaseException]
    zeroes: bool

    @classmethod
    def random(cls, seed: str) -> Interrupt:
        source = random.Random(seed)
        size = source.choice((1, 1, 2))
        return cls(
            source.choice(ALL),
            size,
            source.randrange(size),
            source.choice((1, 3, FREEZE, FREEZE + 1, FREEZE + 4, FREEZE + 5)),
            source.random(),
            source.choice(ERRORS),
            source.random() < 0.7,
        )

    @property
    def may_add_up(self) -> bool:
        """Whether a loop that goes on behind a step, before zero_grad(), adds to its gradients as torch does."""
        return self.subject.stage == 0 and not self.zeroes

    def train(self, comm: Communicator, happens: str) -> tuple[str, str]:
        """A rank's weights in the end, and where it was cut short. `happens`: what does at the moment: an `error`; a
        step that is `left`, `dropped` after its backward or `not zeroed` after it; or `nothing`."""
        model = make_model()
        optimizer = self.subject.build(model, comm)
        where, counted = "", Lines()

        iterate = partial(take, model, optimizer)

        for step in range(self.moment - 1):
            iterate(step)
        counted.trace(lambda: iterate(self.moment - 1))
        if happens == "dropped":
            loss_of(model, comm.rank, self.moment).backward()
            optimizer.zero_grad()
        elif happens == "error" and comm.rank == self.odd:
            lines = Lines(1 + int(self.fraction * counted.count), self.error)
            if lines.trace(lambda: iterate(self.moment)):
                where = lines.where
                try:
                    if self.zeroes:
                        optimizer.zero_grad()
                    optimizer.state_dict()
                    iterate(self.moment + 1)
                except RuntimeError as refused:
                    if not raised_by_us(refused) or "zero_grad()" not in str(refused):
                        raise
                    optimizer.zero_grad()
                    iterate(self.moment + 1)
                return self._rest(model, optimizer, iterate, self.moment + 2), where
        elif happens == "not zeroed":
            loss_of(model, comm.rank, self.moment).backward()
            optimizer.step()
        elif happens != "left":
            iterate(self.moment)
        return self._rest(model, optimizer, iterate, self.moment + 1), where

    def _rest(self, model: nn.Module, optimizer: Any, iterate: Callable[[int], None], begin: int) -> str:
        for step in range(begin, self.moment + STEPS_AFTER):
            iterate(step)
        optimizer.synchronize_weights()
        optimizer.comm.barrier()
        return digest(model)


@each_seed
def interrupts(seed: str) -> list[str]:
    """What is wrong with the trial of that seed."""
    trial = Interrupt.random(seed)
    places: list[str] = []

    def body(comm: Communicator) -> str:
        found, where = trial.train(comm, "error")
        places.append(where)
        return found

    ends = run_ranks(body, trial.size)
    found = faults(ends, "cut short|zero_grad|rank|call" if trial.size > 1 else "cut short", may_wait=True)
    if not found and trial.size == 1 and ends[0].error is None:
        wanted = {
            happens: run_ranks(lambda comm, happens=happens: trial.train(comm, happens)[0], 1)[0].result
            for happens in ("nothing", "left", "dropped", "not zeroed" if trial.may_add_up else "nothing")
        }
        if ends[0].result not in wanted.values():
            found = [f"goes on with {ends[0].result}, neither {wanted}"]
    return [f"{trial} at {places}: {fault}" for fault in found]


LONGEST_CALL_SECONDS = 60.0
CALLS: dict[str, Callable[[nn.Module, Any], object]] = {
    "backward": lambda model, optimizer: loss_of(model, 0, 77).backward(),
    "step": lambda model, optimizer: optimizer.step(),
    "zero_grad": lambda model, optimizer: optimizer.zero_grad(),
    "state_dict": lambda model, optimizer: optimizer.state_dict(),
}


@dataclass(frozen=True)
class Second:
    """At some line of a step a second thread makes a `call` beside it, or, `free`, makes calls all along."""

    subject: Subject | Exact
    moment: int
    fraction: float
    call: str
    free: bool

    @classmethod
    def random(cls, seed: str) -> Second:
        source = random.Random(seed)
        moment = source.choice((1, 3, FREEZE, FREEZE + 1, FREEZE + 4))
        call = source.choice(list(CALLS))
        return cls(source.choice(ALL), moment, source.random(), call, source.random() < 0.2)

    def train(self, comm: Communicator) -> str:
        """What is wrong on the only rank."""
        model = make_model()
        optimizer = self.subject.build(model, comm)
        wrong: list[str] = []
        ended: list[str] = []

        iterate = partial(take, model, optimizer)

        def beside() -> None:
            try:
                with torch.autograd.set_multithreading_enabled(False):
                    CALLS[self.call](model, optimizer)
                ended.append("")
            except BaseException as error:
                ended.append(str(error))
                wrong.extend(_faults(error))

        for step in range(self.moment - 1):
            iterate(step)
        counted = Lines()
        counted.trace(lambda: iterate(self.moment - 1))
        lines = LinesWithThread(1 + int(self.fraction * counted.count), beside, self.free)
        try:
            lines.trace(lambda: iterate(self.moment))
        except BaseException as error:
            wrong.extend(_faults(error))
        lines.finish()
        if ended == []:
            wrong.append("the second thread hangs")
        try:
            optimizer.zero_grad()
            for step in range(self.moment + 1, self.moment + STEPS_AFTER):
                iterate(step)
            optimizer.synchronize_weights()
        except BaseException as error:
            if "was cut short while weights" not in str(error):
                wrong.extend(["afterwards", *_faults(error)] if not raised_by_us(error) else [f"afterwards {error}"])
        if self.call == "backward" or self.free or "thread" not in ended[0]:
            return "; ".join(wrong)
        (alone,) = run_ranks(
            lambda comm: Interrupt(self.subject, 1, 0, self.moment, 0.0, SystemExit, True).train(comm, "nothing")[0], 1
        )
        if not wrong and alone.result != digest(model):
            wrong.append(f"refused at {lines.where}, it has changed the weights")
        return "; ".join(wrong)


class LinesWithThread(Lines):
    """Runs something in a second thread at one of the lines, and all along where it is `free`."""

    def __init__(self, at: int, beside: Callable[[], None], free: bool) -> None:
        super().__init__()
        self._here, self._beside, self._free = at, beside, free
        self._thread: threading.Thread | None = None

    def __call__(self, frame: FrameType, event: str, argument: object) -> Any:
        found = super().__call__(frame, event, argument)
        if found is not None and event == "line" and self.count == self._here and self._thread is None:
            self.where = f"{frame.f_code.co_filename.removeprefix(PACKAGE)}:{frame.f_lineno} in {frame.f_code.co_name}"
            self._thread = threading.Thread(target=self._run, name="second", daemon=True)
            self._thread.start()
            if not self._free:
                self._thread.join(LONGEST_CALL_SECONDS)
        return found

    def _run(self) -> None:
        for _ in range(20 if self._free else 1):
            self._beside()

    def finish(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="second", daemon=True)
            self._thread.start()
        self._thread.join(LONGEST_CALL_SECONDS)


def _faults(error: BaseException) -> list[str]:
    if isinstance(error, RuntimeError) and (raised_by_us(error) or "modified by an inplace operation" in str(error)):
        return []  # that is torch's, where weights move during a backward
    return ["".join(traceback.format_exception(error)[-3:])]


@each_seed
def threads(seed: str) -> list[str]:
    """What is wrong with the trial of that seed."""
    trial = Second.random(seed)
    (end,) = run_ranks(trial.train, 1)
    if end.error is not None:
        return [f"{trial}: {end.error!r}"]
    return [f"{trial}: {end.result}"] if end.result else []
