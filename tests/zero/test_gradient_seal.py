"""The seal of gradients tells an edit from a write of the values that are there already."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from thinwire.zero.gradient_seal import Seal


def sealed(taken: range = range(3)) -> tuple[list[Tensor], Seal]:
    parameters = [torch.zeros(shape, requires_grad=True) for shape in ((3,), (0,), (40, 50))]
    for one in parameters:
        one.grad = torch.randn(one.shape)
    parameters[0].grad[1] = math.nan
    seal = Seal(parameters, "parameter {}".format)
    seal.take(taken)
    return parameters, seal


def test_a_write_is_known_by_the_version_and_an_edit_by_the_values() -> None:
    parameters, seal = sealed()
    for parameter in parameters:
        parameter.grad.mul_(1.0)
    assert seal._edited() == [0, 1, 2]
    seal.check()
    parameters[2].grad.mul_(1.0625)
    with pytest.raises(RuntimeError, match="parameter 2 was changed"):
        seal.check()
    parameters[0].grad[2] = 7.0  # of a small gradient every element counts
    with pytest.raises(RuntimeError, match="parameter 0 was changed"):
        seal.check()
    seal.check(may_write=True)
    parameters[0].grad = None
    with pytest.raises(RuntimeError, match="parameter 0 was changed"):
        seal.check(may_write=True)


def test_a_gradient_whose_average_may_arrive_has_no_known_value() -> None:
    parameters, seal = sealed()
    seal.expect_averages([0, 2])
    seal.check()
    parameters[2].grad.mul_(1.0)
    with pytest.raises(RuntimeError, match="parameter 2 was changed"):
        seal.check()
    parameters[0].grad.data.fill_(1.0)
    seal.averages_are_there([0, 2])
    seal.take_again()
    parameters[0].grad.mul_(1.0)
    assert seal._edited() == [0, 2]
    with pytest.raises(RuntimeError, match="parameter 2 was changed"):
        seal.check()


def test_what_was_not_sampled_may_be_written_to() -> None:
    parameters, seal = sealed(range(0))
    seal.samples_values = False
    seal.take([0])
    parameters[0].grad.mul_(2.0)
    seal.check()
    parameters[0].grad = parameters[0].grad.clone()
    with pytest.raises(RuntimeError, match="parameter 0 was changed"):
        seal.check()


def test_memory_that_was_swapped_is_no_untouched_gradient() -> None:
    parameters, seal = sealed()
    parameters[0].grad.data = torch.ones(3)
    assert seal._edited() == [0]
