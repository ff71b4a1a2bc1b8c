"""BERT's masking: which tokens the model must restore, and what it sees in their place."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from experiments.tasks.tokenizer import MASK, PAD, SPECIAL_TOKENS

__all__ = ["IGNORED", "mask_tokens", "masked_batch"]

IGNORED = -100
"""Label of a token that is not to be predicted."""

_CHOSEN = 0.15
_MASKED, _REPLACED = 0.8, 0.1


def mask_tokens(
    tokens: NDArray[np.int64], vocabulary: int, random: np.random.Generator
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Chooses 15% of the ordinary tokens, at least one a sequence.

    Of those, 80% become `[MASK]`, 10% a random token, and 10% stay as they are (Devlin et al. 2019).

    Args:
        tokens: int64 `[..., length]`; not changed.
        vocabulary: number of tokens, special ones included.
        random: where the draws come from.

    Returns:
        `(inputs, labels)`, int64, shaped like `tokens`: what the model sees, and the true token where one
        was chosen, `IGNORED` elsewhere.
    """
    first_ordinary = len(SPECIAL_TOKENS)
    ordinary = tokens >= first_ordinary
    draws = np.where(ordinary, random.random(tokens.shape), 1.0)
    # The lowest draw of a sequence counts in any case, so that a short one still asks for something.
    chosen = ordinary & (draws <= np.maximum(_CHOSEN, draws.min(axis=-1, keepdims=True)))
    fate = random.random(tokens.shape)
    replacements = random.integers(first_ordinary, vocabulary, tokens.shape)
    inputs = np.where(chosen & (fate < _MASKED), MASK, tokens)
    replaced = chosen & (fate >= _MASKED) & (fate < _MASKED + _REPLACED)
    return np.where(replaced, replacements, inputs), np.where(chosen, tokens, IGNORED)


def masked_batch(
    documents: Sequence[NDArray[np.int64]], vocabulary: int, random: np.random.Generator, length: int
) -> dict[str, Tensor]:
    """Documents of token numbers, padded to `length` and masked, by the names that Hugging Face's models take."""
    padded = np.full((len(documents), length), PAD, dtype=np.int64)
    for row, one in zip(padded, documents, strict=True):
        row[: len(one)] = one
    inputs, labels = mask_tokens(padded, vocabulary, random)
    named = {"input_ids": inputs, "attention_mask": (padded != PAD).astype(np.int64), "labels": labels}
    return {name: torch.from_numpy(one) for name, one in named.items()}
