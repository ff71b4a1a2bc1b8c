"""The Lion that 1-bit Lion is compared with is the float64 algorithm, on the average of all ranks' gradients."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from experiments.training.baseline import AveragedLion
from experiments.training.lion import Lion
from thinwire.comm import Communicator, threads

SIZES = (5, 70, 1)
LEARNING_RATE, BETA1, BETA2, DECAY = 0.02, 0.8, 0.95, 0.1


def steps_in_float64(weights: np.ndarray, gradients: list[np.ndarray]) -> tuple[np.ndarray, float]:
    """Weights after the steps, one coordinate after another, and how near to zero any direction came."""
    ends = []
    nearest = np.inf
    for coordinate, start in enumerate(weights.astype(np.float64)):
        weight, momentum = float(start), 0.0
        for of_step in gradients:
            gradient = float(of_step[coordinate])
            mixed = BETA1 * momentum + (1 - BETA1) * gradient
            nearest = min(nearest, abs(mixed))
            direction = (mixed > 0) - (mixed < 0)
            weight -= LEARNING_RATE * (direction + DECAY * weight)
            momentum = BETA2 * momentum + (1 - BETA2) * gradient
        ends.append(weight)
    return np.array(ends), nearest


@pytest.mark.parametrize("ranks", [1, 3])
def test_lion_is_the_algorithm(ranks: int) -> None:
    rng = np.random.default_rng(11)
    start = [rng.standard_normal(size).astype(np.float32) for size in SIZES]
    gradients = [[rng.standard_normal((ranks, size)).astype(np.float32) for size in SIZES] for _ in range(40)]
    expected = []
    for layer, weights in enumerate(start):
        averages = [of_step[layer].astype(np.float64).mean(axis=0) for of_step in gradients]
        ends, nearest = steps_in_float64(weights, averages)
        # Otherwise rounding might decide a sign.
        assert nearest > 1e-6
        expected.append(ends)

    def rank(comm: Communicator) -> list[Tensor]:
        layers = [nn.Parameter(torch.from_numpy(layer.copy())) for layer in start]
        options = {"lr": LEARNING_RATE, "betas": (BETA1, BETA2), "weight_decay": DECAY}
        optimizer = AveragedLion(layers, comm, **options)
        for of_step in gradients:
            for layer, workers in zip(layers, of_step, strict=True):
                layer.grad = torch.from_numpy(workers[comm.rank].copy())
            optimizer.step()
        return [layer.detach() for layer in layers]

    for found in threads.run(rank, ranks):
        for wanted, mine in zip(expected, found, strict=True):
            torch.testing.assert_close(mine.double(), torch.from_numpy(wanted), rtol=1e-5, atol=1e-6)


def test_a_gradient_of_zero_moves_nothing_but_decay_does() -> None:
    weight, alone = nn.Parameter(torch.full((3,), 2.0)), nn.Parameter(torch.ones(3))
    optimizer = Lion([weight, alone], lr=0.5, weight_decay=0.25)
    weight.grad = torch.tensor([0.0, 1.0, -1.0])
    optimizer.step()
    assert weight.tolist() == [1.75, 1.25, 2.25]
    assert alone.tolist() == [1.0, 1.0, 1.0]


def test_a_closure_is_called_and_its_loss_returned() -> None:
    weight = nn.Parameter(torch.tensor([1.0]))
    optimizer = Lion([weight], lr=0.5)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = 3 * weight.sum()
        loss.backward()
        return loss

    assert optimizer.step(closure) == 3.0
    assert weight.item() == 0.5
