"""Emulated hosts for a harness's processes, one each, whose links are cut and restored."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager

from experiments.ethernet.cluster.clusters import EmulatedCluster
from experiments.ethernet.cluster.links import HOST_DEVICE

_NEW_NETWORK = 0x40000000  # CLONE_NEWNET


class Hosts:
    """Of a cluster; the last one's is the meeting place, the others' are those of workers by number."""

    def __init__(self, cluster: EmulatedCluster) -> None:
        self._cluster = cluster
        self.place = cluster.hosts - 1
        self.place_address = cluster.address(self.place)

    def enter(self, host: int) -> None:
        """Have this process, and those that it starts, see no other network than the host's."""
        descriptor = os.open(f"/run/netns/{self._cluster.links[host].host}", os.O_RDONLY)
        if ctypes.CDLL(None, use_errno=True).setns(descriptor, _NEW_NETWORK):
            raise OSError(ctypes.get_errno(), "setns")
        os.close(descriptor)
        os.environ["GLOO_SOCKET_IFNAME"] = HOST_DEVICE

    def plug(self, host: int, up: bool) -> None:
        """Plug a host's cable in, or pull it out."""
        self._cluster.links[host].set_up(up)


@contextmanager
def emulated_hosts(count: int) -> Iterator[Hosts]:
    """So many, and the meeting place's."""
    with EmulatedCluster(count + 1).running() as cluster:
        yield Hosts(cluster)
