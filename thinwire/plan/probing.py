"""Probe of a cluster: collectives over sizes, a transfer beside a computation, what a rank computes besides the model,
and a disk, measured on all ranks at once, as they share their node's cores and memory."""

from __future__ import annotations

import math
import os
import socket
import struct
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from io import FileIO
from itertools import combinations
from math import log, sqrt
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from thinwire.comm import Communicator
from thinwire.comm.agreement import on_every_rank
from thinwire.comm.collectives import Work
from thinwire.comm.traffic import sent_bytes
from thinwire.compress import make_codec
from thinwire.plan.calibration import Calibration, CollectiveFit, DiskRates, LinkFit
from thinwire.plan.cluster import COLLECTIVES, Collective, Processor
from thinwire.plan.units import PlanError, require_positive
from thinwire.zero.disk import IN_MEMORY, REQUEST_BYTES, THREADS, Buffer, file_system, transfer

# Fits: one disturbed measurement among many does not move the line


def fit_line(amounts: Sequence[float], seconds: Sequence[float]) -> tuple[float, float, float]:
    """Intercept ≥ 0, slope > 0 and error of the line seconds = intercept + slope · amount.

    Among the lines through two of the points, or through one and the origin, takes the one with the least sum of
    amount^¼ · |log(line / seconds)|: relative, as amounts span orders of magnitude; large ones count more, as they are
    what training sends, and small ones may pass a shaper's burst unhindered. The error is the median of
    |line / seconds - 1|.

    Raises ValueError for fewer than two different amounts, or amounts and seconds that are not positive.
    """
    points = list(zip(amounts, seconds, strict=True))
    if len(set(amounts)) < 2 or any(amount <= 0 or second <= 0 for amount, second in points):
        raise ValueError(f"a line needs two different amounts or more, all above 0, got {points}")
    lines = [(0.0, second / amount) for amount, second in points]
    for (x1, y1), (x2, y2) in combinations(points, 2):
        if x1 != x2:
            slope = (y2 - y1) / (x2 - x1)
            intercept = y1 - slope * x1
            if slope > 0 and intercept >= 0:
                lines.append((intercept, slope))

    def badness(line: tuple[float, float]) -> float:
        return sum(sqrt(sqrt(amount)) * abs(log((line[0] + line[1] * amount) / second)) for amount, second in points)

    intercept, slope = min(lines, key=badness)
    error = median(abs((intercept + slope * amount) / second - 1) for amount, second in points)
    return intercept, slope, error


# Links

_SMALLEST, _LARGEST, _GROWTH = 4 << 10, 64 << 20, 4
_LEAST_SIZES = 3
_MOST_REPETITIONS, _LEAST_REPETITIONS = 9, 3
_MESSAGES = 32
# Training has several buckets in flight. One exchange at a time between two ranks, whose messages share a connection,
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
    wire = watch.typical(_and_wait(transfer), _OVERLAP_REPETITIONS)
    one_product = watch.typical(lambda: _multiply(matrix, 10), _OVERLAP_REPETITIONS) / 10
    products = max(1, round(wire / one_product))
    computation = watch.typical(lambda: _multiply(matrix, products), _OVERLAP_REPETITIONS)

    def both() -> None:
        works = transfer()
        _multiply(matrix, products)
        for work in works:
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
        parts = max(1, min(_PARTS, nbytes // _LEAST_PART))
        start = _and_wait(_operation(watch, name, nbytes, parts))
        start()
        repetitions = _MOST_REPETITIONS if _MOST_REPETITIONS * expected < seconds / 10 else _LEAST_REPETITIONS
        times.append(watch.typical(start, repetitions))
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


def _operation(watch: Stopwatch, name: Collective, nbytes: int, parts: int = 1) -> Callable[[], list[Work]]:
    """Starts a collective about `nbytes` large, in so many parts."""
    comm = watch.comm
    elements = _input_bytes(comm, name, nbytes // parts) // 4
    # Zeros, so that sums that go round and round stay finite.
    sources = [torch.zeros(elements, device=watch.device) for _ in range(parts)]
    if name == "all_reduce":
        return lambda: [comm.all_reduce(source, async_op=True) for source in sources]
    size = elements * (comm.size if name == "all_gather" else 1)
    results = [torch.zeros(size, device=watch.device) for _ in sources]
    start = comm.all_to_all if name == "all_to_all" else comm.all_gather
    return lambda: [start(result, source, async_op=True) for result, source in zip(results, sources, strict=True)]


def _and_wait(start: Callable[[], list[Work]]) -> Callable[[], None]:
    def run() -> None:
        for work in start():
            work.wait()

    return run


def _message_seconds(watch: Stopwatch) -> float:
    """What one message costs where many leave one after another and wait for nothing."""
    comm = watch.comm
    pairs = torch.zeros(_MESSAGES, 2, comm.size, dtype=torch.uint8, device=watch.device)
    all_at_once = _and_wait(lambda: [comm.all_to_all(*pair, async_op=True) for pair in pairs])
    all_at_once()
    return watch.typical(all_at_once, _MOST_REPETITIONS) / (_MESSAGES * (comm.size - 1))


def _multiply(matrix: Tensor, times: int) -> None:
    product = matrix
    for _ in range(times):
        product = product @ matrix


# Processors

_ELEMENTS = 4 << 20  # a bucket of 16 MiB
_MOST_PACKETS = 16
_REPETITIONS = 5


def processor_rates(watch: Stopwatch) -> dict[str, float]:
    """The rates of `thinwire.plan.Processor`, by name, all but `overlap`; the same on every rank. Collective."""
    codec = make_codec("sign1")
    device = watch.device
    workers = min(max(watch.comm.size, 2), _MOST_PACKETS)
    shard = _ELEMENTS // workers // codec.block_size * codec.block_size
    payload, residual = torch.randn(2, _ELEMENTS, device=device)
    packet = torch.empty(1, codec.packet_bytes(_ELEMENTS), dtype=torch.uint8, device=device)
    packets = torch.empty(workers, codec.packet_bytes(shard), dtype=torch.uint8, device=device)
    codec.encode(torch.randn(workers * shard, device=device), None, packets, workers * shard)
    average, decoded = torch.empty(shard, device=device), torch.empty_like(payload)
    weight = torch.nn.Parameter(torch.zeros_like(payload))
    weight.grad = torch.zeros_like(payload)
    adam = torch.optim.AdamW([weight], foreach=True)

    def rate(amount: float, run: Callable[[], object]) -> float:
        run()
        return amount / watch.typical(run, _REPETITIONS)

    return {
        "memory": rate(2 * decoded.nbytes, lambda: decoded.copy_(payload)),
        "encode": rate(_ELEMENTS, lambda: codec.encode(payload, residual, packet, _ELEMENTS)),
        "decode": rate(_ELEMENTS, lambda: codec.decode(packet, decoded, _ELEMENTS)),
        "average": rate(workers * shard, lambda: codec.decode_mean(packets, average, shard)),
        "adam": rate(_ELEMENTS, adam.step),
    }


# Disks, by the requests, past the page cache, by which optimizer state goes through them

_FILE_BYTES = 256 << 20
_DISK_REPETITIONS = 3


def disk_rates(watch: Stopwatch, folder: Path, ranks_per_node: int) -> DiskRates:
    """Write and read a file of every rank in `folder`, all at once: bytes a second of a node. Collective.

    Raises PlanError where the folder cannot be used or is in memory, and ValueError on the other ranks.
    """
    with on_every_rank(watch.comm, partial(_set_aside, folder), "measure its disk", (PlanError,)) as file:
        path, buffer = Path(f"/proc/self/fd/{file.fileno()}"), Buffer(REQUEST_BYTES * THREADS)
        buffer.values.random_()  # a disk may keep zeros, and what repeats, elsewhere

        def request(number: int, writes: bool) -> None:
            start = number % THREADS * REQUEST_BYTES
            view, call = buffer.view[start : start + REQUEST_BYTES], os.pwritev if writes else os.preadv
            transfer(call, path, os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC, view, number * REQUEST_BYTES)

        with ThreadPoolExecutor(THREADS) as pool:

            def move(kinds: Sequence[bool]) -> None:
                for _ in pool.map(request, range(count), kinds):
                    pass

            count = _FILE_BYTES // REQUEST_BYTES
            runs = [partial(move, kinds * (count // 2)) for kinds in ([True, True], [False, False], [True, False])]
            runs[0]()
            nbytes = ranks_per_node * _FILE_BYTES
            write, read, both = (nbytes / watch.typical(run, _DISK_REPETITIONS) for run in runs)
    return DiskRates(read=read, write=write, both=both)


def _set_aside(folder: Path) -> FileIO:
    """A file without a name, read and written past the page cache."""
    if (kind := file_system(folder)) in IN_MEMORY:
        raise PlanError(f"{folder} is {kind}: memory, not a disk. Give a folder of the disk to be measured")
    try:
        file = FileIO(os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC, 0o600), "r+")
        os.posix_fallocate(file.fileno(), 0, _FILE_BYTES)
    except OSError as error:
        raise PlanError(f"the disk of {folder} cannot be measured past the page cache: {error.strerror}") from error
    return file


# Parts of the time given: the overlap's, and of the rest the one of the link between nodes, where there are both.
_OVERLAP = 0.15
_BETWEEN = 0.65


def probe(
    comm: Communicator,
    seconds: float = 45.0,
    device: torch.device | str = "cpu",
    disk: str | os.PathLike[str] | None = None,
) -> Calibration:
    """Measure links for about `seconds`, then the processor for a few more, with tensors on `device`. Collective; the
    result is the same on every rank.

    All nodes have to hold equally many ranks. On one rank there are no links to measure. Links between nodes are
    measured by one rank a node, those inside by all nodes at once. `disk`: a folder, for state to be offloaded to, of
    which a file a rank of 256 MiB is read and written too.

    Raises PlanError on every rank where nodes differ, or `seconds` is not positive; where a disk cannot be measured,
    and ValueError on the other ranks; CommunicationError where a rank fails.
    """
    require_positive("the seconds of a probe", seconds)
    node, index, nodes, ranks_per_node = _find_place(comm)
    device = torch.device(device)
    watch = Stopwatch(comm, device)
    of_disk = None if disk is None else disk_rates(watch, Path(disk), ranks_per_node)
    rates = processor_rates(watch)
    between = comm.split(0 if index == 0 else None) if nodes > 1 else None
    inside = comm.split(node) if ranks_per_node > 1 else None
    for_links = (1 - _OVERLAP) * seconds
    for_between = for_links * (1.0 if ranks_per_node == 1 else _BETWEEN)
    for_inside = for_links * (1.0 if nodes == 1 else 1 - _BETWEEN)
    between_fit = _on_every_rank(comm, None if between is None else fit_link(Stopwatch(between, device), for_between))
    inside_fit = _on_every_rank(comm, None if inside is None else fit_link(Stopwatch(inside, device), for_inside))
    group, fit = (between, between_fit) if nodes > 1 else (inside, inside_fit)
    hidden = 1.0
    if fit is not None:
        mine = None if group is None else hidden_part(Stopwatch(group, device), fit, _OVERLAP * seconds)
        hidden = min(float(one) for one in comm.all_gather_bytes(b"" if mine is None else repr(mine).encode()) if one)
    return Calibration(
        backend=comm.backend,
        nodes=nodes,
        ranks_per_node=ranks_per_node,
        between=between_fit,
        inside=inside_fit,
        processor=Processor(**rates, overlap=hidden),
        disk=of_disk,
    )


def _find_place(comm: Communicator) -> tuple[int, int, int, int]:
    """This rank's node, by the order in which ranks name them, and its index there; nodes, and ranks of each."""
    hosts = [name.decode() for name in comm.all_gather_bytes(socket.gethostname().encode())]
    order = list(dict.fromkeys(hosts))
    counts = {host: hosts.count(host) for host in order}
    if len(set(counts.values())) > 1:
        listed = ", ".join(f"{host} {count}" for host, count in counts.items())
        raise PlanError(f"a probe needs equally many ranks on every node, got {listed}: start it on an even set")
    mine = hosts[comm.rank]
    return order.index(mine), hosts[: comm.rank].count(mine), len(order), counts[mine]


def _on_every_rank(comm: Communicator, fit: LinkFit | None) -> LinkFit | None:
    """The slowest of the fits that some ranks made, on all of them; None where none did."""
    raw = comm.all_gather_bytes(b"" if fit is None else fit.model_dump_json().encode())
    fits = [LinkFit.model_validate_json(one) for one in raw if one]
    return min(fits, key=lambda one: math.prod(fit.bytes_per_second for fit in one.collectives.values()), default=None)
