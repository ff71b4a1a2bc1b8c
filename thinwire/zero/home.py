"""The home of a synchronised optimizer's state and communication: the part that differs between optimizers whose state
every rank holds and those whose state is sharded."""

from __future__ import annotations

import math
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn, Protocol

import torch
from torch import Tensor, nn

from thinwire.comm import Communicator
from thinwire.zero.backward import BackwardWatcher
from thinwire.zero.replica import Replica
from thinwire.zero.saved_state import Counters, SavedSlice, SliceSource, check_weights

_ATTRIBUTE = "_thinwire_state"


@dataclass(frozen=True)
class Fragment:
    """Elements `start` to `start + values.numel()` of the flattened parameter: a one-dimensional view of where they
    are kept."""

    start: int
    values: Tensor


@dataclass(frozen=True)
class Held:
    """What this rank keeps of one parameter's values in one role.

    `everywhere`: every rank keeps all of them; else each rank what it owns, and the ranks' union is everything once.
    `known`: whether this rank keeps values in that role for any parameter at all.
    """

    fragments: Sequence[Fragment]
    everywhere: bool
    known: bool = True


class ParameterState(ABC):
    """The values that an optimizer keeps for its parameters, by the parameter's number.

    `taken`: how many times `gradient` a step takes: the number of ranks where that is their sum.
    """

    comm: Communicator
    taken: float = 1.0
    cuts_parameters: bool
    """Whether a rank has a part of every parameter only, as at stage 3."""

    @abstractmethod
    def parameter(self, number: int) -> Tensor:
        """The parameter."""

    @abstractmethod
    def weights(self, number: int) -> Held:
        """The fp32 weights that steps change. Collective where new ones are on their way."""

    @abstractmethod
    def after_writing_weights(self, number: int, value: Tensor | None) -> None:
        """Have the parameter follow what was written into its `weights`; `value`: all of them, in its shape."""

    @abstractmethod
    def state(self, number: int, kind: str) -> Held:
        """The optimizer's state of this kind; raises RuntimeError where it has another meaning now."""

    def check_may_write_state(self, kind: str) -> None:
        """Raise RuntimeError where other state would have to follow, and cannot."""

    @abstractmethod
    def gradient(self, number: int) -> Held | None:
        """The averaged gradient of the step in flight, times the loss scale; None where there is none yet.

        Collective: waits for what has left. Raises RuntimeError where no gradients are averaged.
        """

    @abstractmethod
    def after_writing_gradient(self, number: int) -> None:
        """Have the step count with what was written into `gradient`."""

    @abstractmethod
    def kinds(self) -> list[str]:
        """The kinds of state that this rank keeps."""


class StateOwner(Protocol):
    """What lives as long as the state does. `superseded`: the state of some of its parameters is another's now.
    `taken`: see ParameterState."""

    superseded: bool
    taken: float

    def parameter_state(self) -> ParameterState:
        """What is held by parameter."""


class _Claim:
    """On a parameter: who holds its state, under which number. It neither keeps the owner alive nor is it saved."""

    def __init__(self, owner: StateOwner, number: int) -> None:
        self.owner = weakref.ref(owner)
        self.number = number

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


def claim(owner: StateOwner, parameters: Iterable[Tensor]) -> None:
    """Note on those of `parameters` that train, numbered in this order, that `owner` holds their state.

    The last owner that says so does; `superseded` tells it to one before.
    """
    for number, parameter in enumerate(parameters):
        if parameter.requires_grad:
            noted: _Claim | None = getattr(parameter, _ATTRIBUTE, None)
            if noted is not None and (before := noted.owner()) is not None:
                before.superseded = before is not owner
            setattr(parameter, _ATTRIBUTE, _Claim(owner, number))


def refuse_other_parameters(optimizer: str, superseded: bool) -> NoReturn:
    """Raise RuntimeError: this optimizer's parameters are those of another by now, or its groups hold others."""
    if superseded:
        raise RuntimeError(
            f"another optimizer of thinwire was built over parameters of this {optimizer}, and gets their gradients: "
            "step that one, or build one optimizer over all parameters"
        )
    raise RuntimeError(
        f"param_groups hold more or fewer parameters than {optimizer} was built with, whose steps would go on with "
        "those: to leave one alone set requires_grad to False, to add some call add_param_group()"
    )


def find_state(parameter: Tensor) -> tuple[ParameterState, int] | None:
    """Who holds a parameter's state, and its number there; None if no owner does."""
    noted: _Claim | None = getattr(parameter, _ATTRIBUTE, None)
    owner = None if noted is None else noted.owner()
    if noted is None or owner is None:
        return None
    state = owner.parameter_state()
    state.taken = owner.taken
    return state, noted.number


def whole_values(state: ParameterState, number: int, held: Held) -> tuple[Tensor, bool]:
    """All values, a new fp32 tensor in the parameter's shape and on its device, and whether any rank knows the role.

    Collective, unless every rank keeps them.
    """
    parameter = state.parameter(number)
    numel = parameter.numel()
    values = torch.zeros(numel + 1, device=parameter.device)
    values[-1] = held.known
    for one in held.fragments:
        values[one.start : one.start + one.values.numel()].copy_(one.values)
    if not held.everywhere:
        state.comm.all_reduce(values)
    return values[:numel].view(parameter.shape), bool(values[-1] > 0)


def local_values(held: Held, device: torch.device) -> Tensor:
    """What this rank keeps, a new fp32 tensor, [elements]."""
    values = [one.values.to(device=device, dtype=torch.float32, copy=True) for one in held.fragments]
    return values[0] if len(values) == 1 else torch.cat([*values, torch.empty(0, device=device)])


@torch.no_grad()
def write_elements(tensor: Tensor, start: int, values: Tensor) -> None:
    """Set elements of a flattened `tensor`, in whatever memory format it has."""
    if tensor.is_contiguous():
        tensor.view(-1)[start : start + values.numel()].copy_(values)
    else:
        whole = tensor.reshape(-1)
        whole[start : start + values.numel()].copy_(values)
        tensor.copy_(whole.view(tensor.shape))


_NOT_STEPPED = "step() has not been called"
NO_GRADIENTS = "no parameter had a gradient"


@dataclass(frozen=True)
class StepResult:
    """What became of a step, the same on every rank.

    `applied`: weights have moved. `grad_norm`: 2-norm of the averaged gradient, loss scale divided out, before
    clipping; not finite where the step was skipped for that, NaN if it was not found. `reason`: why the step was
    not applied, empty where it was.
    """

    applied: bool
    grad_norm: float
    reason: str = ""

    @property
    def overflow(self) -> bool:
        """Whether the step was skipped because a gradient was not finite."""
        with_gradients = self.reason not in (_NOT_STEPPED, NO_GRADIENTS)
        return with_gradients and not self.applied and not math.isfinite(self.grad_norm)


NOT_STEPPED = StepResult(applied=False, grad_norm=math.nan, reason=_NOT_STEPPED)

TRAFFIC = "bytes_sent"
"""The key of what every optimizer's `rank_tensors` holds: bytes sent, and what they would have been uncompressed."""


class Home(ABC):
    """State, buckets, checkpoints and communication of a SynchronizedOptimizer, which documents each call."""

    kind: ClassVar[str]  # of checkpoints
    counted: ClassVar[type[Counters]] = Counters  # what `counters` hold, those of the optimizer among them
    grows = False  # whether parameters may be added later
    comm: Communicator
    watcher: BackwardWatcher  # of the parameters' backwards
    loss_scale: float = 1.0  # what averages are divided by
    taken: float = 1.0  # how many times them a step takes, the loss scale of its backwards aside
    scaled: bool | None = None  # whether a GradScaler steps the optimizer; None until the first step
    uncompressed_step_bytes: int  # what a ring all-reduce of the gradients sends, in the parameters' dtype
    parameters: Sequence[Tensor]  # whose gradients are synchronised
    names: Sequence[str]  # what `saved_slices` calls them
    steps: int = 0  # applied
    frozen_at: int | None = None  # the step after which compression began; None before, and where there is none
    in_sync: bool = True  # whether every rank holds the same weights
    superseded: bool = False  # by another optimizer over some of these parameters
    replica: Replica | None = None  # the ranks that together hold one, where it takes several

    @property
    @abstractmethod
    def bytes_sent(self) -> int:
        """Bytes this rank has sent to synchronise steps, since this object was made."""

    @property
    def bytes_sent_between_nodes(self) -> int:
        """The part of them that left this rank's node."""
        return self.bytes_sent

    # One step

    @abstractmethod
    def step(self) -> StepResult:
        """Apply the synchronised gradients, which are times `loss_scale`. Collective."""

    def drop(self) -> None:
        """Forget gradients that have left since the last step."""
        self.watcher.drop()

    def end_step(self) -> None:
        """Forget the step, whatever has become of it."""
        self.watcher.end_step()

    def leave_out(self, parameters: Iterable[Tensor]) -> None:
        """Expect no gradient of these in the next synchronised backward. Collective."""
        self.watcher.leave_out(parameters, self.comm)

    def end_backward(self) -> None:
        """Send what a backward has left unsent. Collective."""
        self.watcher.end_backward()

    def before_first_backward(self, callback: Callable[[], None]) -> None:
        """Call this once, in the next backward, before its first gradient is taken."""
        self.watcher.before_first = callback

    def name(self, names: Mapping[int, str]) -> None:
        """Call parameters, by id, as `names` does, in error messages."""

    def add_parameters(self) -> None:
        """Take charge of what the optimizer's groups hold and did not before. Collective."""
        raise RuntimeError(
            "parameters cannot be added to a sharded optimizer: build a new one with all of them, and load the old "
            "one's state"
        )

    # Weights

    def synchronize_weights(self) -> None:
        """Meet the other ranks, so that all hold the same weights."""

    def show_own_weights(self, own: bool) -> None:
        """Show this rank's own weights in the parameters, or those that all ranks have in common."""

    def gather_during_forward(self, module: nn.Module) -> None:
        """Let `step` return while new weights are on their way; nothing is where every rank steps all of them."""

    def wait_for_weights(self) -> None:
        """Wait until this rank has the last step's weights."""

    @abstractmethod
    def parameter_state(self) -> ParameterState:
        """What is held of each of `parameters`, by its number, to be read and written."""

    # Checkpoints

    @abstractmethod
    def saved_slices(self) -> list[SavedSlice]:
        """What this rank contributes of weights and state; the ranks' union holds everything once."""

    def rank_tensors(self) -> dict[str, Tensor]:
        """What belongs to this rank alone."""
        return {}

    def counters(self) -> dict[str, Any]:
        """Where the run is, as plain values: the same on every rank."""
        return {}

    def check(self, source: SliceSource) -> None:
        """Raise ValueError where not all is there that `load` reads, or it could not be taken up here."""
        check_weights(source, self.names, self.parameters)

    @abstractmethod
    def load(self, source: SliceSource) -> None:
        """Take over what another run saved, and `check` found nothing against. Collective."""

    @abstractmethod
    def load_weights(self, source: SliceSource) -> None:
        """Take over the weights alone."""

    @abstractmethod
    def reset_state(self) -> None:
        """Forget everything but the weights and settings."""

    def torch_state(self) -> dict[int, dict[str, Tensor]]:
        """The state by parameter number as torch saves it, where this rank holds all of it; else nothing."""
        return {}

    @abstractmethod
    def model_state_bytes(self) -> dict[str, float]:
        """Bytes that a rank should hold by category, as `model_state_formula` has them."""

    def close(self) -> None:
        """Release communicators, on every rank."""


def ring_bytes(ranks: int, parameters: Iterable[Tensor]) -> int:
    """What each of so many ranks sends in a ring all-reduce of these parameters' gradients, in their dtype."""
    nbytes = sum(parameter.numel() * parameter.dtype.itemsize for parameter in parameters)
    return round(2 * (ranks - 1) / ranks * nbytes)
