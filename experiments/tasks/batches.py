"""Packed sequences, and the batch that a rank takes at a step.

A batch is a function of (seed, step, rank) and of nothing else, so a resumed run meets the same batches.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from experiments.common.errors import InputError
from experiments.tasks.masking import IGNORED, mask_tokens
from experiments.tasks.tokenizer import CLS, SEP, SPECIAL_TOKENS

__all__ = ["MaskedBatches", "Purpose", "pack", "random_at", "random_batch", "seeded"]

_ASKED_EVERY = 6
_SEEDING = threading.Lock()


class Purpose(IntEnum):
    """What draws are for; keys of different purposes never meet."""

    ORDER = 1
    TRAINING_MASK = 2
    VALIDATION_MASK = 3
    DROPOUT = 4


def random_at(purpose: Purpose, *key: int) -> np.random.Generator:
    """A generator that depends on purpose and key only: the same ones give the same draws."""
    return np.random.default_rng(np.random.SeedSequence([purpose, *key]))


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seeds torch's own generator for what is built inside: ranks that are threads share it, and take turns."""
    with _SEEDING:
        torch.manual_seed(seed)
        yield


def pack(tokens: NDArray[np.int32], length: int) -> NDArray[np.int32]:
    """Cuts a run of tokens `[n]` into whole sequences `[count, length]` between `[CLS]` and `[SEP]`.

    Raises:
        InputError: there are not enough tokens for one sequence.
    """
    inside = length - 2
    count = len(tokens) // inside
    if count == 0:
        raise InputError(
            f"the corpus is too short: a sequence of {length} needs {inside} tokens in the training text "
            f"and in the held-out text, but one of them has {len(tokens)}; "
            "give more text, or a smaller --sequence-length"
        )
    sequences = np.empty((count, length), dtype=np.int32)
    sequences[:, 0], sequences[:, -1] = CLS, SEP
    sequences[:, 1:-1] = tokens[: count * inside].reshape(count, inside)
    return sequences


def random_batch(sequences: int, length: int, vocabulary: int, seed: int) -> tuple[Tensor, Tensor]:
    """`(inputs, labels)`, int64 `[sequences, length]`, for timing: random tokens, of which every sixth is asked for.

    What the tokens are does not change how long a step takes.
    """
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randint(len(SPECIAL_TOKENS), vocabulary, (sequences, length), generator=generator)
    labels = torch.full_like(inputs, IGNORED)
    labels[:, ::_ASKED_EVERY] = inputs[:, ::_ASKED_EVERY]
    return inputs, labels


class MaskedBatches:
    """Draws masked batches from packed sequences, in an order shuffled anew at each pass."""

    def __init__(self, sequences: NDArray[np.int32], vocabulary: int) -> None:
        """Takes sequences `[count, length]` and the number of tokens in the vocabulary."""
        self.sequences = sequences
        self.vocabulary = vocabulary

    def training(self, seed: int, step: int, rank: int, ranks: int, size: int) -> tuple[Tensor, Tensor]:
        """What `rank` of `ranks` trains on at `step`: `(inputs, labels)`, int64 `[size, length]`.

        In a pass over the corpus no two ranks and no two steps share a sequence.
        """
        first = (step * ranks + rank) * size
        count = len(self.sequences)
        places = [divmod(position, count) for position in range(first, first + size)]
        rows = [_shuffled(seed, epoch, count)[place] for epoch, place in places]
        return self._masked(np.asarray(rows), random_at(Purpose.TRAINING_MASK, seed, step, rank))

    def fixed(self, rows: range) -> tuple[Tensor, Tensor]:
        """Chosen rows under masks that never change, for validation: int64 `[len(rows), length]`."""
        batches = [self._masked(np.asarray([row]), random_at(Purpose.VALIDATION_MASK, row)) for row in rows]
        return torch.cat([inputs for inputs, _ in batches]), torch.cat([labels for _, labels in batches])

    def _masked(self, rows: NDArray[np.int64], random: np.random.Generator) -> tuple[Tensor, Tensor]:
        tokens = self.sequences[rows].astype(np.int64)
        inputs, labels = mask_tokens(tokens, self.vocabulary, random)
        return torch.from_numpy(inputs), torch.from_numpy(labels)


@lru_cache(maxsize=2)
def _shuffled(seed: int, epoch: int, count: int) -> NDArray[np.int64]:
    return random_at(Purpose.ORDER, seed, epoch).permutation(count)
