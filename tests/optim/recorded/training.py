"""A model made by hand, and the run of one form on ranks that are threads.

Every number on the way to a gradient is exact or one correctly rounded elementwise operation, so that neither the
number of threads nor a matrix library decides a bit: coefficients and targets are small fractions from a hash.
"""

from __future__ import annotations

import hashlib
import math
import struct
import warnings
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from tests.optim.recorded import api
from tests.optim.recorded.forms import FREEZE_STEP, Form
from thinwire.comm import Communicator, threads

__all__ = ["STEPS", "Outcome", "run"]

STEPS = 200
_HASHED = (50, 100, 150, 200)
_SAVED_AT = 130
_SHAPES = ((37, 11), (0,), (), (1031,), (29,), (13, 7), (257,), (5, 3, 17))
"""Odd sizes, an empty one, a scalar, and one larger than a bucket."""

_SIZES = [math.prod(shape) for shape in _SHAPES]
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_LARGEST = 3
_ABSENT = (4, 5)  # parameters
_LATE = 6  # parameter
_OVERFLOWS = (40, 90, 91, 133)
_MET_AT = 151


@dataclass(frozen=True)
class Outcome:
    """What a form gave, over all ranks: digests of the weights after the steps of `_HASHED` and of every step's loss,
    and bytes sent by each rank."""

    weights: dict[int, str]
    losses: str
    bytes_sent: list[int]
    frozen_at: int | None


@dataclass
class _Trace:
    """What one rank has seen."""

    weights: dict[int, bytes] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    bytes_sent: int = 0
    frozen_at: int | None = None


def run(form: Form) -> Outcome:
    """Train as `form` says; the same on every machine with one kind of vector registers."""
    traces = [_Trace() for _ in range(form.ranks)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # steps that overflow say so
        if form.resumed:
            saved = threads.run(lambda comm: _train(form, comm, traces[comm.rank], 0, _SAVED_AT), form.ranks)
            threads.run(lambda comm: _train(form, comm, traces[comm.rank], _SAVED_AT, STEPS, saved), form.ranks)
        else:
            threads.run(lambda comm: _train(form, comm, traces[comm.rank], 0, STEPS), form.ranks)
    return Outcome(
        weights={step: _digest(*(trace.weights[step] for trace in traces)) for step in _HASHED},
        losses=_digest(*(struct.pack(f"<{len(trace.losses)}d", *trace.losses) for trace in traces)),
        bytes_sent=[trace.bytes_sent for trace in traces],
        frozen_at=traces[0].frozen_at,
    )


def _train(form: Form, comm: Communicator, trace: _Trace, first: int, last: int, saved: list[Any] | None = None) -> Any:
    """Take the steps from `first` to `last`, after loading what was `saved`; what this rank saves at the end."""
    model = _Model(_DTYPES[form.dtype], salt=1 if saved is None else 2)
    groups = _groups(form, list(model.values))
    rates = [group["lr"] for group in groups]
    optimizer = api.build(form, model, groups, comm)
    if saved is not None:
        api.load_ranks(form, model, optimizer, saved)
    for step in range(first, last):
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * min(1.0, 1.1875 - step / 256)
        trace.losses.append(_step(form, model, optimizer, step))
        if step + 1 in _HASHED:
            trace.weights[step + 1] = model.as_bytes()
    trace.bytes_sent = optimizer.bytes_sent
    trace.frozen_at = api.frozen_at(optimizer)
    return api.save_rank(form, model, optimizer) if last < STEPS else None


def _step(form: Form, model: _Model, optimizer: Any, step: int) -> float:
    """One step of this rank; its loss."""
    rank = optimizer.comm.rank
    left_alone = frozenset[int]()
    if form.events & {"absent", "left out"} and step % 7 == 3:
        left_alone = frozenset(_ABSENT)
    if "meets" in form.events and step == _MET_AT:
        optimizer.synchronize_weights()
    optimizer.zero_grad()
    if "left out" in form.events and left_alone:
        optimizer.leave_out([model.values[number] for number in left_alone])
    overflows = "overflow" in form.events and rank == 1 and step in _OVERFLOWS
    late = "late" in form.events and step < FREEZE_STEP + 10
    losses = []
    for backward in range(form.backwards):
        with optimizer.no_sync() if backward < form.backwards - 1 else nullcontext():
            batch = step * form.backwards + backward
            losses.append(model.backward(rank, batch, left_alone, late=late, overflows=overflows))
    optimizer.step()
    return math.fsum(losses)


class _Model(nn.Module):
    """Parameters that a loss pulls to targets which depend on the rank and the step."""

    def __init__(self, dtype: torch.dtype, salt: int) -> None:
        super().__init__()
        first = torch.from_numpy((_hashed(salt) % 256).astype(numpy.float32) / 128 - 1)
        values = [part.view(shape).to(dtype) for part, shape in zip(first.split(_SIZES), _SHAPES, strict=True)]
        self.values = nn.ParameterList([nn.Parameter(value.clone()) for value in values])

    def backward(self, rank: int, batch: int, left_alone: frozenset[int], *, late: bool, overflows: bool) -> float:
        """Add the gradients of c · (√(1 + (w - t)²) - 1), summed over the parameters but those `left_alone`."""
        coefficients, targets = _batch(rank, batch)
        terms = []
        for number, value in enumerate(self.values):
            if number not in left_alone:
                distance = value.float() - targets[number]
                term = coefficients[number] * ((1 + distance * distance).sqrt() - 1)
                terms.append(term[::3] if late and number == _LATE else term)
        total = torch.stack([term.sum() for term in terms]).sum()
        (total * math.inf if overflows else total).backward()
        # torch adds up in an order of its own: exactly, then.
        return math.fsum(float(value) for term in terms for value in term.detach().reshape(-1).tolist())

    def as_bytes(self) -> bytes:
        return b"".join(value.detach().reshape(-1).view(torch.uint8).numpy().tobytes() for value in self.values)


@lru_cache(maxsize=2048)
def _batch(rank: int, batch: int) -> tuple[list[Tensor], list[Tensor]]:
    """Coefficients from 1/4 to 2, and targets: common ones in [-1, 1), moved by up to 1/2 for this rank and batch."""
    mine = _hashed(1000 + 7919 * rank + 104729 * batch)
    coefficients = torch.from_numpy((mine % 8 + 1).astype(numpy.float32) / 4)
    common = (_hashed(3) % 256).astype(numpy.float32) / 128 - 1
    targets = torch.from_numpy(common + (mine // 8 % 64).astype(numpy.float32) / 64 - numpy.float32(0.5))
    return (
        [part.view(shape) for part, shape in zip(coefficients.split(_SIZES), _SHAPES, strict=True)],
        [part.view(shape) for part, shape in zip(targets.split(_SIZES), _SHAPES, strict=True)],
    )


def _hashed(salt: int) -> numpy.ndarray:
    """A 32-bit integer for each element of the model, as good as random; the same on every machine."""
    value = numpy.arange(sum(_SIZES), dtype=numpy.uint32) + numpy.uint32(salt * 2654435761 % 2**32)
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        value ^= value >> numpy.uint32(shift)
        value *= numpy.uint32(factor)
    return value ^ (value >> numpy.uint32(16))


def _groups(form: Form, parameters: list[Tensor]) -> list[dict[str, Any]]:
    """Every other parameter in a group with half the learning rate and more decay; a masked one on its own."""
    rate = form.all_options["lr"]
    alone = {_LARGEST} if "masked" in form.events else set[int]()
    members = [
        [parameter for number, parameter in enumerate(parameters) if number % 2 == odd and number not in alone]
        for odd in (0, 1)
    ]
    groups = [
        {"params": members[0], "lr": rate, "weight_decay": 0.0078125},
        {"params": members[1], "lr": rate / 2, "weight_decay": 0.125},
    ]
    if alone:
        mask = torch.from_numpy((_hashed(5)[: _SIZES[_LARGEST]] % 4 != 0).astype(numpy.float32))
        groups.append({"params": [parameters[_LARGEST]], "lr": rate, "weight_decay": 0.0, "exp_avg_mask": mask})
    return groups


def _digest(*parts: bytes) -> str:
    """64 bits of the SHA-256 of all parts."""
    return hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()[:16]
