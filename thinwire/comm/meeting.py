"""Where the ranks of a torch process group find each other: on one host over loopback alone, on a free port that rank 0
tells the others through a file that only this user can read; over several hosts where the environment says."""

from __future__ import annotations

import hashlib
import ipaddress
import os
import socket
import stat
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from torch.distributed import HashStore, Store, TCPStore  # type: ignore[attr-defined]

from thinwire.comm.launchers import Launch, rendezvous
from thinwire.comm.torch_backend import group_timeout

__all__ = ["meet"]

_LOOPBACK = "127.0.0.1"
_POLL_SECONDS = 0.01
_ARRIVED = "thinwire/arrived"


def meet(launch: Launch, size: int, timeout: float, environ: Mapping[str, str]) -> Store:
    """The store through which the ranks find each other; rank 0 serves it. Collective.

    Raises ValueError where nobody says where to meet, and RuntimeError where rank 0 does not come.
    """
    if size == 1:
        return HashStore()
    if "MASTER_ADDR" in environ and "MASTER_PORT" in environ:
        return _store(*rendezvous(environ), launch, size, timeout)
    if launch.local_size == size and "MASTER_ADDR" not in environ:
        if "MASTER_PORT" in environ:
            return _store(_LOOPBACK, int(environ["MASTER_PORT"]), launch, size, timeout)
        return _meet_on_this_host(launch, size, timeout, environ)
    if launch.launcher == "srun":
        return _store(*rendezvous(environ), launch, size, timeout)
    raise ValueError(
        "mpirun over several hosts does not tell torch where to meet: set MASTER_ADDR to rank 0's host and "
        "MASTER_PORT to a free port there, for example with mpirun -x MASTER_ADDR=host0 -x MASTER_PORT=29500"
    )


def _meet_on_this_host(launch: Launch, size: int, timeout: float, environ: Mapping[str, str]) -> Store:
    path = _private_folder() / hashlib.sha256(_job(launch, environ).encode()).hexdigest()[:32]
    if launch.rank != 0:
        store = _store(_LOOPBACK, _read_port(path, timeout), launch, size, timeout)
        store.add(_ARRIVED, 1)
        return store
    listener = _listen(_LOOPBACK, 0)
    port = listener.getsockname()[1]
    store = _serve(listener, _LOOPBACK, size, timeout)
    _write_port(path, port)
    try:
        _wait_for(store, size - 1, timeout)
    finally:
        path.unlink(missing_ok=True)
    return store


def _job(launch: Launch, environ: Mapping[str, str]) -> str:
    """A name that the ranks of one job on this host share, and no other job here."""
    if "PMIX_NAMESPACE" in environ:
        return f"pmix {environ['PMIX_NAMESPACE']}"
    if launch.launcher == "srun":
        return f"slurm {environ.get('SLURM_JOB_ID')}.{environ.get('SLURM_STEP_ID')}"
    return f"parent {os.getppid()}"


def _store(address: str, port: int, launch: Launch, size: int, timeout: float) -> Store:
    """Rank 0's at this address; where that is loopback, nobody beyond this host can reach it."""
    if launch.rank == 0 and _is_loopback(address):
        return _serve(_listen(_LOOPBACK, port), address, size, timeout)
    return TCPStore(address, port, size, launch.rank == 0, group_timeout(timeout), wait_for_workers=False)


def _serve(listener: socket.socket, address: str, size: int, timeout: float) -> Store:
    port = listener.getsockname()[1]
    return TCPStore(
        address,
        port,
        size,
        True,
        group_timeout(timeout),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),  # torch itself would listen on every interface
    )


def _listen(address: str, port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((address, port))
    listener.listen(socket.SOMAXCONN)
    return listener


def _wait_for(store: Store, others: int, timeout: float) -> None:
    deadline = time.monotonic() + timeout
    while (arrived := store.add(_ARRIVED, 0)) < others:
        if time.monotonic() > deadline:
            raise RuntimeError(f"{arrived} of {others} other ranks came within {timeout:g} s: did all of them start?")
        time.sleep(_POLL_SECONDS)


def _is_loopback(address: str) -> bool:
    try:
        return address == "localhost" or ipaddress.IPv4Address(address).is_loopback
    except ValueError:
        return False


def _private_folder() -> Path:
    """A folder of this user's that nobody else can read or write."""
    folder = Path(tempfile.gettempdir()) / f"thinwire-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise ValueError(
            f"{folder} must be a folder that this user alone can use, for ranks to meet: remove it, or set MASTER_ADDR "
            "and MASTER_PORT"
        )
    return folder


def _write_port(path: Path, port: int) -> None:
    new = path.with_name(f"{path.name}.{os.getpid()}")
    new.unlink(missing_ok=True)
    file = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with os.fdopen(file, "w") as opened:
        opened.write(f"{port} {os.getpid()}")
    new.replace(path)  # whole or absent


def _read_port(path: Path, timeout: float) -> int:
    deadline = time.monotonic() + timeout
    while True:
        try:
            port, process = map(int, path.read_text().split())
            if _is_alive(process):
                return port
        except FileNotFoundError:
            pass
        if time.monotonic() > deadline:
            raise RuntimeError(
                f"rank 0 did not say in {path} within {timeout:g} s where to meet: did it start, and do all ranks "
                "share this folder? If not, set MASTER_ADDR=127.0.0.1 and MASTER_PORT to a free port"
            )
        time.sleep(_POLL_SECONDS)


def _is_alive(process: int) -> bool:
    """Whether there is such a process: a job that was killed may have left its file behind."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True
