"""1-bit LAMB is LAMB until the freeze, the paper's algorithm after it, and bit for bit the same on every rank."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import thinwire
from tests.compress.lamb_algorithm import ReferenceOneBitLamb
from thinwire.comm import threads

SIZES = (7, 130, 64, 1, 99)


def make_lamb(model, comm, **options):
    options = {"lr": 1e-2, "freeze_step": 10, "block_size": 64} | options
    return thinwire.OneBitLamb(model.parameters(), comm=comm, **options)


def layers_and_gradients(world_size, steps, seed):
    """Layers of very different magnitude, and gradients [step][layer][world_size, numel] to match."""
    rng = np.random.default_rng(seed)
    start = [rng.standard_normal(size).astype(np.float32) * 10.0**-number for number, size in enumerate(SIZES)]
    magnitudes = 10.0 ** -rng.uniform(0, 4, len(SIZES))
    gradients = [
        [
            (magnitude * (rng.standard_normal((world_size, size)) + 0.3)).astype(np.float32)
            for size, magnitude in zip(SIZES, magnitudes, strict=True)
        ]
        for _ in range(steps)
    ]
    return start, gradients


@pytest.mark.parametrize("options", [{}, {"weight_decay": 0.3, "betas": (0.8, 0.9), "factor_threshold": 0.03}])
@pytest.mark.parametrize("compress", ["update", "momentum"])
@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_equals_the_algorithm_in_float64_over_100_steps(world_size, compress, options) -> None:
    steps = 100
    start, gradients = layers_and_gradients(world_size, steps, seed=world_size)
    settings = {"lr": 1e-2, "freeze_step": 20, "block_size": 64, "compress": compress} | options
    reference = ReferenceOneBitLamb(start, world_size, **settings)
    expected = [reference.step([layer.astype(np.float64) for layer in payloads]) for payloads in gradients]

    def rank(comm):
        parameters = [nn.Parameter(torch.from_numpy(layer.copy())) for layer in start]
        optimizer = thinwire.OneBitLamb(parameters, comm=comm, **settings)
        coefficients = []
        for payloads in gradients:
            for parameter, layer in zip(parameters, payloads, strict=True):
                parameter.grad = torch.from_numpy(layer[comm.rank])
            optimizer.step()
            coefficients.append(optimizer.get_lamb_coeffs())
        return [parameter.detach().double().numpy() for parameter in parameters], coefficients

    for result, coefficients in threads.run(rank, world_size):
        np.testing.assert_allclose(coefficients, expected, rtol=1e-4)
        for mine, wanted, begin in zip(result, reference.weights, start, strict=True):
            assert np.linalg.norm(mine - wanted) <= 1e-4 * np.linalg.norm(wanted - begin)
