"""Gates on the layers of a model, put on and taken off again: no edit to the model, no change of its names.

A gate stands in for a layer's `forward`, in the layer's own `__dict__`, and decides, once a forward, whether the layer
runs. A forward that activation checkpointing runs again is recognised by its input, which was kept for that, so its
memory is still its own.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from thinwire.pld.schedule import Decision, DropPlan, ProgressiveLayerDrop, check_saved_keys
from thinwire.pld.stacks import LayerOutput, check_layers, find_layers, probe_layer


class _SeenInputs:
    """Which micro-step had which input. Keeps no input alive; copies begin empty."""

    def __init__(self) -> None:
        self._at: dict[int, tuple[StorageWeakRef, int]] = {}

    def add(self, hidden: Tensor, micro_step: int) -> None:
        """Note that `micro_step` had this input."""
        self._at[hidden.data_ptr()] = (StorageWeakRef(hidden.untyped_storage()), micro_step)  # type: ignore[no-untyped-call]

    def find(self, hidden: Tensor) -> int | None:
        """The last micro-step that had this input, or None."""
        storage, micro_step = self._at.get(hidden.data_ptr(), (None, None))
        # A freed input's address may belong to another tensor by now.
        gone = storage is None or bool(storage.expired())  # type: ignore[no-untyped-call]
        return None if gone else micro_step

    def __getstate__(self) -> dict[str, object]:
        return {"_at": {}}


class Gate:
    """The gate of layer `number`, counted from 1.

    In training it draws once a forward: dropped, the hidden states pass; kept, what the layer adds is scaled by
    1/keep. A forward inside a backward is activation checkpointing's second run, and repeats what the first one did.
    """

    def __init__(self, layer: nn.Module, number: int, plan: DropPlan) -> None:
        self.layer = layer
        self.number = number
        self.plan = plan
        self.forwards = 0  # all that were drawn for
        self.kept = 0
        self._before: Callable[..., Any] | None = layer.__dict__.get("forward")
        self._hidden_name = next(iter(inspect.signature(layer.forward).parameters), "input")
        self._rest: tuple[None, ...] | None = None  # what follows the hidden states, once probed
        self._probed = False
        self._step = -1
        self._decisions: list[Decision] = []  # of this step, by micro-step
        self._inputs = _SeenInputs()

    @property
    def dropped(self) -> bool:
        """Whether every forward of the schedule's step so far has dropped the layer."""
        current = self._step == self.plan.schedule.step and bool(self._decisions)
        return current and not any(decision.kept for decision in self._decisions)

    def begin_step(self) -> None:
        """Count micro-steps from 0 again, in the schedule's step."""
        self._step = self.plan.schedule.step
        self._decisions.clear()
        self._inputs = _SeenInputs()

    def remove(self) -> None:
        """Give the layer its own forward back."""
        if self._before is None:
            del self.layer.__dict__["forward"]
        else:
            self.layer.__dict__["forward"] = self._before

    # Decisions are Python's, between the layers: compiled with the layers, each would make a graph of its own.
    @torch.compiler.disable(recursive=False)  # type: ignore[no-untyped-call, untyped-decorator]
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the module calls in place of its forward."""
        forward, hidden, decision = self._prepare(args, kwargs)
        if hidden is None or decision is None:
            return forward(*args, **kwargs)
        if not decision.kept:
            return self._pass_by(hidden)
        return self._scale(forward(*args, **kwargs), hidden, decision.keep)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _prepare(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Callable[..., Any], Tensor | None, Decision | None]:
        """The layer's own forward and, in training, the hidden states and what becomes of them."""
        if not self.layer.training:
            return self._forward, None, None
        hidden = self._hidden_of(args, kwargs)
        if not self._probed:
            self._rest = probe_layer(self.layer, self._forward, self._hidden_name, hidden, args, kwargs)
            self._probed = True
        return self._forward, hidden, self._decide(hidden)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _pass_by(self, hidden: Tensor) -> Any:
        return LayerOutput(_PassBy.apply(hidden, *_trainable(self.layer)), self._rest).whole()  # type: ignore[no-untyped-call]

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _scale(self, returned: Any, hidden: Tensor, keep: float) -> Any:
        output = LayerOutput.of(self.layer, returned, hidden)
        self._rest = output.rest
        return output.scaled(hidden, keep).whole()

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        return self._forward

    @property
    def _forward(self) -> Callable[..., Any]:
        if self._before is not None:
            return self._before
        forward: Callable[..., Any] = type(self.layer).forward.__get__(self.layer)
        return forward

    def _hidden_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        hidden = args[0] if args else kwargs.get(self._hidden_name)
        if not isinstance(hidden, Tensor) or not hidden.is_floating_point():
            raise TypeError(
                f"{type(self.layer).__name__} got {type(hidden).__name__} as its first argument, but a layer that can "
                f"be dropped takes its hidden states, a floating-point tensor, first or as {self._hidden_name!r}"
            )
        return hidden

    def _decide(self, hidden: Tensor) -> Decision:
        inside_backward = torch._C._current_graph_task_id() != -1
        if inside_backward and self._decisions:
            return self._decisions[self._micro_step_again(hidden)]
        if self._step != self.plan.schedule.step:
            self.begin_step()
        decision = self.plan.decide(self.number, len(self._decisions))
        self._decisions.append(decision)
        self._inputs.add(hidden, len(self._decisions) - 1)
        self.plan.micro_step_again = None
        self.forwards += 1
        self.kept += decision.kept
        return decision

    def _micro_step_again(self, hidden: Tensor) -> int:
        """Which forward is being run again: the one that saved these hidden states for it.

        Where the run began below this layer, the hidden states are new, and the layer it began with has found out.
        Where that is not known, as when inputs were moved to the CPU meanwhile, it is the last one.
        """
        last = len(self._decisions) - 1
        found = self._inputs.find(hidden)
        if found is not None:
            self.plan.micro_step_again = found
        return last if self.plan.micro_step_again is None else min(self.plan.micro_step_again, last)


class _PassBy(torch.autograd.Function):
    """The identity of its first argument, in whose graph the others are: their gradients are undefined, which costs
    nothing, but DDP learns that they are ready and does not wait for them."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, *parameters: Tensor) -> Tensor:
        ctx.num_parameters = len(parameters)
        return hidden

    @staticmethod
    def backward(ctx: Any, *d_outputs: Tensor) -> tuple[Tensor | None, ...]:
        return (d_outputs[0], *[None] * ctx.num_parameters)


def _trainable(module: nn.Module) -> list[nn.Parameter]:
    """The parameters that want a gradient; a shared one may come twice: to look for those, as `module.parameters()`
    does, takes longer than all the rest of a dropped layer."""
    found = [one for one in module._parameters.values() if one is not None and one.requires_grad]
    for child in module._modules.values():
        if child is not None:
            found += _trainable(child)
    return found


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
        """Go on drawing as the run that was saved. Raises ValueError or TypeError for another state."""
        seed = _seed(check_saved_keys(state, "seed", "schedule")["seed"])
        self._plan.schedule.load_state_dict(state["schedule"])
        self._plan.seed = seed
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
        gate.layer.__dict__["forward"] = gate
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
