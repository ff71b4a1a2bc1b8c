"""Changes the links' rate in the middle of a race, for all of its ranks together."""

from __future__ import annotations

from experiments.common.command_line import Parser, positive
from experiments.ethernet.cluster.links import cluster_links, shape_links
from thinwire.comm import Communicator

__all__ = ["add_link_arguments", "shape_together"]


def shape_together(comm: Communicator, cluster: str | None, hosts: int, megabits: float | None) -> None:
    """Limits every link of `cluster` to so many 10⁶ bits a second, None taking the limits away; without a cluster the
    ranks only meet. Nothing of before or after is under way meanwhile. Collective."""
    comm.barrier()
    if cluster and comm.rank == 0:
        shape_links(cluster_links(cluster, hosts), megabits)
    comm.barrier()


def add_link_arguments(parser: Parser) -> None:
    """What `jobs.links` says of whose links a job's ranks shape."""
    parser.add_argument("--cluster", help="whose links to shape; none: leave the network as it is")
    parser.add_argument("--hosts", type=positive, required=True)
    parser.add_argument("--device", help="the hosts' interface, which the links' shapes do not need")
