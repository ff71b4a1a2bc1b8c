"""deepspeed.runtime.zero.stage3."""

from __future__ import annotations

from thinwire.deepspeed.lazy_names import not_offered
from thinwire.zero.fsdp_optimizer import FullyShardedOptimizer as DeepSpeedZeroOptimizer_Stage3

__all__ = [
    "DeepSpeedZeroOptimizer_Stage3",
    "estimate_zero3_model_states_mem_needs_all_cold",
    "estimate_zero3_model_states_mem_needs_all_live",
]

_INSTEAD = "`thinwire plan --model MODEL` estimates memory and time of every stage"

estimate_zero3_model_states_mem_needs_all_live = not_offered(
    "runtime.zero.stage3.estimate_zero3_model_states_mem_needs_all_live", _INSTEAD
)
estimate_zero3_model_states_mem_needs_all_cold = not_offered(
    "runtime.zero.stage3.estimate_zero3_model_states_mem_needs_all_cold", _INSTEAD
)
