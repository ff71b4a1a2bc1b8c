"""Ranks that share an optimizer must hold the same parameters and settings: compared at construction, so that no
collective can mismatch later and no rank can drift from the others unseen."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from thinwire.comm import Communicator

__all__ = ["broadcast_from_rank_0", "check_parameters", "check_same_on_every_rank"]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def check_parameters(parameters: Sequence[Tensor], optimizer: str) -> None:
    """Raise TypeError for parameters of unusable dtype or on several devices; `optimizer` says who refuses."""
    for index, parameter in enumerate(parameters):
        if parameter.dtype not in _DTYPES:
            raise TypeError(
                f"parameter {index}, shape {tuple(parameter.shape)}, is {parameter.dtype}: {optimizer} takes fp32, "
                "bf16 and fp16. Convert it, or leave it to another optimizer"
            )
        if parameter.device != parameters[0].device:
            raise TypeError(
                f"parameter {index} is on {parameter.device} but parameter 0 on {parameters[0].device}: {optimizer} "
                "needs all parameters on one device. Use one optimizer a device"
            )


def check_same_on_every_rank(
    comm: Communicator,
    parameters: Sequence[Tensor],
    groups: Sequence[Mapping[str, Any]],
    settings: Mapping[str, Any],
) -> None:
    """Raise ValueError on every rank, naming the first difference, unless all hold the same parameters and settings.

    Learning rates are compared too: ranks that step differently drift apart without an error.
    """
    hyperparameters = [
        {name: _comparable(value) for name, value in group.items() if name not in _NOT_COMPARED} for group in groups
    ]
    mine = {
        "parameters": [[list(parameter.shape), str(parameter.dtype)] for parameter in parameters],
        "groups": hyperparameters,
        "settings": dict(settings),
    }
    raw = comm.all_gather_bytes(json.dumps(mine).encode())
    if all(other == raw[0] for other in raw):
        return
    descriptions = [json.loads(other) for other in raw]
    rank = next(rank for rank, other in enumerate(raw) if other != raw[0])
    difference = _first_difference(descriptions[0], descriptions[rank])
    raise ValueError(
        f"rank {rank} and rank 0 differ: {difference}. Every rank must build the same model and the same optimizer"
    )


_NOT_COMPARED = ("params", "param_names")


def _comparable(value: Any) -> Any:
    if isinstance(value, Tensor):
        if value.numel() == 1:
            return float(value)
        return [list(value.shape), hashlib.sha256(value.cpu().contiguous().numpy().tobytes()).hexdigest()]
    return value if isinstance(value, int | float | str | list | tuple | None) else type(value).__name__


def _first_difference(left: dict[str, Any], right: dict[str, Any]) -> str:
    if len(left["parameters"]) != len(right["parameters"]):
        return f"{len(right['parameters'])} parameters against {len(left['parameters'])} on rank 0"
    pairs = zip(left["parameters"], right["parameters"], strict=True)
    for index, (mine, other) in enumerate(pairs):
        if mine != other:
            return (
                f"parameter {index} has shape {tuple(other[0])}, {other[1]}, against {tuple(mine[0])}, {mine[1]} on "
                "rank 0"
            )
    for name in left["settings"]:
        if left["settings"][name] != right["settings"][name]:
            return f"{name} is {right['settings'][name]!r} against {left['settings'][name]!r} on rank 0"
    return f"parameter groups are {right['groups']} against {left['groups']} on rank 0"


def broadcast_from_rank_0(comm: Communicator, parameters: Sequence[Tensor]) -> None:
    """Give every rank rank 0's weights, in place."""
    if comm.size == 1:
        return
    for parameter in parameters:
        weights = parameter.detach()
        whole = weights.contiguous()
        comm.broadcast(whole, root=0)
        if whole.data_ptr() != weights.data_ptr():
            weights.copy_(whole)
