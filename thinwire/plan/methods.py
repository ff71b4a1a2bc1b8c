"""Methods of training and their schedules: thinwire's own and what else there is, with the ZeRO stages of each; how
often which kind of step comes in a run: warmups, 0/1 Adam's growing intervals, DiLoCo's outer steps."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

from thinwire.compress.packet_layout import CODE_BITS, BlockCodecName, CodecName, MemorylessCodec
from thinwire.optim import registry
from thinwire.plan.cluster import Cluster
from thinwire.plan.units import PlanError, require_whole
from thinwire.plan.workload import Transformer

POWERSGD, SHARDED_ADAM, DILOCO, ONEBIT_MUON = "powersgd", "sharded-adam", "diloco", "onebit-muon"


# OneBitAdam is "onebit-adam", ZeroOneAdam "zero-one-adam".
_OWN = {
    "-".join(re.findall("[A-Z][a-z0-9]*", name.replace("OneBit", "Onebit"))).lower(): registry.entry(name)
    for name in registry.NAMES
}
_OTHERS = {"ddp-fp32": (0,), "ddp-bf16": (0,), POWERSGD: (0,), SHARDED_ADAM: (1, 2, 3), DILOCO: (0,)}

Offload = Literal["memory", "disk"]
_BY_NODE: tuple[MemorylessCodec, ...] = ("int8", "int4")  # of weights: the first is ZeRO++'s

# The ZeRO stages at which each works.
_STAGES = _OTHERS | {name: entry.stages for name, entry in _OWN.items()}
ALGORITHMS = tuple(_STAGES)


@dataclass(frozen=True)
class Method:
    """One way to train.

    `algorithm`: "ddp-fp32" and "ddp-bf16", torch's DDP with Adam, plain and with bf16_compress_hook; "powersgd", DDP
    with powerSGD_hook of `rank`; "sharded-adam", AdamW at ZeRO stages 1 to 3; "diloco", local steps; or one of
    thinwire's other optimizers, as "onebit-adam". `hierarchical`: exact inside nodes, compressed between them; with
    DiLoCo nodes are the workers, and at stage 3 each has a copy of all weights.

    `weights` and `gradients`: codecs of stage 3. `offload`: where "sharded-adam" has master weights and moments, and at
    stage 3 in the host's memory weights and gradients too, if it has any.
    """

    algorithm: str
    stage: int = 0
    rank: int | None = None
    hierarchical: bool = False
    weights: MemorylessCodec | None = None
    gradients: MemorylessCodec | None = None
    offload: Offload | None = None

    def __post_init__(self) -> None:
        known = _STAGES.get(self.algorithm)
        if known is None:
            raise PlanError(f"method {self.algorithm!r} is not one of {', '.join(ALGORITHMS)}")
        if self.stage not in known:
            stages = " or ".join(map(str, known))
            raise PlanError(f"{self.algorithm} works at ZeRO stage {stages}, not {self.stage}")
        if (self.rank is not None) != (self.algorithm == POWERSGD):
            raise PlanError(f"a rank is given for powersgd and nothing else, got {self.rank!r} for {self.algorithm}")
        if self.rank is not None:
            require_whole("a PowerSGD rank", self.rank)
        if self.hierarchical and not (self.sends_less or self.stage == 3):
            raise PlanError(f"hierarchy is for {' and '.join((*_OWN, DILOCO))} and stage 3, not {self.algorithm}")
        if self.has_codecs and self.stage != 3:
            raise PlanError(f"codecs of weights and gradients are stage 3's, not {self.algorithm}'s at {self.stage}")
        if self.offload is not None and (self.algorithm != SHARDED_ADAM or self.offload not in get_args(Offload)):
            raise PlanError(f"offload is None, memory or disk, of {SHARDED_ADAM}: got {self.offload!r}")

    @property
    def entry(self) -> registry.OptimizerEntry | None:
        """What the registry knows of a method that sends 1 bit an element once warm; None for all others."""
        return _OWN.get(self.algorithm)

    @property
    def sends_less(self) -> bool:
        """Whether it is there for thin wires: thinwire's own, which send less than averages of gradients."""
        return self.entry is not None or self.algorithm == DILOCO or self.has_codecs

    @property
    def has_codecs(self) -> bool:
        """Whether stage 3 gathers or reduces through codecs."""
        return self.weights is not None or self.gradients is not None

    def workers(self, cluster: Cluster) -> int:
        """How many train by themselves, with DiLoCo."""
        return cluster.nodes if self.hierarchical else cluster.ranks

    @property
    def name(self) -> str:
        """How tables call it."""
        parts = [self.algorithm if self.rank is None else f"{self.algorithm} rank {self.rank}"]
        if self.stage:
            parts.append(f"ZeRO-{self.stage}")
        if self.hierarchical:
            parts.append("by node")
        if self.has_codecs:
            parts.append(f"{self.weights}/{self.gradients}")
        if self.offload:
            parts.append(f"on {self.offload}")
        return " ".join(parts)


def methods_for(
    cluster: Cluster, algorithms: Sequence[str] = ALGORITHMS, powersgd_ranks: Sequence[int] = (1, 4)
) -> list[Method]:
    """Every method of these algorithms that this cluster can run: hierarchy needs several ranks on several nodes."""
    methods: list[Method] = []
    for algorithm in algorithms:
        if algorithm == POWERSGD:
            methods += [Method(algorithm, rank=rank) for rank in powersgd_ranks]
            continue
        methods += [Method(algorithm, stage) for stage in _STAGES.get(algorithm, (0,))]
        if algorithm == SHARDED_ADAM:
            methods += _of_shards(cluster)
            continue
        if methods[-1].sends_less and cluster.has_hierarchy:
            methods += [Method(algorithm, stage, hierarchical=True) for stage in _STAGES[algorithm]]
    return methods


def _of_shards(cluster: Cluster) -> list[Method]:
    """What AdamW on shards can be beside exact and on devices alone."""
    many = Method(SHARDED_ADAM, 3)
    found = [replace(many, weights="int8", gradients="int8")] if cluster.ranks > 1 else []
    if cluster.has_hierarchy:
        by_node = replace(many, hierarchical=True)
        found += [by_node, *(replace(by_node, weights=one, gradients="int4") for one in _BY_NODE)]
    host, every = cluster.host, [*(Method(SHARDED_ADAM, stage) for stage in (1, 2, 3)), *found]
    places: list[Offload] = []
    if host is not None:
        places = [one for one in get_args(Offload) if getattr(host, one)]
    return found + [replace(one, offload=place) for place in places for one in every]


CODECS: tuple[CodecName, ...] = get_args(CodecName)
"""What outer gradients can go through."""

InnerName = Literal["AdamW", "Muon"]
INNER: tuple[InnerName, ...] = get_args(InnerName)
"""What may step inside a worker."""

_LAYERS_A_FRAGMENT = 3


@dataclass(frozen=True)
class OuterSchedule:
    """As thinwire.DiLoCo takes them.

    Args:
        every: steps between two outer steps of a fragment.
        fragments: into how many the model is cut; None: one for every three layers.
        overlap: steps that a fragment is in flight while training goes on.
        codec: what it goes through.
        inner: what steps inside.
        share: kinds of its state that workers average too, and after how many outer steps each.
    """

    every: int = 30
    fragments: int | None = None
    overlap: int = 1
    codec: CodecName = "int4"
    inner: InnerName = "AdamW"
    share: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        require_whole("every", self.every)
        if self.fragments is not None:
            require_whole("fragments", self.fragments)
        if isinstance(self.overlap, bool) or not isinstance(self.overlap, int) or not 0 <= self.overlap < self.every:
            raise PlanError(f"overlap must be a number of steps from 0 up to every={self.every}, got {self.overlap!r}")
        if self.codec not in CODECS:
            raise PlanError(f"codec {self.codec!r} is not one of {', '.join(CODECS)}")
        if self.inner not in INNER:
            raise PlanError(f"inner {self.inner!r} is not one of {', '.join(INNER)}")
        for kind, times in self.share.items():
            require_whole(f"share of {kind}", times)
            self.shared_elements(kind, None)

    def shared_elements(self, kind: str, model: Transformer | None) -> int:
        """Of how many elements there is a kind of state; of a `model` or, where that is not known, of none."""
        known = {"AdamW": ("exp_avg", "exp_avg_sq"), "Muon": ("momentum_buffer", "exp_avg", "exp_avg_sq")}[self.inner]
        if kind not in known:
            raise PlanError(f"share has {kind!r}, which {self.inner} does not keep: it has {', '.join(known)}")
        if model is None or self.inner == "AdamW":
            return 0 if model is None else model.parameters
        return model.parameters - model.last_elements if kind == "momentum_buffer" else model.last_elements

    def fragments_of(self, model: Transformer) -> int:
        """Into how many a model is cut."""
        layers = 1 if model.blocks is None else model.blocks.layers
        return max(1, layers // _LAYERS_A_FRAGMENT) if self.fragments is None else self.fragments


@dataclass(frozen=True)
class ZeroOneSteps:
    """Steps of one run of 0/1 Adam: `exact` averages of gradients, 1-bit averages of `gradients` in between, then 1-bit
    averages of `updates`, and `local` steps that send nothing."""

    exact: int
    gradients: int
    updates: int
    local: int


WarmupWire = Literal["fp32", "bf16", "int8", "int4"]
WARMUP_WIRES: tuple[WarmupWire, ...] = get_args(WarmupWire)
ROUNDED_WIRES = ("int8", "int4")


@dataclass(frozen=True)
class Schedule:
    """A run of `steps`.

    Args:
        steps: of the run.
        warmup: part of the steps before 1-bit Adam freezes, from 0 to 1.
        warmup_wire: what carries gradients until then.
        powersgd_start: steps that PowerSGD averages exactly first.
        var_freeze_step: the step after which 0/1 Adam makes local steps; None: `warmup` of all.
        var_update_scaler: updates of the variance after which their interval doubles.
        local_step_scaler: steps after which the interval between exchanges of updates doubles.
        local_step_clipper: the longest such interval.
        resync_interval: steps between gathers of sharded 1-bit Adam's weights.
        bucket_bytes: gradients that leave together, in thinwire's optimizers, by default as theirs; DDP has 25 MiB.
        outer: DiLoCo's outer steps.
        muon_codec: of 1-bit Muon's matrices; its embedding goes through "stat2".
    """

    steps: int = 100_000
    warmup: float = 0.15
    warmup_wire: WarmupWire = "fp32"
    powersgd_start: int = 10
    var_freeze_step: int | None = None
    var_update_scaler: int = 16
    local_step_scaler: int = 32678
    local_step_clipper: int = 16
    resync_interval: int = 100
    bucket_bytes: int | None = None
    outer: OuterSchedule = field(default_factory=OuterSchedule)
    muon_codec: BlockCodecName = "sign1"

    def __post_init__(self) -> None:
        scalers = ("var_update_scaler", "local_step_scaler", "local_step_clipper")
        for name in ("steps", *scalers, "resync_interval"):
            require_whole(name, getattr(self, name))
        if self.bucket_bytes is not None:
            require_whole("bucket_bytes", self.bucket_bytes)
        if not 0 <= self.warmup <= 1:
            raise PlanError(f"warmup is the part of the steps before the freeze, from 0 to 1, got {self.warmup!r}")
        if self.warmup_wire not in WARMUP_WIRES:
            raise PlanError(f"warmup_wire must be one of {', '.join(WARMUP_WIRES)}, got {self.warmup_wire!r}")
        if self.muon_codec not in CODE_BITS:
            raise PlanError(f"muon_codec must be one of {', '.join(CODE_BITS)}, got {self.muon_codec!r}")
        for name in ("powersgd_start", "var_freeze_step"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
                raise PlanError(f"{name} must be a whole number of steps, at least 0, got {value!r}")

    @property
    def freeze_step(self) -> int:
        """The last step of the warmup."""
        return self.var_freeze_step if self.var_freeze_step is not None else round(self.warmup * self.steps)

    def zero_one_steps(self) -> ZeroOneSteps:
        """Count the steps of 0/1 Adam (Lu et al. 2022, arXiv 2202.06009, §4) by kind, without walking the run."""
        first_phase = min(self.freeze_step, self.steps)
        exact = self._variance_updates(first_phase)
        updates = self._synchronisations(first_phase)
        return ZeroOneSteps(exact, first_phase - exact, updates, self.steps - first_phase - updates)

    def _variance_updates(self, steps: int) -> int:
        """Of steps 1 to `steps`: those divisible by an interval that doubles every `var_update_scaler` updates."""
        updates, reached, interval = 0, 0, 1
        while (reached // interval + 1) * interval <= steps:
            first = (reached // interval + 1) * interval
            here = min(self.var_update_scaler, (steps - first) // interval + 1)
            updates += here
            reached = first + (here - 1) * interval
            interval *= 2
        return updates

    def _synchronisations(self, frozen_at: int) -> int:
        """Of the steps after `frozen_at`: those divisible by an interval that doubles every `local_step_scaler` steps,
        up to `local_step_clipper`."""
        synchronised, reached, interval = 0, frozen_at, 1
        while reached < self.steps:
            grows = interval < self.local_step_clipper
            end = min(self.steps, reached + self.local_step_scaler) if grows else self.steps
            synchronised += end // interval - reached // interval
            reached = end
            interval = min(2 * interval, self.local_step_clipper)
        return synchronised
