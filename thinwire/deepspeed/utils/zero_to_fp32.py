"""deepspeed.utils.zero_to_fp32: a checkpoint's weights in fp32. It reads thinwire's checkpoints; `thinwire checkpoint
import` makes one of DeepSpeed's."""

from __future__ import annotations

from thinwire.deepspeed.files.fp32_weights import (
    convert_zero_checkpoint_to_fp32_state_dict,
    get_fp32_state_dict_from_zero_checkpoint,
    load_state_dict_from_zero_checkpoint,
)

__all__ = [
    "convert_zero_checkpoint_to_fp32_state_dict",
    "get_fp32_state_dict_from_zero_checkpoint",
    "load_state_dict_from_zero_checkpoint",
]
