"""What is to be trained: how many parameters in which shapes, and how long a step computes.
Shapes matter to low-rank compression and to the memory of activations only."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from thinwire.plan.errors import PlanError, require_whole

__all__ = ["Activations", "Blocks", "Matrices", "ParameterDtype", "Transformer", "Workload", "plain_model"]

ParameterDtype = Literal["fp32", "bf16"]

# A model given by its parameter count alone is taken for matrices of this many rows and columns.
_SIDE = 1024


@dataclass(frozen=True)
class Matrices:
    """`count` parameters of `rows` x `columns`."""

    rows: int
    columns: int
    count: int = 1

    @property
    def numel(self) -> int:
        """Elements of all of them."""
        return self.rows * self.columns * self.count

    def low_rank_elements(self, rank: int) -> int:
        """Elements of the two factors of `rank` that PowerSGD makes of each, together.

        0 where they would not halve the matrix, which is then sent whole, as torch's powerSGD_hook decides.
        """
        factors = min(rank, self.rows, self.columns) * (self.rows + self.columns)
        return factors * self.count if 2 * factors < self.rows * self.columns else 0


@dataclass(frozen=True)
class Blocks:
    """Of a transformer: `layers` of `hidden` units with `heads`; `sequence`: tokens that it is usually trained on."""

    layers: int
    hidden: int
    heads: int
    sequence: int

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "heads", "sequence"):
            require_whole(name, getattr(self, name))


@dataclass(frozen=True)
class Transformer:
    """A model: `parameters` trained elements, of which `matrices` are two-dimensional; the rest are vectors.

    `last`: the one of the matrices whose gradient is complete at backward's end only, the embedding; it is never cut.
    `blocks`: its layers, where they are known.
    """

    name: str
    parameters: int
    matrices: tuple[Matrices, ...]
    last: Matrices | None = None
    blocks: Blocks | None = None

    def __post_init__(self) -> None:
        require_whole("parameters", self.parameters)
        if sum(one.numel for one in self.matrices) > self.parameters:
            raise PlanError(f"{self.name} has more elements in its matrices than its {self.parameters} parameters")
        if self.last is not None and self.last not in self.matrices:
            raise PlanError(f"the last matrix of {self.name} is not among its matrices")

    @property
    def last_elements(self) -> int:
        """Elements of the matrix that comes last."""
        return 0 if self.last is None else self.last.numel


def plain_model(parameters: int, hidden: int | None = None) -> Transformer:
    """A model of which only the parameter count is known: square matrices of `hidden` rows, 1024 by default.

    Raises PlanError for counts that are not whole and positive.
    """
    require_whole("parameters", parameters)
    require_whole("hidden", hidden if hidden is not None else _SIDE)
    side = min(hidden or _SIDE, math.isqrt(parameters))
    return Transformer("a model", parameters, (Matrices(side, side, parameters // side**2),))


@dataclass(frozen=True)
class Activations:
    """What backward needs from forward, of a transformer that recomputes nothing (Korthikanti et al. 2022, eq. 1)."""

    layers: int
    hidden: int
    heads: int
    sequence: int
    micro_batch: int

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "heads", "sequence", "micro_batch"):
            require_whole(name, getattr(self, name))

    def nbytes(self, dtype: ParameterDtype) -> float:
        """Bytes a rank: s·b·h·L·(34 + 5·a·s/h) in 16 bits, twice that in fp32 but for the masks of dropout."""
        places = self.sequence * self.micro_batch * self.hidden * self.layers
        scores = self.heads * self.sequence / self.hidden
        masks = 2 + scores
        values = 32 + 4 * scores
        return places * (masks + values * (2 if dtype == "fp32" else 1))


@dataclass(frozen=True)
class Workload:
    """A model and what one step of it computes on one rank.

    Args:
        model: what is trained.
        forward_seconds, backward_seconds: of one micro-batch.
        accumulation: micro-batches a step; gradients leave during the last backward.
        update_seconds: of AdamW on all parameters; None: from the processor's rate.
        dtype: of the weights; bf16 has fp32 master weights.
        activations: for the memory a rank needs; None: left out.
    """

    model: Transformer
    forward_seconds: float
    backward_seconds: float
    accumulation: int = 1
    update_seconds: float | None = None
    dtype: ParameterDtype = "fp32"
    activations: Activations | None = None

    def __post_init__(self) -> None:
        require_whole("accumulation", self.accumulation)
        seconds = {"forward_seconds": self.forward_seconds, "backward_seconds": self.backward_seconds}
        if self.update_seconds is not None:
            seconds["update_seconds"] = self.update_seconds
        for name, value in seconds.items():
            if not 0 <= value < math.inf:
                raise PlanError(f"{name} must be a number of seconds, at least 0, got {value!r}")
        if self.dtype not in ("fp32", "bf16"):
            raise PlanError(f"dtype must be 'fp32' or 'bf16', got {self.dtype!r}")

    @property
    def element_bytes(self) -> int:
        """Bytes of a weight and of a gradient."""
        return 4 if self.dtype == "fp32" else 2
