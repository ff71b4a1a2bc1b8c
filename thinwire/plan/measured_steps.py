"""What running a training script told of its steps."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from thinwire.plan.workload import Matrices, ParameterDtype, Transformer, Workload

__all__ = ["MeasuredSteps"]


@dataclass(frozen=True)
class MeasuredSteps:
    """Medians over `steps` steps on one rank, in seconds: `forward` and `backward` of one micro-batch, of which a step
    has `accumulation`, and `update` of the optimizer. `forward` holds all that is neither of the others, the loading of
    data too. `shapes`: of the parameters that the optimizer moves, in its order."""

    script: str
    steps: int
    forward: float
    backward: float
    update: float
    accumulation: int
    dtype: ParameterDtype
    shapes: tuple[tuple[int, ...], ...]

    def workload(self, model: Transformer | None = None) -> Workload:
        """Of the script's own model, unless another is given. The optimizer's time counts as AdamW's."""
        found = self.model() if model is None else model
        return Workload(found, self.forward, self.backward, self.accumulation, self.update, self.dtype)

    def model(self) -> Transformer:
        """By its parameters. The first is taken for an embedding, whose gradient comes last, if none is larger."""
        matrices = [Matrices(shape[0], prod(shape[1:])) for shape in self.shapes if len(shape) > 1 and 0 not in shape]
        total = sum(prod(list(shape)) for shape in self.shapes)
        first = self.shapes[0] if self.shapes else ()
        largest = max(matrices, key=lambda one: one.numel, default=None)
        last = (
            matrices[0] if len(first) == 2 and matrices and matrices[0].numel == getattr(largest, "numel", 0) else None
        )
        return Transformer(self.script, total, tuple(matrices), last)
