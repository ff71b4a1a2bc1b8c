"""Changes the links' rate in the middle of a race, for all of its ranks together."""

from __future__ import annotations

from experiments.ethernet.cluster.links import cluster_links, shape_links
from thinwire.comm import Communicator

__all__ = ["shape_together"]


def shape_together(comm: Communicator, cluster: str | None, hosts: int, megabits: float | None) -> None:
    """Limits every link of `cluster` to so many 10⁶ bits a second, None taking the limits away; without a cluster the
    ranks only meet. Nothing of before or after is under way meanwhile. Collective."""
    comm.barrier()
    if cluster and comm.rank == 0:
        shape_links(cluster_links(cluster, hosts), megabits)
    comm.barrier()
