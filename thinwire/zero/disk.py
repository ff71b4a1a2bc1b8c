"""Optimizer state, and at stage 3 parameters, in files of a fast disk, and the ring of buffers through which they come
into memory and go back.

A file holds what is needed at once, and is read and written whole, past the page cache where the file system can.
While one is used, those after it are read and those before it written. Files are of use to this process alone and end
with it: what a run goes on from is its checkpoints.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import re
import shutil
import socket
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import torch

from thinwire.comm import Communicator
from thinwire.comm.agreement import gather, on_every_rank, raise_together

_PAGE = 4096  # whose multiples addresses, offsets and lengths are, as O_DIRECT asks of them
REQUEST_BYTES = 4 << 20
THREADS = 4
_BYTES_IN_FLIGHT = 64 << 20  # many times a disk's rate times its latency
_FEWEST_BUFFERS = 3  # one that is read, one that is stepped, one that is written
_SUFFIX = ".state"
IN_MEMORY = ("tmpfs", "ramfs")


class SwapFileError(RuntimeError):
    """A file of what is offloaded could not be read or written, or holds something else than was written to it."""


class SwapFile:
    """A file, for which `room` bytes are set aside; the `nbytes` written last, and the sum of each request's words."""

    def __init__(self, path: Path, room: int) -> None:
        self.path, self.room = path, _paged(room)
        self.nbytes = 0
        self.sums: list[int] = []


class Buffer:
    """Memory that begins at a page: `values`, [bytes]; `view` is the same."""

    def __init__(self, nbytes: int) -> None:
        # Private, so that limits on a process's memory count it.
        memory = mmap.mmap(-1, max(_PAGE, _paged(nbytes)), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with suppress(OSError):  # of a kernel without; the disk reads into large pages at up to twice the rate
            memory.madvise(mmap.MADV_HUGEPAGE)
        self.view = memoryview(memory)
        self.values = torch.frombuffer(memory, dtype=torch.uint8)


class Ring:
    """Buffers for `files`, as many as keep a disk busy, of the largest's size or, for small ones, a third of it. One
    thread at a time uses it. `error`: the first that a file had. Half are for what is written if it `keeps_half`."""

    def __init__(self, files: Sequence[SwapFile], direct: bool, keeps_half: bool = False) -> None:
        largest = max([_PAGE, *(file.room for file in files)])
        count = min(max(_FEWEST_BUFFERS, -(-_BYTES_IN_FLIGHT // largest)), len(files) + 1)
        third = _paged(largest // 3)
        several = count > _FEWEST_BUFFERS and 3 * sum(file.room <= third for file in files) >= len(files)
        self._free = [Buffer(size) for size in [largest] * (count - several) + [third] * (3 * several)]
        self._spare = count // 2 if keeps_half else 0
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="thinwire state")
        self._flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | (os.O_DIRECT if direct else 0)
        self._expected: deque[SwapFile] = deque()
        self._reading: dict[SwapFile, tuple[Buffer, list[Future[int]]]] = {}
        self._writing: dict[SwapFile, tuple[Buffer, list[Future[int]]]] = {}
        self._last: tuple[SwapFile, Buffer] | None = None
        self.error: SwapFileError | None = None

    def expect(self, files: Iterable[SwapFile], if_idle: bool = False) -> None:
        """Begin to read `files`, to be taken in this order after those that are expected already; or only `if_idle`."""
        if not if_idle or not (self._expected or self._reading):
            self._expected.extend(files)
            self._read_ahead()

    def blank(self, file: SwapFile) -> Buffer:
        """A buffer to be given back with all that `file` will have."""
        self._let_go(file)
        return self._buffer(file)

    def take(self, file: SwapFile) -> Buffer:
        """A buffer with what was written to `file`. Raises SwapFileError: of a write that failed before, if any."""
        if self._last is not None and self._last[0] is file:
            (_, buffer), self._last = self._last, None
            return buffer
        if file in self._writing:
            self._settle(file)
        if file not in self._reading:
            if self._expected and self._expected[0] is file:
                self._expected.popleft()
            self._reading[file] = self._start(file, self._buffer(file), file.nbytes, os.preadv)
        buffer, requests = self._reading.pop(file)
        try:
            if _results(file, requests, "read") != file.sums:
                raise self.error or SwapFileError(
                    f"{file.path} holds other bytes than were written to it: another program has changed it, or its "
                    "disk fails. Go on from the last checkpoint"
                )
        except SwapFileError:
            self._free.append(buffer)
            raise
        return buffer

    def give_back(self, file: SwapFile, buffer: Buffer, nbytes: int | None) -> None:
        """Have the first `nbytes` of `buffer` written to `file`; None where it is as it was read."""
        if nbytes is None:
            self._forget_last()
            self._last = file, buffer  # what is saved of a file is asked for at once, part by part
        else:
            file.nbytes, file.sums = _paged(nbytes), []
            self._writing[file] = self._start(file, buffer, file.nbytes, os.pwritev)
        self._read_ahead()

    def exchange(self, file: SwapFile, other: SwapFile) -> None:
        """Have each file what the other has."""
        self._forget_last()
        self._let_go(file)
        self._let_go(other)
        file.path, other.path = other.path, file.path
        file.nbytes, other.nbytes, file.sums, other.sums = other.nbytes, file.nbytes, other.sums, file.sums

    @contextmanager
    def noting_errors(self) -> Iterator[None]:
        """Have the first SwapFileError inside in `error`, to be raised by `Disk.finish` on all ranks."""
        try:
            yield
        except SwapFileError as error:
            self.error = self.error or error

    def finish(self) -> None:
        """Wait for all that is read and written; what fails is in `error`."""
        self._expected.clear()
        for file in list(self._writing):
            self._settle(file)
        for file in list(self._reading):
            self._forget_read_ahead(file)
        self._forget_last()

    def close(self) -> None:
        """End the threads, and let the memory go."""
        self.finish()
        self._pool.shutdown()
        self._free.clear()

    def _start(
        self, file: SwapFile, buffer: Buffer, nbytes: int, call: Callable[[int, list[memoryview], int], int]
    ) -> tuple[Buffer, list[Future[int]]]:
        cuts = [slice(start, min(start + REQUEST_BYTES, nbytes)) for start in range(0, nbytes, REQUEST_BYTES)]
        flags = self._flags
        return buffer, [self._pool.submit(_move, call, file.path, flags, buffer.view[one], one.start) for one in cuts]

    def _buffer(self, file: SwapFile) -> Buffer:
        self._forget_last()
        while (found := self._smallest_free(file)) is None:
            if self._writing:
                self._settle(next(iter(self._writing)))
            else:
                self._forget_read_ahead(next(reversed(self._reading)))
        return found

    def _smallest_free(self, file: SwapFile) -> Buffer | None:
        fitting = [one for one in self._free if len(one.view) >= file.room]
        found = min(fitting, key=lambda one: len(one.view), default=None)
        if found is not None:
            self._free.remove(found)
        return found

    def _let_go(self, file: SwapFile) -> None:
        if file in self._writing:
            self._settle(file)
        if file in self._reading:
            self._forget_read_ahead(file)

    def _forget_last(self) -> None:
        if self._last is not None:
            self._free.append(self._last[1])
            self._last = None

    def _forget_read_ahead(self, file: SwapFile) -> None:
        buffer, requests = self._reading.pop(file)
        wait(requests)
        self._free.append(buffer)

    def _read_ahead(self) -> None:
        for file in [one for one, (_, requests) in self._writing.items() if all(part.done() for part in requests)]:
            self._settle(file)
        while self._expected and len(self._free) > self._spare and (file := self._expected[0]) not in self._reading:
            if (buffer := self._smallest_free(file)) is None:
                return
            self._expected.popleft()
            if file in self._writing:
                self._settle(file)
            self._reading[file] = self._start(file, buffer, file.nbytes, os.preadv)

    def _settle(self, file: SwapFile) -> None:
        """Wait until a file is written."""
        buffer, requests = self._writing.pop(file)
        try:
            file.sums = _results(file, requests, "written")
        except SwapFileError as error:
            self.error = self.error or error
        self._free.append(buffer)


def transfer(
    call: Callable[[int, list[memoryview], int], int], path: Path, flags: int, view: memoryview, offset: int
) -> None:
    """Read or write a part of a file. Raises OSError, also where the file ends."""
    descriptor, done = os.open(path, flags), 0
    try:
        while done < len(view):
            count = call(descriptor, [view[done:]], offset + done)
            if count == 0:
                raise OSError(0, f"it ends at byte {offset + done}")
            done += count
    finally:
        os.close(descriptor)


def _move(
    call: Callable[[int, list[memoryview], int], int], path: Path, flags: int, view: memoryview, offset: int
) -> int:
    """`transfer`; the sum of the part's words, which a program that writes to it would have to keep."""
    transfer(call, path, flags, view, offset)
    return int(np.frombuffer(view, np.uint64).sum())


def _results(file: SwapFile, requests: Sequence[Future[int]], done: str) -> list[int]:
    wait(requests)
    try:
        return [request.result() for request in requests]
    except OSError as error:
        raise SwapFileError(
            f"{file.path} cannot be {done}: {error.strerror}. Its disk must hold what is offloaded for as long as the "
            "job runs: go on from the last checkpoint, on another disk if this one is full or fails"
        ) from error


def _paged(nbytes: int) -> int:
    return -(-nbytes // _PAGE) * _PAGE


class Disk:
    """This rank's folder below `path`, which no other process has: what is of a `kind` rests there. Collective to make.

    Raises ValueError, on every rank, where it cannot be written to, or another job is in it.
    """

    def __init__(self, path: Path, comm: Communicator, kind: str = "optimizer state") -> None:
        self._comm, self._kind, rank = comm, kind, comm.global_ranks[comm.rank]
        self.folder = path.absolute() / f"thinwire-{kind.split()[0]}-rank-{rank:05d}"
        self._files: list[SwapFile] = []
        self.ring = Ring([], direct=False)
        lock = on_every_rank(comm, self._open, f"use the disk for {kind}", (ValueError,))
        self._end = weakref.finalize(self, _remove, self.folder, lock, os.getpid())
        mounted = file_system(self.folder)
        if mounted in IN_MEMORY:
            warnings.warn(
                f"{kind} is offloaded to {path}, which is {mounted}: memory, not a disk. Give a folder of an NVMe disk",
                RuntimeWarning,
                stacklevel=6,
            )

    def plan(self, name: str, nbytes: int) -> SwapFile:
        """Note a file for `nbytes`, to be called after a parameter."""
        plain = re.sub(r"[^\w.-]", "_", name)[:100]
        self._files.append(SwapFile(self.folder / f"{len(self._files):06d}-{plain}{_SUFFIX}", nbytes))
        return self._files[-1]

    def begin(self, keeps_half: bool = False) -> None:
        """Set the disk's blocks aside for all that was planned, with a ring that `keeps_half`. Collective.

        Raises ValueError, on every rank and before anything is written, where there is not enough of them.
        """
        try:
            self._check_room(sum(file.room for file in self._files))
            direct = on_every_rank(self._comm, self._set_aside, "set its disk's blocks aside", (ValueError,))
        except ValueError:
            self.close()
            raise
        self.ring = Ring(self._files, direct, keeps_half)

    def finish(self) -> None:
        """Wait until everything is on the disk. Collective: raises on every rank what failed on any."""
        self.ring.finish()
        with suppress(OSError, AttributeError):  # glibc's alone
            # What steps took and let go lies between other memory, and glibc would keep as much of it as all state is.
            ctypes.CDLL(None).malloc_trim(0)
        error, self.ring.error = self.ring.error, None
        raise_together(self._comm, error, f"keep {self._kind} on its disk")

    def close(self) -> None:
        """Remove the files."""
        self.ring.close()
        self._end()

    def _open(self) -> int:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            lock = _lock(self.folder / "owner", self._comm.timeout, self._kind)
            for stale in self.folder.glob(f"*{_SUFFIX}"):
                stale.unlink()
        except OSError as error:
            raise ValueError(
                f"{error.filename or self.folder} cannot be used for {self._kind}: {error.strerror}. offload= must "
                "be a folder that can be written to"
            ) from error
        return lock

    def _check_room(self, needed: int) -> None:
        free, device = shutil.disk_usage(self.folder).free, os.stat(self.folder).st_dev
        mine = [socket.gethostname(), device, needed, free, os.fspath(self.folder.parent)]
        given = gather(self._comm, mine, "check its disk's room")
        for host, number, _, there, path in given:
            wanted = sum(one[2] for one in given if one[:2] == [host, number])
            if wanted > there:
                raise ValueError(
                    f"{self._kind} needs {wanted:,} bytes of the disk of {path} on {host}, and {there:,} are free: "
                    "make room, give a folder of another disk, or use more ranks"
                )

    def _set_aside(self) -> bool:
        """Whether the file system reads and writes past the page cache."""
        for file in self._files:
            try:
                descriptor = os.open(file.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
                try:
                    os.posix_fallocate(descriptor, 0, max(_PAGE, file.room))
                finally:
                    os.close(descriptor)
            except OSError as error:
                raise ValueError(f"{file.path} cannot be made: {error.strerror}") from error
        with suppress(OSError, IndexError):
            os.close(os.open(self._files[0].path, os.O_RDWR | os.O_DIRECT))
            return True
        return False


def _lock(path: Path, patience: float, kind: str) -> int:
    """The descriptor of a lock that ends with this process. Raises ValueError where another has it, and lives."""
    until = time.monotonic() + patience
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.exists(path) and os.path.samestat(os.fstat(descriptor), os.stat(path)):
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, f"{os.getpid()} {socket.gethostname()}".encode(), 0)
                return descriptor
        except BlockingIOError:
            owner = os.pread(descriptor, 300, 0).decode(errors="replace")
            number, _, host = owner.partition(" ")
            dead = host == socket.gethostname() and number.isdigit() and not os.path.exists(f"/proc/{number}")
            if time.monotonic() > until or not dead:  # a dead owner's children have its lock until they notice
                os.close(descriptor)
                raise ValueError(
                    f"{path.parent} holds the {kind} of another job or optimizer, of process {owner}: give "
                    "each a folder of its own"
                ) from None
        os.close(descriptor)
        time.sleep(0.05)


def _remove(folder: Path, lock: int, process: int) -> None:
    if process != os.getpid():  # a fork, whose parent goes on
        return
    with suppress(OSError):
        for file in [*folder.glob(f"*{_SUFFIX}"), folder / "owner"]:
            file.unlink(missing_ok=True)
        folder.rmdir()
    os.close(lock)


def file_system(path: Path) -> str:
    """The kind of file system that a folder is on, as Linux calls it; "" where that is not known."""
    best, kind = "", ""
    with suppress(OSError):
        real = os.path.realpath(path)
        for line in Path("/proc/self/mounts").read_text().splitlines():
            _, where, found, *_ = line.split()
            if os.path.commonpath([real, where]) == where and len(where) >= len(best):
                best, kind = where, found
    return kind
