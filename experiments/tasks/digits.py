"""Handwritten digits: scikit-learn's 1,797 images of 8x8 pixels and a small convolutional classifier.

A second task, far from text and done in seconds, for the convergence plots.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from sklearn.datasets import load_digits
from torch import Tensor, nn

from experiments.tasks.batches import Purpose, random_at, seeded

__all__ = ["DigitsTask"]

_HOLD_OUT_EVERY = 5


class DigitsTask:
    """The task that `experiments.training.trainer` trains: which digit an image shows."""

    def __init__(self, batch_size: int) -> None:
        """Loads the images, fp32 `[count, 1, 8, 8]` in 0..1, and holds every fifth out for validation."""
        digits = load_digits()
        images = torch.from_numpy(digits.images).float().unsqueeze(1) / 16
        labels = torch.from_numpy(digits.target).long()
        held_out = torch.arange(len(labels)) % _HOLD_OUT_EVERY == 0
        self.batch_size = batch_size
        self._training = images[~held_out], labels[~held_out]
        self._validation = images[held_out], labels[held_out]

    def build_model(self, seed: int) -> nn.Module:
        """Two convolutions and two linear layers, about 85,000 parameters."""
        with seeded(seed):
            return nn.Sequential(
                nn.Conv2d(1, 32, 3, padding=1),
                nn.ReLU(),
                nn.Conv2d(32, 64, 3, padding=1),
                nn.ReLU(),
                nn.MaxPool2d(2),
                nn.Flatten(),
                nn.Linear(64 * 4 * 4, 64),
                nn.ReLU(),
                nn.Linear(64, 10),
            )

    def training_loss(self, model: nn.Module, seed: int, step: int, rank: int, ranks: int) -> Tensor:
        """Mean cross-entropy of images drawn by (seed, step, rank), each shifted by up to one pixel."""
        images, labels = self._training
        random = random_at(Purpose.TRAINING_MASK, seed, step, rank)
        chosen = torch.from_numpy(random.integers(0, len(labels), self.batch_size))
        down, right = random.integers(-1, 2, 2).tolist()
        shifted = torch.roll(images[chosen], (down, right), dims=(2, 3))
        return F.cross_entropy(model(shifted), labels[chosen])

    def validation_sum(self, model: nn.Module, rank: int, ranks: int) -> tuple[float, int]:
        """Every `ranks`-th held-out image."""
        images, labels = (one[rank::ranks] for one in self._validation)
        return F.cross_entropy(model(images), labels, reduction="sum").item(), len(labels)
