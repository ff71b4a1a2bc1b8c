"""Seals of gradients whose values are looked at together."""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.zero.gradient_seal import GradientSeal, SharedDigest, seal_written


def sealed() -> tuple[list[Tensor], dict[int, GradientSeal]]:
    parameters = [torch.zeros(size, requires_grad=True) for size in (3, 0, 5)]
    for one in parameters:
        one.grad = torch.ones_like(one)
    shared = SharedDigest(lambda: torch.cat([one.grad for one in parameters if one.grad is not None]))
    seals = {}
    for number, one in enumerate(parameters):
        seals[number] = GradientSeal(one, digests=False)
        seals[number].shared = shared
    return parameters, seals


def grad_of(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def test_values_that_are_there_already_break_no_seal() -> None:
    parameters, seals = sealed()
    grad_of(parameters[0]).mul_(1.0)
    assert not seals[0].is_untouched(parameters[0])
    assert seals[0].has_same_values(parameters[0])
    grad_of(parameters[0])[1] = 2.0
    assert not seals[0].has_same_values(parameters[0])


def test_who_writes_with_leave_breaks_nobody_elses_seal() -> None:
    parameters, seals = sealed()
    grad_of(parameters[2]).zero_()
    seal_written(seals, parameters)
    grad_of(parameters[0]).mul_(1.0)
    assert all(seal.has_same_values(one) for seal, one in zip(seals.values(), parameters, strict=True))
    grad_of(parameters[0]).mul_(2.0)
    assert not seals[0].has_same_values(parameters[0])
