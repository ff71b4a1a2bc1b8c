"""Puts gates on the layers of a model, and takes them off again: no edit to the model, no change of its names."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from thinwire.pld.gates import Gate
from thinwire.pld.schedule import DropPlan, ProgressiveLayerDrop
from thinwire.pld.stacks import check_layers, find_layers

__all__ = ["LayerDrop", "drop_layers", "undrop"]


class LayerDrop:
    """What `drop_layers` did to a stack: what it dropped, and what a checkpoint needs."""

    def __init__(self, gates: list[Gate], plan: DropPlan, used_elsewhere: frozenset[int] = frozenset()) -> None:
        """`used_elsewhere`: ids of parameters that the model has outside of these layers, too."""
        self._gates = gates
        self._plan = plan
        self._used_elsewhere = used_elsewhere

    @property
    def layers(self) -> list[nn.Module]:
        """The layers, from the bottom up."""
        return [gate.layer for gate in self._gates]

    @property
    def keep_rates(self) -> list[float]:
        """The part of all training forwards in which each layer ran; NaN before the first."""
        return [gate.kept / gate.forwards if gate.forwards else float("nan") for gate in self._gates]

    def dropped_parameters(self) -> list[Tensor]:
        """Parameters that every forward of this step so far has done without: the same on every rank.

        Those of dropped layers, but for what a kept layer, or the rest of the model, uses as well. For the optimizer's
        `leave_out`, between the forward and the backward.
        """
        used = {id(one) for gate in self._gates if not gate.dropped for one in gate.layer.parameters()}
        used |= self._used_elsewhere
        dropped = (one for gate in self._gates if gate.dropped for one in gate.layer.parameters())
        return [one for one in dropped if id(one) not in used]

    def state_dict(self) -> dict[str, Any]:
        """Seed and schedule: all that later draws depend on. To be saved between steps."""
        return {"seed": self._plan.seed, "schedule": self._plan.schedule.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on drawing as the run that was saved."""
        self._plan.seed = _seed(state["seed"])
        self._plan.schedule.load_state_dict(state["schedule"])
        for gate in self._gates:
            gate.begin_step()


def drop_layers(model: nn.Module | Iterable[nn.Module], schedule: ProgressiveLayerDrop, *, seed: int = 0) -> LayerDrop:
    """Let the layers of `model` be dropped while it trains (arXiv 2010.13369); evaluation stays as it is.

    Layer i of L, from 1, is kept with probability p = 1 - (i/L)(1 - θ): its output is then x + (layer(x) - x) / p, the
    layer's own in expectation. Dropped, it returns x and costs nothing, forward or backward; its parameters get no
    gradient. What is dropped depends on the seed, the schedule's step, the layer, and how many training forwards the
    step has had: it is the same on every rank, after a resume, and in activation checkpointing's second run.

    Args:
        model: one with a single stack of pre-LN layers, or the layers, bottom up, as nn.ModuleList or list. Names,
            parameters and `state_dict` keep. A deep copy drops by a copy of the schedule.
        schedule: call its `update_state(step)` as every step begins.
        seed: the same on every rank; another one for another stack.

    Raises ValueError for a model without layers, or with several stacks, for post-LN layers, and for layers that are
    gated already; nothing is changed then. A layer's first training forward tries it out, and raises ValueError where
    it is not residual or changes shape.
    """
    if not isinstance(schedule, ProgressiveLayerDrop):
        raise TypeError(f"schedule is {type(schedule).__name__}: give a thinwire.pld.ProgressiveLayerDrop")
    layers = find_layers(model)
    check_layers(layers)
    if any(_gate_of(layer) for layer in layers):
        raise ValueError("these layers are dropped by a schedule already: call undrop() first")
    plan = DropPlan(schedule, _seed(seed), len(layers))
    gates = [Gate(layer, number, plan) for number, layer in enumerate(layers, start=1)]
    for gate in gates:
        gate.install()
    elsewhere = _parameters_outside(model, layers) if isinstance(model, nn.Module) else frozenset[int]()
    return LayerDrop(gates, plan, elsewhere)


def undrop(model: nn.Module | Iterable[nn.Module]) -> None:
    """Undo `drop_layers`: every layer in `model`, or in a list of layers, has its own forward again.

    Raises ValueError where no layer has a gate, or where something put its own forward on top of one.
    """
    roots = [model] if isinstance(model, nn.Module) else list(model)
    gates = [gate for root in roots for module in root.modules() if (gate := _gate_of(module))]
    if not gates:
        raise ValueError(
            "no layer here is dropped by a schedule: pass what drop_layers() was given. If activation checkpointing "
            "was put on top since, take that off first"
        )
    for gate in gates:
        gate.remove()


def _gate_of(module: nn.Module) -> Gate | None:
    forward = module.__dict__.get("forward")
    return forward if isinstance(forward, Gate) else None


def _parameters_outside(model: nn.Module, layers: list[nn.Module]) -> frozenset[int]:
    """Ids of the parameters that are reached without passing through one of the layers."""
    gated = {id(layer) for layer in layers}
    found: set[int] = set()
    seen: set[int] = set()
    rest = [model]
    while rest:
        module = rest.pop()
        if id(module) not in gated | seen:
            seen.add(id(module))
            found |= {id(parameter) for parameter in module.parameters(recurse=False)}
            rest += module.children()
    return frozenset(found)


def _seed(seed: object) -> int:
    if isinstance(seed, bool) or not isinstance(seed, int) or not -(2**63) <= seed < 2**63:
        raise ValueError(f"seed is {seed!r}: give a whole number of 64 bits")
    return seed
