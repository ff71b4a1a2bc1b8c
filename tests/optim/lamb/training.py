"""1-bit LAMB as its tests build it, and layers for it to train."""

from __future__ import annotations

import numpy as np

import thinwire

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
