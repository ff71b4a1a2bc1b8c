"""For networks in which every parameter has a gradient at every step: an error where one has none, instead of leaving
it alone."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from thinwire.comm import Communicator
from thinwire.comm.agreement import on_every_rank

__all__ = ["UnusedParametersError", "UsedParameters"]

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
