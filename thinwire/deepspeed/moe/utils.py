"""deepspeed.moe.utils, which thinwire has no counterpart of."""

from __future__ import annotations

from thinwire.deepspeed.lazy_names import not_offered

__all__ = ["split_params_into_different_moe_groups_for_optimizer"]

split_params_into_different_moe_groups_for_optimizer = not_offered(
    "moe.utils.split_params_into_different_moe_groups_for_optimizer", "it has no expert parallelism; pass plain groups"
)
