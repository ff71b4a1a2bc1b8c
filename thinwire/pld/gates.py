"""Gates, which stand in for a layer's `forward` and decide, once a forward, whether the layer runs. An object in the
layer's own `__dict__`: no module is added, so names, parameters and checkpoints stay as they are. A forward that
activation checkpointing runs again is recognised by its input, which was kept for that, so its memory is still its
own."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from thinwire.pld.schedule import Decision, DropPlan
from thinwire.pld.stacks import LayerOutput, probe_layer

__all__ = ["Gate", "SeenInputs"]


class SeenInputs:
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

    def clear(self) -> None:
        """Forget all."""
        self._at.clear()

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
        self._inputs = SeenInputs()

    @property
    def dropped(self) -> bool:
        """Whether every forward of the schedule's step so far has dropped the layer."""
        current = self._step == self.plan.schedule.step and bool(self._decisions)
        return current and not any(decision.kept for decision in self._decisions)

    def begin_step(self) -> None:
        """Count micro-steps from 0 again, in the schedule's step."""
        self._step = self.plan.schedule.step
        self._decisions.clear()
        self._inputs.clear()

    def install(self) -> None:
        """Take the place of the layer's forward."""
        self.layer.__dict__["forward"] = self

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
        if _inside_backward() and self._decisions:
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
        Where nobody knows, as when inputs were moved to the CPU meanwhile, it is the last one.
        """
        last = len(self._decisions) - 1
        found = self._inputs.find(hidden)
        if found is not None:
            self.plan.micro_step_again = found
        return last if self.plan.micro_step_again is None else min(self.plan.micro_step_again, last)


class _PassBy(torch.autograd.Function):
    """The identity of its first argument, in whose graph the others are: their gradients are undefined, which costs
    nothing, but DDP hears that they are ready and does not wait for them."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, *parameters: Tensor) -> Tensor:
        ctx.num_parameters = len(parameters)
        return hidden

    @staticmethod
    def backward(ctx: Any, *d_outputs: Tensor) -> tuple[Tensor | None, ...]:
        return (d_outputs[0], *[None] * ctx.num_parameters)


def _trainable(module: nn.Module) -> list[nn.Parameter]:
    """The parameters that want a gradient; a shared one may come twice.

    `module.parameters()` makes their names and looks for repetitions: more than all the rest of a dropped layer costs.
    """
    found = [one for one in module._parameters.values() if one is not None and one.requires_grad]
    for child in module._modules.values():
        if child is not None:
            found += _trainable(child)
    return found


def _inside_backward() -> bool:
    return bool(torch._C._current_graph_task_id() != -1)
