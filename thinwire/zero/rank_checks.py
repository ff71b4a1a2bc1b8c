"""Ranks that share an optimizer must hold the same parameters and settings: compared at construction, so that no
collective can mismatch later and no rank can drift from the others unseen."""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from thinwire.comm import Communicator

__all__ = [
    "broadcast_from_rank_0",
    "check_parameters",
    "check_same_kind",
    "check_same_on_every_rank",
    "check_settings_votes",
    "settings_digest",
    "settings_votes",
]

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


def check_same_kind(comm: Communicator, optimizer: str, stage: int) -> None:
    """Raise ValueError on every rank where some build another optimizer, or at another stage.

    Before anything else is compared: what that would be, and in how many collectives, depends on these two.
    """
    check_same_on_every_rank(comm, [], [], {"optimizer": optimizer, "stage": stage})


def check_same_on_every_rank(
    comm: Communicator,
    parameters: Sequence[Tensor],
    groups: Sequence[Mapping[str, Any]],
    settings: Mapping[str, Any],
) -> None:
    """Raise ValueError on every rank, naming the first difference, unless all hold the same parameters and settings.

    Learning rates are compared too, and which parameters of the groups are trained: ranks that step differently drift
    apart without an error.
    """
    hyperparameters = [
        {name: _comparable(value) for name, value in group.items() if name not in _NOT_COMPARED} for group in groups
    ]
    mine = {
        "parameters": [[list(parameter.shape), str(parameter.dtype)] for parameter in parameters],
        "groups": hyperparameters,
        "settings": {**settings, "requires_grad": [one for group in groups for one in _trained(group)]},
    }
    raw = comm.all_gather_bytes(json.dumps(mine).encode(), "compare parameters and settings")
    if all(other == raw[0] for other in raw):
        return
    descriptions = [json.loads(other) for other in raw]
    rank = next(rank for rank, other in enumerate(raw) if other != raw[0])
    difference = _first_difference(descriptions[0], descriptions[rank])
    raise ValueError(
        f"rank {rank} and rank 0 differ: {difference}. Every rank must have the same model and the same settings"
    )


def settings_digest(groups: Sequence[Mapping[str, Any]], step: int) -> int:
    """16 bits that differ, but for chance, between ranks whose groups have other hyperparameters in this step, or other
    parameters that are trained.

    Numbers, strings and lists of them count, and one-element tensors in CPU memory: nothing waits for a GPU. With the
    step's number in it, what chance hid in one step shows in the next.
    """
    values = [
        [
            zlib.crc32(bytes(_trained(group))),
            *((name, _comparable(value)) for name, value in group.items() if _counts(value)),
        ]
        for group in groups
    ]
    return zlib.crc32(repr((step, values)).encode()) & 0xFFFF


def settings_votes(groups: Sequence[Mapping[str, Any]], step: int) -> tuple[int, int]:
    """What a rank adds to a sum over all of them, from which `check_settings_votes` tells whether settings differ."""
    digest = settings_digest(groups, step)
    return digest, digest**2


def check_settings_votes(
    comm: Communicator, groups: Sequence[Mapping[str, Any]], digests: float, squares: float
) -> None:
    """Raise ValueError on every rank, naming the first difference, where the ranks' `settings_votes` add up to those of
    ranks that have other hyperparameters. Collective only then."""
    if comm.size * squares != digests**2:  # whole numbers, exact: only of equal numbers are the two the same
        check_same_on_every_rank(comm, [], groups, {})


def _trained(group: Mapping[str, Any]) -> list[bool]:
    return [parameter.requires_grad for parameter in group.get("params", ())]


def _counts(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1 and value.device.type == "cpu"
    return isinstance(value, int | float | str | tuple | None)


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
        mine, other = left["settings"][name], right["settings"][name]
        if isinstance(mine, list) and isinstance(other, list) and len(mine) == len(other):
            for index, (of_left, of_right) in enumerate(zip(mine, other, strict=True)):
                if of_left != of_right:
                    return f"{name}[{index}] is {of_right!r} against {of_left!r} on rank 0"
        if mine != other:
            return f"{name} is {other!r} against {mine!r} on rank 0"
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
