"""Adam and Lion by DeepSpeed's arguments."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.optimizer import ParamsT

from thinwire.deepspeed.errors import NotOfferedError
from thinwire.optim import Lion
from thinwire.zero import ShardedOptimizer

_STANDS_FOR = "_stands_for"


def show_adam(inner: Any, offloads: bool) -> None:
    """Have torch's Adam that a configuration named answer as DeepSpeed's, with its `adam_w_mode`."""
    if isinstance(inner, torch.optim.Adam):
        setattr(inner, _STANDS_FOR, DeepSpeedCPUAdam if offloads else FusedAdam)
        vars(inner)["adam_w_mode"] = bool(inner.defaults["decoupled_weight_decay"])


class _AnyAdam(type):
    """What isinstance takes for a FusedAdam."""

    def __instancecheck__(cls, instance: Any) -> bool:
        """Also the optimizer of an engine, where torch's Adam is what it steps with, and that Adam."""
        if type.__instancecheck__(cls, instance) or issubclass(getattr(instance, _STANDS_FOR, object), cls):
            return True
        return (
            cls is FusedAdam
            and isinstance(instance, ShardedOptimizer)
            and isinstance(instance.optimizer, torch.optim.Adam)
        )


class FusedAdam(torch.optim.Adam, metaclass=_AnyAdam):
    """torch's Adam by DeepSpeed's arguments: weight decay is decoupled, AdamW's, unless `adam_w_mode` is False.

    isinstance finds it in an engine's optimizer too, where that steps with torch's Adam or AdamW below stage 3.

    Raises NotOfferedError for `bias_correction` False, which torch's Adam cannot leave out, and for `amsgrad`.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        if not bias_correction:
            raise NotOfferedError(
                'FusedAdam(bias_correction=False): name the optimizer in the configuration, {"type": "Adam", "params": '
                '{"bias_correction": false}}'
            )
        if amsgrad:
            raise NotOfferedError("FusedAdam has no amsgrad, in DeepSpeed neither: use torch.optim.AdamW(amsgrad=True)")
        super().__init__(params, lr, betas, eps, weight_decay, decoupled_weight_decay=adam_w_mode)
        self.defaults["adam_w_mode"] = adam_w_mode


class DeepSpeedCPUAdam(FusedAdam):
    """The same, with the arguments of DeepSpeed's Adam for offloaded state, in its order.

    thinwire offloads by `zero_optimization.offload_optimizer`, with any optimizer.
    """

    def __init__(
        self,
        model_params: ParamsT,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        adamw_mode: bool = True,
        fp32_optimizer_states: bool = True,
    ) -> None:
        if not fp32_optimizer_states:
            raise NotOfferedError("DeepSpeedCPUAdam(fp32_optimizer_states=False): moments are fp32; leave it out")
        super().__init__(model_params, lr, bias_correction, betas, eps, adamw_mode, weight_decay, amsgrad)


class FusedLion(Lion):
    """thinwire's Lion, with DeepSpeed's defaults: a rate of 1e-3, and 0.999 as its second beta."""

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
    ) -> None:
        super().__init__(params, lr=lr, betas=betas, weight_decay=weight_decay)
