"""Samples of gradients tell an edit from a write of the values that are there already."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from thinwire.zero.gradient_seal import Samples, is_untouched, taken


def with_gradients() -> list[Tensor]:
    parameters = [torch.zeros(shape, requires_grad=True) for shape in ((3,), (0,), (40, 50))]
    for one in parameters:
        one.grad = torch.randn(one.shape)
    parameters[0].grad[1] = math.nan
    return parameters


def test_a_write_is_known_by_the_version_and_an_edit_by_the_values() -> None:
    parameters, samples = with_gradients(), Samples()
    samples.take(range(3), parameters)
    was = [taken(one.grad) for one in parameters]
    for parameter in parameters:
        parameter.grad.mul_(1.0)
    assert [is_untouched(one.grad, before) for one, before in zip(parameters, was, strict=True)] == [False] * 3
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
    parameter = with_gradients()[0]
    was = taken(parameter.grad)
    parameter.grad.data = torch.ones(3)
    assert not is_untouched(parameter.grad, was)
