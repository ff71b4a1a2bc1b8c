"""Checks that ranks agree: on the optimizer at construction, on the gradients that a step lacks, on replicas of the
weights; and norms over all of them."""

from __future__ import annotations

import json
import math
import random
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Literal

import torch
from torch import Tensor

from thinwire.comm import Communicator
from thinwire.comm.agreement import check_same_on_every_rank, raise_together
from thinwire.zero.gradient_seal import gradient_of
from thinwire.zero.replica import Replica, checksum, stages_of

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def check_parameters(parameters: Sequence[Tensor], optimizer: str, *, whole: bool = False) -> None:
    """Raise TypeError for parameters of unusable dtype or on several devices, and where a model has to be `whole` on
    every rank for a pipeline's; `optimizer` says who refuses."""
    if whole and any(map(stages_of, parameters)):
        raise TypeError(
            f"{optimizer} takes parameters of a model that is whole on every rank, not a pipeline's: workers' own "
            "steps would be clipped, and skipped, stage by stage. Use OneBitAdam or ShardedOptimizer"
        )
    for index, parameter in enumerate(parameters):
        if hasattr(parameter, "placements"):
            raise TypeError(
                f"parameter {index}, shape {tuple(parameter.shape)}, is a DTensor: {optimizer} takes parameters that "
                "are whole on every rank. Use OneBitAdam, OneBitLamb, OneBitLion, ZeroOneAdam or ShardedOptimizer"
            )
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


# Replicas of the weights


class ReplicaDriftError(RuntimeError):
    """Ranks' replicas of the weights differ, where every one of them should hold the same bits."""


def compare_replicas(
    comm: Communicator, replicas: Iterable[Tensor], step: int, on_drift: Literal["repair", "raise"], source: str
) -> bool:
    """Whether the ranks hold the same weights; warns, or raises ReplicaDriftError, on every rank where not. Collective.

    `replicas`: weights in the parameters' dtype. `source`: what they will be repaired from.
    """
    mine = b"".join(checksum(one).to_bytes(8, "little") for one in replicas)
    of_rank = comm.all_gather_bytes(mine, "compare the weights")
    drifted = [rank for rank, other in zip(comm.global_ranks, of_rank, strict=True) if other != of_rank[0]]
    if drifted:
        _report(comm, drifted, step, on_drift, source)
    return not drifted


def _report(
    comm: Communicator, ranks: Sequence[int], step: int, on_drift: Literal["repair", "raise"], source: str
) -> None:
    message = (
        f"the weights of ranks {list(ranks)} differ from rank {comm.global_ranks[0]}'s after step {step}: something "
        "changed them outside of the optimizer, or a rank's hardware computes differently"
    )
    if on_drift == "raise":
        raise ReplicaDriftError(message)
    if comm.rank == 0:
        warnings.warn(f"{message}. They were repaired from {source}", RuntimeWarning, stacklevel=6)


# Gradients of a step


def agree_on_order(
    comm: Communicator, trainable: Sequence[int], arrived: Collection[int], describe: Callable[[int], str]
) -> list[int]:
    """Rank 0's order of arrival of `trainable` parameters; those that had no gradient come last, last ones first.

    Collective. Raises ValueError, on every rank, where ranks disagree on which those are.
    """
    wanted, here = set(trainable), set(arrived)
    order = [index for index in arrived if index in wanted]
    order += [index for index in reversed(trainable) if index not in here]
    raw = comm.all_gather_bytes(torch.tensor(order, dtype=torch.int64).numpy().tobytes(), "order the parameters")
    orders = [torch.frombuffer(bytearray(one), dtype=torch.int64).tolist() if one else [] for one in raw]
    for rank, other in enumerate(orders):
        differing = sorted(set(other) ^ set(orders[0]))
        if differing:
            raise ValueError(
                f"rank {comm.global_ranks[rank]} and rank {comm.global_ranks[0]} disagree on whether "
                f"{describe(differing[0])} requires a gradient: set requires_grad alike on every rank"
            )
    return orders[0]


def agree_on_absent(
    comm: Communicator, count: int, arrived: Collection[int], describe: Callable[[int], str]
) -> frozenset[int]:
    """Those of `count` parameters without a gradient on any rank. Collective.

    Raises ValueError, on every rank, for one with a gradient on some ranks only.
    """
    of_rank = comm.all_gather_bytes(
        bytes(index in arrived for index in range(count)), "find parameters without gradients"
    )
    for index in range(count):
        having = [rank for rank, mask in zip(comm.global_ranks, of_rank, strict=True) if mask[index]]
        if having and len(having) < comm.size:
            lacking = sorted(set(comm.global_ranks) - set(having))
            raise ValueError(
                f"{describe(index)} got a gradient on ranks {having} but none on ranks {lacking}: every rank must use "
                "the same parameters in a step. Nothing was applied"
            )
    return frozenset(index for index in range(count) if not of_rank[0][index])


def find_overflowing(comm: Communicator, parameters: Sequence[Tensor]) -> tuple[int, ...]:
    """The ranks on which a gradient is not finite. Collective."""
    mine = any(one is not None and not bool(torch.isfinite(one).all()) for one in map(gradient_of, parameters))
    of_rank = comm.all_gather_bytes(bytes([mine]), "find overflows")
    return tuple(rank for rank, answer in zip(comm.global_ranks, of_rank, strict=True) if answer[0])


def agree_to_leave_out(
    comm: Communicator, parameters: Sequence[Tensor], chosen: Iterable[Tensor], error: Exception | None
) -> frozenset[int]:
    """The numbers, in `parameters`, of those `chosen`; others are left to whom they belong. Collective.

    Raises `error`, or ValueError where a chosen parameter has a gradient already, on every rank; and ValueError where
    ranks chose differently.
    """
    number_of = {id(parameter): number for number, parameter in enumerate(parameters)}
    numbers = sorted(number_of[id(one)] for one in {id(one): one for one in chosen}.values() if id(one) in number_of)
    for number in numbers:
        if error is None and _has_gradient(parameters[number]):
            error = ValueError(
                f"parameter {number}, of shape {tuple(parameters[number].shape)}, is to be left out but has a gradient "
                "from an earlier backward(): leave out what no backward() of the step reaches"
            )
    mine = json.dumps({"failed": error is not None, "numbers": numbers}).encode()
    of_rank = comm.all_gather_bytes(mine, "leave parameters out")
    if any(json.loads(other)["failed"] for other in of_rank):
        raise_together(comm, error, "leave parameters out")
    for rank, other in enumerate(of_rank):
        if other != of_rank[0]:
            theirs = set(json.loads(other)["numbers"]) ^ set(json.loads(of_rank[0])["numbers"])
            raise ValueError(
                f"rank {comm.global_ranks[rank]} and rank {comm.global_ranks[0]} disagree on leaving out parameter "
                f"{min(theirs)}: every rank must leave out the same. Layers are dropped alike where all "
                "ranks have the same seed, step and number of forwards"
            )
    return frozenset(numbers)


def check_left_out(parameter: Tensor, name: str) -> None:
    """Raise RuntimeError if a parameter that was left out has a gradient all the same, but DDP's zeros."""
    if _has_gradient(parameter):
        raise RuntimeError(
            f"{name} was left out of this step, but this backward() reached it: leave out only what no rank's "
            "backward() reaches"
        )


def _has_gradient(parameter: Tensor) -> bool:
    """Whether there is one that is not all zeros, as DDP and `zero_grad(set_to_none=False)` leave behind."""
    gradient = gradient_of(parameter)
    return gradient is not None and bool(torch.count_nonzero(gradient))


# What a step needs on the host


def clip_coefficient(max_norm: float, norm: float) -> float:
    """What a gradient of this norm is multiplied by: torch's clip_grad_norm_. `max_norm` 0 does not clip."""
    return min(1.0, max_norm / (norm + 1e-6)) if max_norm else 1.0


def clip_of_norm(max_norm: float, norm: Tensor) -> float | Tensor:
    """`clip_coefficient` of a norm, fp64 [], and 1 where it is not finite; on an accelerator fp32 [] there, without a
    wait. `max_norm` is above 0."""
    if norm.device.type == "cpu":
        number = float(norm)
        return clip_coefficient(max_norm, number) if math.isfinite(number) else 1.0
    clip = torch.full_like(norm, max_norm).div_(norm + 1e-6).clamp_(max=1.0)
    return torch.where(norm < math.inf, clip, 1.0).float()


_PERIOD, _WIDTH = 1 << 20, 1 << 14


class NormSketch:
    """Estimates the 2-norm of the mean over ranks of vectors of which each rank holds its own.

    Every element is multiplied by a random sign and added to one of 16384 sums (Charikar et al. 2002, Count sketch;
    Alon et al. 1999). The sums are linear in the vector, so their mean over ranks is the mean vector's sketch, and its
    square norm is an unbiased estimate of the vector's, with a relative standard deviation of at most √(2 / 16384):
    1.1% of the square, 0.55% of the norm, for 64 KB on the wire whatever the model's size.

    Every step draws signs and columns anew, from its number: a resumed run has those of one that was not stopped.

    Vectors that are no longer together than the sums, in bf16, are averaged in their place: that sends half of their
    bytes in fp32 at most, and rounding changes the norm by less than 0.1%.

    Ranks that hold a replica together share the sums by how many elements each holds: its estimates add up, and deviate
    by as much where gradients are as large everywhere, and at most √n times that where all is in one nth of them."""

    def __init__(
        self, comm: Communicator, parameters: Mapping[int, Tensor], device: torch.device, replica: Replica | None = None
    ) -> None:
        """`parameters`: those of the vectors, by their numbers, the same on every rank."""
        self._comm, self._replica = comm, replica
        self._shares = {} if replica is None else {one: replica.share(of) ** 0.5 for one, of in parameters.items()}
        self._width = _WIDTH if replica is None else max(1, round(_WIDTH * replica.part))
        self._step = 0
        numbers = sorted(parameters)
        *places, numel = accumulate((parameters[number].numel() for number in numbers), initial=0)
        self._places = dict(zip(numbers, places, strict=True)) if numel <= 2 * self._width else None
        if self._places is not None:
            self._sums = torch.zeros(numel, dtype=torch.bfloat16, device=device)
            return
        self._sums = torch.zeros(self._width, device=device)
        # One period of signs serves every vector, from another place, into other columns and under another sign each
        # time, so that no two elements share both sign and column more often than by chance.
        generator = torch.Generator().manual_seed(0)
        signs = torch.randint(2, (_PERIOD,), generator=generator, dtype=torch.int8).mul_(2).sub_(1)
        self._signs = signs.to(device)

    def begin(self, step: int) -> None:
        """Forget what was added, and be ready for the vectors of the step with this number, the same on every rank."""
        self._step = step
        self._sums.zero_()

    def add(self, vector: Tensor, number: int) -> None:
        """Count the elements of this rank's vector `number`, floats of any shape; every number once a step."""
        flat = vector.reshape(-1)
        if self._shares.get(number, 1.0) != 1.0:
            flat = flat * self._shares[number]
        if self._places is not None:
            self._sums[self._places[number] :][: flat.numel()].copy_(flat)
            return
        chance = random.Random((self._step << 32) + number)  # the same on every rank
        while flat.numel():
            place, column = chance.randrange(_PERIOD), chance.randrange(self._width)
            length = min(flat.numel(), _PERIOD - place)
            signed = flat[:length].float() * self._signs[place : place + length]
            self._fold(signed, column, chance.choice((-1, 1)))
            flat = flat[length:]

    def norm(self) -> Tensor:
        """The estimate for everything added in this step, fp64 [] where the vectors are; not finite where any rank's
        was not. Collective."""
        if self._sums.numel():  # else nothing lies in a bucket yet
            self._comm.all_reduce(self._sums, "mean")
        return self.own_norm()

    def own_norm(self) -> Tensor:
        """The same for what this rank has added alone."""
        square = self._sums.double().square_().sum()
        self._sums.zero_()
        if self._replica is not None:
            self._replica.all_reduce(square)
        return square.sqrt_()

    def _fold(self, signed: Tensor, column: int, sign: int) -> None:
        """Add `signed` to the sums, from `column` on and round again."""
        head = signed[: self._width - column]
        self._sums[column : column + head.numel()].add_(head, alpha=sign)
        rest = signed[head.numel() :]
        rows = rest.numel() // self._width
        self._sums.add_(rest[: rows * self._width].view(rows, self._width).sum(dim=0), alpha=sign)
        tail = rest[rows * self._width :]
        self._sums[: tail.numel()].add_(tail, alpha=sign)


def refuse_unfrozen(frozen: Iterable[Tensor]) -> None:
    """Raise RuntimeError: some of these parameters, frozen when their optimizer was built, require gradients now."""
    raise RuntimeError(
        f"{sum(one.requires_grad for one in frozen)} parameters require gradients now but did not when the optimizer "
        "was built, so that none of its steps would move them: set requires_grad before building it, or build a new "
        "one and load the old one's state"
    )
