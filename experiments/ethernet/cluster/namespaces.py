"""Network namespaces that are gone when their maker is, whatever ended it.

Their names hold the maker's process number and start time: a later run finds and removes what a killed one left.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import signal
from pathlib import Path

from experiments.ethernet.cluster.commands import ClusterError, run

__all__ = [
    "add_namespace",
    "congestion_control",
    "end_processes",
    "new_cluster_name",
    "remove_namespaces",
    "remove_stale_namespaces",
]

_PREFIX = "thinwire"
_TCP = "/proc/sys/net/ipv4/tcp_"
_TCP_RETRIES = 6
_CONGESTION_CONTROLS = ("cubic", "reno")
"""Linux's default, or where the kernel keeps that from namespaces its forerunner: on links that lose nothing they do
the same. Left alone, hosts have the machine's, and some have BBR, which forgets how fast a link is whenever it rests:
exchanges with one partner after another then take 1.2 to 1.6 times as long, rings do not."""
_NAME = re.compile(rf"{_PREFIX}-(\d+)-(\d+)-[0-9a-f]+(?:-\w+)?")


def new_cluster_name() -> str:
    """A name that no other cluster has: of another process, or of this one."""
    return f"{_PREFIX}-{os.getpid()}-{_start_time(os.getpid())}-{secrets.token_hex(3)}"


def add_namespace(name: str) -> None:
    """Makes a network namespace, with nothing in it but a loopback device that is down.

    Its TCP gives a silent peer up after about 25 seconds. The kernel's own patience is a quarter of an hour, for which
    mpirun would wait for a host that has been cut off.
    """
    run("ip", "netns", "add", name)
    _set_tcp(name, "retries2", str(_TCP_RETRIES))
    for one in _CONGESTION_CONTROLS:
        with contextlib.suppress(ClusterError):
            _set_tcp(name, "congestion_control", one)
            break


def congestion_control(namespace: str) -> str:
    """By what its TCP finds out how fast it can send: "cubic", say."""
    return run("ip", "netns", "exec", namespace, "cat", f"{_TCP}congestion_control").strip()


def _set_tcp(namespace: str, setting: str, value: str) -> None:
    run("ip", "netns", "exec", namespace, "sh", "-c", f"echo {value} > {_TCP}{setting}")


def remove_namespaces(cluster: str) -> None:
    """Ends the processes inside a cluster's namespaces, and removes them."""
    for name in _of_cluster(cluster):
        _remove(name)


def end_processes(cluster: str) -> None:
    """Kills whatever runs inside a cluster's namespaces: what a job left behind on hosts that it could not reach."""
    for name in _of_cluster(cluster):
        _end_processes(name)


def _of_cluster(cluster: str) -> list[str]:
    return [name for name in _existing() if name.startswith(f"{cluster}-")]


def remove_stale_namespaces() -> list[str]:
    """Removes namespaces of clusters whose makers are no more; returns their names."""
    stale = [name for name in _existing() if (match := _NAME.fullmatch(name)) and not _alive(int(match[1]), match[2])]
    for name in stale:
        _remove(name)
    return stale


def _existing() -> list[str]:
    """Names of all network namespaces, ours or not."""
    return [line.split()[0] for line in run("ip", "netns", "list").splitlines() if line.strip()]


def _remove(name: str) -> None:
    # Another run may be removing the same stale one.
    with contextlib.suppress(ClusterError):
        _end_processes(name)
        run("ip", "netns", "delete", name)


def _end_processes(name: str) -> None:
    for process in run("ip", "netns", "pids", name).split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(process), signal.SIGKILL)


def _alive(process: int, start_time: str) -> bool:
    return _start_time(process) == start_time


def _start_time(process: int) -> str | None:
    """When a process started, in clock ticks since boot: numbers are used again, pairs of both are not."""
    try:
        status = Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return None
    # The second field is the program's name in parentheses, and may hold anything.
    return status.rpartition(")")[2].split()[19]
