"""Counts and times of collectives by kind and size, for whoever asks what a step sends and how long that takes.

Sizes are of what one rank puts in. Times go from the call to the end of the wait for it: a collective that travels
while the rank computes looks slower than the wire is, and a rank that comes early waits in it for the late ones.
"""

from __future__ import annotations

import json
import sys
import time
from array import array
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from thinwire.comm.collectives import Finishing, Pending, ReduceOp, Work
from thinwire.comm.communicator import Communicator
from thinwire.comm.errors import Call, RollCall
from thinwire.comm.traffic import sent_bytes

__all__ = ["OPERATION_NAMES", "LoggedCommunicator", "OperationLog", "OperationStatistics", "table"]

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
    """All collectives of one `name` and of `nbytes` bytes a rank: how many, and the milliseconds of each.

    `straggler_milliseconds`: how much longer this rank was in them than the rank that came last; None where nobody
    asked the other ranks.
    """

    name: str
    nbytes: int
    milliseconds: Sequence[float]
    ranks: int
    straggler_milliseconds: Sequence[float] | None = None

    @property
    def count(self) -> int:
        """How many there were."""
        return len(self.milliseconds)

    @property
    def total_bytes(self) -> int:
        """Bytes that this rank put into all of them."""
        return self.count * self.nbytes

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
        if self._caller:
            name = f"{name} in {_calling_function()}"
        self._ranks[name] = comm.size
        if comm.backend == "nccl":
            return self._begin_on_device(name, nbytes)
        start = time.perf_counter()
        return lambda: self._add(name, nbytes, 1000 * (time.perf_counter() - start))

    def statistics(self, comm: Communicator | None = None) -> list[OperationStatistics]:
        """What was counted, by name and size; with `comm`, how long this rank waited for others too: collective then.

        On a GPU, waits for what is on its way.
        """
        self._collect()
        keys = sorted(self._seen)
        fastest = {} if comm is None else self._fastest(comm)
        found = []
        for name, nbytes in keys:
            mine = tuple(self._seen[name, nbytes])
            least = fastest.get((name, nbytes))
            waited = None if least is None else tuple(one - other for one, other in zip(mine, least, strict=True))
            found.append(OperationStatistics(name, nbytes, mine, self._ranks[name], waited))
        return found

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

    def _fastest(self, comm: Communicator) -> dict[tuple[str, int], list[float]]:
        """The least time of any rank in each collective that all ranks counted alike. Collective."""
        mine = [(name, nbytes, len(times)) for (name, nbytes), times in sorted(self._seen.items())]
        with self.paused():
            everyone = comm.all_gather_bytes(json.dumps(mine).encode(), "compare how long collectives took")
            common = [key for key in mine if all(list(key) in json.loads(one) for one in everyone)]
            if not common:
                return {}
            times = [torch.tensor(self._seen[name, nbytes], dtype=torch.float64) for name, nbytes, _ in common]
            least = torch.cat(times)
            comm.all_reduce(least, "min")
        split = torch.split(least, [count for _, _, count in common])
        return {(name, nbytes): part.tolist() for (name, nbytes, _), part in zip(common, split, strict=True)}


def table(found: Sequence[OperationStatistics]) -> str:
    """Lines for people: a row a kind and size."""
    heads = ["collective", "size a rank", "count", "total ms", "mean ms", "Gb/s", "wire Gb/s"]
    straggling = any(one.straggler_milliseconds is not None for one in found)
    rows = [heads + ["waited for others, ms"] * straggling]
    for one in found:
        rows.append(
            [
                one.name,
                _shown_size(one.nbytes),
                str(one.count),
                f"{one.total_milliseconds:.2f}",
                f"{one.total_milliseconds / one.count:.3f}",
                f"{one.gigabits_per_second:.3f}",
                f"{one.wire_gigabits_per_second:.3f}",
            ]
        )
        if straggling:
            waited = one.straggler_milliseconds
            rows[-1].append("" if waited is None else f"{sum(waited):.2f}")
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def _shown_size(nbytes: int) -> str:
    """`nbytes` with the unit that people would use."""
    size, unit = float(nbytes), 0
    while size >= 1024 and unit + 1 < len(_UNITS):
        size, unit = size / 1024, unit + 1
    return f"{size:.4g} {_UNITS[unit]}"


def _calling_function() -> str:
    """The innermost function outside of this room on the way to a collective."""
    frame = sys._getframe(1)
    while frame.f_back is not None and str(frame.f_globals.get("__name__", "")).startswith("thinwire.comm."):
        frame = frame.f_back
    return frame.f_code.co_name


class LoggedCommunicator(Communicator):
    """The ranks and the transport of `inner`, with every collective noted in `log`; so are those of its groups.

    From here on use it in the place of `inner`, on every rank alike: the ranks' calls are numbered here.
    """

    def __init__(self, inner: Communicator, log: OperationLog) -> None:
        super().__init__(inner.rank, inner.size, inner.backend, inner.timeout)
        self.log = log
        self.traffic = inner.traffic
        self.speaks = inner.speaks
        self._inner = inner
        self._sequence = inner._sequence
        self._failure = inner._failure
        self._transport_errors = inner._transport_errors

    def log_summary(self, show_straggler: bool = False, return_dict: bool = False) -> dict[str, Any] | None:
        """Print on rank 0 what was counted so far; with `return_dict` return this rank's numbers too. Collective.

        `show_straggler`: ask all ranks, and say how long this one waited for the last in each kind.

        The dict is {"summary": {name: {bytes: {...}}}, "straggler_analysis": the same or None, "metadata": {...}}.
        """
        with self.log.paused():
            self.barrier()
        found = self.log.statistics(self if show_straggler else None)
        if self.rank == 0:
            print(table(found), flush=True)
        with self.log.paused():
            self.barrier()
        return _as_dict(found, show_straggler, self) if return_dict else None

    def _issue(
        self,
        name: str,
        signature: str,
        nbytes: int,
        start: Callable[[Call], Pending],
        async_op: bool,
        arrived: torch.Event | None = None,
    ) -> Work:
        end = self.log.begin(name, nbytes, self)
        if end is None:
            return super()._issue(name, signature, nbytes, start, async_op, arrived)

        def begin(call: Call) -> Pending:
            return Finishing(start(call), end)

        return super()._issue(name, signature, nbytes, begin, async_op, arrived)

    def _start_all_to_all(self, call: Call, output: Tensor, input: Tensor) -> Pending:
        return self._inner._start_all_to_all(call, output, input)

    def _start_all_gather(self, call: Call, output: Tensor, input: Tensor) -> Pending:
        return self._inner._start_all_gather(call, output, input)

    def _start_broadcast(self, call: Call, tensor: Tensor, root: int) -> Pending:
        return self._inner._start_broadcast(call, tensor, root)

    def _start_all_reduce(self, call: Call, tensor: Tensor, op: ReduceOp) -> Pending:
        return self._inner._start_all_reduce(call, tensor, op)

    def _subgroup(self, members: list[int], number: int, timeout: float) -> Communicator:
        return LoggedCommunicator(self._inner._subgroup(members, number, timeout), self.log)

    def _roll_call(self, call: Call) -> RollCall:
        return self._inner._roll_call(call)

    def _alarmed(self) -> bool:
        return self._inner._alarmed()

    def _release(self) -> None:
        self._inner.close()

    def _leave_in_flight(self) -> None:
        self._inner._leave_in_flight()

    def _abandon(self) -> None:
        self._inner._abandon()

    def _needs_staging(self, device: torch.device, *, reduction: bool) -> bool:
        return self._inner._needs_staging(device, reduction=reduction)

    @property
    def control_device(self) -> torch.device:
        """See Communicator."""
        return self._inner.control_device


def _as_dict(found: list[OperationStatistics], show_straggler: bool, comm: Communicator) -> dict[str, Any]:
    summary: dict[str, dict[int, Any]] = {}
    straggling: dict[str, dict[int, Any]] = {}
    for one in found:
        summary.setdefault(one.name, {})[one.nbytes] = {
            "count": one.count,
            "total_latency_ms": one.total_milliseconds,
            "avg_latency_ms": one.total_milliseconds / one.count,
            "tput_avg_gbps": one.gigabits_per_second,
            "busbw_avg_gbps": one.wire_gigabits_per_second,
            "msg_size_bytes": one.nbytes,
        }
        if one.straggler_milliseconds is not None:
            waited = sum(one.straggler_milliseconds)
            straggling.setdefault(one.name, {})[one.nbytes] = {
                "count": one.count,
                "total_comm_lat_ms": one.total_milliseconds - waited,
                "total_straggler_ms": waited,
                "avg_comm_lat_ms": (one.total_milliseconds - waited) / one.count,
                "avg_straggler_ms": waited / one.count,
                "msg_size_bytes": one.nbytes,
            }
    metadata = {"world_size": comm.size, "rank": comm.rank}
    return {
        "summary": summary,
        "straggler_analysis": straggling if show_straggler else None,
        "metadata": metadata,
    }
