"""What a model is called by in checkpoints, and whether one that was saved can fill it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from torch import nn

from thinwire.engine.checkpoint import ModelDescription
from thinwire.engine.model.precision import Precision

__all__ = ["ModelNames"]


@dataclass(frozen=True)
class ModelNames:
    """What a model is called by, found before it is sharded.

    `tied`: other names of a parameter -> the one in `description`. `buffers`: names of those that are saved.
    """

    description: ModelDescription
    tied: Mapping[str, str]
    buffers: frozenset[str]

    @classmethod
    def of(cls, model: nn.Module, precision: Precision) -> ModelNames:
        """Names, shapes, and the dtypes that `precision` makes of them."""
        first_name = {id(parameter): name for name, parameter in model.named_parameters()}
        every = model.named_parameters(remove_duplicate=False)
        tied = {name: first_name[id(parameter)] for name, parameter in every if first_name[id(parameter)] != name}
        saved = {name for name, _ in model.named_buffers()} & model.state_dict(keep_vars=True).keys()
        parameters = {
            name: (tuple(parameter.shape), precision.dtype_of(parameter))
            for name, parameter in model.named_parameters()
        }
        return cls(ModelDescription(parameters), tied, frozenset(saved))

    def without(self, names: Collection[str]) -> ModelDescription:
        """The description of the other parameters."""
        kept = {name: one for name, one in self.description.parameters.items() if name not in names}
        return ModelDescription(kept)

    def fault_of(self, saved: ModelDescription, left_out: Collection[str], strict: bool) -> str | None:
        """Why a checkpoint of `saved` cannot fill this model; None where it can.

        `left_out`: parameters that it need not have. Without `strict` only those that both have are compared.
        """
        mine = self.without(left_out)
        if not strict:
            mine = ModelDescription({name: one for name, one in mine.parameters.items() if name in saved.parameters})
            saved = ModelDescription({name: one for name, one in saved.parameters.items() if name in mine.parameters})
        difference = mine.difference_to(saved)
        return f"it is of another model: {difference}" if difference else None
