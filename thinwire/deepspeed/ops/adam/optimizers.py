"""DeepSpeed's two constructors of Adam, over torch's."""

from __future__ import annotations

import torch
from torch.optim.optimizer import ParamsT

from thinwire.deepspeed.lazy_names import NotOfferedError

__all__ = ["DeepSpeedCPUAdam", "FusedAdam"]


class FusedAdam(torch.optim.Adam):
    """torch's Adam by DeepSpeed's arguments: weight decay is decoupled, AdamW's, unless `adam_w_mode` is False.

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
        super().__init__(
            params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, decoupled_weight_decay=adam_w_mode
        )
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
