"""deepspeed.utils."""

from __future__ import annotations

from thinwire.deepspeed.lazy_names import lazy_names

# At once, since a function of DeepSpeed's has its module's name, and what is imported last has the name.
from thinwire.deepspeed.utils.z3_leaf_module import (
    get_z3_leaf_modules,
    set_z3_leaf_module,
    set_z3_leaf_modules,
    unset_z3_leaf_modules,
    z3_leaf_module,
)

__all__ = [
    "get_z3_leaf_modules",
    "set_z3_leaf_module",
    "set_z3_leaf_modules",
    "unset_z3_leaf_modules",
    "z3_leaf_module",
]

__getattr__, __dir__ = lazy_names(
    __name__,
    (
        "groups",
        "init_on_device",
        "logging",
        "nvtx",
        "tensor_fragment",
        "timer",
        "torch",
        "zero_to_fp32",
    ),
    {
        "runtime.dataloader": ("RepeatingLoader",),
        "utils.init_on_device": ("OnDevice",),
        "utils.logging": ("log_dist", "log_dist_once", "logger", "set_log_level_from_string"),
        "utils.nvtx": ("instrument_w_nvtx",),
        "utils.tensor_fragment": (
            "safe_get_full_fp32_param",
            "safe_get_full_grad",
            "safe_get_full_optimizer_state",
            "safe_get_local_fp32_param",
            "safe_get_local_grad",
            "safe_get_local_optimizer_state",
            "safe_set_full_fp32_param",
            "safe_set_full_grad",
            "safe_set_full_optimizer_state",
            "safe_set_local_fp32_param",
            "safe_set_local_grad",
            "safe_set_local_optimizer_state",
            "safe_update_full_grad_vectorized",
        ),
    },
)
