"""Pieces that the caches hold are the whole, in order, and operations on them have the bits that they have on the
whole."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from thinwire.optim import in_cache as module
from thinwire.optim.formulas import AdamSettings, decay, root, track_moments, track_variances, warmup_update
from thinwire.optim.in_cache import in_cache


@pytest.fixture(autouse=True)
def parts_of_64(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_ELEMENTS", 64 // torch.get_num_threads())


def tensors(generator: torch.Generator) -> list[Tensor]:
    """Smaller than a part, larger, of a part exactly, empty, without dimensions, and not contiguous."""
    shapes = [(3, 5), (40,), (9, 31), (64,), (0,), (), (1,), (200,)]
    return [*(torch.rand(shape, generator=generator) for shape in shapes), torch.rand(20, 30, generator=generator).T]


def test_parts_are_the_whole_in_order() -> None:
    whole = tensors(torch.Generator().manual_seed(0))
    parts = [part for (part,) in in_cache(whole)]
    found = [one for part in parts for one in part]
    assert torch.equal(*(torch.cat([one.reshape(-1) for one in some]) for some in (whole, found)))
    memory = {one.untyped_storage().data_ptr() for one in whole}
    assert {one.untyped_storage().data_ptr() for one in found} == memory
    assert all(sum(one.numel() for one in part) <= 64 or len(part) == 1 for part in parts)
    assert list(in_cache([], [])) == []


@pytest.mark.parametrize("inside", [False, True])
def test_a_step_has_the_bits_of_one_over_the_whole(inside: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    settings = AdamSettings(0.01, 0.9, 0.999, 1e-8, 0.1, bias_correction=True, eps_inside_sqrt=inside)
    given = [tensors(generator) for _ in range(4)]
    gradients, momenta, variances, weights = [[one.clone() for one in some] for some in given]
    track_moments(gradients, momenta, variances, settings)
    warmup_update(weights, momenta, variances, settings, 3)

    whole_gradients, whole_momenta, whole_variances, whole_weights = given
    torch._foreach_lerp_(whole_momenta, whole_gradients, 1 - settings.beta1)
    track_variances(whole_gradients, whole_variances, settings)
    denominators = [one.clone() for one in whole_variances]
    decay(whole_weights, settings)
    root(denominators, settings, 3)
    torch._foreach_addcdiv_(whole_weights, whole_momenta, denominators, -0.01 / (1 - 0.9**3))
    found = [*momenta, *variances, *weights]
    wanted = [*whole_momenta, *whole_variances, *whole_weights]
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))
