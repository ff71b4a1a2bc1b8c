"""What the collectives of one bucket cost: a plain all-reduce, the two-leg exchange through a codec, flat or by node,
and the parts that ZeRO sends. Packet and shard sizes are the library's own."""

from __future__ import annotations

from thinwire.compress.packet_layout import CODE_BITS, DEFAULT_BLOCK_SIZE, CodecName, codec_packet_bytes
from thinwire.plan.cluster import Cluster, Processor
from thinwire.plan.costs import Cost, between_nodes, compute, everywhere, inside_nodes
from thinwire.zero.bucket_layout import shard_numel

__all__ = ["gather", "hierarchical_exchange", "reduce", "two_legs"]

# Memory traffic of the passes that no fused kernel makes, bytes an element.
_FILL_BYTES = 16  # momentum, gradient and denominator in, payload out
_SUM_BYTES = 4  # an owner reads every rank's fp32 and keeps the sum in its cache
_CAST_BYTES = 12  # fp32 to 16 bits and back


def reduce(cluster: Cluster, elements: int, element_bytes: int, *, cast: bool) -> Cost:
    """One all-reduce of `elements`, as DDP makes it; with `cast`, fp32 gradients travel in 16 bits."""
    cost = everywhere(cluster, "all_reduce", elements * element_bytes)
    if cast:
        cost += compute(elements * _CAST_BYTES / cluster.processor.memory)
    return cost


def gather(cluster: Cluster, elements: int, element_bytes: int) -> Cost:
    """Every rank gets everybody's shard of `elements`."""
    shard = shard_numel(elements, cluster.ranks, DEFAULT_BLOCK_SIZE)
    return everywhere(cluster, "all_gather", shard * element_bytes)


def two_legs(cluster: Cluster, elements: int, codec: CodecName, *, back: bool = True) -> Cost:
    """The exchange of all ranks: packets to the owners, and with `back` their average to everybody."""
    ranks = cluster.ranks
    shard = shard_numel(elements, ranks, DEFAULT_BLOCK_SIZE)
    packet = codec_packet_bytes(codec, shard)
    cost = everywhere(cluster, "all_to_all", ranks * packet)
    if back:
        cost += everywhere(cluster, "all_gather", packet)
    return cost + compute(_codec_seconds(cluster.processor, codec, elements, shard, ranks, back=back))


def hierarchical_exchange(cluster: Cluster, elements: int, codec: CodecName) -> Cost:
    """Exact sums inside the node, the codec between the nodes on each rank's shard, exact values inside again."""
    local = shard_numel(elements, cluster.ranks_per_node, DEFAULT_BLOCK_SIZE)
    shard = shard_numel(local, cluster.nodes, DEFAULT_BLOCK_SIZE)
    packet = codec_packet_bytes(codec, shard)
    cost = inside_nodes(cluster, "all_to_all", 4 * local * cluster.ranks_per_node)
    cost += between_nodes(cluster, "all_to_all", cluster.nodes * packet)
    cost += between_nodes(cluster, "all_gather", packet)
    cost += inside_nodes(cluster, "all_gather", 4 * local)
    sums = local * cluster.ranks_per_node * _SUM_BYTES / cluster.processor.memory
    return cost + compute(sums + _codec_seconds(cluster.processor, codec, local, shard, cluster.nodes, back=True))


def _codec_seconds(
    processor: Processor, codec: CodecName, elements: int, shard: int, owners: int, *, back: bool
) -> float:
    if codec in CODE_BITS:  # at the rates of sign1, which the probe measures
        fill = elements * _FILL_BYTES / processor.memory
        return fill + _kernel_seconds(processor, elements, shard, owners, back)
    sums = owners * shard * _SUM_BYTES / processor.memory
    return sums + (elements * _CAST_BYTES / processor.memory if codec != "none" else 0.0)


def _kernel_seconds(processor: Processor, elements: int, shard: int, owners: int, back: bool) -> float:
    """Encode all, average what came to the own shard; on the way back encode the shard and decode all."""
    seconds = elements / processor.encode + owners * shard / processor.average
    if back:
        seconds += shard / processor.encode + elements / processor.decode
    return seconds
