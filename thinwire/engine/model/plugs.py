"""What a configuration puts into a model: block-sparse attention, and layers that are dropped while it trains."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Set
from types import CodeType
from typing import Any

from torch import Tensor, nn

from thinwire.engine.config.models import LayerDropConfig
from thinwire.pld import LayerDrop, ProgressiveLayerDrop, drop_layers, undrop
from thinwire.sparse_attn import layout_from_config, sparsify

__all__ = ["LayerDropping", "put_in_sparse_attention"]


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
    if _names(model, names):
        return True
    if not _takes_any_keyword(model):
        return False
    return _looks_up(model, names) or any(_takes(part, names) for part in _parts(model))


def _parts(module: nn.Module) -> Iterator[nn.Module]:
    """The modules that a forward may call, which passes through lists of them."""
    for child in module.children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield from _parts(child)
        else:
            yield child


def _names(module: nn.Module, names: Set[str]) -> bool:
    return names <= inspect.signature(module.forward).parameters.keys()


def _takes_any_keyword(module: nn.Module) -> bool:
    kinds = [one.kind for one in inspect.signature(module.forward).parameters.values()]
    return inspect.Parameter.VAR_KEYWORD in kinds


def _looks_up(module: nn.Module, names: Set[str]) -> bool:
    """Whether forward's code holds one of the names, as `kwargs["pld_theta"]` does: a signature cannot say."""
    code = getattr(inspect.unwrap(module.forward), "__code__", None)
    return code is not None and not names.isdisjoint(_strings(code))


def _strings(code: CodeType) -> Iterator[str]:
    for constant in code.co_consts:
        if isinstance(constant, str):
            yield constant
        elif isinstance(constant, CodeType):
            yield from _strings(constant)
