"""Counts and times of collectives by kind and size, for whoever asks what a step sends and how long that takes.

Sizes are of what one rank puts in. Times go from the call to the end of the wait for it: a collective that travels
while the rank computes looks slower than the wire is, and a rank that comes early waits in it for the late ones.
"""

from __future__ import annotations

import sys
import time
from array import array
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from thinwire.comm.collectives import Finishing, Pending, Work
from thinwire.comm.communicator import Communicator, Start
from thinwire.comm.errors import Call
from thinwire.comm.traffic import sent_bytes

OPERATION_NAMES: Mapping[str, str] = {
    **{name: name for name in ("all_gather", "all_gather_bytes", "all_reduce", "all_to_all", "barrier", "broadcast")},
    "all_gather_into_tensor": "all_gather",
    "all_to_all_single": "all_to_all",
    "reduce_scatter": "all_to_all",
    "reduce_scatter_tensor": "all_to_all",
}
"""Kinds of collectives, by the names that they go by here and in torch. What others reduce-scatter, owners average
after an all-to-all."""

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


@dataclass(frozen=True)
class OperationStatistics:
    """All collectives of one `name` and of `nbytes` bytes a rank: how many, and the milliseconds of each."""

    name: str
    nbytes: int
    milliseconds: Sequence[float]
    ranks: int

    @property
    def count(self) -> int:
        """How many there were."""
        return len(self.milliseconds)

    @property
    def total_milliseconds(self) -> float:
        """Time in all of them."""
        return sum(self.milliseconds)

    @property
    def gigabits_per_second(self) -> float:
        """The size of what comes out over the time; for all_gather that is of all ranks."""
        factor = self.ranks if self._kind in ("all_gather", "all_gather_bytes", "barrier") else 1
        return self._rate(factor * self.nbytes)

    @property
    def wire_gigabits_per_second(self) -> float:
        """What this rank has to send, with the best algorithm, over the time."""
        return self._rate(sent_bytes(self._kind, self.nbytes, self.ranks))

    @property
    def _kind(self) -> str:
        return self.name.partition(" ")[0]

    def _rate(self, nbytes: int) -> float:
        milliseconds = self.total_milliseconds
        return 8e-6 * nbytes * self.count / milliseconds if milliseconds else 0.0


class OperationLog:
    """What `LoggedCommunicator` writes to. One log may serve several communicators of one rank.

    `names`: the kinds to count, None for all. `caller`: count those of each calling function apart. `report`: is told
    of every collective in a line, which on a GPU waits for it.

    Raises ValueError for a name that is no collective.
    """

    def __init__(
        self, names: Collection[str] | None = None, *, caller: bool = False, report: Callable[[str], None] | None = None
    ) -> None:
        unknown = [name for name in names or () if name not in OPERATION_NAMES]
        if unknown:
            raise ValueError(f"{unknown[0]!r} is no collective, expected some of {', '.join(OPERATION_NAMES)}")
        self._names = None if names is None else {OPERATION_NAMES[name] for name in names}
        self._caller = caller
        self._report = report
        self._paused = False
        self._ranks: dict[str, int] = {}
        self._seen: dict[tuple[str, int], array[float]] = {}
        self._on_device: list[tuple[str, int, Any, Any]] = []

    def begin(self, name: str, nbytes: int, comm: Communicator) -> Callable[[], None] | None:
        """Note that a collective begins; what is returned notes its end. None for one that is not counted."""
        if self._paused or (self._names is not None and name not in self._names):
            return None
        if self._caller:  # the innermost function outside of this room
            frame = sys._getframe(1)
            while frame.f_back is not None and str(frame.f_globals.get("__name__", "")).startswith("thinwire.comm."):
                frame = frame.f_back
            name = f"{name} in {frame.f_code.co_name}"
        self._ranks[name] = comm.size
        if comm.backend == "nccl":
            return self._begin_on_device(name, nbytes)
        start = time.perf_counter()
        return lambda: self._add(name, nbytes, 1000 * (time.perf_counter() - start))

    def statistics(self) -> list[OperationStatistics]:
        """What was counted, by name and size. On a GPU, waits for what is on its way."""
        self._collect()
        return [
            OperationStatistics(name, nbytes, tuple(times), self._ranks[name])
            for (name, nbytes), times in sorted(self._seen.items())
        ]

    def reset(self) -> None:
        """Forget what was counted."""
        self._collect()
        self._seen.clear()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What begins inside is not counted."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def _begin_on_device(self, name: str, nbytes: int) -> Callable[[], None]:
        make_event: Any = torch.cuda.Event
        start, end = make_event(enable_timing=True), make_event(enable_timing=True)
        start.record()

        def finish() -> None:
            end.record()
            self._on_device.append((name, nbytes, start, end))
            if self._report is not None:
                self._collect()

        return finish

    def _collect(self) -> None:
        waiting, self._on_device = self._on_device, []
        for name, nbytes, start, end in waiting:
            end.synchronize()
            self._add(name, nbytes, float(start.elapsed_time(end)))

    def _add(self, name: str, nbytes: int, milliseconds: float) -> None:
        self._seen.setdefault((name, nbytes), array("d")).append(milliseconds)
        if self._report is not None:
            one = OperationStatistics(name, nbytes, (milliseconds,), self._ranks[name])
            self._report(
                f"{name} of {_shown_size(nbytes)}: {milliseconds:.3f} ms, {one.gigabits_per_second:.3f} Gb/s, "
                f"{one.wire_gigabits_per_second:.3f} Gb/s on the wire"
            )


def _table(found: Sequence[OperationStatistics]) -> str:
    """Lines for people: a row a kind and size."""
    rows = [["collective", "size a rank", "count", "total ms", "mean ms", "Gb/s", "wire Gb/s"]]
    for one in found:
        times = (f"{one.total_milliseconds:.2f}", f"{one.total_milliseconds / one.count:.3f}")
        rates = (f"{one.gigabits_per_second:.3f}", f"{one.wire_gigabits_per_second:.3f}")
        rows.append([one.name, _shown_size(one.nbytes), str(one.count), *times, *rates])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def _shown_size(nbytes: int) -> str:
    size, unit = float(nbytes), 0
    while size >= 1024 and unit + 1 < len(_UNITS):
        size, unit = size / 1024, unit + 1
    return f"{size:.4g} {_UNITS[unit]}"


def _of_inner(name: str) -> Any:
    """A method of a LoggedCommunicator that is its inner one's."""

    def forward(self: LoggedCommunicator, *arguments: Any, **options: Any) -> Any:
        return getattr(self._inner, name)(*arguments, **options)

    return forward


class LoggedCommunicator(Communicator):
    """The ranks and the transport of `inner`, with every collective noted in `log`; so are those of its groups.

    From here on use it in the place of `inner`, on every rank alike: the ranks' calls are numbered here.
    """

    def __init__(self, inner: Communicator, log: OperationLog) -> None:
        super().__init__(inner.rank, inner.size, inner.backend, inner.timeout)
        self.log = log
        self.traffic = inner.traffic
        self.speaks = inner.speaks
        self.global_ranks = inner.global_ranks
        self._inner = inner
        self._sequence = inner._sequence
        self._failure = inner._failure
        self._transport_errors = inner._transport_errors

    def log_summary(self, return_dict: bool = False) -> dict[str, Any] | None:
        """Print on rank 0 what was counted so far; with `return_dict` return this rank's numbers too. Collective.

        The dict is {"summary": {name: {bytes: {...}}}, "metadata": {...}}.
        """
        with self.log.paused():
            self.barrier()
        found = self.log.statistics()
        if self.rank == 0:
            print(_table(found), flush=True)
        with self.log.paused():
            self.barrier()
        if not return_dict:
            return None
        summary: dict[str, dict[int, Any]] = {}
        for one in found:
            summary.setdefault(one.name, {})[one.nbytes] = {
                "count": one.count,
                "total_latency_ms": one.total_milliseconds,
                "avg_latency_ms": one.total_milliseconds / one.count,
                "tput_avg_gbps": one.gigabits_per_second,
                "busbw_avg_gbps": one.wire_gigabits_per_second,
                "msg_size_bytes": one.nbytes,
            }
        return {"summary": summary, "metadata": {"world_size": self.size, "rank": self.rank}}

    @override
    def _complete_alone(self, name: str, output: Tensor, input: Tensor) -> Work:
        end = self.log.begin(name, input.nbytes, self)
        work = super()._complete_alone(name, output, input)
        if end is not None:
            end()
        return work

    @override
    def _issue(self, name: str, signature: str, nbytes: int, start: Start, *options: Any, **named: Any) -> Work:
        end = self.log.begin(name, nbytes, self)
        if end is None:
            return super()._issue(name, signature, nbytes, start, *options, **named)

        def begin(call: Call) -> Pending:
            return Finishing(start(call), end)

        return super()._issue(name, signature, nbytes, begin, *options, **named)

    _start_all_to_all = _of_inner("_start_all_to_all")
    _start_all_gather = _of_inner("_start_all_gather")
    _start_broadcast = _of_inner("_start_broadcast")
    _start_all_reduce = _of_inner("_start_all_reduce")
    _roll_call = _of_inner("_roll_call")
    _alarmed = _of_inner("_alarmed")
    _release = _of_inner("close")
    _leave_in_flight = _of_inner("_leave_in_flight")
    _abandon = _of_inner("_abandon")
    _needs_staging = _of_inner("_needs_staging")

    @override
    def _subgroup(self, members: list[int], number: int, timeout: float) -> Communicator:
        return LoggedCommunicator(self._inner._subgroup(members, number, timeout), self.log)

    @property
    @override
    def control_device(self) -> torch.device:
        return self._inner.control_device
