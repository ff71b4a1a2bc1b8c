"""deepspeed.moe.utils: without expert parallelism no parameter is an expert's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = ["has_moe_layers", "is_moe_param", "split_params_into_different_moe_groups_for_optimizer"]


def split_params_into_different_moe_groups_for_optimizer(
    param_groups: dict[str, Any] | Sequence[dict[str, Any]], max_group_size: float | None = None
) -> list[dict[str, Any]]:
    """The parameter groups, as a list: no group has experts to be split from."""
    return [param_groups] if isinstance(param_groups, dict) else list(param_groups)


def is_moe_param(param: Any) -> bool:
    """Never."""
    return False


def has_moe_layers(module: Any) -> tuple[bool, int]:
    """(False, 0)."""
    return False, 0
