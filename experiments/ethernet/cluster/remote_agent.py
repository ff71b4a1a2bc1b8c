"""What mpirun calls in place of ssh: `remote_agent.py CLUSTER HOST COMMAND...` runs the command on an emulated host.

A script of its own, that imports nothing of this repository: it starts once a host, on every launch.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Sequence
from typing import NoReturn

__all__ = ["host_number", "main", "remote_command"]

_SSH_PORT = 22
_CONNECT_SECONDS = 5.0
_SSH_FAILED = 255


def main(arguments: Sequence[str]) -> NoReturn:
    """Becomes the command, on its host; exits as ssh does where the host cannot be reached."""
    cluster, host, *command = arguments
    complaint = _unreachable(host)
    if complaint is not None:
        print(f"remote_agent: connect to host {host} port {_SSH_PORT}: {complaint}", file=sys.stderr)
        sys.exit(_SSH_FAILED)
    os.execvp("ip", remote_command(cluster, host, command))


def remote_command(cluster: str, host: str, command: Sequence[str]) -> list[str]:
    """The command in the host's namespace, under the host's own name, as a remote shell would run it.

    mpirun tells hosts apart by their names, so each gets a UTS namespace as well.
    """
    name = f"host{host_number(host)}"
    script = f"echo {name} > /proc/sys/kernel/hostname; {' '.join(command)}"
    return ["ip", "netns", "exec", f"{cluster}-{name}", "unshare", "--uts", "sh", "-c", script]


def host_number(address: str) -> int:
    """0 for 10.77.0.1, and so on."""
    return int(address.rpartition(".")[2]) - 1


def _unreachable(host: str) -> str | None:
    """Why nothing answers at the address; None if something does, be it with a refusal: no ssh server runs there."""
    try:
        socket.create_connection((host, _SSH_PORT), timeout=_CONNECT_SECONDS).close()
    except ConnectionRefusedError:
        return None
    except OSError as error:
        return error.strerror or str(error)
    return None


if __name__ == "__main__":
    main(sys.argv[1:])
