"""What a model computes in, fp32, bf16 or fp16, and what has to be converted for that: weights, buffers, inputs."""

from __future__ import annotations

import copy
from collections.abc import Mapping, MutableMapping, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.engine.config import EngineConfig

__all__ = ["Precision", "check_model"]

_TRAINABLE = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Precision:
    """`dtype`: of parameters, buffers and floating inputs; None leaves every parameter and input as it is."""

    dtype: torch.dtype | None

    @classmethod
    def of(cls, config: EngineConfig) -> Precision:
        """What the configuration asks for; None where neither fp16 nor bf16 is enabled."""
        if config.bf16.enabled:
            return cls(torch.bfloat16)
        return cls(torch.float16 if config.fp16.enabled else None)

    def dtype_of(self, parameter: Tensor) -> torch.dtype:
        """What the model will see of this parameter, frozen ones included."""
        return self.dtype if self.dtype is not None and parameter.is_floating_point() else parameter.dtype

    @torch.no_grad()
    def convert(self, model: nn.Module, held: Set[int]) -> None:
        """Convert what no optimizer holds, buffers and the other parameters, those with floating-point values.

        Parameters whose ids are in `held` stay as they are, or become fp32 where they are in the other 16-bit dtype:
        the optimizer takes fp32 master weights from their values before it rounds them.
        """
        if self.dtype is None:
            return
        for parameter in model.parameters():
            if id(parameter) not in held:
                parameter.data = parameter.to(self.dtype_of(parameter))
            elif parameter.dtype != self.dtype:
                parameter.data = parameter.to(torch.float32)
        converted: dict[int, Tensor] = {}  # modules may share a buffer
        for module in model.modules():
            for name, buffer in list(module.named_buffers(recurse=False, remove_duplicate=False)):
                if buffer.is_floating_point():
                    setattr(module, name, converted.setdefault(id(buffer), buffer.to(self.dtype)))

    def place(self, inputs: Any, device: torch.device) -> Any:
        """`inputs` with every tensor in it on `device`, floating-point ones in this precision's dtype.

        Looks into dicts and other mappings, lists and tuples, whose types are kept; anything else stays as it is.
        """
        if isinstance(inputs, Tensor):
            floating = inputs.is_floating_point() and self.dtype is not None
            return inputs.to(device=device, dtype=self.dtype if floating else inputs.dtype, non_blocking=True)
        if isinstance(inputs, Mapping):
            placed = {key: self.place(value, device) for key, value in inputs.items()}
            return _like_mapping(inputs, placed)
        if isinstance(inputs, tuple) and hasattr(inputs, "_fields"):
            return type(inputs)(*(self.place(value, device) for value in inputs))
        if isinstance(inputs, list | tuple):
            # From a list: a tuple that grows must not be seen by a search of the process's objects in another thread.
            return type(inputs)([self.place(value, device) for value in inputs])
        return inputs


def check_model(model: object) -> tuple[nn.Module, torch.device]:
    """The model, and the one device that all of it is on.

    Raises TypeError for parameters that cannot be trained in their dtype; ValueError for a model without any, one that
    is sharded already, is on several devices or whose parameters have no values yet.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    places: dict[torch.device, str] = {}
    for name, parameter in model.named_parameters():
        places.setdefault(parameter.device, name)
        if hasattr(parameter, "device_mesh"):
            raise ValueError(
                f"parameter {name!r} is sharded already, by fully_shard or an earlier thinwire.initialize at stage 3: "
                "go on with that engine, or build the model anew"
            )
        if parameter.requires_grad and parameter.dtype not in _TRAINABLE:
            raise TypeError(
                f"parameter {name!r} of shape {tuple(parameter.shape)} is {parameter.dtype}: the engine trains fp32, "
                "bf16 and fp16 parameters. Convert it with .float(), or freeze it with requires_grad_(False)"
            )
    if not places:
        raise ValueError(f"{type(model).__name__} has no parameters: there is nothing to train")
    for device, name in places.items():
        if device.type == "meta":
            raise ValueError(f"parameter {name!r} is on the meta device: give the model its values first")
    if len(places) > 1:
        where = " and ".join(f"{name!r} on {device}" for device, name in places.items())
        raise ValueError(f"the model is on several devices, {where}: move all of it to this rank's device")
    return model, next(iter(places))


def _like_mapping(original: Mapping[Any, Any], values: dict[Any, Any]) -> Mapping[Any, Any]:
    if not isinstance(original, MutableMapping):
        return values
    result = copy.copy(original)  # keeps what a tokenizer's output holds besides its tensors
    for key, value in values.items():
        result[key] = value
    return result
