"""The model that an engine trains: its precision, the sections that change its layers, and parameters without
gradients.

fp32, bf16 or fp16 converts weights, buffers and inputs. A configuration can put block-sparse attention into a model,
and drop layers while it trains.
"""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Iterator, Mapping, MutableMapping, Set
from dataclasses import dataclass
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.comm import Communicator
from thinwire.comm.agreement import on_every_rank
from thinwire.engine.config import EngineConfig
from thinwire.engine.config.models import LayerDropConfig
from thinwire.pld import LayerDrop, ProgressiveLayerDrop, drop_layers, undrop
from thinwire.sparse_attn import layout_from_config, sparsify
from thinwire.zero.fsdp import is_sharded, is_sharded_here

_TRAINABLE = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Precision:
    """`dtype`: of parameters, buffers and floating inputs; None leaves every parameter and input as it is. Values of
    one byte, of a model that is quantised, stay as they are in any case."""

    dtype: torch.dtype | None

    @classmethod
    def of(cls, config: EngineConfig) -> Precision:
        """What the configuration asks for; None where neither fp16 nor bf16 is enabled."""
        if config.bf16.enabled:
            return cls(torch.bfloat16)
        return cls(torch.float16 if config.fp16.enabled else None)

    def dtype_of(self, parameter: Tensor) -> torch.dtype:
        """What the model will see of this parameter, frozen ones included."""
        return self.dtype if self.dtype is not None and _converts(parameter) else parameter.dtype

    @torch.no_grad()
    def convert(self, model: nn.Module, held: Set[int]) -> None:
        """Convert what no optimizer holds, buffers and the other parameters, those with floating-point values.

        Parameters whose ids are in `held` stay as they are, or become fp32 where they are in the other 16-bit dtype:
        the optimizer takes fp32 master weights from their values before it rounds them.
        """
        if self.dtype is None:
            return
        for parameter in model.parameters():
            if is_sharded(parameter):
                continue  # stage 3 has it as it should be
            if id(parameter) not in held:
                parameter.data = parameter.to(self.dtype_of(parameter))
            elif parameter.dtype != self.dtype:
                parameter.data = parameter.to(torch.float32)
        converted: dict[int, Tensor] = {}  # modules may share a buffer
        for module in model.modules():
            for name, buffer in list(module.named_buffers(recurse=False, remove_duplicate=False)):
                if _converts(buffer):
                    setattr(module, name, converted.setdefault(id(buffer), buffer.to(self.dtype)))

    def place(self, inputs: Any, device: torch.device) -> Any:
        """`inputs` with every tensor in it on `device`, floating-point ones in this precision's dtype.

        Looks into dicts and other mappings, lists and tuples, whose types are kept; anything else stays as it is.
        """
        if isinstance(inputs, Tensor):
            floating = _converts(inputs) and self.dtype is not None
            return inputs.to(device=device, dtype=self.dtype if floating else inputs.dtype, non_blocking=True)
        if isinstance(inputs, Mapping):
            placed = {key: self.place(value, device) for key, value in inputs.items()}
            if not isinstance(inputs, MutableMapping):
                return placed
            result = copy.copy(inputs)  # keeps what a tokenizer's output holds besides its tensors
            result.update(placed)
            return result
        if isinstance(inputs, tuple) and hasattr(inputs, "_fields"):
            return type(inputs)(*(self.place(value, device) for value in inputs))
        if isinstance(inputs, list | tuple):
            # From a list: a tuple that grows must not be seen by a search of the process's objects in another thread.
            return type(inputs)([self.place(value, device) for value in inputs])
        return inputs


def _converts(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and tensor.element_size() > 1


def check_model(
    model: object, stage: int = 0, parts: int = 1, weights: str | None = None
) -> tuple[nn.Module, torch.device]:
    """The model, and the one device that all of it is on.

    `stage` 3 takes a model that it has sharded before, and it or several `parts` one on the meta device.

    Raises TypeError for parameters that cannot be trained in their dtype; ValueError for a model without any, one that
    is sharded otherwise, is on several devices or whose parameters have no values yet.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    again = is_sharded_here(model) and stage == 3
    places: dict[torch.device, str] = {}
    for name, parameter in model.named_parameters():
        places.setdefault(parameter.device, name)
        if is_sharded(parameter) and not again:
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
        if device.type == "meta" and parts == 1 and stage < 3:
            raise ValueError(
                f"parameter {name!r} is on the meta device: give the model its values first, or have each rank make or "
                'read those of its own part, at "zero_optimization.stage" 3 or by "pipeline" or "tensor_parallel"'
            )
    if weights is not None and "meta" not in {device.type for device in places}:
        raise ValueError(
            f'"initial_weights" {weights!r} are for a model on the meta device, and this one has its values'
        )
    if len(places) > 1:
        where = " and ".join(f"{name!r} on {device}" for device, name in places.items())
        raise ValueError(f"the model is on several devices, {where}: move all of it to this rank's device")
    return model, next(iter(places))


def put_in_sparse_attention(model: nn.Module, section: Mapping[str, Any]) -> None:
    """Let every self-attention of a Hugging Face model attend over the blocks that `section` describes.

    Raises TypeError or ValueError for a model that cannot be served.
    """
    heads = getattr(getattr(model, "config", None), "num_attention_heads", None)
    if heads is None:
        raise TypeError(
            f'"sparse_attention" plugs into Hugging Face models, and {type(model).__name__} is none: use '
            "thinwire.sparse_attn.block_sparse_attention in it, and delete the section"
        )
    sparsify(model, layout_from_config(section, heads))


class LayerDropping:
    """Progressive layer drop by the engine's steps.

    Models whose forward takes `progressive_layer_drop` and `pld_theta` get them, and drop layers by themselves; others
    get gates on their layers. A forward takes them by name, or among keyword arguments that it looks them up in or
    passes on to a module inside that takes them.

    Raises ValueError or TypeError for a model whose layers cannot be dropped.
    """

    def __init__(self, model: nn.Module, config: LayerDropConfig, total_steps: int | None, seed: int) -> None:
        self._schedule = ProgressiveLayerDrop(
            config.theta, config.gamma, total_steps=total_steps if config.gamma == "auto" else None
        )
        self._model = model
        self._drop: LayerDrop | None = None
        if not _takes(model, self._schedule.get_state().keys()):
            self._drop = drop_layers(model, self._schedule, seed=seed)

    @property
    def theta(self) -> float:
        """θ of the step that was begun last."""
        return self._schedule.get_theta()

    def begin_step(self, step: int) -> dict[str, Any]:
        """Begin step `step`, from 0, or go on with it; returns what forward is to be given."""
        self._schedule.update_state(step)
        return self._schedule.get_state() if self._drop is None else {}

    def resume(self, step: int) -> None:
        """Go on from a checkpoint, earlier or later."""
        if self._drop is None:
            self._schedule.load_state_dict({"step": step})
        else:
            self._drop.load_state_dict({**self._drop.state_dict(), "schedule": {"step": step}})

    def dropped_parameters(self) -> list[Tensor]:
        """Of the step so far; empty where the model drops by itself, which only it knows."""
        return self._drop.dropped_parameters() if self._drop is not None else []

    def remove(self) -> None:
        """Take the gates off again."""
        if self._drop is not None:
            undrop(self._model)


def _takes(model: nn.Module, names: Set[str]) -> bool:
    """Whether the model's forward knows what to do with keyword arguments of these names."""
    parameters = inspect.signature(model.forward).parameters
    if names <= parameters.keys():
        return True
    if all(one.kind is not inspect.Parameter.VAR_KEYWORD for one in parameters.values()):
        return False
    # Forward's code may hold one of the names, as in `kwargs["pld_theta"]`: a signature cannot say.
    code = getattr(inspect.unwrap(model.forward), "__code__", None)
    looked_up = code is not None and not names.isdisjoint(_strings(code))
    return looked_up or any(_takes(part, names) for part in _parts(model))


def _parts(module: nn.Module) -> Iterator[nn.Module]:
    """The modules that a forward may call, which passes through lists of them."""
    for child in module.children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield from _parts(child)
        else:
            yield child


def _strings(code: CodeType) -> Iterator[str]:
    for constant in code.co_consts:
        if isinstance(constant, str):
            yield constant
        elif isinstance(constant, CodeType):
            yield from _strings(constant)


_MOST_NAMES = 5


class UnusedParametersError(AssertionError):
    """Parameters that the configuration asserts to be used had no gradient; the step was taken without them."""


class UsedParameters:
    """Checks after each step of an optimizer that all trainable parameters of `model` have had a gradient.

    `check` is the optimizer's hook after its step, and collective. Not before: ranks whose gradients are all there may
    be sending already what others only send in the step.
    """

    def __init__(self, model: nn.Module, comm: Communicator) -> None:
        self._comm = comm
        self._names = {id(one): name for name, one in model.named_parameters() if one.requires_grad and one.numel()}
        self._used: set[int] = set()
        watched: list[Any] = [one for one in model.parameters() if id(one) in self._names]  # torch's hooks are untyped
        self._hooks = [one.register_post_accumulate_grad_hook(self._note) for one in watched]

    def check(self, *_: Any) -> None:
        """Raise UnusedParametersError, and ValueError on other ranks, where a parameter has had no gradient."""
        used, self._used = self._used, set()
        missing = [name for number, name in self._names.items() if number not in used]

        def all_used() -> None:
            if missing:
                named = ", ".join(missing[:_MOST_NAMES]) + (", ..." if len(missing) > _MOST_NAMES else "")
                raise UnusedParametersError(
                    f'"zero_optimization.ignore_unused_parameters" is false, and {len(missing)} of {len(self._names)} '
                    f"parameters had no gradient in the step just taken: {named}. Use them in the loss, freeze them "
                    "with requires_grad_(False), or set the key to true, which leaves them alone"
                )

        on_every_rank(self._comm, all_used, "use all of its parameters", (UnusedParametersError,))

    def remove(self) -> None:
        """Take the hooks off the parameters."""
        for hook in self._hooks:
            hook.remove()

    def _note(self, parameter: Tensor) -> None:
        self._used.add(id(parameter))


def first_dimension(inputs: Any) -> int | None:
    """The length of the first tensor that has any dimension, in dicts, lists and tuples."""
    if isinstance(inputs, Tensor):
        return inputs.shape[0] if inputs.dim() else None
    values = inputs.values() if isinstance(inputs, Mapping) else inputs if isinstance(inputs, list | tuple) else ()
    return next((size for size in map(first_dimension, values) if size is not None), None)


def warn_of_another_size(inputs: Any, expected: int, rank: int) -> None:
    """Warn where the samples in `inputs` are not the `expected` ones, so that counts cannot be right."""
    size = first_dimension(inputs)
    if size is not None and size != expected:
        warnings.warn(
            f"rank {rank} got a first batch of {size} samples, and train_micro_batch_size_per_gpu is {expected}: "
            f"samples are counted, and every rank's loss weighs, as if it were {expected}",
            RuntimeWarning,
            stacklevel=4,
        )
