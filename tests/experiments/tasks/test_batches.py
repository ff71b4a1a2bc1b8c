"""Sequences of a rank at a step: packed, shuffled, masked."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from experiments.common.errors import InputError
from experiments.tasks.batches import MaskedBatches, pack, random_batch
from experiments.tasks.masking import IGNORED, mask_tokens
from experiments.tasks.tokenizer import CLS, MASK, SEP, SPECIAL_TOKENS


def test_packing_keeps_the_order_and_frames_each_sequence() -> None:
    run = np.arange(FIRST, FIRST + 25, dtype=np.int32)
    sequences = pack(run, 10)
    assert sequences.shape == (3, 10)
    assert (sequences[:, 0] == CLS).all()
    assert (sequences[:, -1] == SEP).all()
    assert np.array_equal(sequences[:, 1:-1].ravel(), run[:24])


def test_too_few_tokens_for_a_sequence_are_refused() -> None:
    with pytest.raises(InputError, match="--sequence-length"):
        pack(np.arange(7, dtype=np.int32), 10)


def test_a_batch_depends_on_seed_step_and_rank_only() -> None:
    sequences = pack(tokens(1, 5000).ravel().astype(np.int32), 12)
    batches, again = MaskedBatches(sequences, VOCABULARY), MaskedBatches(sequences, VOCABULARY)
    first = batches.training(seed=3, step=7, rank=1, ranks=2, size=5)
    batches.training(seed=3, step=8, rank=1, ranks=2, size=5)
    repeated = again.training(seed=3, step=7, rank=1, ranks=2, size=5)
    assert all(torch.equal(a, b) for a, b in zip(first, repeated, strict=True))
    for other in (
        {"seed": 4, "step": 7, "rank": 1},
        {"seed": 3, "step": 8, "rank": 1},
        {"seed": 3, "step": 7, "rank": 0},
    ):
        assert not bool((batches.training(**other, ranks=2, size=5)[0] == first[0]).all())


def test_a_pass_over_the_corpus_meets_every_sequence_once() -> None:
    count, ranks, size = 24, 3, 2
    sequences = np.full((count, 6), SEP, dtype=np.int32)
    sequences[:, 1] = np.arange(count)
    batches = MaskedBatches(sequences, VOCABULARY)
    batches_of_a_pass = (
        batches.training(seed=0, step=step, rank=rank, ranks=ranks, size=size)
        for step in range(count // (ranks * size))
        for rank in range(ranks)
    )
    seen = sorted(_origin(inputs, labels) for pair in batches_of_a_pass for inputs, labels in zip(*pair, strict=True))
    assert seen == list(range(count))


def _origin(inputs: Tensor, labels: Tensor) -> int:
    """The number in second place, whether it was masked or not."""
    return int(inputs[1]) if int(labels[1]) == IGNORED else int(labels[1])


def test_random_batches_ask_for_every_sixth_token() -> None:
    inputs, labels = random_batch(3, 13, VOCABULARY, seed=4)
    asked = labels != IGNORED
    assert asked.sum(dim=1).tolist() == [3, 3, 3]
    assert torch.equal(labels[asked], inputs[asked])
    assert int(inputs.min()) >= FIRST
    assert torch.equal(inputs, random_batch(3, 13, VOCABULARY, seed=4)[0])
    assert not torch.equal(inputs, random_batch(3, 13, VOCABULARY, seed=5)[0])


VOCABULARY = 500
FIRST = len(SPECIAL_TOKENS)


def tokens(rows: int, length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(FIRST, VOCABULARY, (rows, length))


def test_proportions_are_those_of_the_paper() -> None:
    original = tokens(2000, 100)
    inputs, labels = mask_tokens(original, VOCABULARY, np.random.default_rng(1))
    chosen = labels != IGNORED
    assert chosen.mean() == pytest.approx(0.15, abs=0.005)
    assert (inputs[chosen] == MASK).mean() == pytest.approx(0.8, abs=0.01)
    assert (inputs[chosen] == original[chosen]).mean() == pytest.approx(0.1 + 0.1 / VOCABULARY, abs=0.01)


@given(rows=st.integers(1, 6), length=st.integers(1, 40), seed=st.integers(0, 2**32))
def test_only_chosen_ordinary_tokens_change(rows: int, length: int, seed: int) -> None:
    original = np.random.default_rng(seed).integers(0, VOCABULARY, (rows, length))
    before = original.copy()
    inputs, labels = mask_tokens(original, VOCABULARY, np.random.default_rng(seed))
    chosen = labels != IGNORED
    assert np.array_equal(original, before)
    assert np.array_equal(inputs[~chosen], original[~chosen])
    assert np.array_equal(labels[chosen], original[chosen])
    assert (original[chosen] >= FIRST).all()
    assert (chosen.any(axis=1) == (original >= FIRST).any(axis=1)).all()
    assert ((inputs[chosen] == MASK) | (inputs[chosen] >= FIRST)).all()
