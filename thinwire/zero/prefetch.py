"""New weights on their way while the next forward already runs: each parameter is waited for when it is read, so that
gathering costs time only where the network is slower than the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

__all__ = ["WeightGate"]


class WeightGate:
    """Holds what waits for each bucket's weights, and calls it when a parameter of the bucket is read.

    Reading is `module.weight`, whatever module's code does it, `module.parameters()` or `state_dict()`. Code that has
    kept parameters from before must call `open` first. Modules that keep references of their own, as recurrent ones
    do, wait before their forward.
    """

    def __init__(self, module: nn.Module, bucket_of: Mapping[int, int]) -> None:
        self._pending: dict[int, Callable[[], None]] = {}
        self._bucket_of = bucket_of
        for part in module.modules():
            own = part._parameters
            needed = sorted({bucket_of[id(one)] for one in own.values() if id(one) in bucket_of})
            if needed:
                part._parameters = _WaitingParameters(own, self)
                part.register_forward_pre_hook(self._before_forward(needed))

    def close(self, bucket: int, wait: Callable[[], None]) -> None:
        """Note what waits for a bucket's weights."""
        self._pending[bucket] = wait

    def open(self) -> None:
        """Wait for all of them."""
        for bucket in list(self._pending):
            self._wait(bucket)

    def open_for(self, parameter: Tensor | None) -> None:
        """Wait for one parameter."""
        if self._pending and parameter is not None:
            self._wait(self._bucket_of.get(id(parameter), -1))

    def _wait(self, bucket: int) -> None:
        wait = self._pending.pop(bucket, None)
        if wait is not None:
            wait()

    def _before_forward(self, needed: list[int]) -> Callable[..., None]:
        def hook(module: nn.Module, arguments: Any) -> None:
            del module, arguments
            for bucket in needed:
                self._wait(bucket)

        return hook


class _WaitingParameters(dict[str, nn.Parameter | None]):
    """A module's own parameters, which `nn.Module` looks up by name; a copy, as of a module, is a plain dict."""

    def __init__(self, parameters: Mapping[str, nn.Parameter | None], gate: WeightGate) -> None:
        super().__init__(parameters)
        self._gate = gate

    def __getitem__(self, name: str) -> nn.Parameter | None:
        parameter = super().__getitem__(name)
        self._gate.open_for(parameter)
        return parameter

    def get(self, name: str, default: Any = None) -> Any:
        parameter = super().get(name, default)
        self._gate.open_for(parameter)
        return parameter

    def items(self) -> Any:
        self._open()
        return super().items()

    def values(self) -> Any:
        self._open()
        return super().values()

    def __reduce__(self) -> tuple[Any, ...]:
        self._open()
        return dict, (dict(super().items()),)

    def _open(self) -> None:
        for parameter in super().values():
            self._gate.open_for(parameter)
