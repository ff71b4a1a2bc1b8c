"""What can be chosen: who averages what, through which codec, at which ZeRO stage, with or without hierarchy.

thinwire's own optimizers are those of the registry: one that is added there is planned here.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from thinwire.optim import registry
from thinwire.plan.cluster import Cluster
from thinwire.plan.errors import PlanError, require_whole

__all__ = ["ALGORITHMS", "DILOCO", "POWERSGD", "SHARDED_ADAM", "Method", "methods_for", "stages_of"]

POWERSGD, SHARDED_ADAM, DILOCO = "powersgd", "sharded-adam", "diloco"


def _name(class_name: str) -> str:
    """OneBitAdam is "onebit-adam", ZeroOneAdam "zero-one-adam"."""
    words = re.findall("[A-Z][a-z0-9]*", class_name.replace("OneBit", "Onebit"))
    return "-".join(words).lower()


# thinwire's own, and what else there is, with the ZeRO stages of each.
_OWN = {_name(class_name): registry.entry(class_name) for class_name in registry.NAMES}
_OTHERS: dict[str, tuple[int, ...]] = {
    "ddp-fp32": (0,),
    "ddp-bf16": (0,),
    POWERSGD: (0,),
    SHARDED_ADAM: (1, 2, 3),
    DILOCO: (0,),
}

ALGORITHMS: tuple[str, ...] = (*_OTHERS, *_OWN)


def stages_of(algorithm: str) -> tuple[int, ...]:
    """The ZeRO stages at which an algorithm works. Raises PlanError for one that is not known."""
    if algorithm in _OWN:
        return _OWN[algorithm].stages
    if algorithm not in _OTHERS:
        raise PlanError(f"method {algorithm!r} is not one of {', '.join(ALGORITHMS)}")
    return _OTHERS[algorithm]


@dataclass(frozen=True)
class Method:
    """One way to train.

    `algorithm`: "ddp-fp32" and "ddp-bf16", torch's DDP with Adam, plain and with bf16_compress_hook; "powersgd", DDP
    with powerSGD_hook of `rank`; "sharded-adam", AdamW at ZeRO stages 1 to 3; "diloco", local steps of AdamW; or one of
    thinwire's other optimizers, as "onebit-adam". `hierarchical`: exact inside nodes, compressed between them, at stage
    0; with DiLoCo nodes are the workers.
    """

    algorithm: str
    stage: int = 0
    rank: int | None = None
    hierarchical: bool = False

    def __post_init__(self) -> None:
        known = stages_of(self.algorithm)
        if self.stage not in known:
            stages = " or ".join(map(str, known))
            raise PlanError(f"{self.algorithm} works at ZeRO stage {stages}, not {self.stage}")
        if (self.rank is not None) != (self.algorithm == POWERSGD):
            raise PlanError(
                f"a rank is given for powersgd and for nothing else, got {self.rank!r} for {self.algorithm}"
            )
        if self.rank is not None:
            require_whole("a PowerSGD rank", self.rank)
        if self.hierarchical and (not self.sends_less or self.stage):
            allowed = " and ".join((*_OWN, DILOCO))
            raise PlanError(f"hierarchy is for {allowed} at stage 0, not {self.algorithm} at stage {self.stage}")

    @property
    def entry(self) -> registry.OptimizerEntry | None:
        """What the registry knows of it; None for what is not thinwire's."""
        return _OWN.get(self.algorithm)

    @property
    def is_one_bit(self) -> bool:
        """Whether it sends 1 bit an element once warm."""
        return self.algorithm in _OWN

    @property
    def sends_less(self) -> bool:
        """Whether it is there for thin wires: thinwire's own, which send less than averages of gradients."""
        return self.is_one_bit or self.algorithm == DILOCO

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
        methods += [Method(algorithm, stage) for stage in stages_of(algorithm)]
        if (algorithm in _OWN or algorithm == DILOCO) and cluster.has_hierarchy:
            methods.append(Method(algorithm, hierarchical=True))
    return methods
