"""Trades time for memory: chosen modules keep only their inputs in forward, and run again in backward. The model's
parameter names, results and gradients stay the same, to the bit."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint, noop_context_fn

_CACHES = ("past_key_value", "past_key_values", "layer_past")


@dataclass(frozen=True)
class ActivationCheckpoints:
    """Which modules of a model run again in backward: `names`, as in `model.named_modules()`."""

    model: nn.Module
    names: tuple[str, ...]

    def restore(self) -> None:
        """Let the modules keep their activations again."""
        for name in self.names:
            module = self.model.get_submodule(name)
            recomputed = module.__dict__.get("forward")
            if isinstance(recomputed, _RecomputedForward):
                recomputed.restore()


def checkpoint_activations(
    model: nn.Module, modules: Sequence[str], *, cpu_checkpointing: bool = False
) -> ActivationCheckpoints:
    """Let `modules` recompute their activations in backward (Chen et al. 2016, arXiv 1604.06174).

    Random numbers, dropout's for one, are the same in both runs, and so is autocast. Do this before FSDP's
    `fully_shard`, so that its hooks stay outside.

    Args:
        model: any; its `state_dict` keeps its keys. Copies of it recompute as well.
        modules: class names, or names as in `model.named_modules()`, where a ModuleList stands for its elements.
        cpu_checkpointing: keep the inputs that need gradients in CPU memory, page-locked where they come from a GPU.

    Raises ValueError for names that match nothing, modules inside others that are chosen, and modules that recompute
    already. At a forward, ValueError for a module that fills a cache of keys and values, which a second run would fill
    twice.
    """
    names = _matches(model, modules)
    for outer in names:
        inner = next((name for name in names if name != outer and (not outer or name.startswith(f"{outer}."))), None)
        if inner is not None:
            raise ValueError(f"{inner!r} lies inside {outer or 'the model'!r} and would run three times: name one")
    for name in names:
        _check_plain(name, model.get_submodule(name))
    for name in names:
        layer = model.get_submodule(name)
        layer.__dict__["forward"] = _RecomputedForward(layer, cpu_checkpointing)
    return ActivationCheckpoints(model, tuple(names))


def recomputed_call(
    run: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    cpu_checkpointing: bool = False,
    contexts: Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]] = noop_context_fn,
) -> Any:
    """`run(*args, **kwargs)`, of which only the inputs are kept: backward runs it again.

    Random numbers, dropout's for one, are the same in both runs, and so is autocast. `cpu_checkpointing`: keep the
    inputs that need gradients in CPU memory, page-locked where they come from a GPU. `contexts`: makes what each of the
    two runs is inside of.
    """
    names, count, inputs = list(kwargs), len(args), [*args, *kwargs.values()]
    # Only these are saved by autograd, and so moved to the CPU: masks and the like are shared by all layers.
    places = [place for place, one in enumerate(inputs) if isinstance(one, Tensor) and one.requires_grad]
    differentiable = [inputs[place] for place in places]
    for place in places:
        inputs[place] = None

    def run_with(*values: Tensor) -> Any:
        given = list(inputs)
        for place, value in zip(places, values, strict=True):
            given[place] = value
        return run(*given[:count], **dict(zip(names, given[count:], strict=True)))

    on_gpu = any(tensor.is_cuda for tensor in differentiable)
    with save_on_cpu(pin_memory=on_gpu) if cpu_checkpointing else nullcontext():
        return checkpoint(run_with, *differentiable, use_reentrant=False, context_fn=contexts)


class _RecomputedForward:
    """A module's `forward` that keeps its inputs instead of its activations. An object rather than a closure, so that a
    deep copy of the module runs the copy's parameters."""

    def __init__(self, module: nn.Module, cpu_checkpointing: bool) -> None:
        self._module = module
        self._cpu_checkpointing = cpu_checkpointing
        self._before = module.__dict__.get("forward")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self._run(*args, **kwargs)
        if cache := next((key for key in _CACHES if kwargs.get(key) is not None), None):
            raise ValueError(
                f"{type(self._module).__name__} got {cache}, which running it again in backward would fill twice: set "
                "model.config.use_cache = False for training"
            )
        return recomputed_call(self._run, args, kwargs, cpu_checkpointing=self._cpu_checkpointing)

    def restore(self) -> None:
        """Give the module its own forward back."""
        if self._before is None:
            del self._module.__dict__["forward"]
        else:
            self._module.__dict__["forward"] = self._before

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        if self._before is not None:
            return self._before(*args, **kwargs)
        return type(self._module).forward(self._module, *args, **kwargs)


def _matches(model: nn.Module, wanted: Sequence[str]) -> list[str]:
    modules = dict(model.named_modules())
    classes = {type(module).__name__ for module in modules.values()}
    chosen: dict[str, None] = {}
    for name in wanted:
        if name in classes:
            found = [path for path, module in modules.items() if type(module).__name__ == name]
        elif name and isinstance(modules.get(name), nn.ModuleList):
            found = [path for path in modules if path.rpartition(".")[0] == name]
        elif name and name in modules:
            found = [name]
        else:
            near = difflib.get_close_matches(name, [*classes, *filter(None, modules)], n=3)
            hint = f"; did you mean {' or '.join(map(repr, near))}?" if near else ""
            raise ValueError(f"{name!r} is neither a class nor the name of a module in {type(model).__name__}{hint}")
        chosen.update(dict.fromkeys(found))
    if not chosen:
        raise ValueError("no modules were named: name some")
    return list(chosen)


def _check_plain(name: str, module: nn.Module) -> None:
    if isinstance(module.__dict__.get("forward"), _RecomputedForward):
        raise ValueError(f"{name!r} recomputes its activations already: call restore() first")
    if getattr(module, "gradient_checkpointing", False):
        raise ValueError(
            f"{name!r} recomputes its activations already, by its own gradient checkpointing: call "
            "model.gradient_checkpointing_disable() first"
        )
    if isinstance(module, nn.ModuleDict):
        raise ValueError(f"{name!r} is a ModuleDict, which has no forward: name what is in it")
