"""Edits of gradients, and of the loop around them, in sequences: each takes effect as in torch, to the bit, or every
rank has an error of ours. Nothing is ignored.

The same edits are made to a plain model, and what they leave in its `.grad` is given to an optimizer of the same kind
as the gradient of a linear loss. If averages are shown in `.grad`, as at stage 0 of ShardedOptimizer, edits behind a
backward are of the averages, as behind DistributedDataParallel's.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tests.chaos.harness import digest, each_seed, faults, run_ranks
from tests.chaos.turns import ALL, Exact, take
from tests.optim.subject import FREEZE, Subject
from tests.optim.training import loss_of, make_model
from thinwire.comm import Communicator

Edit = Callable[[nn.Module, nn.Parameter], object]
"""Of the gradients of a model, one parameter's above all."""


def _grad(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def _numpy_zero(model: nn.Module, one: nn.Parameter) -> None:
    _grad(one).numpy()[...] = 0.0


def _numpy_swap(model: nn.Module, one: nn.Parameter) -> None:
    values = _grad(one).numpy().reshape(-1)
    values[:] = values[::-1].copy()


def _assign(model: nn.Module, one: nn.Parameter) -> None:
    one.grad = _grad(one) * 2.0


def _drop(model: nn.Module, one: nn.Parameter) -> None:
    one.grad = None


def _drop_all(model: nn.Module, one: nn.Parameter) -> None:
    model.zero_grad()


def _replace_data(model: nn.Module, one: nn.Parameter) -> None:
    _grad(one).data = torch.full_like(one, 0.25)


EDITS: dict[str, Edit] = {
    "zero_": lambda model, one: _grad(one).zero_(),
    "data.zero_": lambda model, one: _grad(one).data.zero_(),
    "_foreach_zero_": lambda model, one: torch._foreach_zero_([_grad(other) for other in model.parameters()]),
    "mul_": lambda model, one: _grad(one).mul_(-0.5),
    "data.mul_": lambda model, one: _grad(one).data.mul_(-0.5),
    "_foreach_mul_": lambda model, one: torch._foreach_mul_([_grad(other) for other in model.parameters()], 0.5),
    "add_": lambda model, one: _grad(one).add_(0.125),
    "fill_": lambda model, one: _grad(one).fill_(0.5),
    "one element": lambda model, one: _grad(one)[0].fill_(3.0),
    "copy_": lambda model, one: _grad(one).copy_(torch.ones_like(one)),
    "sign_": lambda model, one: _grad(one).sign_(),
    "write what is there": lambda model, one: _grad(one).mul_(1.0),
    "clip_grad_norm_": lambda model, one: nn.utils.clip_grad_norm_(model.parameters(), 1e-3),
    "clip_grad_norm_ to no norm": lambda model, one: nn.utils.clip_grad_norm_(model.parameters(), 1e9),
    "clip_grad_value_": lambda model, one: nn.utils.clip_grad_value_(model.parameters(), 1e-3),
    "numpy": _numpy_zero,
    "numpy swap": _numpy_swap,
    "assigned": _assign,
    "dropped": _drop,
    "all dropped": _drop_all,
    "data replaced": _replace_data,
}
PLACES = (
    "before accumulation",
    "behind the hook",
    "end of backward",
    "between backwards",
    "after backward",
    "set before",
)
WITHIN = ("behind the hook", "end of backward")
"""Places where edits that leave no version are not seen: what left is known from the end of the backward on."""
LOOPS = (
    "none",
    "none",
    "none",
    "step twice",
    "no zero_grad",
    "other zero_grad",
    "groups replaced",
    "rate",
    "left group",
)


@dataclass(frozen=True)
class Trial:
    """In step `moment` of training the ranks `odd` make `edits`, each (its name, the parameter's number, its place)."""

    subject: Subject | Exact
    size: int
    moment: int
    odd: tuple[int, ...]
    edits: tuple[tuple[str, int, str], ...]
    loop: str
    backwards: int
    max_norm: float
    dtype: torch.dtype

    @classmethod
    def random(cls, seed: str) -> Trial:
        source = random.Random(seed)
        subject = source.choice(ALL)
        # Of three ranks the mean of three equal averages may round.
        size = 2 if isinstance(subject, Exact) and subject.stage == 0 else source.choice((2, 2, 2, 3))
        loop = source.choice(LOOPS)
        dtype = source.choice((torch.float32, torch.float32, torch.bfloat16))
        places = PLACES if dtype == torch.float32 else [one for one in PLACES if one != "between backwards"]

        def edit() -> tuple[str, int, str]:
            place = source.choice(places)
            unseen = place in WITHIN or dtype == torch.bfloat16  # which numpy does not know
            names = [name for name in EDITS if not (unseen and name in ("numpy", "numpy swap"))]
            names = [name for name in names if not (place in WITHIN and name.startswith("data"))]
            return source.choice(names), source.randrange(6), place

        edits = tuple(edit() for _ in range(source.choice((1, 1, 2, 3)) if loop == "none" else 0))
        backwards = 2 if any(place == "between backwards" for _, _, place in edits) else source.choice((1, 1, 2))
        backwards = backwards if dtype == torch.float32 else 1  # 16 bits add up in fp32, but for plain torch
        everyone = tuple(range(size))
        odd = everyone if subject.stage == 0 else source.choice((everyone, (source.randrange(size),)))
        clips = source.choice((0.0, 0.0, 0.5))
        if isinstance(subject, Exact) and subject.stage == 0 and loop in ("step twice", "no zero_grad"):
            clips = 0.0  # else the average in `.grad` is clipped, as clip_grad_norm_ does
        moment = source.choice((0, 1, 3, FREEZE, FREEZE + 1, FREEZE + 4))
        return cls(subject, size, moment, odd, edits, loop, backwards, clips, dtype)

    def build(self, comm: Communicator) -> tuple[nn.Module, Any]:
        """A model and its optimizer, as they are before the moment."""
        model = make_model(dtype=self.dtype)
        optimizer = self.subject.build(model, comm, max_norm=self.max_norm)
        for step in range(self.moment):
            take(model, optimizer, step)
        return model, optimizer

    def rest(self, model: nn.Module, optimizer: Any) -> str:
        """Go on, and say what weights there are in the end."""
        optimizer.zero_grad()
        for step in range(100, 102):
            take(model, optimizer, step)
        optimizer.synchronize_weights()
        optimizer.comm.barrier()
        return digest(model)

    def at(self, *places: str) -> list[tuple[Edit, int]]:
        return [(EDITS[name], number) for name, number, place in self.edits if place in places]

    def backward(self, model: nn.Module, rank: int, number: int, *, last: bool) -> None:
        """One, with the edits that are made within it, or before."""
        parameters = list(model.parameters())
        hooks = []
        edits = rank in self.odd and last
        if edits:
            for _, one in self.at("before accumulation"):
                hooks.append(parameters[one].register_hook(lambda gradient: gradient * -0.5))
            for edit, one in self.at("behind the hook"):
                hooks.append(
                    parameters[one].register_post_accumulate_grad_hook(
                        lambda parameter, edit=edit: _quietly(edit, model, parameter)
                    )
                )
            for edit, one in self.at("end of backward"):
                hooks.append(parameters[one].register_hook(_at_end(edit, model, parameters[one])))
        try:
            loss_of(model, rank, 50 + number).backward()
        finally:
            for hook in hooks:
                hook.remove()

    def accumulate(
        self, model: nn.Module, rank: int, no_sync: Callable[[], Any], apart: list[Tensor | None] | None = None
    ) -> None:
        """All backwards of the step. `apart`: put what all but the last have brought there."""
        parameters = list(model.parameters())
        if rank in self.odd:
            for _, one in self.at("set before"):
                parameters[one].grad = torch.full_like(parameters[one], 0.125)
        with no_sync() if self.backwards > 1 else nullcontext():
            for number in range(self.backwards - 1):
                self.backward(model, rank, number, last=False)
        if rank in self.odd:
            for edit, one in self.at("between backwards"):
                _quietly(edit, model, parameters[one])
        if apart is not None:
            apart += [parameter.grad for parameter in parameters]
            model.zero_grad()
        self.backward(model, rank, self.backwards - 1, last=True)

    def edit_after(self, model: nn.Module, rank: int) -> None:
        parameters = list(model.parameters())
        for edit, one in self.at("after backward") if rank in self.odd else ():
            _quietly(edit, model, parameters[one])

    # What is tried

    def edited(self, comm: Communicator) -> str:
        """The weights in the end."""
        model, optimizer = self.build(comm)
        rank = comm.rank
        if self.loop in ("rate", "groups replaced"):
            groups = [{**group, "lr": 0.5 * group["lr"]} for group in optimizer.param_groups]
            if self.loop == "rate":
                optimizer.param_groups[0]["lr"] *= 0.5
            else:
                optimizer.param_groups = groups
        if self.loop == "left group" and rank in self.odd:
            optimizer.param_groups[0]["params"] = optimizer.param_groups[0]["params"][1:]
        self.accumulate(model, rank, optimizer.no_sync)
        self.edit_after(model, rank)
        optimizer.step()
        if self.loop == "step twice":
            optimizer.step()
        if self.loop == "other zero_grad":
            for parameter in model.parameters():
                parameter.grad = None
        if self.loop in ("no zero_grad", "other zero_grad"):
            loss_of(model, rank, 60).backward()
            optimizer.step()
        return self.rest(model, optimizer)

    # What it has to be

    def wanted(self, comm: Communicator, averaged: bool) -> str:
        """The weights in the end if edits are of this rank's gradients, or, behind a backward, of the averages."""
        model, optimizer = self.build(comm)
        plain = make_model(dtype=self.dtype)
        with torch.no_grad():
            for mine, other in zip(plain.parameters(), model.parameters(), strict=True):
                mine.copy_(other)
        rank = comm.rank
        if self.loop in ("rate", "groups replaced"):
            optimizer.param_groups[0]["lr"] *= 0.5
        # At stage 2 averages add up where gradients do not: (a + b) + (c + d), not (a + c) + (b + d).
        apart: list[Tensor | None] | None = [] if self.subject.stage == 2 and self.backwards > 1 else None
        self.accumulate(plain, rank, nullcontext, apart)
        if averaged:
            _average(comm, plain)
        self.edit_after(plain, rank)
        self.give(model, optimizer, plain, apart or [])
        if self.loop == "step twice":
            self.give(model, optimizer, plain)
        if self.loop in ("no zero_grad", "other zero_grad"):
            with torch.no_grad():
                for mine, other in zip(plain.parameters(), model.parameters(), strict=True):
                    mine.copy_(other)
            if self.loop == "other zero_grad":
                plain.zero_grad()
            loss_of(plain, rank, 60).backward()
            self.give(model, optimizer, plain)
        return self.rest(model, optimizer)

    def give(self, model: nn.Module, optimizer: Any, plain: nn.Module, before: Sequence[Tensor | None] = ()) -> None:
        """Take a step by the gradients of a plain model, and others before."""
        optimizer.zero_grad()
        with optimizer.no_sync():
            _backward_of(model, before)
        _backward_of(model, [one.grad for one in plain.parameters()])
        optimizer.step()


def _backward_of(model: nn.Module, gradients: Sequence[Tensor | None]) -> None:
    """With these gradients."""
    pairs = zip(model.parameters(), gradients, strict=True) if gradients else ()
    losses = [(one * gradient.clone()).sum() for one, gradient in pairs if gradient is not None]
    if losses:
        torch.stack(losses).sum().backward()


def _at_end(edit: Edit, model: nn.Module, parameter: nn.Parameter) -> Callable[[Tensor], None]:
    def queue(_: Tensor) -> None:
        torch.autograd.Variable._execution_engine.queue_callback(lambda: _quietly(edit, model, parameter))

    return queue


@torch.no_grad()
def _quietly(edit: Edit, model: nn.Module, parameter: nn.Parameter) -> None:
    """Make an edit, unless its gradient has been dropped by one before."""
    if all(one.grad is not None for one in model.parameters()):
        edit(model, parameter)


@torch.no_grad()
def _average(comm: Communicator, model: nn.Module) -> None:
    """As every stage does: summed in rank order, in fp32."""
    for parameter in model.parameters():
        if parameter.grad is None:
            continue
        gathered = torch.empty(comm.size, *parameter.shape)
        comm.all_gather(gathered.view(-1), parameter.grad.float().reshape(-1).contiguous())
        total = gathered[0].clone()
        for one in gathered[1:]:
            total += one
        parameter.grad = (total / comm.size).to(parameter.dtype)


@each_seed
def run(seed: str) -> list[str]:
    """What is wrong with the trial of that seed."""
    trial = Trial.random(seed)
    ends = run_ranks(trial.edited, trial.size)
    found = [fault for fault in faults(ends, may_wait=True) if ".numpy() is not supported for tensor sub" not in fault]
    if not found and all(end.error is None for end in ends):
        wanted = [run_ranks(lambda comm, way=way: trial.wanted(comm, way), trial.size) for way in (False, True)]
        for of_way in wanted:
            found += [f"reference: {end.error!r}" for end in of_way if end.error is not None][:1]
        if ends[0].result not in (wanted[0][0].result, wanted[1][0].result):
            found.append(f"ends with {ends[0].result}, not {[of_way[0].result for of_way in wanted]}")
    return [f"{trial}: {fault}" for fault in found]
