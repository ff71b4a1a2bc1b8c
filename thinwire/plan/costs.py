"""What one collective costs: seconds on the link between nodes and on that inside, and bytes, counted as
`thinwire.comm.Traffic` counts them."""

from __future__ import annotations

from dataclasses import dataclass

from thinwire.comm.traffic import sent_bytes
from thinwire.plan.cluster import Cluster, Collective

__all__ = ["Cost", "between_nodes", "compute", "everywhere", "inside_nodes"]


@dataclass(frozen=True)
class Cost:
    """Seconds by what is busy (the processor with compression, the links), and bytes.

    `bytes_sent`: by one rank. `bytes_between`: by the ranks of one node together, to other nodes.
    """

    codec: float = 0.0
    between: float = 0.0
    inside: float = 0.0
    bytes_sent: float = 0.0
    bytes_between: float = 0.0

    @property
    def wire(self) -> float:
        """Seconds on either link, one after the other."""
        return self.between + self.inside

    @property
    def total(self) -> float:
        """Seconds of everything, one after the other."""
        return self.codec + self.wire

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.codec + other.codec,
            self.between + other.between,
            self.inside + other.inside,
            self.bytes_sent + other.bytes_sent,
            self.bytes_between + other.bytes_between,
        )

    def __mul__(self, times: float) -> Cost:
        return Cost(
            self.codec * times,
            self.between * times,
            self.inside * times,
            self.bytes_sent * times,
            self.bytes_between * times,
        )


def compute(seconds: float) -> Cost:
    """So many seconds of the processor."""
    return Cost(codec=seconds)


def everywhere(cluster: Cluster, collective: Collective, nbytes: int) -> Cost:
    """A collective of all ranks with an input of `nbytes` a rank, which knows nothing of nodes.

    Rings and trees cross from node to node once, so that a node sends between nodes what one rank sends; in an
    all-to-all each of its ranks sends to every rank elsewhere. Both links are busy at the same time.
    """
    if cluster.nodes == 1:
        return inside_nodes(cluster, collective, nbytes)
    sent = sent_bytes(collective, nbytes, cluster.ranks)
    if collective == "all_to_all":
        elsewhere = cluster.ranks - cluster.ranks_per_node
        crossing = cluster.ranks_per_node * nbytes * elsewhere / cluster.ranks
        sent_inside = sent * (cluster.ranks_per_node - 1) / (cluster.ranks - 1)
    else:
        crossing, sent_inside = float(sent), float(sent)
    seconds = cluster.between.seconds(collective, cluster.ranks, crossing)
    if cluster.ranks_per_node > 1:
        seconds = max(seconds, cluster.inside.seconds(collective, cluster.ranks_per_node, sent_inside))
    return Cost(between=seconds + cluster.turn_seconds, bytes_sent=sent, bytes_between=crossing)


def between_nodes(cluster: Cluster, collective: Collective, nbytes: int) -> Cost:
    """A collective of one rank of each node; all ranks of a node are in one such, and share its link."""
    sent = sent_bytes(collective, nbytes, cluster.nodes)
    crossing = sent * cluster.ranks_per_node
    return Cost(
        between=cluster.between.seconds(collective, cluster.nodes, crossing) + cluster.turn_seconds,
        bytes_sent=sent,
        bytes_between=crossing,
    )


def inside_nodes(cluster: Cluster, collective: Collective, nbytes: int) -> Cost:
    """A collective of the ranks of one node."""
    sent = sent_bytes(collective, nbytes, cluster.ranks_per_node)
    seconds = cluster.inside.seconds(collective, cluster.ranks_per_node, sent)
    return Cost(inside=seconds + (cluster.turn_seconds if cluster.ranks_per_node > 1 else 0), bytes_sent=sent)
