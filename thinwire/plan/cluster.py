"""The cluster to train on: nodes, ranks, links and what a rank computes besides the model; and costs of
communication on it: one collective, the collectives of one bucket, and how much of them hides behind backward. Links
follow the alpha-beta model: so many seconds a round, so many bytes a second."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal, get_args

from thinwire.comm.traffic import sent_bytes
from thinwire.compress.packet_layout import (
    CODE_BITS,
    DEFAULT_BLOCK_SIZE,
    CodecName,
    MemorylessCodec,
    codec_packet_bytes,
    shard_numel,
    sharded_block,
)
from thinwire.plan.units import PlanError, require_positive, require_seconds, require_whole
from thinwire.plan.workload import ADAM_BYTES, Host

Collective = Literal["all_to_all", "all_gather", "all_reduce"]
COLLECTIVES: tuple[Collective, ...] = get_args(Collective)

# Bytes of memory traffic an element, as docs/measurements/engine.md counts them for the fused kernels.
_ENCODE_BYTES = 12 + 1 / 8
_DECODE_BYTES = 4 + 1 / 8
_AVERAGE_BYTES = 1 / 8 + 4 / 4  # a code read, and a sum written for every four
RATES = ("memory", "encode", "decode", "average", "adam")


def rounds(collective: Collective, ranks: int) -> int:
    """Messages of a rank that wait for one another, each of which pays the latency.

    None do in an all-to-all. All-gather and all-reduce need ⌈log₂ N⌉ and twice that in the best algorithms (recursive
    doubling and halving, trees), which rings do not reach: a baseline is not made slow.
    """
    if ranks == 1:
        return 0
    if collective == "all_to_all":
        return 1
    return (2 if collective == "all_reduce" else 1) * math.ceil(math.log2(ranks))


@dataclass(frozen=True)
class Speed:
    """Of one collective on one link: seconds a round and bytes a second."""

    latency: float
    bytes_per_second: float

    def __post_init__(self) -> None:
        require_positive("a link's bytes per second", self.bytes_per_second)
        require_seconds("a link's latency", self.latency)


@dataclass(frozen=True)
class Link:
    """What carries a collective: one speed for all, unless `measured` has this collective's own.

    Bytes a second are those that a node sends to others (between nodes), or a rank (inside a node). `message`: seconds
    that each further message of an all-to-all costs, which leave one after the other without waiting for an answer.
    """

    speed: Speed
    message: float
    measured: Mapping[Collective, Speed] = field(default_factory=dict)

    def __post_init__(self) -> None:
        require_seconds("a message's cost", self.message)

    @classmethod
    def of(cls, bytes_per_second: float, latency: float, message: float) -> Link:
        """A link with the same rate, and latency in seconds, for every collective."""
        return cls(Speed(latency, bytes_per_second), message)

    def seconds(self, collective: Collective, ranks: int, nbytes: float) -> float:
        """Of a collective among `ranks` that sends `nbytes` over this link."""
        speed = self.measured.get(collective, self.speed)
        further = max(ranks - 2, 0) if collective == "all_to_all" else 0
        return rounds(collective, ranks) * speed.latency + further * self.message + nbytes / speed.bytes_per_second

    def with_rate(self, bytes_per_second: float) -> Link:
        """The same latencies at another rate; collectives keep their rates relative to each other."""
        factor = bytes_per_second / self.speed.bytes_per_second
        measured = {name: Speed(one.latency, one.bytes_per_second * factor) for name, one in self.measured.items()}
        return replace(self, speed=Speed(self.speed.latency, bytes_per_second), measured=measured)


@dataclass(frozen=True)
class Processor:
    """What a rank does besides the model, in elements a second, and what of the wire goes on meanwhile.

    `encode`: the fused 1-bit encode with residual; `decode`; `average`: codes that an owner decodes and averages;
    `adam`: AdamW in fp32. `memory`: bytes a second of memory traffic, for passes that have no rate of their own.
    `overlap`: the part of a transfer that goes on while the processor computes, from 0 (none) to 1 (all).
    """

    memory: float
    encode: float
    decode: float
    average: float
    adam: float
    overlap: float = 1.0

    # How a calibration's file is read.
    __pydantic_config__: ClassVar = {"extra": "forbid", "strict": True, "allow_inf_nan": False}

    def __post_init__(self) -> None:
        for name in RATES:
            require_positive(f"a processor's {name} rate", getattr(self, name))
        if not 0 <= self.overlap <= 1:
            raise PlanError(f"overlap must be from 0 to 1, got {self.overlap!r}")

    def slower(self, times: float) -> Processor:
        """The same with all rates divided; transfers go on beside computation as before."""
        return replace(self, **{name: getattr(self, name) / times for name in RATES})

    @classmethod
    def of_memory(cls, bytes_per_second: float, overlap: float = 1.0) -> Processor:
        """A processor whose passes all run at the speed of its memory."""
        require_positive("the memory's bytes per second", bytes_per_second)
        passes = (_ENCODE_BYTES, _DECODE_BYTES, _AVERAGE_BYTES, ADAM_BYTES)
        encode, decode, average, adam = (bytes_per_second / one for one in passes)
        return cls(bytes_per_second, encode, decode, average, adam, overlap)


# Of a rank that comes back to a core that another one has: about a turn of Linux's scheduler. It was chosen so that
# `make ethernet`'s steps, of two ranks a core, come out right; docs/measurements/plan.md has others.
_TURN_SECONDS = 5e-3


@dataclass(frozen=True)
class Cluster:
    """`nodes` of `ranks_per_node` ranks; `between` is the link of a whole node, which its ranks share, and `inside`
    that of a rank to the others of its node.

    `cores_per_node`: processors that the ranks of a node share, for ranks that compute on CPUs, a thread each: where
    there are fewer than ranks, all that a rank computes takes longer, and in each collective ranks wait for those that
    have no core just then. None: one a rank, or more. The processor's rates are a rank's that has one for itself.
    """

    nodes: int
    ranks_per_node: int
    between: Link
    inside: Link
    processor: Processor
    cores_per_node: float | None = None
    host: Host | None = None

    def __post_init__(self) -> None:
        if self.cores_per_node is not None:
            require_positive("cores_per_node", self.cores_per_node)
        require_whole("nodes", self.nodes)
        require_whole("ranks_per_node", self.ranks_per_node)

    @property
    def ranks(self) -> int:
        """Ranks of the job."""
        return self.nodes * self.ranks_per_node

    @property
    def ranks_a_core(self) -> float:
        """Ranks that share a processor, at least 1."""
        return 1.0 if self.cores_per_node is None else max(1.0, self.ranks_per_node / self.cores_per_node)

    @property
    def turn_seconds(self) -> float:
        """That a collective waits for ranks whose core another one has."""
        return (self.ranks_a_core - 1) * _TURN_SECONDS

    @property
    def has_hierarchy(self) -> bool:
        """Whether there is an inside and a between."""
        return self.nodes > 1 and self.ranks_per_node > 1


# Costs of communication


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
_DIRECTIONS_BYTES = 28  # six products with their bases, and the difference


def to_owners(cluster: Cluster, elements: int, codec: CodecName, block: int = DEFAULT_BLOCK_SIZE) -> Cost:
    """The first leg of the exchange of all ranks: packets to the owners, who average them."""
    shard = shard_numel(elements, cluster.ranks, DEFAULT_BLOCK_SIZE)
    cost = everywhere(cluster, "all_to_all", cluster.ranks * codec_packet_bytes(codec, shard, block))
    return cost + Cost(_averaging_seconds(cluster.processor, codec, elements, shard, cluster.ranks))


def directions_to_owners(cluster: Cluster, elements: int, numbers: int, *, by_node: bool) -> Cost:
    """So many `numbers` of 16 bits, of the leading directions of matrices of `elements`, beside the first leg."""
    passes = Cost(elements * _DIRECTIONS_BYTES / cluster.processor.memory)
    if by_node:
        return passes + _between_nodes(cluster, "all_to_all", 2 * numbers // cluster.ranks_per_node)
    return passes + everywhere(cluster, "all_to_all", 2 * numbers)


def from_owners(cluster: Cluster, elements: int, codec: CodecName, block: int = DEFAULT_BLOCK_SIZE) -> Cost:
    """The second: what owners have goes to everybody."""
    shard = shard_numel(elements, cluster.ranks, DEFAULT_BLOCK_SIZE)
    cost = everywhere(cluster, "all_gather", codec_packet_bytes(codec, shard, block))
    return cost + Cost(_spreading_seconds(cluster.processor, codec, elements, shard))


def two_legs(cluster: Cluster, elements: int, codec: CodecName) -> Cost:
    """The exchange of all ranks: packets to the owners, and their average to everybody."""
    return to_owners(cluster, elements, codec) + from_owners(cluster, elements, codec)


def to_owners_by_node(
    cluster: Cluster, elements: int, codec: CodecName, size: int = 4, block: int = DEFAULT_BLOCK_SIZE
) -> Cost:
    """The first leg by node: exact sums inside it, to which ranks send elements of `size` bytes, and between the nodes
    each rank's lane of them through the codec."""
    lane, shard, packet = _lane(cluster, elements, codec, block)
    cost = inside_nodes(cluster, "all_to_all", size * lane * cluster.ranks_per_node)
    cost += _between_nodes(cluster, "all_to_all", cluster.nodes * packet)
    sums = lane * cluster.ranks_per_node * _SUM_BYTES / cluster.processor.memory
    return cost + Cost(sums + _averaging_seconds(cluster.processor, codec, lane, shard, cluster.nodes))


def from_owners_by_node(cluster: Cluster, elements: int, codec: CodecName) -> Cost:
    """The second: what owners have goes to every node, and there, as it came, to every rank."""
    _, shard, packet = _lane(cluster, elements, codec)
    return gather_by_node(cluster, packet) + Cost(_spreading_seconds(cluster.processor, codec, elements, shard))


def gather_by_node(cluster: Cluster, nbytes: int) -> Cost:
    """What each rank owns goes to every node once, and there to every rank."""
    between = _between_nodes(cluster, "all_gather", nbytes)
    return between + inside_nodes(cluster, "all_gather", cluster.nodes * nbytes)


def copies_refreshed(cluster: Cluster, elements: int, codec: MemorylessCodec | None, size: int) -> Cost:
    """What each rank owns to its number in every node, through a codec or in elements of `size` bytes."""
    lane, shard, _ = _lane(cluster, elements, "none")
    if codec is None:
        return _between_nodes(cluster, "all_gather", size * shard)
    between = _between_nodes(cluster, "all_gather", codec_packet_bytes(codec, shard, sharded_block(codec)))
    return between + Cost(_spreading_seconds(cluster.processor, codec, lane, shard))


def hierarchical_exchange(cluster: Cluster, elements: int, codec: CodecName) -> Cost:
    """The exchange by node, in both legs."""
    return to_owners_by_node(cluster, elements, codec) + from_owners_by_node(cluster, elements, codec)


def _lane(cluster: Cluster, elements: int, codec: CodecName, block: int = DEFAULT_BLOCK_SIZE) -> tuple[int, int, int]:
    """Elements of a rank's part of its node's sum, those of an owner's shard of it, and the bytes of one's packet."""
    shard = shard_numel(elements, cluster.ranks, DEFAULT_BLOCK_SIZE)
    return shard * cluster.nodes, shard, codec_packet_bytes(codec, shard, block)


def _averaging_seconds(processor: Processor, codec: CodecName, elements: int, shard: int, owners: int) -> float:
    """Encode all, and average what came to the own shard."""
    if codec not in CODE_BITS:
        sums = owners * shard * _SUM_BYTES / processor.memory
        return sums + (elements * CAST_BYTES / processor.memory if codec != "none" else 0.0)
    # At the rates of sign1, which the probe measures.
    seconds = elements / processor.encode + owners * shard / processor.average
    return elements * _FILL_BYTES / processor.memory + seconds


def _spreading_seconds(processor: Processor, codec: CodecName, elements: int, shard: int) -> float:
    """Encode the own shard, and decode all."""
    return shard / processor.encode + elements / processor.decode if codec in CODE_BITS else 0.0


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
