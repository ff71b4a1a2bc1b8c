"""Costs of communication: one collective, the collectives of one bucket, and how much of them hides behind backward."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass

from thinwire.comm.traffic import sent_bytes
from thinwire.compress.packet_layout import CODE_BITS, DEFAULT_BLOCK_SIZE, CodecName, codec_packet_bytes
from thinwire.plan.cluster import Cluster, Collective, Processor
from thinwire.zero.bucket_layout import shard_numel


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
        return Cost(*map(operator.add, vars(self).values(), vars(other).values()))

    def __mul__(self, times: float) -> Cost:
        return Cost(*(value * times for value in vars(self).values()))


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


def _between_nodes(cluster: Cluster, collective: Collective, nbytes: int) -> Cost:
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


# One bucket: packet and shard sizes are the library's own

# Memory traffic of the passes that no fused kernel makes, bytes an element.
_FILL_BYTES = 16  # momentum, gradient and denominator in, payload out
_SUM_BYTES = 4  # an owner reads every rank's fp32 and keeps the sum in its cache
CAST_BYTES = 12  # fp32 to 16 bits and back


def two_legs(cluster: Cluster, elements: int, codec: CodecName, *, back: bool = True) -> Cost:
    """The exchange of all ranks: packets to the owners, and with `back` their average to everybody."""
    shard = shard_numel(elements, cluster.ranks, DEFAULT_BLOCK_SIZE)
    packet = codec_packet_bytes(codec, shard)
    cost = everywhere(cluster, "all_to_all", cluster.ranks * packet)
    if back:
        cost += everywhere(cluster, "all_gather", packet)
    return cost + Cost(_codec_seconds(cluster.processor, codec, elements, shard, cluster.ranks, back=back))


def hierarchical_exchange(cluster: Cluster, elements: int, codec: CodecName) -> Cost:
    """Exact sums inside the node, the codec between the nodes on each rank's shard, exact values inside again."""
    local = shard_numel(elements, cluster.ranks_per_node, DEFAULT_BLOCK_SIZE)
    shard = shard_numel(local, cluster.nodes, DEFAULT_BLOCK_SIZE)
    packet = codec_packet_bytes(codec, shard)
    cost = inside_nodes(cluster, "all_to_all", 4 * local * cluster.ranks_per_node)
    cost += _between_nodes(cluster, "all_to_all", cluster.nodes * packet)
    cost += _between_nodes(cluster, "all_gather", packet)
    cost += inside_nodes(cluster, "all_gather", 4 * local)
    sums = local * cluster.ranks_per_node * _SUM_BYTES / cluster.processor.memory
    return cost + Cost(sums + _codec_seconds(cluster.processor, codec, local, shard, cluster.nodes, back=True))


def _codec_seconds(
    processor: Processor, codec: CodecName, elements: int, shard: int, owners: int, *, back: bool
) -> float:
    """Encode all, average what came to the own shard; on the way back encode the shard and decode all."""
    if codec not in CODE_BITS:
        sums = owners * shard * _SUM_BYTES / processor.memory
        return sums + (elements * CAST_BYTES / processor.memory if codec != "none" else 0.0)
    # At the rates of sign1, which the probe measures.
    seconds = elements / processor.encode + owners * shard / processor.average
    if back:
        seconds += shard / processor.encode + elements / processor.decode
    return elements * _FILL_BYTES / processor.memory + seconds


# Overlap: buckets leave as their gradients complete


@dataclass(frozen=True)
class Buckets:
    """`count` equal buckets, what `each` costs, and what the `last` does: one more, of the parameter whose gradient is
    complete at backward's end only."""

    count: int
    each: Cost
    last: Cost

    @property
    def total(self) -> Cost:
        """What all of them cost."""
        return self.each * self.count + self.last

    def __add__(self, other: Buckets) -> Buckets:
        if self.count != other.count:
            raise ValueError(f"{self.count} and {other.count} buckets do not add up: cut both alike")
        return Buckets(self.count, self.each + other.each, self.last + other.last)


NO_BUCKETS = Buckets(1, Cost(), Cost())


def cut(elements: int, last: int, bucket_elements: int, cost: Callable[[int], Cost]) -> Buckets:
    """Cut `elements`, the `last` of which make a bucket of their own, into buckets of about `bucket_elements`."""
    rest = elements - last
    count = max(1, round(rest / bucket_elements))
    return Buckets(count, cost(-(-rest // count)) if rest else Cost(), cost(last) if last else Cost())


def seconds_beside(computation: float, buckets: Buckets, overlap: float) -> float:
    """Seconds of `computation`, at equal intervals of which buckets become ready and leave, and of what is left of
    their way when it ends.

    Buckets are jobs in a pipeline of three machines: processor (computation and compression), the link between nodes,
    the link inside. With equal jobs, the first one's way and then the busiest machine decide; the last bucket follows.
    `overlap` is the part of a transfer that goes on while the processor computes: 0 gives the sum of everything.
    """
    each, last = buckets.each, buckets.last
    arrival = computation / buckets.count
    busiest = max(arrival + each.codec, each.between, each.inside)
    links_free = arrival + each.total + (buckets.count - 1) * busiest
    processor_free = computation + buckets.count * each.codec + last.codec
    pipelined = max(links_free, processor_free) + last.wire
    in_turn = computation + buckets.total.total
    return overlap * pipelined + (1 - overlap) * in_turn
