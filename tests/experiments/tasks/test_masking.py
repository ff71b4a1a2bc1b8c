"""What masking hides: how much, as what, and never a special token."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.tasks.masking import IGNORED, mask_tokens
from experiments.tasks.tokenizer import MASK, SPECIAL_TOKENS

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
