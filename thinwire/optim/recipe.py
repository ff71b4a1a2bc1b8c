"""How an optimizer of ours is made: what its public class gives to the home that it chooses."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from thinwire.optim.algorithm import Algorithm
from thinwire.optim.freeze_rule import FreezeRule
from thinwire.optim.options import check_group

__all__ = ["Recipe"]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """An algorithm, when it freezes, and what has to hold of its options.

    Args:
        algorithm: makes one, for parameters that enter together.
        rule: makes the rule that ends their warmup, given the largest β₂; None where there is none.
        settings: what ranks and checkpoints have to agree on, as it gives momenta and residuals their meaning.
        schedule: what ranks have to agree on, and a resume may change.
        stages: those that the algorithm has.
        check: raises ValueError for options that cannot work.
        check_group: the same for a parameter group, or the defaults of one.
    """

    algorithm: Callable[[], Algorithm]
    rule: Callable[[float], FreezeRule | None]
    settings: Mapping[str, Any]
    schedule: Mapping[str, Any]
    stages: Sequence[int]
    check: Callable[[], None]
    check_group: Callable[[Mapping[str, Any]], None] = check_group
