"""Training with the rounding of quantised layers: the same answers afterwards, and better ones than without."""

import copy

import pytest
import torch
from torch import nn

from tests.refusing import refused
from thinwire.inference import convert, prepare, prepare_qat
from thinwire.inference.rounding_in_training import undo_qat

DTYPES = {"int8-dynamic": torch.float32, "int8": torch.bfloat16, "int4": torch.bfloat16}


def network(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))


@pytest.mark.parametrize(("how", "tolerance"), [("int8-dynamic", 1e-6), ("int8", 0.01), ("int4", 0.01)])
def test_what_was_trained_so_answers_as_it_did(how, tolerance) -> None:
    """Rounding of levels is the same; products in bf16 round what they are given besides."""
    model = prepare_qat(network(1), how)
    exact, inputs = copy.deepcopy(model), torch.randn(9, 64)
    with torch.no_grad():
        answers, plain = model(inputs), undo_qat(exact)(inputs)
    found = convert(model)(inputs.to(DTYPES[how])).float()
    assert (found - answers).norm() < tolerance * answers.norm()
    if how != "int8":  # whose levels are finer than bf16's products
        assert (answers - plain).norm() > 2 * (found - answers).norm()
    assert torch.equal(model(inputs), answers)  # it rounds on
    assert list(model.state_dict()) == list(exact.state_dict())


@pytest.mark.parametrize("how", DTYPES)
def test_matrices_have_the_same_levels(how) -> None:
    """As products with the unit matrix show."""
    torch.manual_seed(0)
    model = prepare_qat(nn.Sequential(nn.Linear(64, 80, bias=False)), how)
    with torch.no_grad():
        trained = model(torch.eye(64))
    found = convert(model)(torch.eye(64).to(DTYPES[how])).float()
    exact = model[0].weight.T.detach()
    torch.testing.assert_close(found, trained, rtol=0 if how == "int8-dynamic" else 2**-8, atol=1e-6)
    assert (found - trained).norm() < 0.5 * (found - exact).norm()


@pytest.mark.parametrize("how", DTYPES)
def test_gradients_pass_as_if_nothing_were_rounded(how) -> None:
    torch.manual_seed(0)
    layer, inputs, slopes = nn.Linear(64, 80), torch.randn(5, 64, requires_grad=True), torch.randn(5, 80)
    model = prepare_qat(nn.Sequential(layer), how)
    model(inputs).backward(slopes)
    given = inputs.detach()
    if how == "int8-dynamic":  # they met rounded inputs
        scale, zero = torch._choose_qparams_per_tensor(given, True)
        given = torch.fake_quantize_per_tensor_affine(given, scale, zero, 0, 127)
    torch.testing.assert_close(layer.weight.grad, slopes.T @ given)
    torch.testing.assert_close(layer.bias.grad, slopes.sum(dim=0))
    with torch.no_grad():  # inputs met rounded weights: what the layer gives of a unit matrix
        undone = convert(model)(torch.eye(64).to(DTYPES[how])).float() - layer.bias
    torch.testing.assert_close(inputs.grad, slopes @ undone.T, rtol=0.02, atol=0.05)


def test_training_with_4_bits_loses_less_than_rounding_afterwards() -> None:
    """Of a network that learns another's answers, over three seeds: the loss above that of equally many exact steps."""
    lost = {"before": 0.0, "afterwards": 0.0}
    for seed in (1, 2, 3):
        teacher, student = network(seed), network(seed + 10)
        generator = torch.Generator().manual_seed(seed)

        def train(model, steps, rate, teacher=teacher, generator=generator):
            optimizer = torch.optim.Adam(model.parameters(), lr=rate)
            schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, steps)
            for _ in range(steps):
                inputs = torch.randn(128, 64, generator=generator)
                loss = nn.functional.mse_loss(model(inputs), teacher(inputs).detach())
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                schedule.step()
            return model

        def tested(model, dtype=torch.float32, seed=seed, teacher=teacher):
            inputs = torch.randn(1024, 64, generator=torch.Generator().manual_seed(seed + 100))
            with torch.no_grad():
                return nn.functional.mse_loss(model(inputs.to(dtype)).float(), teacher(inputs)).item()

        train(student, 200, 3e-3)
        rounding = prepare_qat(copy.deepcopy(student), "int4")
        exact = train(student, 100, 1e-3)
        floor = tested(exact)
        lost["afterwards"] += tested(prepare(exact, torch.bfloat16, "int4"), torch.bfloat16) - floor
        lost["before"] += tested(convert(train(rounding, 100, 1e-3)), torch.bfloat16) - floor
    assert 0 < lost["before"] < 0.7 * lost["afterwards"], lost


def test_bad_input() -> None:
    refused(ValueError, "quantize is 'int3', expected 'int8-dynamic', 'int8', 'int4'", prepare_qat, network(0), "int3")
    refused(ValueError, "ReLU has no linear layer that int8 takes", prepare_qat, nn.ReLU(), "int8")
    with pytest.raises(ValueError, match="Sequential rounds to int8 already: convert it first"):
        prepare_qat(prepare_qat(network(0), "int8"), "int4")
    refused(ValueError, "does not round: give what prepare_qat returned", convert, network(0))
