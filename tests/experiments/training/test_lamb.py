"""The LAMB that 1-bit LAMB is compared with is the float64 algorithm, and 1-bit LAMB's warmup."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from experiments.training.baseline import AveragedLamb
from tests.optim.lamb.reference import ReferenceOneBitLamb
from thinwire import OneBitLamb
from thinwire.comm import Communicator, threads

SIZES = (5, 70, 1)
OPTIONS = {"lr": 0.02, "weight_decay": 0.1, "max_coeff": 3.0}


@pytest.mark.parametrize("ranks", [1, 3])
def test_lamb_is_the_algorithm_and_the_warmup_of_1_bit_lamb(ranks: int) -> None:
    rng = np.random.default_rng()
    start = [rng.standard_normal(size).astype(np.float32) for size in SIZES]
    start[2][:] = 0  # a layer without a norm
    gradients = [[rng.standard_normal((ranks, size)).astype(np.float32) for size in SIZES] for _ in range(40)]
    reference = ReferenceOneBitLamb(start, ranks, freeze_step=1000, block_size=64, **OPTIONS)
    for of_step in gradients:
        reference.step([of_layer.astype(np.float64) for of_layer in of_step])

    def rank(comm: Communicator) -> list[list[Tensor]]:
        ends = []
        for build in (AveragedLamb, lambda layers, comm, **options: OneBitLamb(layers, comm=comm, **options)):
            layers = [nn.Parameter(torch.from_numpy(layer.copy())) for layer in start]
            optimizer = build(layers, comm, **OPTIONS)
            for of_step in gradients:
                for layer, workers in zip(layers, of_step, strict=True):
                    layer.grad = torch.from_numpy(workers[comm.rank].copy())
                optimizer.step()
            ends.append([layer.detach() for layer in layers])
        return ends

    for plain, onebit in threads.run(rank, ranks):
        for expected, mine, warmup in zip(reference.weights, plain, onebit, strict=True):
            torch.testing.assert_close(mine.double(), torch.from_numpy(expected), rtol=1e-3, atol=1e-5)
            torch.testing.assert_close(warmup, mine, rtol=1e-3, atol=1e-5)
