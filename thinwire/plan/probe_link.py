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

__all__ = ["Stopwatch", "fit_link", "hidden_part"]

_SMALLEST, _LARGEST, _GROWTH = 4 << 10, 64 << 20, 4
_LEAST_SIZES = 3
_MOST_REPETITIONS, _LEAST_REPETITIONS = 9, 3
_MESSAGES = 32
# Training has several buckets under way. One exchange at a time between two ranks, whose messages share a connection,
# reaches half of what two or more do; so large ones are timed in so many parts that start together.
_PARTS, _LEAST_PART = 4, 256 << 10
_PRODUCT_SIDE = 256
_OVERLAP_REPETITIONS = 3


class Stopwatch:
    """Times what the ranks of `comm` do together, on `device`, by `clock`, in seconds."""

    def __init__(
        self, comm: Communicator, device: torch.device, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.comm = comm
        self.device = device
        self._clock = clock

    def once(self, run: Callable[[], object]) -> float:
        """Seconds of `run` on the rank that takes longest, all starting together; all ranks get it. Collective."""
        self.comm.barrier()
        before = self._clock()
        run()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        mine = struct.pack("<d", self._clock() - before)
        return max(float(struct.unpack("<d", one)[0]) for one in self.comm.all_gather_bytes(mine))

    def typical(self, run: Callable[[], object], repetitions: int) -> float:
        """The median of that over `repetitions`. Collective."""
        return median(self.once(run) for _ in range(repetitions))


def fit_link(watch: Stopwatch, seconds: float) -> LinkFit:
    """Latency and rate of every collective among the watch's ranks, in about `seconds`. Collective."""
    share = seconds / len(COLLECTIVES)
    collectives = {name: _fit_collective(watch, name, share) for name in COLLECTIVES}
    return LinkFit(ranks=watch.comm.size, message=_message_seconds(watch), collectives=collectives)


def hidden_part(watch: Stopwatch, fit: LinkFit, seconds: float) -> float:
    """The part of an all-reduce that goes on while this rank multiplies matrices, from 0 to 1. Collective.

    Both take about as long; with t the times, (t_wire + t_computation - t_both) / min(t_wire, t_computation).
    """
    reduction = fit.collectives["all_reduce"]
    each = seconds / (4 * _OVERLAP_REPETITIONS)
    nbytes = int(max(_SMALLEST, min(_LARGEST, each * reduction.bytes_per_second / 2)))
    transfer = _operation(watch, "all_reduce", nbytes)
    matrix = torch.randn(_PRODUCT_SIDE, _PRODUCT_SIDE, device=watch.device) / _PRODUCT_SIDE
    wire = watch.typical(lambda: transfer().wait(), _OVERLAP_REPETITIONS)
    one_product = watch.typical(lambda: _multiply(matrix, 10), _OVERLAP_REPETITIONS) / 10
    products = max(1, round(wire / one_product))
    computation = watch.typical(lambda: _multiply(matrix, products), _OVERLAP_REPETITIONS)

    def both() -> None:
        work = transfer()
        _multiply(matrix, products)
        work.wait()

    together = watch.typical(both, _OVERLAP_REPETITIONS)
    return max(0.0, min(1.0, (wire + computation - together) / min(wire, computation)))


def _fit_collective(watch: Stopwatch, name: Collective, seconds: float) -> CollectiveFit:
    comm = watch.comm
    nbytes = _SMALLEST
    inputs: list[int] = []
    times: list[float] = []
    spent = 0.0
    while nbytes <= _LARGEST:
        # Every rank knows the same times, so that all take the same decisions.
        expected = times[-1] * _GROWTH if times else 0.0
        if len(times) >= _LEAST_SIZES and spent + _LEAST_REPETITIONS * expected > seconds:
            break
        start = _operations(watch, name, nbytes)
        start()
        repetitions = _MOST_REPETITIONS if _MOST_REPETITIONS * expected < seconds / 10 else _LEAST_REPETITIONS
        times.append(watch.typical(start, repetitions))
        parts = _parts(nbytes)
        inputs.append(parts * _input_bytes(comm, name, nbytes // parts))
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


def _parts(nbytes: int) -> int:
    return max(1, min(_PARTS, nbytes // _LEAST_PART))


def _operations(watch: Stopwatch, name: Collective, nbytes: int) -> Callable[[], None]:
    """Makes a collective about `nbytes` large, in its parts, and waits for it."""
    starts = [_operation(watch, name, nbytes // _parts(nbytes)) for _ in range(_parts(nbytes))]

    def run() -> None:
        for work in [start() for start in starts]:
            work.wait()

    return run


def _operation(watch: Stopwatch, name: Collective, nbytes: int) -> Callable[[], Work]:
    comm, device = watch.comm, watch.device
    elements = _input_bytes(comm, name, nbytes) // 4
    # Zeros, so that sums that go round and round stay finite.
    source = torch.zeros(elements, device=device)
    if name == "all_reduce":
        return lambda: comm.all_reduce(source, async_op=True)
    target = torch.zeros(elements * (comm.size if name == "all_gather" else 1), device=device)
    start = comm.all_to_all if name == "all_to_all" else comm.all_gather
    return lambda: start(target, source, async_op=True)


def _message_seconds(watch: Stopwatch) -> float:
    """What one message costs where many leave one after another and wait for nothing."""
    comm = watch.comm
    sources = [torch.zeros(comm.size, dtype=torch.uint8, device=watch.device) for _ in range(_MESSAGES)]
    targets: list[Tensor] = [torch.empty_like(source) for source in sources]

    def all_at_once() -> None:
        works = [
            comm.all_to_all(target, source, async_op=True) for target, source in zip(targets, sources, strict=True)
        ]
        for work in works:
            work.wait()

    all_at_once()
    return watch.typical(all_at_once, _MOST_REPETITIONS) / (_MESSAGES * (comm.size - 1))


def _multiply(matrix: Tensor, times: int) -> None:
    product = matrix
    for _ in range(times):
        product = product @ matrix
