"""Communication over a torch process group: Gloo between host memories, NCCL between GPUs.

Adds to torch.distributed timeouts that name the ranks at fault, and groups that only their members make. Roll calls go
through the key-value store of the job, which may itself be lost or stopped with rank 0: nothing waits for it without a
limit.
"""

from __future__ import annotations

import ctypes
import os
import socket
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh
from typing_extensions import override

from thinwire.comm.attendance import Attendance, attend, attendance_of, within
from thinwire.comm.collectives import Pending, ReduceOp, Sizes
from thinwire.comm.communicator import Communicator
from thinwire.comm.errors import ROLL_CALL_SECONDS, Call, CommunicationError, RollCall
from thinwire.comm.pairwise import LEAST_CHUNK_BYTES, Pairwise, all_gather, all_to_all

_POLL_SECONDS = 0.05
_STORE_SECONDS = 1.0


# torch 2.13 renamed all_gather_into_tensor and warns at the old name.
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

_REDUCE_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


def group_timeout(timeout: float) -> timedelta:
    """Timeout for a process group that a communicator with ``timeout`` seconds will use.

    It is longer, so that the communicator, which can name the ranks at fault, gives up first.
    """
    return timedelta(seconds=timeout + 5.0)


def serve_store(host: str, port: int, timeout: timedelta, size: int | None = None) -> TCPStore:
    """Serve a store at this address alone, where torch itself would listen on every interface; `port` 0: a free one.

    Raises OSError where this host cannot listen there.
    """
    family, _, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(place)
    listener.listen(socket.SOMAXCONN)
    port, descriptor = listener.getsockname()[1], listener.detach()
    return TCPStore(host, port, size, True, timeout, wait_for_workers=False, master_listen_fd=descriptor)


@dataclass
class Wiring:
    """A process group with what torch keeps about it elsewhere, and a place of its own in the store.

    ``instance`` tells apart those on one group. ``group`` is None once it is let go.
    """

    group: dist.ProcessGroup | None
    backend_of: dict[str, str]
    global_ranks: tuple[int, ...]
    store: Store
    path: str
    instance: int = 0
    pairwise: Pairwise | None = None

    def let_go(self) -> None:
        """Let go of the group, whose transfers have ended."""
        if self.pairwise is not None:
            self.pairwise.close()
        self.group = self.pairwise = None

    def keep_group(self) -> None:
        """Have the group outlive all: its destructor waits for transfers that may never end, so that it must not
        run."""
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self.group))

    def let_go_of_kept(self) -> None:
        """The same of a group that was kept."""
        group = self.group
        self.let_go()
        ctypes.pythonapi.Py_DecRef(ctypes.py_object(group))


class TorchCommunicator(Communicator):
    """A communicator over an initialised torch process group or a DeviceMesh of one dimension, by default the job's.

    The group keeps its own timeout: give ``init_process_group`` at least ``timeout``. CUDA tensors under
    Gloo travel through pinned host memory; issuing such a collective makes the host wait for the current
    stream. Host tensors under an NCCL-only group are a ``ValueError``. Under NCCL, ``wait`` only makes the
    current stream wait, and a lost rank ends the process through torch's watchdog after the group's timeout.
    """

    _transport_errors = (RuntimeError,)
    _attendance: Attendance | None = None

    def __init__(
        self,
        group: dist.ProcessGroup | DeviceMesh | None = None,
        timeout: float | None = None,
        *,
        _wiring: Wiring | None = None,
    ) -> None:
        wiring = _wiring or _wire(group)
        self._wiring = wiring
        backend = "nccl" if "nccl" in wiring.backend_of.values() else "gloo"
        super().__init__(self._group.rank(), self._group.size(), backend, timeout)
        self.global_ranks = wiring.global_ranks
        # At exit too: a group that outlives Python's shutdown aborts the process from Gloo's threads.
        self._let_go = weakref.finalize(self, wiring.let_go)
        self._roll = PrefixStore(f"{wiring.path}/roll", wiring.store)

    def _start_all_to_all(self, call: Call, output: Tensor, input: Tensor, sizes: Sizes) -> Pending:
        if self._takes_turns(input, max(sizes or [input.nbytes // self.size])):
            return self._pairwise.start(all_to_all, output, input, sizes)
        received = None if sizes is None else [sizes[self.rank]] * self.size
        return self._exchange(output, input, received, sizes)

    def _start_all_gather(self, call: Call, output: Tensor, input: Tensor, sizes: Sizes) -> Pending:
        if self._takes_turns(input, max(sizes or [input.nbytes])):
            return self._pairwise.start(all_gather, output, input, sizes)
        if sizes is not None:  # torch gathers equal ones alone
            return self._exchange(output, input.repeat(self.size), sizes, [input.numel()] * self.size)
        return _pending(output, _all_gather(output, input, group=self._group, async_op=True))

    def _exchange(self, output: Tensor, input: Tensor, received: Sizes, sent: Sizes) -> Pending:
        there, here = (None if sizes is None else list(sizes) for sizes in (sent, received))
        work = dist.all_to_all_single(output, input, here, there, group=self._group, async_op=True)
        return _pending(output, work)

    def _start_broadcast(self, call: Call, tensor: Tensor, root: int) -> Pending:
        return _pending(tensor, dist.broadcast(tensor, group=self._group, group_src=root, async_op=True))

    def _start_all_reduce(self, call: Call, tensor: Tensor, op: ReduceOp) -> Pending:
        work = dist.all_reduce(tensor, _REDUCE_OPS[op], group=self._group, async_op=True)
        return _pending(tensor, work)

    def _subgroup(self, members: list[int], number: int, timeout: float) -> Communicator:
        parent = self._wiring
        path = f"{parent.path}/{number}:{'-'.join(map(str, members))}"
        group = _make_group(parent.store, path, members.index(self.rank), len(members), parent.backend_of, timeout)
        global_ranks = tuple(parent.global_ranks[member] for member in members)
        wiring = Wiring(group, parent.backend_of, global_ranks, parent.store, path)
        return TorchCommunicator(timeout=timeout, _wiring=wiring)

    def _takes_turns(self, input: Tensor, chunk_bytes: int) -> bool:
        return chunk_bytes >= LEAST_CHUNK_BYTES and not input.is_cuda

    @property
    def _pairwise(self) -> Pairwise:
        if self._wiring.pairwise is None:
            self._wiring.pairwise = Pairwise(self._group, self._wiring.instance)
        return self._wiring.pairwise

    @property
    def _group(self) -> dist.ProcessGroup:
        assert self._wiring.group is not None, "a closed communicator starts nothing"
        return self._wiring.group

    def _release(self) -> None:
        self._let_go()

    def _abandon(self) -> None:
        if self._let_go.detach() is not None:
            self._wiring.keep_group()

    def attend(self) -> None:
        """Have this process answer for its rank while it lives, as ranks do that wait in transfers which torch started:
        errors then tell which ranks of the job are lost, and no transfer takes for longer than this communicator's do.
        Every rank that will enter `transfers` calls it."""
        dist.distributed_c10d._set_pg_timeout(group_timeout(self.timeout), self._group)
        self._attendance = attend(self._wiring.store, dist.get_rank(), dist.get_world_size())

    @contextmanager
    def transfers(self, name: str) -> Iterator[None]:
        """Have failures of transfers that torch starts inside be this communicator's, of a call `name`: they tell which
        ranks are missing. Every rank enters it as often."""
        self._raise_earlier_failure()
        self._sequence += 1
        call = Call(self._sequence, name)
        try:
            yield
        except RuntimeError as error:
            found: BaseException | None = error
            while not (found is None or _is_of_transport(found)):  # torch's schedules wrap what a stage raises
                found = found.__cause__
            if found is None or isinstance(found, CommunicationError):
                raise
            raise self._fail(call, cause=found) from error

    def _alarmed(self) -> bool:
        """Whether a rank has opened a roll call or is lost, or the store is, which is a failure as well."""
        attendance = attendance_of(self._wiring.store)
        if attendance is not None and attendance.lost:
            return True
        roll = self._roll  # alone: a store that is stopped must not keep this communicator
        try:
            return bool(within(_STORE_SECONDS, lambda: roll.check(["alarm"])))
        except RuntimeError:
            return True

    def _roll_call(self, call: Call) -> RollCall:
        """Say where this rank stands and collect what the others say, for ``ROLL_CALL_SECONDS`` at most."""
        if lost := self._lost_ranks():
            return RollCall({}, (), lost=tuple(lost))
        answers: dict[int, Call] = {}
        host = _host_of_store(self._wiring)
        try:
            complete = within(ROLL_CALL_SECONDS + _STORE_SECONDS, lambda: self._collect(call, answers, host))
        except RuntimeError:
            complete = None
        if complete is None:
            if host is None or host == self.rank:
                return RollCall({}, (), "the job's store does not answer either, so no rank can be named")
            return RollCall({}, (host,), "it serves the job's store, so the other ranks are unknown")
        return RollCall(answers, tuple(rank for rank in range(self.size) if rank not in answers))

    def _lost_ranks(self) -> Sequence[int]:
        """Ranks of the job that answer no more, as far as ranks attend."""
        attendance = attendance_of(self._wiring.store)
        try:
            return () if attendance is None else within(2 * ROLL_CALL_SECONDS, attendance.ask) or ()
        except RuntimeError:  # the store is lost, before anyone could tell
            return ()

    def _collect(self, call: Call, answers: dict[int, Call], host: int | None) -> bool:
        deadline = time.monotonic() + ROLL_CALL_SECONDS
        self._roll.set(f"at/{self.rank}", call.encode().decode())
        self._roll.set("alarm", "1")
        while len(answers) < self.size and time.monotonic() < deadline:
            for rank in self._present("at", set(range(self.size)) - answers.keys()):
                answers[rank] = Call.decode(self._roll.get(f"at/{rank}"))
            time.sleep(_POLL_SECONDS)
        self._roll.set(f"left/{self.rank}", "1")
        # The store dies with its host: it stays until all who answered have read the answers.
        readers = set(answers) if self.rank == host else set()
        while readers and time.monotonic() < deadline:
            readers -= self._present("left", readers)
            time.sleep(_POLL_SECONDS)
        return True

    def _present(self, kind: str, ranks: set[int]) -> set[int]:
        return {rank for rank in ranks if self._roll.check([f"{kind}/{rank}"])}

    def _needs_staging(self, device: torch.device, *, reduction: bool) -> bool:
        backend = self._wiring.backend_of.get(device.type)
        if backend is None:
            raise ValueError(
                f"tensors on {device} cannot travel over this {self.backend} process group, which serves "
                f"{' and '.join(self._wiring.backend_of)}; move them there, or use a group for them, for "
                "example with thinwire.comm.init(backend='gloo')"
            )
        return backend == "gloo" and device.type != "cpu"

    @property
    @override
    def control_device(self) -> torch.device:
        if "cpu" in self._wiring.backend_of:
            return torch.device("cpu")
        return torch.device("cuda", torch.cuda.current_device())


def connect(store: Store, path: str, rank: int, size: int, timeout: float) -> Wiring:
    """Connect `size` processes over Gloo, this one as `rank`, at `path` of a store, without torch's own job.

    Raises RuntimeError where some do not come in time.
    """
    backend_of = {"cpu": "gloo", "cuda": "gloo"}
    group = _make_group(store, path, rank, size, backend_of, timeout)
    return Wiring(group, backend_of, tuple(range(size)), store, path)


class _StreamPending:
    """A transfer for which the current CUDA stream waits."""

    def __init__(self, work: dist.Work) -> None:
        self._work = work

    def done(self) -> bool:
        return self._work.is_completed()

    def wait(self, seconds: float) -> bool:
        self._work.wait()
        return True


class _HostPending(_StreamPending):
    """A transfer for which the host waits, in slices."""

    @override
    def wait(self, seconds: float) -> bool:
        # Zero would mean forever.
        limit = timedelta(seconds=max(0.001, seconds))
        try:
            self._work.wait(limit)
        except RuntimeError:
            if not self._work.is_completed():
                return False
            # It ended while its time ran out, or it failed: only asking again can tell.
            self._work.wait(limit)
        return True


def _pending(tensor: Tensor, work: dist.Work | None) -> Pending:
    assert work is not None, "torch returns no handle only to processes outside of the group"
    return _StreamPending(work) if tensor.is_cuda else _HostPending(work)


def _is_of_transport(error: BaseException) -> bool:
    # Gloo's are of no class of their own; others may be what a model raises.
    return isinstance(error, CommunicationError | dist.DistError) or "gloo/transport" in str(error)


def _group_of(mesh: DeviceMesh) -> dist.ProcessGroup:
    """The ranks of a mesh that this process is in; raises ValueError for one of several dimensions, or of others."""
    if mesh.ndim != 1:
        names = mesh.mesh_dim_names or ()
        raise ValueError(
            f"mesh has {mesh.ndim} dimensions{f', {names}' if names else ''}: give the one over which gradients are "
            f'averaged, as mesh["{names[0] if names else "dp"}"]'
        )
    if mesh.get_coordinate() is None:
        raise ValueError(f"this process, rank {dist.get_rank()}, is not in the mesh of ranks {mesh.mesh.tolist()}")
    group: dist.ProcessGroup = mesh.get_group()
    return group


def _wire(group: dist.ProcessGroup | DeviceMesh | None) -> Wiring:
    """Look up what torch knows about a group that it has registered."""
    if isinstance(group, DeviceMesh):
        group = _group_of(group)
    if not dist.is_initialized():
        raise RuntimeError(
            "torch.distributed is not initialised: call thinwire.comm.init(), or init_process_group() first"
        )
    group = dist.group.WORLD if group is None else group
    if not isinstance(group, dist.ProcessGroup):
        raise ValueError("this process is not a member of the given process group")
    backend_of = dict(entry.split(":") for entry in dist.get_backend_config(group).split(","))
    global_ranks = tuple(dist.get_process_group_ranks(group))
    store = dist.distributed_c10d._get_default_store()
    path = f"thinwire/{group.group_name}"
    # Communicators on one group need keys of their own; all ranks make them in the same order.
    instance = store.add(f"{path}/instances/{group.rank()}", 1)
    return Wiring(group, backend_of, global_ranks, store, f"{path}/{instance}", instance)


def _host_of_store(wiring: Wiring) -> int | None:
    """The rank that serves the store: the job's rank 0; None if it is no rank, but the launcher itself or a file."""
    store = wiring.store
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    by_launcher = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if not isinstance(store, TCPStore) or by_launcher or 0 not in wiring.global_ranks:
        return None
    return wiring.global_ranks.index(0)


def _make_group(
    store: Store, path: str, rank: int, size: int, backend_of: dict[str, str], timeout: float
) -> dist.ProcessGroup:
    # new_group needs every rank of the job, or equal numbers of groups on all; this needs neither.
    own = PrefixStore(path, store)
    group = dist.ProcessGroup(own, rank, size)
    kinds, limit = dist.ProcessGroup.BackendType, group_timeout(timeout)
    for device, backend in backend_of.items():
        place = PrefixStore(device, own)
        if backend == "nccl":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = limit
            nccl = dist.ProcessGroupNCCL(place, rank, size, options)
            group._register_backend(torch.device(device), kinds.NCCL, nccl)
        elif device == "cpu":
            gloo = dist.ProcessGroupGloo(place, rank, size, limit)
            group._register_backend(torch.device(device), kinds.GLOO, gloo)
    return group
