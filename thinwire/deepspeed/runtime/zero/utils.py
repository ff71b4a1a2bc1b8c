"""deepspeed.runtime.zero.utils."""

from __future__ import annotations

import torch

from thinwire.engine.config.optimizer import check_optimizer

__all__ = ["ZeRORuntimeException", "is_zero_supported_optimizer"]

ZeRORuntimeException = RuntimeError


def is_zero_supported_optimizer(optimizer: torch.optim.Optimizer) -> bool:
    """Whether thinwire can shard this optimizer's class, which is so of every elementwise one."""
    problems: list[str] = []
    if type(optimizer).__module__.startswith("torch.optim"):
        check_optimizer({"type": type(optimizer).__name__}, problems)
    return not problems
