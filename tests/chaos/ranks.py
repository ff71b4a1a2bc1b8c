"""Ranks on threads of which each may end in its own way, and the judgement of how they ended: what the harnesses about
training share."""

from __future__ import annotations

import hashlib
import re
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

import thinwire
from tests.optim.training import weights
from thinwire.comm import CommunicationTimeout, Communicator, threads

PACKAGE = str(Path(thinwire.__file__).parent)

TIMEOUT = 15.0
"""Seconds for a collective: on a busy machine ranks that are well wait for one another for a few."""

DOCUMENTED = (ValueError, TypeError, RuntimeError, KeyError)


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


def is_our_answer(error: BaseException) -> bool:
    """Whether a `raise` of thinwire's own says what is wrong, and no line of it or of torch has stumbled."""
    if not isinstance(error, DOCUMENTED) or not str(error):
        return False
    last = traceback.extract_tb(error.__traceback__)[-1]
    return last.filename.startswith(PACKAGE) and (last.line or "").startswith("raise ")


def where(error: BaseException) -> str:
    """The line that raised an error."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{Path(last.filename).name}:{last.lineno} {last.line}"


def faults_of_errors(ends: list[End], names: str = "", *, may_wait: bool = False) -> list[str]:
    """What is wrong with errors of a run in which ranks had errors.

    `names` is what one of the texts must match. `may_wait`: ranks may wait for one another until the timeout says who
    did not come, where one of them made a collective call that the others never make.
    """
    stuck = [rank for rank, end in enumerate(ends) if not end.ended]
    if stuck:
        return [f"ranks {stuck} hang"]
    errors = [end.error for end in ends]
    late = all(error is None or CommunicationTimeout.__name__ in f"{type(error).__name__} {error}" for error in errors)
    if late and not may_wait:
        return [f"a hang, ended by the timeout: {next(error for error in errors if error is not None)}"]
    faults = [f"rank {rank} has no error" for rank, error in enumerate(errors) if error is None]
    for rank, error in enumerate(errors):
        if error is not None and not is_our_answer(error):
            faults.append(f"rank {rank} raises {type(error).__name__}: {str(error)[:200]} [{where(error)}]")
    texts = " | ".join(str(error) for error in errors)
    if not faults and not re.search(names, texts):
        faults.append(f"no text names {names!r}: {texts[:400]}")
    return faults


def digest(model: nn.Module) -> str:
    """Of the weights' bits."""
    return hashlib.sha256(weights(model).numpy().tobytes()).hexdigest()[:16]


def faults_of_replicas(ends: list[End]) -> list[str]:
    """What is wrong where all ranks came to their end, with a digest of the weights as results."""
    if len({end.result for end in ends}) == 1:
        return []
    return [f"silent divergence: {[end.result for end in ends]}"]


def faults(ends: list[End], names: str = "", *, may_wait: bool = False) -> list[str]:
    """What is wrong with how ranks ended, all errors of ours or the same weights."""
    if all(end.ended and end.error is None for end in ends):
        return faults_of_replicas(ends)
    return faults_of_errors(ends, names, may_wait=may_wait)
