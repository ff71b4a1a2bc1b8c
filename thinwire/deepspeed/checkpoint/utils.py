"""deepspeed.checkpoint.utils."""

from __future__ import annotations

import os
from typing import Any

import torch

__all__ = ["clone_tensors_for_torch_save", "get_model_ckpt_name_for_rank"]


def clone_tensors_for_torch_save(item: Any, device: torch.device | str = "cpu") -> Any:
    """A copy of nested lists, tuples and dicts whose tensors have memory of their own, on `device`.

    torch.save writes all memory that a tensor lies in, a whole bucket's where it is a view of one.
    """
    if isinstance(item, torch.Tensor):
        return item.detach().clone().to(device)
    if isinstance(item, list | tuple):
        return type(item)(clone_tensors_for_torch_save(one, device) for one in item)
    if isinstance(item, dict):
        return type(item)({key: clone_tensors_for_torch_save(one, device) for key, one in item.items()})
    return item


def get_model_ckpt_name_for_rank(base_folder: str, mp_rank_str: str) -> str:
    """Where DeepSpeed's own checkpoint has a model's weights; thinwire's has them in one file a rank."""
    return os.path.join(base_folder, f"mp_rank_{mp_rank_str}_model_states.pt")
