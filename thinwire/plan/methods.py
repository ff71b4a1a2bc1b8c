"""What can be chosen: who averages what, through which codec, at which ZeRO stage, with or without hierarchy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from thinwire.plan.cluster import Cluster
from thinwire.plan.errors import PlanError, require_whole

__all__ = ["ALGORITHMS", "Algorithm", "Method", "methods_for", "stages_of"]

Algorithm = Literal["ddp-fp32", "ddp-bf16", "powersgd", "sharded-adam", "onebit-adam", "zero-one-adam"]
ALGORITHMS: tuple[Algorithm, ...] = get_args(Algorithm)

# The ZeRO stages that the cost model knows.
_STAGES: dict[Algorithm, tuple[int, ...]] = {
    "ddp-fp32": (0,),
    "ddp-bf16": (0,),
    "powersgd": (0,),
    "sharded-adam": (1, 2, 3),
    "onebit-adam": (0, 1, 2),
    "zero-one-adam": (0,),
}

# thinwire's own, by their names in thinwire.optim.registry.
_OWN: dict[Algorithm, str] = {"onebit-adam": "OneBitAdam", "zero-one-adam": "ZeroOneAdam"}


def stages_of(algorithm: Algorithm) -> tuple[int, ...]:
    """The ZeRO stages at which an algorithm works and the cost model knows it."""
    if algorithm not in _OWN:
        return _STAGES.get(algorithm, (0,))  # Method refuses what is none
    from thinwire.optim import registry  # with thinwire.optim comes torch, and `--help` needs neither

    return tuple(stage for stage in _STAGES[algorithm] if stage in registry.entry(_OWN[algorithm]).stages)


@dataclass(frozen=True)
class Method:
    """One way to train.

    `algorithm`: "ddp-fp32" and "ddp-bf16", torch's DDP with Adam, plain and with bf16_compress_hook; "powersgd", DDP
    with powerSGD_hook of `rank`; "sharded-adam", AdamW at ZeRO stages 1 to 3; "onebit-adam" at stages 0 to 2;
    "zero-one-adam". `hierarchical`: exact inside nodes, 1 bit between them, at stage 0.
    """

    algorithm: Algorithm
    stage: int = 0
    rank: int | None = None
    hierarchical: bool = False

    def __post_init__(self) -> None:
        if self.algorithm not in ALGORITHMS:
            raise PlanError(f"method {self.algorithm!r} is not one of {', '.join(ALGORITHMS)}")
        known = stages_of(self.algorithm)
        if self.stage not in known:
            stages = " or ".join(map(str, known))
            raise PlanError(f"{self.algorithm} works at ZeRO stage {stages}, not {self.stage}")
        if (self.rank is not None) != (self.algorithm == "powersgd"):
            raise PlanError(
                f"a rank is given for powersgd and for nothing else, got {self.rank!r} for {self.algorithm}"
            )
        if self.rank is not None:
            require_whole("a PowerSGD rank", self.rank)
        if self.hierarchical and (self.algorithm not in _OWN or self.stage):
            allowed = " and ".join(_OWN)
            raise PlanError(f"hierarchy is for {allowed} at stage 0, not {self.algorithm} at stage {self.stage}")

    @property
    def is_one_bit(self) -> bool:
        """Whether it sends 1 bit an element once warm."""
        return self.algorithm in _OWN

    @property
    def name(self) -> str:
        """How tables call it."""
        parts = [self.algorithm if self.rank is None else f"{self.algorithm} rank {self.rank}"]
        if self.stage:
            parts.append(f"ZeRO-{self.stage}")
        if self.hierarchical:
            parts.append("by node")
        return " ".join(parts)


def methods_for(
    cluster: Cluster, algorithms: Sequence[Algorithm] = ALGORITHMS, powersgd_ranks: Sequence[int] = (1, 4)
) -> list[Method]:
    """Every method of these algorithms that this cluster can run: hierarchy needs several ranks on several nodes."""
    methods: list[Method] = []
    for algorithm in algorithms:
        if algorithm == "powersgd":
            methods += [Method(algorithm, rank=rank) for rank in powersgd_ranks]
            continue
        methods += [Method(algorithm, stage) for stage in stages_of(algorithm)]
        if algorithm in _OWN and cluster.has_hierarchy:
            methods.append(Method(algorithm, hierarchical=True))
    return methods
