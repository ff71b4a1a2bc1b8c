"""Samples of gradients tell an edit from a write of the values that are there already."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from thinwire.zero.gradient_seal import Samples, edited, taken


def with_gradients() -> list[Tensor]:
    parameters = [torch.zeros(shape, requires_grad=True) for shape in ((3,), (0,), (40, 50))]
    for one in parameters:
        one.grad = torch.randn(one.shape)
    parameters[0].grad[1] = math.nan
    return parameters


def test_a_write_is_known_by_the_version_and_an_edit_by_the_values() -> None:
    parameters, samples = with_gradients(), Samples()
    samples.take(range(3), parameters)
    was = {number: taken(one.grad) for number, one in enumerate(parameters)}
    for parameter in parameters:
        parameter.grad.mul_(1.0)
    assert edited(was, parameters) == [0, 1, 2]
    assert samples.first_that_differs(range(3), parameters) is None
    parameters[2].grad.mul_(1.0625)
    assert samples.first_that_differs(range(3), parameters) == 2
    parameters[0].grad[2] = 7.0  # of a small gradient every element counts
    assert samples.first_that_differs(range(3), parameters) == 0


def test_what_was_not_sampled_is_taken_for_edited() -> None:
    parameters, samples = with_gradients(), Samples()
    samples.take([0], parameters)
    assert samples.first_that_differs([0, 2], parameters) == 2
    parameters[0].grad = None
    assert samples.first_that_differs([0], parameters) == 0


def test_memory_that_was_swapped_is_no_untouched_gradient() -> None:
    parameters = with_gradients()
    was = taken(parameters[0].grad)
    parameters[0].grad.data = torch.ones(3)
    assert edited({0: was}, parameters) == [0]
