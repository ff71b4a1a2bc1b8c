"""What must hold before an optimizer may run: usable parameters, sane hyperparameters, and ranks that hold
the same ones. Checked at construction, on every rank, so that no collective can mismatch later."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from thinwire.comm import Communicator

__all__ = [
    "broadcast_from_rank_0",
    "check_group",
    "check_options",
    "check_parameters",
    "check_same_freeze",
    "check_same_on_every_rank",
]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def check_options(amsgrad: bool, compress: str, bucket_bytes: int, warmup_wire: str) -> None:
    """Raise ValueError, naming what was given and what is expected, for options that cannot work."""
    if amsgrad:
        raise ValueError("amsgrad=True cannot work with a frozen variance: pass False, or use torch.optim.AdamW")
    if compress not in ("update", "momentum"):
        raise ValueError(f"compress must be 'update' or 'momentum', got {compress!r}")
    if not bucket_bytes >= 4:
        raise ValueError(f"bucket_bytes must be at least 4, one element, got {bucket_bytes}")
    if warmup_wire not in ("fp32", "bf16"):
        raise ValueError(f"warmup_wire must be 'fp32' or 'bf16', got {warmup_wire!r}")


def check_group(group: Mapping[str, Any]) -> None:
    """Raise ValueError for a parameter group, or defaults for one, whose hyperparameters cannot work."""
    if not float(group["lr"]) >= 0:
        raise ValueError(f"lr must be at least 0, got {group['lr']}")
    betas = group["betas"]
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise ValueError(f"betas must be two numbers from 0 up to, not including, 1; got {betas}")
    if not group["eps"] > 0:
        raise ValueError(f"eps must be above 0, got {group['eps']}")
    if not group["weight_decay"] >= 0:
        raise ValueError(f"weight_decay must be at least 0, got {group['weight_decay']}")
    if (mask := group.get("exp_avg_mask")) is not None:
        for parameter in group["params"]:
            if not _broadcasts(mask.shape, parameter.shape):
                raise ValueError(
                    f"exp_avg_mask of shape {tuple(mask.shape)} does not broadcast to a parameter of its group, of "
                    f"shape {tuple(parameter.shape)}: give parameters with a mask a group of their own"
                )


def _broadcasts(shape: torch.Size, target: torch.Size) -> bool:
    pairs = zip(reversed(shape), reversed(target), strict=False)
    return len(shape) <= len(target) and all(size in (1, wanted) for size, wanted in pairs)


def check_parameters(parameters: Sequence[Tensor]) -> None:
    """Raise TypeError for parameters of unusable dtype or on several devices."""
    for index, parameter in enumerate(parameters):
        if parameter.dtype not in _DTYPES:
            raise TypeError(
                f"parameter {index}, shape {tuple(parameter.shape)}, is {parameter.dtype}: OneBitAdam takes fp32, bf16 "
                "and fp16. Convert it, or leave it to another optimizer"
            )
        if parameter.device != parameters[0].device:
            raise TypeError(
                f"parameter {index} is on {parameter.device} but parameter 0 on {parameters[0].device}: OneBitAdam "
                "needs all parameters on one device. Use one optimizer a device"
            )


def check_same_freeze(comm: Communicator, reached: bool, learning_rates: Sequence[float]) -> None:
    """Raise ValueError on every rank unless all come to the same decision from the same learning rates. Collective."""
    answers = comm.all_gather_bytes(json.dumps([reached, list(learning_rates)]).encode())
    for rank, answer in enumerate(answers):
        if answer != answers[0]:
            theirs, first = json.loads(answer), json.loads(answers[0])
            raise ValueError(
                f"rank {rank} has learning rates {theirs[1]} and {'freezes' if theirs[0] else 'does not freeze'}, "
                f"rank 0 has {first[1]} and {'freezes' if first[0] else 'does not'}: every rank must use the same "
                "learning rates. A scheduler that looks at the loss must look at the average over the ranks"
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
        {name: _comparable(name, value) for name, value in group.items() if name in _COMPARED} for group in groups
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


_COMPARED = ("lr", "betas", "eps", "weight_decay", "bias_correction", "eps_inside_sqrt", "exp_avg_mask")


def _comparable(name: str, value: Any) -> Any:
    if name == "exp_avg_mask" and value is not None:
        return [list(value.shape), hashlib.sha256((value != 0).cpu().numpy().tobytes()).hexdigest()]
    return float(value) if name == "lr" else value


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
