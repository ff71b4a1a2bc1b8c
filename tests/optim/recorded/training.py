"""A model made by hand, and the run of one form on ranks that are threads.

Every number on the way to a gradient is exact or one correctly rounded elementwise operation, so that neither the
number of threads nor a matrix library decides a bit: coefficients and targets are small fractions from a hash. A sum
over elements, which torch adds up in an order of its own, is nowhere among them.
"""

from __future__ import annotations

import hashlib
import io
import math
import warnings
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch
from torch import Tensor, nn

import thinwire
from tests.launching import one_core
from tests.optim.recorded.forms import FREEZE_STEP, Form
from tests.zero.saved import Saved, save
from thinwire.comm import Communicator, threads

__all__ = ["STEPS", "Outcome", "run"]

STEPS = 200
_HASHED = (50, 100, 150, 200)
_SAVED_AT = 130
_SHAPES = ((37, 11), (0,), (), (1031,), (29,), (13, 7), (257,), (5, 3, 17))
"""Odd sizes, an empty one, a scalar, and one larger than a bucket."""

_SIZES = [math.prod(shape) for shape in _SHAPES]
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_LARGEST = 3
_ABSENT = (4, 5)  # parameters
_LATE = 6  # parameter
_OVERFLOWS = (40, 90, 91, 133)
_ADDED = 7  # parameter
_ADDED_AT = 30
_MET_AT = 151


@dataclass(frozen=True)
class Outcome:
    """What a form gave, over all ranks: digests of the weights after the steps of `_HASHED` and of every element's loss
    in every step, and bytes sent by each rank."""

    weights: dict[int, str]
    losses: str
    bytes_sent: list[int]
    frozen_at: int | None


@dataclass
class _Trace:
    """What one rank has seen."""

    weights: dict[int, bytes] = field(default_factory=dict)
    losses: Any = field(default_factory=hashlib.sha256)
    bytes_sent: int = 0
    frozen_at: int | None = None


def run(form: Form) -> Outcome:
    """Train as `form` says; the same on every machine with one kind of vector registers."""
    traces = [_Trace() for _ in range(form.ranks)]
    with one_core(), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # steps that overflow say so
        if form.resumed:
            saved = threads.run(lambda comm: _train(form, comm, traces[comm.rank], 0, _SAVED_AT), form.ranks)
            threads.run(lambda comm: _train(form, comm, traces[comm.rank], _SAVED_AT, STEPS, saved), form.ranks)
        else:
            threads.run(lambda comm: _train(form, comm, traces[comm.rank], 0, STEPS), form.ranks)
    return Outcome(
        weights={step: _digest(*(trace.weights[step] for trace in traces)) for step in _HASHED},
        losses=_digest(*(trace.losses.digest() for trace in traces)),
        bytes_sent=[trace.bytes_sent for trace in traces],
        frozen_at=traces[0].frozen_at,
    )


def _train(form: Form, comm: Communicator, trace: _Trace, first: int, last: int, saved: list[Any] | None = None) -> Any:
    """Take the steps from `first` to `last`, after loading what was `saved`; what this rank saves at the end."""
    model = _Model(_DTYPES[form.dtype], salt=1 if saved is None else 2)
    rank = _Rank(form, model, _build(form, model, _groups(form, list(model.values)), comm))
    if saved is not None:
        if "added" in form.events:
            rank.add_group()
        _load_ranks(form, model, rank.optimizer, saved)
    for step in range(first, last):
        for losses in rank.step(step):
            trace.losses.update(losses.numpy())
        if step + 1 in _HASHED:
            trace.weights[step + 1] = model.as_bytes()
    trace.bytes_sent = rank.optimizer.bytes_sent
    trace.frozen_at = getattr(rank.optimizer, "frozen_at", None)
    return _save_rank(form, model, rank.optimizer) if last < STEPS else None


class _Rank:
    """One rank of a form's run."""

    def __init__(self, form: Form, model: _Model, optimizer: Any) -> None:
        self.form = form
        self.model = model
        self.optimizer = optimizer
        self._rates = [group["lr"] for group in optimizer.param_groups]
        self._scaler: torch.amp.GradScaler | None = None
        if "scaled" in form.events and not form.stage:
            self._scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=11)

    def add_group(self) -> None:
        """Let the parameter come in that was not there at first."""
        rate = self.form.all_options["lr"]
        self.optimizer.add_param_group({"params": [self.model.values[_ADDED]], "lr": rate, "weight_decay": 0.0})
        self._rates.append(rate)

    def step(self, step: int) -> list[Tensor]:
        """One step of this rank; the losses of its backwards."""
        events, optimizer = self.form.events, self.optimizer
        if "added" in events and step == _ADDED_AT:
            self.add_group()
        if "meets" in events and step == _MET_AT:
            optimizer.synchronize_weights()
        for group, rate in zip(optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate * min(1.0, 1.1875 - step / 256)
        optimizer.zero_grad()
        left_alone = self._left_alone(step)
        if "left out" in events and left_alone:
            optimizer.leave_out([self.model.values[number] for number in left_alone])
        losses = []
        for backward in range(self.form.backwards):
            batch = _Batch(optimizer.comm.rank, step * self.form.backwards + backward)
            late = "late" in events and step < FREEZE_STEP + 10
            with optimizer.no_sync() if backward < self.form.backwards - 1 else nullcontext():
                losses.append(self.model.backward(batch, left_alone, late, self._loss_factor(step)))
        if self._scaler is None:
            optimizer.step()
        else:
            self._scaler.step(optimizer)
            self._scaler.update()
        return losses

    def _left_alone(self, step: int) -> frozenset[int]:
        """Numbers of the parameters that get no gradient in this step."""
        if "added" in self.form.events and step < _ADDED_AT:
            return frozenset({_ADDED})
        return frozenset(_ABSENT) if self.form.events & {"absent", "left out"} and step % 7 == 3 else frozenset()

    def _loss_factor(self, step: int) -> float | Tensor:
        """What the loss is multiplied by."""
        if "overflow" in self.form.events and self.optimizer.comm.rank == 1 and step in _OVERFLOWS:
            return math.inf
        if self._scaler is not None:
            return self._scaler.scale(torch.ones(()))
        if "scaled" in self.form.events:
            # The last one overflows fp16, on all ranks.
            self.optimizer.loss_scale = 2.0 ** (17 if step in _OVERFLOWS else 10 + step // 40)
            return self.optimizer.loss_scale
        return 1.0


class _Model(nn.Module):
    """Parameters that a loss pulls to targets which depend on the rank and the step."""

    def __init__(self, dtype: torch.dtype, salt: int) -> None:
        super().__init__()
        first = torch.from_numpy((_hashed(salt) % 256).astype(numpy.float32) / 128 - 1)
        values = [part.view(shape).to(dtype) for part, shape in zip(first.split(_SIZES), _SHAPES, strict=True)]
        self.values = nn.ParameterList([nn.Parameter(value.clone()) for value in values])

    def backward(self, batch: _Batch, left_alone: frozenset[int], late: bool, factor: float | Tensor) -> Tensor:
        """Add the gradients of factor · c · (√(1 + (w - t)²) - 1) to all parameters but those `left_alone`; the loss of
        each element, without the factor."""
        distance = torch.cat([value.detach().float().reshape(-1) for value in self.values]) - batch.targets
        root = _root(1 + distance * distance)
        gradients = (batch.coefficients * distance / root).split(_SIZES)
        if late:
            gradients[_LATE][1::3] = 0
        # The gradient of w · g is g; as in a network, that of the last parameter comes first.
        terms = [
            (value.float() * gradient.view(value.shape)).sum()
            for number, (value, gradient) in enumerate(zip(self.values, gradients, strict=True))
            if number not in left_alone
        ]
        (torch.stack(terms).sum() * factor).backward()
        return batch.coefficients * (root - 1)

    def as_bytes(self) -> bytes:
        return b"".join(value.detach().reshape(-1).view(torch.uint8).numpy().tobytes() for value in self.values)


def _root(values: Tensor) -> Tensor:
    """Square roots, rounded once: torch's are up to one unit in the last place off, on each processor elsewhere."""
    return torch.from_numpy(numpy.sqrt(values.numpy()))


class _Batch:
    """Coefficients from 1/4 to 2, and targets: common ones in [-1, 1), moved by up to 1/2 for this rank and batch."""

    def __init__(self, rank: int, batch: int) -> None:
        mine = _hashed(1000 + 7919 * rank + 104729 * batch)
        coefficients = (mine % 8 + 1).astype(numpy.float32) / 4
        common = (_hashed(3) % 256).astype(numpy.float32) / 128 - 1
        targets = common + (mine // 8 % 64).astype(numpy.float32) / 64 - numpy.float32(0.5)
        self.coefficients, self.targets = torch.from_numpy(coefficients), torch.from_numpy(targets)


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
    apart = {_LARGEST} if "masked" in form.events else {_ADDED} if "added" in form.events else set()
    members = [
        [parameter for number, parameter in enumerate(parameters) if number % 2 == odd and number not in apart]
        for odd in (0, 1)
    ]
    groups = [
        {"params": members[0], "lr": rate, "weight_decay": 0.0078125},
        {"params": members[1], "lr": rate / 2, "weight_decay": 0.125},
    ]
    if "masked" in form.events:
        mask = torch.from_numpy((_hashed(5)[: _SIZES[_LARGEST]] % 4 != 0).astype(numpy.float32))
        groups.append({"params": [parameters[_LARGEST]], "lr": rate, "weight_decay": 0.0, "exp_avg_mask": mask})
    return groups


def _digest(*parts: bytes) -> str:
    """64 bits of the SHA-256 of all parts."""
    return hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()[:16]


# How a form's optimizer is built, saved and loaded


def _build(form: Form, model: nn.Module, groups: list[dict[str, Any]], comm: Communicator) -> Any:
    """The optimizer of `form` on `groups` of the parameters of `model`."""
    options = form.all_options | {"stage": form.stage, "comm": comm}
    if _is_sharded(form):
        options["named_parameters"] = model.named_parameters()
    if hasattr(thinwire, form.optimizer):
        return getattr(thinwire, form.optimizer)(groups, **options)
    return thinwire.ShardedOptimizer(groups, getattr(torch.optim, form.optimizer), **options)


def _save_rank(form: Form, model: nn.Module, optimizer: Any) -> Any:
    """What this rank saves of the model and its optimizer."""
    if _is_sharded(form):
        return save(optimizer.comm, optimizer)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    return file.getvalue()


def _load_ranks(form: Form, model: nn.Module, optimizer: Any, saved: list[Any]) -> None:
    """Take over what `_save_rank` gave on every rank."""
    if _is_sharded(form):
        optimizer.load(_Saved(*map(list, zip(*saved, strict=True))))
        return
    state = torch.load(io.BytesIO(saved[optimizer.comm.rank]), weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])


def _is_sharded(form: Form) -> bool:
    """Whether its state is laid out as ShardedOptimizer's is, even at that one's stage 0."""
    return form.stage > 0 or not hasattr(thinwire, form.optimizer)


class _Saved(Saved):
    """Knows as the engine's checkpoints do that of an empty parameter nobody saves a slice."""

    def read(self, kind: str, name: str, start: int, numel: int) -> Tensor:
        return super().read(kind, name, start, numel) if numel or kind != "weight" else torch.empty(0)
