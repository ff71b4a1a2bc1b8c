"""Bytes and operations of a step of each method, in each phase of a run: the one place that knows the methods."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from thinwire.compress.packet_layout import DEFAULT_BLOCK_SIZE, CodecName, shard_numel, sharded_block
from thinwire.plan.cluster import (
    CAST_BYTES,
    NO_BUCKETS,
    Buckets,
    Cluster,
    Cost,
    copies_refreshed,
    cut,
    directions_to_owners,
    everywhere,
    from_owners,
    from_owners_by_node,
    gather_by_node,
    hierarchical_exchange,
    inside_nodes,
    to_owners,
    to_owners_by_node,
    two_legs,
)
from thinwire.plan.methods import (
    DILOCO,
    ONEBIT_MUON,
    POWERSGD,
    ROUNDED_WIRES,
    SHARDED_ADAM,
    Method,
    Schedule,
    WarmupWire,
)
from thinwire.plan.workload import Matrices, Workload
from thinwire.zero.bucket_layout import LARGEST_BUCKET_BYTES, bucket_numel

_DDP_BUCKET_BYTES = 25 << 20  # torch's
_FP32 = 4

# Memory traffic, bytes an element, of passes without a rate of their own.
_APPLY_BYTES = 12  # update and weight in, weight out
_LOCAL_STEP_BYTES = 40  # gradient, momentum, denominator, weight and sum in; momentum, weight and sum out; scaled twice
_OUTER_BYTES = 36  # weights and outer weights in, their difference out; both and what arrived in, both out
_POWERSGD_BYTES = 44  # error in and out, a copy, two products with factors, their product, the difference

_EXACT: dict[str, CodecName] = {"fp32": "none", "bf16": "bf16", "int8": "int8", "int4": "int4"}
_NOTHING = Cost()


@dataclass(frozen=True)
class Phase:
    """A kind of step, and the part of the run's steps that are of it.

    `buckets` leave beside the last backward, `forward` beside every forward, `backward` beside every backward but the
    last; what comes `after` goes on beside as many steps as `overlap` says, or nothing hides it. `update`: seconds of
    the optimizer. `warm`: before the freeze.
    """

    name: str
    share: float
    buckets: Buckets
    update: float
    after: Cost = _NOTHING
    forward: Buckets = NO_BUCKETS
    backward: Buckets = NO_BUCKETS
    warm: bool = False
    overlap: float = 0.0


def phases(setting: Setting) -> list[Phase]:
    """The phases of a run, of which the shares add up to 1; those that no step is in are left out."""
    entry = setting.method.entry
    own = _local_steps if entry is not None and entry.local_steps else _one_bit
    make = _MAKERS.get(setting.method.algorithm, own)
    return [phase for phase in make(setting) if phase.share > 0]


@dataclass(frozen=True)
class Setting:
    """A run: `workload` on `cluster` with `method` over `schedule`."""

    method: Method
    workload: Workload
    cluster: Cluster
    schedule: Schedule

    @property
    def parameters(self) -> int:
        """Elements that are trained."""
        return self.workload.model.parameters

    @property
    def adam_seconds(self) -> float:
        """Of AdamW on what one rank owns of the state; offloaded, with the way of gradients there and weights back,
        which at stage 3 come as they are gathered."""
        cluster, host, offload = self.cluster, self.cluster.host, self.method.offload
        if offload is not None and host is not None:
            owned = self.parameters / cluster.ranks
            moved = (1 if self.gathers_from_host else 2) * owned * self.workload.element_bytes
            given = owned, cluster.ranks_per_node
            if offload == "memory":
                return moved / host.link + host.adam_seconds(*given)
            return moved / host.link + host.adam_seconds_on_disk(*given, self.shown, self.workload.backward_seconds)
        whole = self.workload.update_seconds
        if whole is None:
            whole = self.parameters / self.cluster.processor.adam
        return whole / (self.cluster.ranks if self.method.stage > 0 else 1)

    @property
    def shown(self) -> int:
        """Bytes of an element of what a step changes and other ranks see: stage 3's shards are fp32."""
        return _FP32 if self.method.stage == 3 else self.workload.element_bytes

    @property
    def gathers_from_host(self) -> bool:
        """Whether stage 3's shards of weights lie in the host's memory."""
        host = self.cluster.host
        return self.method.stage == 3 and self.method.offload is not None and host is not None and host.memory > 0

    @property
    def muon_seconds(self) -> float:
        """Of Muon on what one rank owns: Newton-Schulz iterations of the matrices, and AdamW on what comes last."""
        model = self.workload.model
        operations = sum(one.newton_schulz_operations for one in model.hidden)
        owned = operations / (self.cluster.ranks if self.method.stage > 0 else 1)
        adam = self.adam_seconds * model.last_elements / model.parameters
        return owned * self.workload.seconds_an_operation + adam

    def pass_seconds(self, bytes_an_element: float) -> float:
        """Of one pass over all parameters at the speed of memory."""
        return self.parameters * bytes_an_element / self.cluster.processor.memory

    def in_buckets(self, bucket_elements: int, cost: Callable[[int], Cost]) -> Buckets:
        """The model in buckets of about `bucket_elements`, each of which costs what `cost` says of its elements."""
        return cut(self.parameters, self.workload.model.last_elements, bucket_elements, cost)

    def in_sharded_buckets(self, size: int, cost: Callable[[int], Cost]) -> Buckets:
        """The same in the buckets of sharded optimizers, with elements of `size` bytes."""
        largest = self.schedule.bucket_bytes or LARGEST_BUCKET_BYTES
        return self.in_buckets(bucket_numel(largest, self.parameters, size), cost)

    def exchanged(self, codec: CodecName) -> Buckets:
        """Averages through `codec` as thinwire's unsharded optimizers make them, flat or by node."""
        exchange = hierarchical_exchange if self.method.hierarchical else two_legs
        return self.in_buckets(
            bucket_numel(self.schedule.bucket_bytes, self.parameters, 4),
            lambda elements: exchange(self.cluster, elements, codec),
        )

    def sharded_gradients(self, wire: WarmupWire = "fp32") -> Buckets:
        """Gradients sent to their owners, in the weights' dtype unless a warmup's `wire` is another one; sums of nodes
        in fp32 then."""
        size = self.workload.element_bytes
        if not self.method.hierarchical:
            codec = _EXACT[self.workload.dtype if wire == "fp32" else wire]
            return self.in_sharded_buckets(size, lambda elements: to_owners(self.cluster, elements, codec))
        each = _FP32 if wire in ROUNDED_WIRES else size
        return self.in_sharded_buckets(
            size, lambda elements: to_owners_by_node(self.cluster, elements, _EXACT[wire], each)
        )

    def gathered(self, size: int) -> Buckets:
        """As many elements as there are weights, each of `size` bytes, sent by their owners to all."""

        def gather(elements: int) -> Cost:
            nbytes = shard_numel(elements, self.cluster.ranks, DEFAULT_BLOCK_SIZE) * size
            by_node = self.method.hierarchical
            return gather_by_node(self.cluster, nbytes) if by_node else everywhere(self.cluster, "all_gather", nbytes)

        return self.in_sharded_buckets(size, gather)

    def resync(self) -> Cost:
        """A step's share of the owners' weights, which replicas of sharded state take over now and then."""
        if not self.method.stage:
            return _NOTHING
        return self.gathered(self.workload.element_bytes).total * (1 / self.schedule.resync_interval)


def _ddp(setting: Setting) -> list[Phase]:
    size = setting.workload.element_bytes
    wire_bytes = 2 if setting.method.algorithm == "ddp-bf16" else size
    cast_bytes = CAST_BYTES if wire_bytes < size else 0

    def reduce(elements: int) -> Cost:
        sent = everywhere(setting.cluster, "all_reduce", elements * wire_bytes)
        return sent + Cost(elements * cast_bytes / setting.cluster.processor.memory)

    buckets = setting.in_buckets(_DDP_BUCKET_BYTES // size, reduce)
    return [Phase("every step", 1.0, buckets, setting.adam_seconds)]


def _powersgd(setting: Setting) -> list[Phase]:
    share = min(1.0, setting.schedule.powersgd_start / setting.schedule.steps)
    (exact,) = _ddp(setting)
    model = setting.workload.model
    last = () if model.last is None else (model.last,)
    others = [one for one in model.matrices if one not in last]
    count = exact.buckets.count
    each = _low_rank_cost(setting, others, model.parameters - model.last_elements, count)
    low_rank = Buckets(count, each, _low_rank_cost(setting, last, model.last_elements, 1))
    return [
        Phase("exact", share, exact.buckets, exact.update, warm=True),
        Phase("low rank", 1 - share, low_rank, exact.update),
    ]


def _low_rank_cost(setting: Setting, matrices: Sequence[Matrices], elements: int, buckets: int) -> Cost:
    """One of `buckets` that hold `matrices`, `elements` with the vectors: what is sent whole, then one factor, then
    the other, which is made of what the first gave."""
    assert setting.method.rank is not None
    if not elements:
        return _NOTHING
    small = [one for one in matrices if one.low_rank_elements(setting.method.rank)]
    factors = sum(one.low_rank_elements(setting.method.rank) for one in small)
    whole = elements - sum(one.numel for one in small)
    cost = Cost(elements * _POWERSGD_BYTES / setting.cluster.processor.memory / buckets)
    for sent in (whole, factors // 2, factors - factors // 2):
        nbytes = -(-sent * setting.workload.element_bytes // buckets)
        cost += everywhere(setting.cluster, "all_reduce", nbytes)
    return cost


def _sharded_adam(setting: Setting) -> list[Phase]:
    if setting.method.stage < 3:
        return [_sharded_step(setting, 1.0, "every step")]
    # Weights come as layers run, in forward and again in backward.
    forward, again = _gathers(setting)
    both = again + _reduced(setting)
    return [Phase("every step", 1.0, both, setting.adam_seconds, forward=forward, backward=both)]


def _gathers(setting: Setting) -> tuple[Buckets, Buckets]:
    """Stage 3's of weights, in forward and in backward. By node copies come up to date once a step, which its forwards
    share, and all else is inside."""
    cluster, method, size = setting.cluster, setting.method, setting.workload.element_bytes

    def gather(elements: int) -> Cost:
        shard = shard_numel(elements, cluster.ranks, DEFAULT_BLOCK_SIZE)
        fetched = (
            Cost(inside=shard * size / cluster.host.link) if cluster.host and setting.gathers_from_host else _NOTHING
        )
        if method.hierarchical:
            return inside_nodes(cluster, "all_gather", cluster.nodes * shard * size)
        if method.weights is not None:
            return fetched + from_owners(cluster, elements, method.weights, sharded_block(method.weights))
        return fetched + everywhere(cluster, "all_gather", shard * size)

    def refresh(elements: int) -> Cost:
        return copies_refreshed(cluster, elements, method.weights, size) * (1 / setting.workload.accumulation)

    gathers = setting.in_sharded_buckets(size, gather)
    return (gathers + setting.in_sharded_buckets(size, refresh) if method.hierarchical else gathers), gathers


def _reduced(setting: Setting) -> Buckets:
    """Stage 3's of gradients: by node exact sums inside, then codecs; without one torch's reduce-scatter, which sends
    what a gather does."""
    codec, size, cluster = setting.method.gradients, setting.workload.element_bytes, setting.cluster
    if codec is None:
        return replace(setting, method=Method(SHARDED_ADAM, 3)).gathered(size)
    block = sharded_block(codec)
    if setting.method.hierarchical:
        return setting.in_sharded_buckets(size, lambda one: to_owners_by_node(cluster, one, codec, size, block))
    return setting.in_sharded_buckets(size, lambda one: to_owners(cluster, one, codec, block))


def _sharded_step(setting: Setting, share: float, name: str, *, warm: bool = False) -> Phase:
    """Stages 1 and 2: gradients to their owners, who step; then the new weights to all."""
    wire = setting.schedule.warmup_wire if warm else "fp32"
    gradients = setting.sharded_gradients(wire)
    return Phase(
        name,
        share,
        gradients,
        setting.adam_seconds,
        after=setting.gathered(setting.workload.element_bytes).total,
        # Stage 2 keeps no gradients, so that every backward sends its own, unless they are rounded.
        backward=gradients if setting.method.stage == 2 and wire not in ROUNDED_WIRES else NO_BUCKETS,
        warm=warm,
    )


def _one_bit(setting: Setting) -> list[Phase]:
    """What freezes once, and then, or from the first step on, sends one bit an element in every step."""
    entry = setting.method.entry
    assert entry is not None
    frozen = Phase("frozen", 1.0, setting.exchanged("sign1"), setting.pass_seconds(_APPLY_BYTES), setting.resync())
    if entry.freeze_option is None:
        return [replace(frozen, name="every step")]
    share = setting.schedule.warmup
    if setting.method.stage:
        warm = _sharded_step(setting, share, "warmup", warm=True)
    else:
        exact = setting.exchanged(_EXACT[setting.schedule.warmup_wire])
        warm = Phase("warmup", share, exact, setting.adam_seconds, warm=True)
    return [warm, replace(frozen, share=1 - share)]


def _muon(setting: Setting) -> list[Phase]:
    """Gradients to the owners of whole matrices, their leading directions apart; what owners step by, orthogonalised,
    goes to all. What comes last, the embedding, in 2 bits, and through AdamW."""
    cluster, model, codec = setting.cluster, setting.workload.model, setting.schedule.muon_codec
    largest = bucket_numel(setting.schedule.bucket_bytes or LARGEST_BUCKET_BYTES, setting.parameters, 4)
    elements = model.padded_elements(1)
    by_node = setting.method.hierarchical
    padding = model.padded_elements(cluster.ranks) / elements
    # Directions' owners are those of a lane, of whom each node has one.
    unlike = model.padded_elements(cluster.nodes) / elements if by_node else padding
    directions = sum(one.leading_elements for one in model.hidden) / elements

    def in_buckets(leg: Callable[[Cluster, int, CodecName], Cost], apart: float = 0.0) -> Buckets:
        def of(one: int, numbers: float) -> Cost:
            beside = directions_to_owners(cluster, one, round(numbers * apart), by_node=by_node)
            return leg(cluster, one, codec) + (beside if apart else _NOTHING)

        def cost(one: int) -> Cost:
            """All wait for the owner of most; what the others have less of does not travel."""
            most, mean = of(round(one * padding), one * unlike), of(one, one)
            if not by_node:
                return replace(most, bytes_sent=mean.bytes_sent, bytes_between=mean.bytes_between)
            spared = (most.bytes_between - mean.bytes_between) / cluster.ranks_per_node  # between nodes alone
            return replace(most, bytes_sent=most.bytes_sent - spared, bytes_between=mean.bytes_between)

        last = leg(cluster, model.last_elements, "stat2") if model.last else _NOTHING
        return replace(cut(elements, 0, largest, cost), last=last)

    # Of shards, at every stage.
    update = replace(setting, method=replace(setting.method, stage=1, hierarchical=False)).muon_seconds
    there = in_buckets(to_owners_by_node if by_node else to_owners, directions)
    back = in_buckets(from_owners_by_node if by_node else from_owners).total
    return [Phase("every step", 1.0, there, update, back)]


def _local_steps(setting: Setting) -> list[Phase]:
    steps, total = setting.schedule.zero_one_steps(), setting.schedule.steps
    adam, local_update = setting.adam_seconds, setting.pass_seconds(_LOCAL_STEP_BYTES)
    exact, one_bit = setting.exchanged(_EXACT[setting.schedule.warmup_wire]), setting.exchanged("sign1")
    resync = setting.resync()
    # Owners of sharded state publish the momentum that local steps begin with.
    published = setting.gathered(_FP32).total if setting.method.stage else _NOTHING
    return [
        Phase("exact gradients", steps.exact / total, exact, adam, published, warm=True),
        Phase("1-bit gradients", steps.gradients / total, one_bit, adam, resync),
        # Updates are exchanged once the local step is made, beside nothing.
        Phase("1-bit updates", steps.updates / total, NO_BUCKETS, local_update, after=one_bit.total + resync),
        Phase("local", steps.local / total, NO_BUCKETS, local_update),
    ]


def _local_updates(setting: Setting) -> list[Phase]:
    """DiLoCo: each fragment takes an outer step once in `every` steps; `workers` are ranks, or nodes that average their
    gradients exactly inside."""
    outer, cluster = setting.schedule.outer, setting.cluster
    fragments = outer.fragments_of(setting.workload.model)
    inside = NO_BUCKETS
    if setting.method.hierarchical:
        size = setting.workload.element_bytes
        inside = setting.in_sharded_buckets(size, lambda elements: inside_nodes(cluster, "all_reduce", elements * size))
    local = Phase("local", 1.0, inside, setting.muon_seconds if outer.inner == "Muon" else setting.adam_seconds)
    if setting.method.workers(cluster) == 1:
        return [replace(local, name="every step")]
    exchange = hierarchical_exchange if setting.method.hierarchical else two_legs

    def take(elements: int, codec: CodecName) -> Cost:
        of_one = -(-elements // fragments)
        return exchange(cluster, of_one, codec) + Cost(of_one * _OUTER_BYTES / cluster.processor.memory)

    one = take(setting.parameters, outer.codec)
    for kind, times in outer.share.items():
        if elements := outer.shared_elements(kind, setting.workload.model):  # a variance goes through bf16
            rounded = "bf16" if kind == "exp_avg_sq" and outer.codec != "none" else outer.codec
            one += take(elements, rounded) * (1 / times)
    # Where there are more fragments than steps, several leave at once.
    at_once = max(1.0, fragments / outer.every)
    share = min(1.0, fragments / outer.every)
    free = min(float(outer.overlap), outer.every / fragments)  # steps until the next one needs the link
    step = replace(local, name="outer", share=share, after=one * at_once, overlap=free)
    return [replace(local, share=1 - share), step]


_MAKERS: dict[str, Callable[[Setting], list[Phase]]] = {
    "ddp-fp32": _ddp,
    "ddp-bf16": _ddp,
    POWERSGD: _powersgd,
    SHARDED_ADAM: _sharded_adam,
    DILOCO: _local_updates,
    ONEBIT_MUON: _muon,
}
