"""A worker's own part: an inner optimizer that steps this rank's replica of the weights, or the replica of its node."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import chain, product

import torch
from torch import Tensor
from typing_extensions import override

from thinwire.comm import Communicator
from thinwire.comm.agreement import gather
from thinwire.optim.home import check_in_sync
from thinwire.zero import ShardedOptimizer
from thinwire.zero.backward import BackwardWatcher, GradientHook
from thinwire.zero.gradient_seal import replace_hook
from thinwire.zero.home import (
    NO_GRADIENTS,
    Fragment,
    Held,
    ParameterState,
    StepResult,
    find_state,
    local_values,
    whole_values,
    write_elements,
)
from thinwire.zero.saved_state import AVERAGE_RESIDUAL, state_of_slices, state_slices

# What a key says of a value besides its kind: a plain number, or where in the parameter a slice begins.
_NUMBER = "[number]"
_START = "[start]"
# Of slices, what is no state of the inner optimizer.
_NO_STATE = ("weight", "master", AVERAGE_RESIDUAL)


class Worker:
    """An inner optimizer and the weights that it steps: here any torch optimizer and one rank's own fp32 parameters.

    `optimizer`: the inner one. `parameters`: what it holds, in the order of its groups. `watcher`: of backwards whose
    gradients leave this rank, for others of its node. Gradients are clipped to a 2-norm of `max_norm`, 0 for none: this
    rank's own.
    """

    optimizer: torch.optim.Optimizer
    times_mean: float = 1.0  # what its steps take, over the mean of its ranks' gradients

    def __init__(self, optimizer: torch.optim.Optimizer, comm: Communicator, max_norm: float) -> None:
        self.optimizer = optimizer
        self.parameters: list[Tensor] = [one for group in optimizer.param_groups for one in group["params"]]
        self.watcher = BackwardWatcher(str, lambda: None)  # of no parameter
        self._comm = comm
        self._max_norm = max_norm

    def step(self, loss_scale: float, overflows: bool) -> StepResult:
        """Step by the gradients, which are times `loss_scale`, or skip them where they are not finite.

        `overflows`: a GradScaler has found that already.
        """
        gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        if not gradients:
            return StepResult(False, math.nan, NO_GRADIENTS)
        norm = float(torch.nn.utils.get_total_norm(gradients)) / loss_scale
        if overflows or not math.isfinite(norm):
            return StepResult(False, math.inf, "a gradient was NaN or infinite on this rank")
        factor = min(1.0, self._max_norm / norm) if self._max_norm and norm else 1.0
        if factor != loss_scale:  # the same bits as without us where nothing is to be done
            torch._foreach_mul_(gradients, factor / loss_scale)
        self.optimizer.step()
        return StepResult(True, norm)

    def weights(self, number: int) -> Tensor:
        """The fp32 weights that steps change, one-dimensional, of a parameter: to be read."""
        return self.parameters[number].detach().reshape(-1)

    def write(self, number: int, start: int, values: Tensor) -> None:
        """Set elements of a parameter from `start` on, and all that follows from them."""
        self.show(number, start, values)

    def show(self, number: int, start: int, values: Tensor) -> None:
        """Let the parameter alone have these values from `start` on, rounded to its dtype."""
        write_elements(self.parameters[number], start, values)

    def kinds(self, number: int) -> dict[str, bool]:
        """The kinds of the inner optimizer's state of a parameter that this rank has a part of, and whether they have
        a value for each of its elements."""
        parameter = self.parameters[number]
        return {
            kind: isinstance(value, Tensor) and value.shape == parameter.shape and value.is_floating_point()
            for kind, value in self.optimizer.state.get(parameter, {}).items()
        }

    def state(self, number: int, kind: str) -> Tensor:
        """The inner optimizer's state of a parameter, fp32 [elements]: to be read."""
        values: Tensor = self.optimizer.state[self.parameters[number]][kind]
        return values.reshape(-1).float()

    def own_state(self, number: int, kind: str) -> Tensor:
        """What this rank has of it."""
        return self.state(number, kind)

    def keeps(self, number: int, kind: str) -> bool:
        """Whether it is there, after it was."""
        return self.kinds(number).get(kind, False)

    def write_state(self, number: int, kind: str, start: int, values: Tensor) -> None:
        """Set elements of it from `start` on."""
        write_elements(self.optimizer.state[self.parameters[number]][kind], start, values)

    def parameter_state(self, in_sync: Callable[[], bool]) -> ParameterState:
        """What is held of each parameter."""
        return _OwnState(self, self._comm, in_sync)

    def leave_out(self, parameters: Iterable[Tensor]) -> None:
        """Expect no gradient of these in the next backward."""

    def before_backwards(self, callback: Callable[[int], None]) -> None:
        """Call this, a method, now and then during backwards, and before the first gradient is taken."""
        for number, parameter in enumerate(self.parameters):
            if parameter.requires_grad:
                replace_hook(parameter, GradientHook(callback, number))

    def saved(self, names: Sequence[str]) -> dict[tuple[str, str], Tensor]:
        """The inner optimizer's state by kind and name; the parameters called `names`."""
        return {
            (f"{kind}{'' if isinstance(value, Tensor) else _NUMBER}", name): torch.as_tensor(value)
            for name, parameter in zip(names, self.parameters, strict=True)
            for kind, value in self.optimizer.state.get(parameter, {}).items()
            if value is not None
        }

    def whole_state(self, names: Sequence[str]) -> dict[tuple[str, str], Tensor]:
        """What `saved` gives of a worker that is one rank, of any worker. Collective inside a node."""
        return self.saved(names)

    def load_whole(self, names: Sequence[str], values: Mapping[tuple[str, str], Tensor]) -> None:
        """Take over what another worker's `whole_state` gave, of which a node's first rank has the values."""
        by_key = {f"{kind}.{name}": value for (kind, name), value in values.items()}
        self.load(names, dict.fromkeys(kind for kind, _ in values), by_key.__getitem__)

    def load(self, names: Sequence[str], kinds: Iterable[str], read: Callable[[str], Tensor]) -> None:
        """Take over what `saved` gave; `read` takes "kind.name", and raises KeyError where there is none. Weights stay
        as they are."""
        self.reset_state()
        for name, parameter in zip(names, self.parameters, strict=True):
            for kind in kinds:
                try:
                    value = read(f"{kind}.{name}")
                except KeyError:
                    continue
                entry = self.optimizer.state[parameter]
                if kind.endswith(_NUMBER):
                    entry[kind.removesuffix(_NUMBER)] = value.item()
                else:
                    # Step counts stay on the CPU, where torch's optimizers keep them.
                    entry[kind] = value.clone() if value.dim() == 0 else value.to(parameter.device, copy=True)

    def reset_state(self) -> None:
        """Forget the inner optimizer's state."""
        self.optimizer.state.clear()

    def model_state_bytes(self, numel: int) -> dict[str, float]:
        """Bytes that a rank holds of the replica, its gradients and its optimizer state, `numel` trained elements."""
        held = float(
            sum(getattr(one, "nbytes", 0) for entry in self.optimizer.state.values() for one in entry.values())
        )
        return {"weights": 4.0 * numel, "master weights": 0.0, "gradients": 4.0 * numel, "optimizer state": held}

    @property
    def bytes_inside(self) -> int:
        """Bytes this rank has sent to ranks of its node."""
        return 0

    def close(self) -> None:
        """Release communicators."""


class NodeWorker(Worker):
    """The ranks of a node, or one rank with master weights: gradients are averaged exactly inside, state is sharded."""

    optimizer: ShardedOptimizer

    def __init__(self, optimizer: ShardedOptimizer, inside: Communicator) -> None:
        """`inside`: the node's ranks, to be closed with it."""
        self.optimizer = optimizer
        self.times_mean = optimizer._times_mean
        self.watcher = optimizer._home.watcher
        self.parameters = [parameter for _, parameter in optimizer.saved_parameters()]
        self._inside = inside
        found = next(one for one in map(find_state, self.parameters) if one is not None)
        self._state = found[0]

    @override
    def step(self, loss_scale: float, overflows: bool) -> StepResult:
        self.optimizer._home.loss_scale = loss_scale  # DiLoCo counts with what is inside
        self.optimizer._home.superseded = False  # by the optimizer around it, whose steps its own are
        self.watcher.turn.thread = 0
        self.optimizer.step()
        return self.optimizer.last_step

    @override
    def weights(self, number: int) -> Tensor:
        if self.parameters[number].dtype == torch.float32:
            return super().weights(number)
        return whole_values(self._state, number, self._state.weights(number))[0].reshape(-1)

    @override
    def write(self, number: int, start: int, values: Tensor) -> None:
        if self.parameters[number].dtype == torch.float32:
            super().write(number, start, values)
            return
        whole = self.weights(number).clone()
        whole[start : start + values.numel()] = values
        for held in self._state.weights(number).fragments:
            held.values.copy_(whole[held.start : held.start + held.values.numel()])
        self._state.after_writing_weights(number, whole.view(self.parameters[number].shape))

    @override
    @torch.no_grad()
    def show(self, number: int, start: int, values: Tensor) -> None:
        parameter = self.parameters[number]
        if parameter.dtype == torch.float32:
            super().show(number, start, values)
            return
        self._state.weights(number)  # which takes over what was written
        shown = parameter.detach().clone()
        shown.view(-1)[start : start + values.numel()].copy_(values)
        self._state.after_writing_weights(number, shown)  # else master weights would follow it

    @override
    def kinds(self, number: int) -> dict[str, bool]:
        slices = {kind: self._state.state(number, kind).fragments for kind in self._state.kinds()}
        return {kind: True for kind, held in slices.items() if held}

    @override
    def own_state(self, number: int, kind: str) -> Tensor:
        return local_values(self._state.state(number, kind), self.parameters[number].device)

    @override
    def keeps(self, number: int, kind: str) -> bool:
        return len(self._state.state(number, kind).fragments) == len(self._state.weights(number).fragments)

    @override
    def state(self, number: int, kind: str) -> Tensor:
        """Collective inside the node."""
        return whole_values(self._state, number, self._state.state(number, kind))[0].reshape(-1)

    @override
    def write_state(self, number: int, kind: str, start: int, values: Tensor) -> None:
        for held in self._state.state(number, kind).fragments:
            first, last = max(held.start, start), min(held.start + held.values.numel(), start + values.numel())
            if first < last:
                held.values[first - held.start : last - held.start].copy_(values[first - start : last - start])

    @override
    def parameter_state(self, in_sync: Callable[[], bool]) -> ParameterState:
        return self._state

    @override
    def leave_out(self, parameters: Iterable[Tensor]) -> None:
        self.optimizer.leave_out(parameters)

    @override
    def saved(self, names: Sequence[str]) -> dict[tuple[str, str], Tensor]:
        found: dict[tuple[str, str], Tensor] = {}
        for one in self.optimizer.saved_slices():
            if one.kind not in ("weight", "master"):
                found[one.kind, one.name] = one.tensor
                found[f"{one.kind}{_START}", one.name] = torch.tensor(one.start)
        return found

    @override
    def whole_state(self, names: Sequence[str]) -> dict[tuple[str, str], Tensor]:
        mine = {(one.kind, one.name): one for one in self.optimizer.saved_slices() if one.kind not in _NO_STATE}
        ends = [[*key, one.start + one.tensor.numel()] for key, one in mine.items()]
        ranks = gather(self._inside, ends, "gather its state")
        of_name: dict[str, dict[str, Tensor]] = defaultdict(dict)
        for kind, name, end in sorted(chain.from_iterable(ranks)):
            of_name[name][kind] = torch.zeros(end, device=self.parameters[0].device)
        found: dict[tuple[str, str], Tensor] = {}
        for name, values in of_name.items():
            for kind, whole in values.items():
                if (own := mine.get((kind, name))) is not None:
                    whole[own.start : own.start + own.tensor.numel()].copy_(own.tensor)
                self._inside.all_reduce(whole)
            shape = self.parameters[names.index(name)].shape
            for kind, value in state_of_slices(values).items():
                form = "" if isinstance(value, Tensor) else _NUMBER
                found[f"{kind}{form}", name] = value.view(shape) if kind in values else torch.as_tensor(value)
        return found

    @override
    def load_whole(self, names: Sequence[str], values: Mapping[tuple[str, str], Tensor]) -> None:
        """Collective inside the node."""
        slices = []
        for (kind, name), value in values.items():
            like = self.parameters[names.index(name)]
            one = value.item() if kind.endswith(_NUMBER) else value.reshape(-1) if value.shape == like.shape else value
            state = {kind.removesuffix(_NUMBER): one}
            found = state_slices(state, name, 0, slice(0, like.numel()), like.numel())
            slices += [(part.kind, name, 0, part.tensor) for part in found]
        self._load_slices(names, slices)

    @override
    def load(self, names: Sequence[str], kinds: Iterable[str], read: Callable[[str], Tensor]) -> None:
        """Collective inside the node."""
        slices: list[tuple[str, str, int, Tensor]] = []
        for name, kind in product(names, (one for one in kinds if not one.endswith(_START))):
            with suppress(KeyError):
                slices.append((kind, name, int(read(f"{kind}{_START}.{name}")), read(f"{kind}.{name}")))
        self._load_slices(names, slices)

    def _load_slices(self, names: Sequence[str], slices: list[tuple[str, str, int, Tensor]]) -> None:
        for number, name in enumerate(names):
            weights = self.weights(number)
            if self.optimizer.comm.rank == 0:
                slices.append(("master", name, 0, weights))
                slices.append(("weight", name, 0, self.parameters[number].detach().reshape(-1)))
        state = self.optimizer.state_dict()
        state["thinwire"] |= {"slices": slices, "seal": None}
        self.optimizer.load_state_dict(state)

    @override
    def reset_state(self) -> None:
        self.optimizer.reset_state()

    @override
    def model_state_bytes(self, numel: int) -> dict[str, float]:
        return self.optimizer.model_state_bytes()

    @override
    def before_backwards(self, callback: Callable[[int], None]) -> None:
        """Ranks that share a worker look for others by themselves, and each step gives the chance to go on. A rank
        alone does not: it would let a DistributedDataParallel average the gradients of all."""
        if self.optimizer.comm.size == 1:
            self.optimizer._home.before_first_backward(lambda: callback(0))

    @property
    @override
    def bytes_inside(self) -> int:
        return self.optimizer.bytes_sent

    @override
    def close(self) -> None:
        self.optimizer.close()
        self._inside.close()


class _OwnState(ParameterState):
    """What one rank's inner optimizer has of its own replica."""

    cuts_parameters = False

    def __init__(self, worker: Worker, comm: Communicator, in_sync: Callable[[], bool]) -> None:
        self.comm = comm
        self._worker = worker
        self._in_sync = in_sync

    @override
    def parameter(self, number: int) -> Tensor:
        return self._worker.parameters[number]

    @override
    def weights(self, number: int) -> Held:
        check_in_sync(self._in_sync())
        return Held([Fragment(0, self._worker.weights(number))], everywhere=True)

    @override
    def after_writing_weights(self, number: int, value: Tensor | None) -> None:
        assert value is not None, "every rank has all of its weights"
        self._worker.write(number, 0, value.reshape(-1))

    @override
    def state(self, number: int, kind: str) -> Held:
        values = self._worker.optimizer.state.get(self.parameter(number), {}).get(kind)
        known = isinstance(values, Tensor) and values.numel() == self.parameter(number).numel()
        return Held([Fragment(0, values.reshape(-1))] if known else [], everywhere=True, known=known)

    @override
    def gradient(self, number: int) -> Held | None:
        gradient = self.parameter(number).grad
        return None if gradient is None else Held([Fragment(0, gradient.reshape(-1))], everywhere=True)

    @override
    def after_writing_gradient(self, number: int) -> None:
        """Do nothing: the step reads the gradient itself."""

    @override
    def kinds(self) -> list[str]:
        return sorted({kind for entry in self._worker.optimizer.state.values() for kind in entry})
