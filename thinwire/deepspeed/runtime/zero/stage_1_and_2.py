"""deepspeed.runtime.zero.stage_1_and_2."""

from __future__ import annotations

from thinwire.deepspeed.lazy_names import not_offered
from thinwire.zero import ShardedOptimizer as DeepSpeedZeroOptimizer

__all__ = [
    "DeepSpeedZeroOptimizer",
    "estimate_zero2_model_states_mem_needs_all_cold",
    "estimate_zero2_model_states_mem_needs_all_live",
]

_INSTEAD = "`thinwire plan --model MODEL` estimates memory and time of every stage"

estimate_zero2_model_states_mem_needs_all_live = not_offered(
    "runtime.zero.stage_1_and_2.estimate_zero2_model_states_mem_needs_all_live", _INSTEAD
)
estimate_zero2_model_states_mem_needs_all_cold = not_offered(
    "runtime.zero.stage_1_and_2.estimate_zero2_model_states_mem_needs_all_cold", _INSTEAD
)
