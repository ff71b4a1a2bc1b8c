"""deepspeed.runtime.zero.stage_1_and_2, whose place the engine's own optimizer takes."""

from __future__ import annotations

from thinwire.deepspeed.lazy_names import not_offered

__all__ = [
    "DeepSpeedZeroOptimizer",
    "estimate_zero2_model_states_mem_needs_all_cold",
    "estimate_zero2_model_states_mem_needs_all_live",
]

_ESTIMATE = "`thinwire plan --model MODEL` estimates memory and time of every stage"

DeepSpeedZeroOptimizer = not_offered(
    "runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer",
    "sharding is the engine's, zero_optimization in the configuration; without it there is thinwire.ShardedOptimizer",
)
estimate_zero2_model_states_mem_needs_all_live = not_offered(
    "runtime.zero.stage_1_and_2.estimate_zero2_model_states_mem_needs_all_live", _ESTIMATE
)
estimate_zero2_model_states_mem_needs_all_cold = not_offered(
    "runtime.zero.stage_1_and_2.estimate_zero2_model_states_mem_needs_all_cold", _ESTIMATE
)
