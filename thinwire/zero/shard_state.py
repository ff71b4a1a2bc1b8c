"""What this rank's shards of a stage 3 model, and the torch optimizer that steps them, hold by parameter."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from thinwire.comm import Communicator
from thinwire.zero.fsdp import local_run
from thinwire.zero.parameter_state import Fragment, Held, ParameterState

__all__ = ["ShardState"]


class ShardState(ParameterState):
    """`parameters`: sharded, by number. `state_of`: the optimizer's state of one's shard, by number."""

    cuts_parameters = True

    def __init__(
        self,
        comm: Communicator,
        parameters: Sequence[Tensor],
        state_of: Callable[[int], Mapping[str, Any]],
        reshard: Callable[[], None],
    ) -> None:
        """`reshard` has what a forward has left gathered read from the shards again."""
        self.comm = comm
        self._parameters = parameters
        self._state_of = state_of
        self._reshard = reshard

    def parameter(self, number: int) -> Tensor:
        """See ParameterState."""
        return self._parameters[number]

    def weights(self, number: int) -> Held:
        """See ParameterState."""
        return self._held(self._parameters[number])

    def after_writing_weights(self, number: int, value: Tensor | None) -> None:
        """See ParameterState; layers are gathered from the shards."""
        self._reshard()

    def state(self, number: int, kind: str) -> Held:
        """See ParameterState."""
        start, _ = local_run(self._parameters[number])
        values = self._state_of(number).get(kind)
        held = [Fragment(start, values)] if values is not None and _is_of_elements(values) else []
        return Held(held, self.comm.size == 1, known=kind in self.kinds())

    def gradient(self, number: int) -> Held | None:
        """See ParameterState."""
        gradient = self._parameters[number].grad
        return None if gradient is None else self._held(gradient)

    def after_writing_gradient(self, number: int) -> None:
        """See ParameterState; steps find everything out from the shards."""

    def kinds(self) -> list[str]:
        """See ParameterState."""
        states = (self._state_of(number) for number in range(len(self._parameters)))
        return sorted({kind for state in states for kind, value in state.items() if _is_of_elements(value)})

    def _held(self, sharded: Tensor) -> Held:
        start, values = local_run(sharded)
        whole = not hasattr(sharded, "device_mesh")  # an empty parameter, which nobody cuts
        return Held([Fragment(start, values)], everywhere=whole or self.comm.size == 1)


def _is_of_elements(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() == 1
