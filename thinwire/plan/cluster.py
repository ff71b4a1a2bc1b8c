"""The cluster to train on: nodes, ranks, the links between and inside nodes, and what a rank computes besides the
model. Links follow the alpha-beta model: so many seconds a round, so many bytes a second."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal, get_args

from thinwire.plan.units import PlanError, require_positive, require_seconds, require_whole

Collective = Literal["all_to_all", "all_gather", "all_reduce"]
COLLECTIVES: tuple[Collective, ...] = get_args(Collective)

# Bytes of memory traffic an element, as docs/measurements/engine.md counts them for the fused kernels.
_ENCODE_BYTES = 12 + 1 / 8
_DECODE_BYTES = 4 + 1 / 8
_AVERAGE_BYTES = 1 / 8 + 4 / 4  # a code read, and a sum written for every four
_ADAM_BYTES = 28  # reads weight, gradient and both moments, and writes all but the gradient
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
        passes = (_ENCODE_BYTES, _DECODE_BYTES, _AVERAGE_BYTES, _ADAM_BYTES)
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
