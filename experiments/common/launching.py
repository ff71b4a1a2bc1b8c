"""Starts an experiment on its ranks: by itself with `--ranks`, or as torchrun, mpirun or srun started it.

It also turns bad input into one message and exit code 2, before any rank trains.
"""

from __future__ import annotations

import gc
import logging
import os
import sys
import uuid
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from experiments.common.errors import BAD_INPUT, InputError, on_every_rank, refuse
from experiments.common.machine import cores
from thinwire import comm as communication
from thinwire.comm import detect

__all__ = ["FAILED", "INTERRUPTED", "Settings", "launch", "refuse_launchers"]

FAILED = 1
INTERRUPTED = 130
"""Exit codes: a rank or the network failed, Ctrl-C."""

_TIMEOUT = 600.0


class Settings(Protocol):
    """What a command line asked for."""

    @property
    def ranks(self) -> int | None:
        """Ranks asked for; None where it was left open."""


Parsed = TypeVar("Parsed", bound=Settings)


def launch(
    module: str,
    parse: Callable[[Sequence[str]], Parsed],
    work: Callable[[communication.Communicator, Parsed], None],
    arguments: Sequence[str],
    default_ranks: int,
) -> int:
    """Runs `work(comm, settings)` on every rank, and returns the exit code.

    Args:
        module: what `python -m` runs, to start ranks with.
        parse: reads and checks the arguments; raises `InputError` for what it cannot use.
        work: the experiment; raises `InputError` on every rank or on none.
        arguments: the command line, without the program.
        default_ranks: ranks to start where neither a launcher nor `--ranks` says.
    """
    if detect(os.environ).launcher == "single":
        try:
            ranks = parse(arguments).ranks or default_ranks
        except InputError as error:
            return refuse(module, error)
        if ranks > 1:
            return _end_soon(_start_ranks(module, arguments, ranks))
        return _be_rank(module, parse, work, arguments)
    return _end_soon(_be_rank(module, parse, work, arguments))


def _be_rank(
    module: str,
    parse: Callable[[Sequence[str]], Parsed],
    work: Callable[[communication.Communicator, Parsed], None],
    arguments: Sequence[str],
) -> int:
    """This process's part, as a rank of its launcher's or as the only one; the exit code."""
    try:
        comm = communication.init(timeout=_TIMEOUT)
        code = _work_on_this_rank(comm, module, parse, work, arguments)
        # A launcher may end all ranks when the first one ends: not before rank 0 has spoken.
        comm.barrier()
        comm.close()
    except communication.CommunicationError as error:
        print(f"{module}: {error}", file=sys.stderr, flush=True)
        return FAILED
    except KeyboardInterrupt:
        return INTERRUPTED
    return code


def _end_soon(code: int) -> int:
    """The exit code of a process that is for this experiment alone: it ends without a last search for garbage.

    That takes a second or two, with all that torch and transformers have loaded.
    """
    gc.freeze()
    return code


def refuse_launchers() -> None:
    """Raises `InputError` where a launcher started this process: for experiments that start their own ranks."""
    if detect(os.environ).launcher != "single":
        raise InputError("this starts its own ranks: run it without a launcher")


def _work_on_this_rank(
    comm: communication.Communicator,
    module: str,
    parse: Callable[[Sequence[str]], Parsed],
    work: Callable[[communication.Communicator, Parsed], None],
    arguments: Sequence[str],
) -> int:
    try:
        settings = on_every_rank(comm, lambda: parse(arguments))
        _check_ranks(settings.ranks, comm.size)
        work(comm, settings)
    except InputError as error:
        return refuse(module, error) if comm.rank == 0 else BAD_INPUT
    return 0


def _check_ranks(asked: int | None, found: int) -> None:
    if asked is not None and asked != found:
        raise InputError(
            f"--ranks {asked} was given, but the launcher started {found}: "
            "leave --ranks out, or change the launcher's number"
        )


def _start_ranks(module: str, arguments: Sequence[str], ranks: int) -> int:
    """What `torchrun --standalone --nproc-per-node RANKS -m MODULE` does, with the ranks' own exit code."""
    threads = str(max(1, cores() // ranks))
    for variable in ("OMP_NUM_THREADS", "NUMBA_NUM_THREADS"):
        os.environ.setdefault(variable, threads)
    # Ranks explain their failures themselves.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        monitor_interval=0.1,
    )
    try:
        elastic_launch(config, sys.executable)("-m", module, *arguments)
    except ChildFailedError as error:
        if any(failure.exitcode == BAD_INPUT for failure in error.failures.values()):
            return BAD_INPUT
        rank, failure = error.get_first_failure()
        if failure.exitcode < 0:
            print(f"{module}: rank {rank} was ended by {failure.signal_name()}", file=sys.stderr, flush=True)
        return FAILED
    except (SignalException, KeyboardInterrupt):
        return INTERRUPTED
    return 0
