"""Dropout without a stored mask: the share, the same mask in every derivative, and torch's where it does not apply."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from thinwire.transformers.dropout import SeededDropout, drop


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_the_share_by_element_seed_and_neighbour(p) -> None:
    one, other = (drop(torch.ones(999, 1001), p, seed) == 0 for seed in (5, 5 + (1 << 32)))
    kept = drop(torch.ones(999, 1001), p, 5)
    torch.testing.assert_close(kept.unique(), torch.tensor([0.0, 1 / (1 - p)]))
    for shape, mask in ((p, one), (p * p, one & other), (p * p, one[:, 1:] & one[:, :-1]), (p * p, one[1:] & one[:-1])):
        assert float(mask.float().mean()) == pytest.approx(shape, abs=4e-3)
    assert float(one.float().mean(dim=0).std()) < 1.2 * (p * (1 - p) / 999) ** 0.5


@pytest.mark.parametrize("shape", [(), (0, 3), (1,), (33,), (3, 70_001)])
def test_every_derivative_has_the_mask(shape) -> None:
    inputs = torch.randn(shape, requires_grad=True)
    found = SeededDropout(0.3)(inputs)
    factors = (found / inputs).detach().nan_to_num()
    (gradient,) = torch.autograd.grad(found, inputs, torch.ones_like(found).requires_grad_(), create_graph=True)
    torch.testing.assert_close(gradient, factors)
    assert gradient.requires_grad
    transposed = torch.randn(shape, requires_grad=True).T if len(shape) == 2 else inputs
    torch.manual_seed(3)
    expected = SeededDropout(0.3)(transposed.contiguous())
    torch.manual_seed(3)
    assert torch.equal(SeededDropout(0.3)(transposed), expected)


def test_recomputed_activations_have_the_same_mask() -> None:
    layer = nn.Sequential(nn.Linear(8, 64), SeededDropout(0.5), nn.Linear(64, 8))
    inputs, gradients = torch.randn(4, 8), []
    for run in (layer, lambda given: checkpoint(layer, given, use_reentrant=False)):
        torch.manual_seed(0)
        run(inputs).square().sum().backward()
        gradients.append([one.grad for one in layer.parameters()])
        layer.zero_grad()
    assert all(map(torch.equal, *gradients))


def test_what_is_not_finite_stays_so() -> None:
    assert drop(torch.full((40,), torch.nan), 0.5, 1).isnan().all()


@pytest.mark.parametrize(("p", "dtype"), [(0.0, torch.float32), (1.0, torch.float32), (0.5, torch.bfloat16)])
def test_other_inputs_take_torch_s(p, dtype) -> None:
    inputs, results = torch.randn(50, dtype=dtype), []
    for layer in (nn.Dropout(p), SeededDropout(p)):
        torch.manual_seed(0)
        results.append(layer(inputs))
    assert torch.equal(*results)
    assert torch.equal(layer.eval()(inputs), inputs)
