"""An accelerator that leaves gradients to a thinwire optimizer: it wraps no model in DistributedDataParallel, and does
not clip."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor, nn

from thinwire.hugging_face.checks import refuse_clipping_by_value, synchronized

__all__ = ["adapt_accelerator", "never_wrap_models"]


def adapt_accelerator(accelerator: Accelerator, check: Callable[[torch.optim.Optimizer], None]) -> None:
    """Replace what an accelerator does with gradients.

    `check`: called with each optimizer before it is prepared, on every rank; raises what is wrong with it.
    """
    plug = _Plug(accelerator, check)
    never_wrap_models(accelerator)
    accelerator.prepare_optimizer = plug.prepare_optimizer
    accelerator.no_sync = plug.no_sync
    accelerator.clip_grad_norm_ = plug.clip_grad_norm_
    accelerator.clip_grad_value_ = refuse_clipping_by_value


def never_wrap_models(accelerator: Accelerator) -> None:
    """Have an accelerator place models, and wrap their forward for mixed precision, as for evaluation: without DDP."""
    own: Callable[..., nn.Module] = accelerator.prepare_model

    def prepare_model(
        model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        del evaluation_mode
        return own(model, device_placement, evaluation_mode=True)

    accelerator.prepare_model = prepare_model


class _Plug:
    """The methods that take the place of an accelerator's own."""

    def __init__(self, accelerator: Accelerator, check: Callable[[torch.optim.Optimizer], None]) -> None:
        self._accelerator = accelerator
        self._check = check

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None
    ) -> AcceleratedOptimizer:
        """Wrap the optimizer. Its state is where its parameters are, so that nothing has to be placed."""
        del device_placement
        if isinstance(optimizer, AcceleratedOptimizer):
            prepared = optimizer
        else:
            self._check(optimizer)
            prepared = _ReportingOptimizer(optimizer, device_placement=False, scaler=self._accelerator.scaler)
        if prepared not in self._accelerator._optimizers:
            self._accelerator._optimizers.append(prepared)
        return prepared

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """Gradient accumulation."""
        del model
        with ExitStack() as stack:
            for optimizer in self._accelerator._optimizers:
                stack.enter_context(synchronized(optimizer).no_sync())
            yield

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Tensor:
        """Leave it to the optimizers, whose step clips the averaged gradient; returns NaN, as the norm is not known
        yet.

        Raises ValueError for another norm than theirs.
        """
        del parameters
        for optimizer in map(synchronized, self._accelerator._optimizers):
            if (max_norm != math.inf and max_norm != optimizer.max_norm) or norm_type != 2:
                raise ValueError(
                    f"clip_grad_norm_(max_norm={max_norm}, norm_type={norm_type}) was called, and "
                    f"{type(optimizer).__name__} clips the averaged gradient to a 2-norm of {optimizer.max_norm}: "
                    "build the optimizer with that max_norm="
                )
        return torch.tensor(math.nan)


class _ReportingOptimizer(AcceleratedOptimizer):  # type: ignore[misc]
    """Says of a step that the optimizer skipped that it was, so that the learning rate's schedule waits."""

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step was not applied; not of one that other workers have taken, and move their rates."""
        optimizer = synchronized(self)
        return not optimizer.last_step.applied and not optimizer.steps_alone
