"""What DeepSpeed's model files say: which parameters there are, of which shape and dtype, and what is beside them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from thinwire.engine.checkpoint.deepspeed.fields import Entry, flat_tensor, shape_of
from thinwire.engine.checkpoint.errors import CheckpointError
from thinwire.engine.checkpoint.snapshot import ModelDescription
from thinwire.zero import SavedSlice

__all__ = ["ModelFiles"]

# Every other key of a model's file is what its user gave as client_state.
_DEEPSPEEDS = frozenset(
    {
        "module",
        "buffer_names",
        "optimizer",
        "param_shapes",
        "frozen_param_shapes",
        "shared_params",
        "frozen_param_fragments",
        "lr_scheduler",
        "data_sampler",
        "random_ltd",
        "sparse_tensor_module_names",
        "skipped_steps",
        "global_steps",
        "global_samples",
        "dp_world_size",
        "mp_world_size",
        "ds_config",
        "ds_version",
        "universal_checkpoint_info",
    }
)


@dataclass(frozen=True)
class ModelFiles:
    """The model's files, each rank's at stage 3.

    `groups`: name -> shape of the parameters that are in the optimizer's files, group by group, in the order in which
    they lie there; None at stage 0, where the optimizer is in the model's file. `tied`: other names of a parameter ->
    the one that holds it. `module`: what lies under the model's names, buffers left out; at stage 3 without values.
    """

    files: Sequence[Entry]
    module: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]
    tied: Mapping[str, str]
    groups: Sequence[Mapping[str, tuple[int, ...]]] | None
    sharded: bool

    @classmethod
    def read(cls, files: Sequence[Entry], sharded: bool) -> ModelFiles:
        """What these files hold; `sharded` at stage 3. Raises CheckpointError for what is not DeepSpeed's."""
        first = files[0]
        module = first.below("module")
        names = {name: module.take(name, Tensor) for name in module.values if not _is_extra(name)}
        named_buffers = set(first.take("buffer_names", list))
        shapes = first.get("param_shapes")
        groups = None
        if shapes is not None:
            where = first.where("param_shapes")
            given = first.take("param_shapes", (list, dict))
            per_group = given if isinstance(given, list) else [given]
            groups = [
                {
                    str(name): shape_of(shape, f"{name} of {where}")
                    for name, shape in Entry(first.path, one).values.items()
                }
                for one in per_group
            ]
        tied = {str(alias): str(name) for alias, name in (first.get("shared_params") or {}).items()}
        kept = {name: one for name, one in names.items() if name not in named_buffers}
        tied |= _same_tensors(kept) if not sharded else {}
        buffers = {name: one for name, one in names.items() if name in named_buffers}
        return cls(files, {name: one for name, one in kept.items() if name not in tied}, buffers, tied, groups, sharded)

    def description(self) -> ModelDescription:
        """Shape and dtype of every parameter."""
        return ModelDescription({name: (self._shape(name), one.dtype) for name, one in self.module.items()})

    def other_weights(self) -> list[SavedSlice]:
        """The weights of parameters that no optimizer holds, and at stages 0 to 2 of all parameters in 16 bits."""
        held = {name for group in self.groups or () for name in group}
        slices = []
        for name, tensor in self.module.items():
            if self.sharded:
                if name not in held:
                    slices += self._frozen(name)
            elif name not in held or tensor.dtype != torch.float32:
                slices.append(SavedSlice("weight", name, 0, tensor.reshape(-1)))
        return [one for one in slices if one.tensor.numel()]

    def client_state(self) -> dict[str, Any]:
        """What the user has saved beside the model."""
        return {key: value for key, value in self.files[0].values.items() if key not in _DEEPSPEEDS}

    def _shape(self, name: str) -> tuple[int, ...]:
        for group in self.groups or ():
            if name in group:
                shape = group[name]
                if not self.sharded and shape != tuple(self.module[name].shape):
                    raise CheckpointError(
                        f"{self.files[0].path} has {name} in the shapes {shape} and {tuple(self.module[name].shape)}"
                    )
                return shape
        if not self.sharded:
            return tuple(self.module[name].shape)
        frozen = self.files[0].get("frozen_param_shapes") or {}
        if name not in frozen:
            raise CheckpointError(
                f"no file holds the values of {name}: it was in no optimizer and not frozen, and DeepSpeed saves no "
                "such parameter at stage 3. Freeze it there with requires_grad_(False), and save again"
            )
        return shape_of(frozen[name], self.files[0].where(f"frozen_param_shapes.{name}"))

    def _frozen(self, name: str) -> list[SavedSlice]:
        """Each rank's run of a frozen parameter; the last ones are padded."""
        wanted, start, slices = math.prod(self._shape(name)), 0, []
        for file in self.files:
            fragment = flat_tensor(
                file.below("frozen_param_fragments").take(name, Tensor), file.where(f"frozen_param_fragments.{name}")
            )
            run = fragment[: max(0, wanted - start)]
            slices.append(SavedSlice("weight", name, start, run))
            start += fragment.numel()
        if start < wanted:
            raise CheckpointError(f"the files of {len(self.files)} ranks hold {start} of the {wanted} values of {name}")
        return slices


def _is_extra(name: object) -> bool:
    """Whether a module keeps something of its own under this name, which is no tensor as a rule."""
    return isinstance(name, str) and name.endswith("_extra_state")


def _same_tensors(module: Mapping[str, Tensor]) -> dict[str, str]:
    """Names under which a tensor is saved again -> the first."""
    first: dict[int, str] = {}
    tied = {}
    for name, tensor in module.items():
        known = first.setdefault(id(tensor), name)
        if known != name:
            tied[name] = known
    return tied
