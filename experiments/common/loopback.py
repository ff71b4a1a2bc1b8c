"""What ranks of one host really send: the kernel's count of the loopback interface, of one that nobody else uses.

Linux gives a job an interface of its own in a network namespace, without root where it allows user namespaces.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from thinwire.comm import detect

__all__ = ["bytes_sent", "is_own", "run_on_own"]

_COUNTERS = Path("/proc/self/net/dev")
_INSIDE = "THINWIRE_OWN_LOOPBACK"
_ALONE = ("unshare", "--user", "--map-root-user", "--net")
_GET_FLAGS, _SET_FLAGS, _UP = 0x8913, 0x8914, 1


def bytes_sent() -> int:
    """Bytes that all processes sent through "lo", headers and acknowledgements included; 0 where nobody counts."""
    if _COUNTERS.exists():
        for line in _COUNTERS.read_text().splitlines():
            name, _, counts = line.partition(":")
            if name.strip() == "lo":
                return int(counts.split()[8])
    return 0


def is_own() -> bool:
    """Whether only this job's processes send through it."""
    return _INSIDE in os.environ


def run_on_own(module: str, main: Callable[[], int]) -> int:
    """Runs `python -m module` on a loopback interface of its own, and there `main()`; the exit code.

    Under a launcher, or where the system gives none, it runs `main()` at once.
    """
    if is_own():
        _put_up()
    elif detect(os.environ).launcher == "single" and _can_be_had():
        command = [*_ALONE, sys.executable, "-m", module, *sys.argv[1:]]
        # Names of hosts may not resolve there: Gloo is told which interface there is.
        inside = {**os.environ, _INSIDE: "1", "GLOO_SOCKET_IFNAME": "lo"}
        return subprocess.run(command, env=inside, check=False).returncode
    return main()


def _can_be_had() -> bool:
    if shutil.which(_ALONE[0]) is None:
        return False
    return subprocess.run([*_ALONE, "true"], capture_output=True, check=False).returncode == 0


def _put_up() -> None:
    """What `ip link set lo up` does."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("16sh22x", b"lo", 0)
        _, flags = struct.unpack("16sh22x", fcntl.ioctl(any_socket, _GET_FLAGS, request))
        fcntl.ioctl(any_socket, _SET_FLAGS, struct.pack("16sh22x", b"lo", flags | _UP))
