"""What harnesses share: trials by seed and what was found in them; ranks on threads, each of which may end in its own
way, and the judgement of how they ended.

Bad is a wrong result, an exception that does not come from a check of thinwire's own, and a trial without an end.
"""

import hashlib
import os
import random
import re
import subprocess
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

import thinwire
from tests.launching import REPOSITORY, environment
from tests.optim.training import weights
from thinwire.comm import CommunicationTimeout, Communicator, threads
from thinwire.engine.errors import CheckpointError, UsageError

# Trials take milliseconds; only one that hangs takes so long, however slow the machine.
LONGEST_TRIAL_SECONDS = 300.0
MOST_EXAMPLES = 5
PACKAGE = str(Path(thinwire.__file__).parent)
TIMEOUT = 15.0
"""Seconds for a collective: on a busy machine ranks that are well wait for one another for a few."""

Trial = Callable[[str], Iterable[str]]
"""What is wrong with the trial of a seed."""


@dataclass
class Outcome:
    """`examples`: what was wrong with the first bad trials, each with the seed and the trial to repeat it by."""

    tried: int = 0
    bad: int = 0
    examples: list[str] = field(default_factory=list)

    def note(self, faults: Iterable[str]) -> None:
        """Count another trial, with what was wrong in it."""
        self.tried += 1
        found = list(faults)
        self.bad += bool(found)
        self.examples = (self.examples + found)[:MOST_EXAMPLES]


def over_seeds(trials: Callable[[], AbstractContextManager[Trial]]) -> Callable[[int, int], Outcome]:
    """The harness of so many trials, each of a seed of its own; RuntimeWarnings are no fault. One that hangs is the
    last."""

    def run(count: int, seed: int) -> Outcome:
        outcome = Outcome()
        with trials() as trial, warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            for name in (f"{seed}-{number}" for number in range(count)):
                found: list[str] = []
                thread = threading.Thread(target=_watch, args=(trial, name, found), daemon=True)
                thread.start()
                thread.join(LONGEST_TRIAL_SECONDS)
                outcome.note([f"{name}: it hangs"] if thread.is_alive() else [f"{name}: {fault}" for fault in found])
                if thread.is_alive():
                    break
        return outcome

    return run


def each_seed(trial: Trial) -> Callable[[int, int], Outcome]:
    """The harness of trials that share nothing."""
    return over_seeds(lambda: nullcontext(trial))


def _watch(trial: Trial, seed: str, found: list[str]) -> None:
    try:
        found += trial(seed)
    except BaseException as error:
        found.append("".join(traceback.format_exception(error)[-4:]))


def in_own_process(python: str, module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """One that may fork, as no backward has run in it."""
    quiet = environment(TORCH_CPP_LOG_LEVEL="ERROR")
    return subprocess.run([python, "-m", module, *arguments], env=quiet, cwd=REPOSITORY, capture_output=True, text=True)


def of_jobs(module: str, *kind: str) -> Callable[..., Outcome]:
    """The harness of so many jobs that a program starts, which gives `judged` of each."""

    def run(count: int, seed: int, python: str = sys.executable) -> Outcome:
        outcome = Outcome()
        done = in_own_process(python, module, str(count), str(seed), *kind)
        lines = done.stdout.splitlines()
        for line in lines[:count]:
            outcome.note([line] if line != "good" else [])
        if done.returncode or len(lines) < count:
            outcome.note([f"{done.returncode}: {done.stderr[-800:]}"])
        return outcome

    return run


def judged(job: object, seconds: float, found: list[str]) -> None:
    """Say what is wrong with one of many jobs."""
    print(f"{seconds:.1f} s {job}", file=sys.stderr, flush=True)
    print("; ".join(found).replace("\n", " ") or "good", flush=True)


def tell(line: str) -> None:
    """Say a whole line at once: ranks share one output."""
    os.write(1, f"{line}\n".encode())


def raised_by_us(error: BaseException) -> bool:
    """Whether a `raise` of thinwire's own says what is wrong, and no line of it or of torch has stumbled."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    return last.filename.startswith(PACKAGE) and (last.line or "").startswith("raise ")


def is_documented(error: BaseException) -> bool:
    """Whether an error of a checkpoint is one that a check of thinwire's own has raised."""
    if isinstance(error, CheckpointError | UsageError):
        return True
    return isinstance(error, ValueError | TypeError) and raised_by_us(error)


def descend(value: Any, source: random.Random, deeper: float = 0.85) -> tuple[str, Any, Any]:
    """One place in nested dicts and lists: where, what it is in, and its key there."""
    where, inner = "", value
    while True:
        key = source.choice(list(inner) if isinstance(inner, dict) else range(len(inner)))
        where, below = f"{where}.{key}", inner[key]
        if not (isinstance(below, dict | list) and below and source.random() < deeper):
            return where, inner, key
        inner = below


def contents(folder: Path) -> dict[str, bytes | None]:
    """Every name below a folder, and the content of its files: to see whether anything was written there."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() and not path.is_symlink() else None
        for path in sorted(folder.rglob("*"))
    }


@dataclass
class End:
    """How a rank's body ended: with a result, an error, or, where it has neither, not at all."""

    ended: bool = False
    result: Any = None
    error: BaseException | None = None


def run_ranks(body: Callable[[Communicator], Any], size: int) -> list[End]:
    """The end of `body` on each rank."""
    ends = [End() for _ in range(size)]

    def on_rank(comm: Communicator) -> None:
        end = ends[comm.rank]
        try:
            end.result = body(comm)
        except BaseException as error:
            end.error = error
            raise
        finally:
            end.ended = True

    try:
        threads.run(on_rank, size, TIMEOUT)
    except Exception:
        assert any(end.error is not None for end in ends)
    return ends


def digest(model: nn.Module) -> str:
    """Of the weights' bits."""
    return hashlib.sha256(weights(model).numpy().tobytes()).hexdigest()[:16]


def faults(ends: list[End], names: str = "", *, may_wait: bool = False) -> list[str]:
    """What is wrong with how ranks ended: all with errors of ours, or all with the same digest of weights as result.

    `names` is what one of the texts must match. `may_wait`: ranks may wait for one another until the timeout says who
    did not come, where one of them made a collective call that the others never make.
    """
    stuck = [rank for rank, end in enumerate(ends) if not end.ended]
    if stuck:
        return [f"ranks {stuck} hang"]
    errors = [end.error for end in ends]
    if not any(errors):
        results = [end.result for end in ends]
        return [] if len(set(results)) == 1 else [f"silent divergence: {results}"]
    late = all(error is None or CommunicationTimeout.__name__ in f"{type(error).__name__} {error}" for error in errors)
    if late and not may_wait:
        return [f"a hang, ended by the timeout: {next(error for error in errors if error is not None)}"]
    found = [f"rank {rank} has no error" for rank, error in enumerate(errors) if error is None]
    for rank, error in enumerate(errors):
        documented = isinstance(error, ValueError | TypeError | RuntimeError | KeyError) and str(error)
        if error is not None and not (documented and raised_by_us(error)):
            last = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{Path(last.filename).name}:{last.lineno} {last.line}"
            found.append(f"rank {rank} raises {type(error).__name__}: {str(error)[:200]} [{where}]")
    texts = " | ".join(str(error) for error in errors)
    if not found and not re.search(names, texts):
        found.append(f"no text names {names!r}: {texts[:400]}")
    return found
