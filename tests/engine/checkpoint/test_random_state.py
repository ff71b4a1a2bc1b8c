"""Generators go on where they were, or afresh in a way that depends on what it should and nothing else."""

from __future__ import annotations

import json
import random

import numpy as np
import torch

from thinwire.engine.saved_job import load_random_state, random_tensors, random_values, reseed

CPU = torch.device("cpu")


def draw() -> tuple[float, ...]:
    return (float(torch.randn(1)), random.gauss(0, 1), float(np.random.randn()))


def test_all_generators_go_on() -> None:
    for _ in range(3):  # an odd number leaves half of a pair of normal numbers behind
        draw()
    tensors, values = random_tensors(CPU), json.loads(json.dumps(random_values()))
    expected = [draw() for _ in range(4)]
    draw()
    load_random_state(tensors, values, CPU)
    assert [draw() for _ in range(4)] == expected


def test_seeds() -> None:
    drawn = []
    for entropy in ((1, 2, 3), (1, 2, 4), (2, 1, 3), (1, 2, 3)):
        reseed(*entropy)
        drawn.append(draw())
    assert drawn[0] == drawn[3]
    for one in zip(*drawn[:3], strict=True):
        assert len(set(one)) == 3
