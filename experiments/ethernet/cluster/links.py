"""A host's link: its rate, and whether it is up. Both ends are shaped alike, so that it is full duplex.

The queue is deep. With a shallow one (burst 64 kB, 20 ms) TCP loses packets, and plain all-reduces come out 2.3 times
slower than the link allows: a race against them would be unfair.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from experiments.ethernet.cluster.commands import run

__all__ = ["HOST_DEVICE", "Link", "cluster_links", "shape_links"]

HOST_DEVICE = "eth0"
"""What every host calls its end."""

_QUEUE = "8mb"
_LEAST_BURST, _BURST_SECONDS = 64 << 10, 0.002
"""What a link carries at once after a rest: as little as lets it reach its rate, since small messages gain by it."""


@dataclass(frozen=True)
class Link:
    """A veth pair between a host and the switch.

    Attributes:
        host: namespace of the host, whose end is `HOST_DEVICE`.
        switch: namespace of the switch.
        port: name of the switch's end.
    """

    host: str
    switch: str
    port: str

    def connect(self, address: str) -> None:
        """Makes the pair, joins the switch's end to its bridge "br0", and gives the host's end `address`, as a/bits."""
        run("ip", "-n", self.host, "link", "add", HOST_DEVICE, "type", "veth", "peer", self.port, "netns", self.switch)
        run("ip", "-n", self.host, "address", "add", address, "dev", HOST_DEVICE)
        run("ip", "-n", self.switch, "link", "set", self.port, "master", "br0")
        for namespace, device in ((self.host, "lo"), *self._ends):
            run("ip", "-n", namespace, "link", "set", device, "up")

    def shape(self, megabits: float | None) -> None:
        """Limits both directions to so many 10⁶ bits a second; None takes the limits away."""
        for namespace, device in self._ends:
            if megabits is not None:
                burst = max(_LEAST_BURST, round(1e6 / 8 * megabits * _BURST_SECONDS))
                rate = ("rate", f"{round(1e6 * megabits)}bit", "burst", f"{burst}b", "limit", _QUEUE)
                run("tc", "-n", namespace, "qdisc", "replace", "dev", device, "root", "tbf", *rate)
            elif "tbf" in run("tc", "-n", namespace, "qdisc", "show", "dev", device):
                run("tc", "-n", namespace, "qdisc", "delete", "dev", device, "root")

    def set_up(self, up: bool) -> None:
        """Plugs the cable in, or pulls it out, at the switch."""
        run("ip", "-n", self.switch, "link", "set", self.port, "up" if up else "down")

    @property
    def _ends(self) -> tuple[tuple[str, str], tuple[str, str]]:
        return (self.host, HOST_DEVICE), (self.switch, self.port)


def cluster_links(cluster: str, hosts: int) -> list[Link]:
    """The links of a cluster, by its name, host by host."""
    return [Link(f"{cluster}-host{host}", f"{cluster}-switch", f"port{host}") for host in range(hosts)]


def shape_links(links: Iterable[Link], megabits: float | None) -> None:
    """Shapes all of them alike; see `Link.shape`."""
    for link in links:
        link.shape(megabits)
