"""New weights on their way while the next forward already runs: each module waits for its own parameters only, so
that gathering costs time only where the network is slower than the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

__all__ = ["WeightGate"]


class WeightGate:
    """Holds what waits for each bucket's weights, and calls it when a module is about to use them.

    Hooks on every module of `module` that has parameters of its own wait before its forward, and one on `module` before
    its `state_dict`. Code that reads parameters without calling their module must call `open` first.
    """

    def __init__(self, module: nn.Module, bucket_of: Mapping[int, int]) -> None:
        self._pending: dict[int, Callable[[], None]] = {}
        for part in module.modules():
            parameters = part.parameters(recurse=False)
            needed = sorted({bucket_of[id(one)] for one in parameters if id(one) in bucket_of})
            if needed:
                part.register_forward_pre_hook(self._before_forward(needed))
        register: Callable[[Callable[..., None]], object] = module.register_state_dict_pre_hook
        register(lambda *_: self.open())

    def close(self, bucket: int, wait: Callable[[], None]) -> None:
        """Note what waits for a bucket's weights."""
        self._pending[bucket] = wait

    def open(self) -> None:
        """Wait for all of them."""
        for bucket in list(self._pending):
            self._pending.pop(bucket)()

    def _before_forward(self, needed: list[int]) -> Callable[..., None]:
        def hook(module: nn.Module, arguments: Any) -> None:
            del module, arguments
            for bucket in needed:
                wait = self._pending.pop(bucket, None)
                if wait is not None:
                    wait()

        return hook
