"""Times the collectives of one group of ranks over sizes, and a transfer beside a computation."""

from __future__ import annotations

import struct
import time
from collections.abc import Callable
from statistics import median

import torch
from torch import Tensor

from thinwire.comm import Communicator
from thinwire.comm.traffic import sent_bytes
from thinwire.comm.work import Work
from thinwire.plan.calibration import CollectiveFit, LinkFit
from thinwire.plan.cluster import COLLECTIVES, Collective
from thinwire.plan.fitting import fit_line

__all__ = ["agreed_seconds", "fit_link", "hidden_part"]

_SMALLEST, _LARGEST, _GROWTH = 4 << 10, 64 << 20, 4
_LEAST_SIZES = 3
_MOST_REPETITIONS, _LEAST_REPETITIONS = 9, 3
_MESSAGES = 32
_PRODUCT_SIDE = 256
_OVERLAP_REPETITIONS = 3


def fit_link(comm: Communicator, seconds: float, device: torch.device) -> LinkFit:
    """Latency and rate of every collective among the ranks of `comm`, in about `seconds`. Collective."""
    share = seconds / len(COLLECTIVES)
    collectives = {name: _fit_collective(comm, name, share, device) for name in COLLECTIVES}
    return LinkFit(ranks=comm.size, message=_message_seconds(comm, device), collectives=collectives)


def hidden_part(comm: Communicator, fit: LinkFit, seconds: float, device: torch.device) -> float:
    """The part of an all-reduce that goes on while this rank multiplies matrices, from 0 to 1. Collective.

    Both take about as long; with t the times, (t_wire + t_computation - t_both) / min(t_wire, t_computation).
    """
    reduction = fit.collectives["all_reduce"]
    each = seconds / (4 * _OVERLAP_REPETITIONS)
    nbytes = int(max(_SMALLEST, min(_LARGEST, each * reduction.bytes_per_second / 2)))
    transfer = _operation(comm, "all_reduce", nbytes, device)
    matrix = torch.randn(_PRODUCT_SIDE, _PRODUCT_SIDE, device=device) / _PRODUCT_SIDE
    wire = _repeat(comm, lambda: transfer().wait(), _OVERLAP_REPETITIONS, device)
    one_product = _repeat(comm, lambda: _multiply(matrix, 10), _OVERLAP_REPETITIONS, device) / 10
    products = max(1, round(wire / one_product))
    computation = _repeat(comm, lambda: _multiply(matrix, products), _OVERLAP_REPETITIONS, device)

    def both() -> None:
        work = transfer()
        _multiply(matrix, products)
        work.wait()

    together = _repeat(comm, both, _OVERLAP_REPETITIONS, device)
    return max(0.0, min(1.0, (wire + computation - together) / min(wire, computation)))


def agreed_seconds(comm: Communicator, run: Callable[[], object], device: torch.device) -> float:
    """Seconds of `run` on the rank that takes longest, all starting together; the same on every rank. Collective."""
    comm.barrier()
    before = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    mine = time.perf_counter() - before
    return max(float(struct.unpack("<d", one)[0]) for one in comm.all_gather_bytes(struct.pack("<d", mine)))


def _fit_collective(comm: Communicator, name: Collective, seconds: float, device: torch.device) -> CollectiveFit:
    nbytes = _SMALLEST
    inputs: list[int] = []
    times: list[float] = []
    spent = 0.0
    while nbytes <= _LARGEST:
        # Every rank knows the same times, so that all take the same decisions.
        expected = times[-1] * _GROWTH if times else 0.0
        if len(times) >= _LEAST_SIZES and spent + _LEAST_REPETITIONS * expected > seconds:
            break
        start = _operation(comm, name, nbytes, device)
        start().wait()
        repetitions = _MOST_REPETITIONS if _MOST_REPETITIONS * expected < seconds / 10 else _LEAST_REPETITIONS
        times.append(_repeat(comm, lambda start=start: start().wait(), repetitions, device))  # type: ignore[misc]
        inputs.append(_input_bytes(comm, name, nbytes))
        spent += (repetitions + 1) * times[-1]
        nbytes *= _GROWTH
    sent = [sent_bytes(name, one, comm.size) for one in inputs]
    intercept, slope, error = fit_line(sent, times)
    return CollectiveFit(
        intercept=intercept, bytes_per_second=1 / slope, error=error, input_bytes=inputs, seconds=times
    )


def _input_bytes(comm: Communicator, name: Collective, nbytes: int) -> int:
    """What a rank puts into a collective about `nbytes` large, whole floats: an all-gather's result is that large."""
    parts = max(1, nbytes // (4 * comm.size))
    return 4 * parts * (1 if name == "all_gather" else comm.size)


def _operation(comm: Communicator, name: Collective, nbytes: int, device: torch.device) -> Callable[[], Work]:
    elements = _input_bytes(comm, name, nbytes) // 4
    # Zeros, so that sums that go round and round stay finite.
    source = torch.zeros(elements, device=device)
    if name == "all_reduce":
        return lambda: comm.all_reduce(source, async_op=True)
    target = torch.zeros(elements * (comm.size if name == "all_gather" else 1), device=device)
    start = comm.all_to_all if name == "all_to_all" else comm.all_gather
    return lambda: start(target, source, async_op=True)


def _message_seconds(comm: Communicator, device: torch.device) -> float:
    """What one message costs where many leave one after another and wait for nothing."""
    sources = [torch.zeros(comm.size, dtype=torch.uint8, device=device) for _ in range(_MESSAGES)]
    targets: list[Tensor] = [torch.empty_like(source) for source in sources]

    def all_at_once() -> None:
        works = [
            comm.all_to_all(target, source, async_op=True) for target, source in zip(targets, sources, strict=True)
        ]
        for work in works:
            work.wait()

    all_at_once()
    return _repeat(comm, all_at_once, _MOST_REPETITIONS, device) / (_MESSAGES * (comm.size - 1))


def _repeat(comm: Communicator, run: Callable[[], object], repetitions: int, device: torch.device) -> float:
    return median(agreed_seconds(comm, run, device) for _ in range(repetitions))


def _multiply(matrix: Tensor, times: int) -> None:
    product = matrix
    for _ in range(times):
        product = product @ matrix
