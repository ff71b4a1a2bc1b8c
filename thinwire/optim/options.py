"""What must hold of an algorithm's options and of the ranks' decision to freeze: checked before anything is sent, so
that no collective can mismatch later."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from thinwire.comm import Communicator
from thinwire.compress.packet import SettingsError
from thinwire.zero.rank_checks import check_same_on_every_rank

__all__ = ["check_compress", "check_count", "check_group", "check_same_freeze", "naming_differences"]


def check_compress(amsgrad: bool, compress: str, stage: int) -> None:
    """Raise ValueError, naming what was given and what is expected, for options that cannot work."""
    if amsgrad:
        raise ValueError("amsgrad=True cannot work with a frozen variance: pass False, or use torch.optim.AdamW")
    if compress not in ("update", "momentum"):
        raise ValueError(f"compress must be 'update' or 'momentum', got {compress!r}")
    if compress == "momentum" and stage:
        raise ValueError(f"compress='momentum' does not go with stage={stage}, which compresses updates: use stage 0")


def check_count(name: str, value: object) -> None:
    """Raise ValueError where option `name` is not a whole number of at least 1."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")


def check_group(group: Mapping[str, Any]) -> None:
    """Raise ValueError for a parameter group, or defaults for one, whose hyperparameters cannot work."""
    if not _number("lr", group["lr"]) >= 0:
        raise ValueError(f"lr must be at least 0, got {group['lr']}")
    betas = group["betas"]
    if not isinstance(betas, Sequence) or len(betas) != 2 or not all(0 <= _number("betas", one) < 1 for one in betas):
        raise ValueError(f"betas must be two numbers from 0 up to, not including, 1; got {betas}")
    if not _number("eps", group.get("eps", 1.0)) > 0:
        raise ValueError(f"eps must be above 0, got {group['eps']}")
    if not _number("weight_decay", group["weight_decay"]) >= 0:
        raise ValueError(f"weight_decay must be at least 0, got {group['weight_decay']}")
    if group.get("maximize") or group.get("amsgrad"):
        raise ValueError("a compressed optimizer has no maximize and no amsgrad: it descends, with one variance")
    if group.get("exp_avg_mask") is not None:
        _check_mask(group["exp_avg_mask"], group["params"])


def _check_mask(mask: object, parameters: Sequence[Tensor]) -> None:
    if not isinstance(mask, Tensor):
        raise TypeError(f"exp_avg_mask must be a tensor, got {type(mask).__name__}")
    for parameter in parameters:
        flat = mask.dim() == 1 and mask.numel() == parameter.numel()
        if not flat and not _broadcasts(mask.shape, parameter.shape):
            raise ValueError(
                f"exp_avg_mask of shape {tuple(mask.shape)} does not broadcast to a parameter of its group, of shape "
                f"{tuple(parameter.shape)}, and is not that flattened: give parameters with a mask a group of their own"
            )


def _number(name: str, value: Any) -> float:
    """Raises ValueError for what is none, in a string too."""
    if not isinstance(value, str | bytes):
        try:
            return float(value)
        except (TypeError, ValueError, OverflowError):
            pass
    raise ValueError(f"{name} must be a number, got {value!r}")


def _broadcasts(shape: Sequence[int], target: Sequence[int]) -> bool:
    pairs = zip(reversed(shape), reversed(target), strict=False)
    return len(shape) <= len(target) and all(size in (1, wanted) for size, wanted in pairs)


def check_same_freeze(comm: Communicator, reached: bool, learning_rates: Sequence[float]) -> None:
    """Raise ValueError on every rank unless all come to the same decision from the same learning rates. Collective."""
    answers = comm.all_gather_bytes(json.dumps([reached, list(learning_rates)]).encode(), "decide on the freeze")
    for rank, answer in enumerate(answers):
        if answer != answers[0]:
            theirs, first = json.loads(answer), json.loads(answers[0])
            raise ValueError(
                f"rank {rank} has learning rates {theirs[1]} and {'freezes' if theirs[0] else 'does not freeze'}, "
                f"rank 0 has {first[1]} and {'freezes' if first[0] else 'does not'}: every rank must use the same "
                "learning rates. A scheduler that looks at the loss must look at the average over the ranks"
            )


@contextmanager
def naming_differences(comm: Communicator, groups: Sequence[Mapping[str, Any]]) -> Iterator[None]:
    """Where packets say that ranks have other hyperparameters, raise ValueError, on every rank, that names the first.

    Wraps what hears of all packets of a step, after the last has come. Collective only where they differ.
    """
    try:
        yield
    except SettingsError:
        check_same_on_every_rank(comm, [], groups, {})
        raise
