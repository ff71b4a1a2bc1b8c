"""A communicator around another, which counts and times what goes through it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from thinwire.comm.checks import ReduceOp
from thinwire.comm.communicator import Communicator
from thinwire.comm.failure import Call, RollCall
from thinwire.comm.operation_log import OperationLog, OperationStatistics, table
from thinwire.comm.work import Finishing, Pending, Work

__all__ = ["LoggedCommunicator"]


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
