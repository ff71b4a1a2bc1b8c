"""One text for all ranks: rank 0 reads and tokenizes, the others receive its sequences.

So only rank 0 needs the files, and a tokenizer learned from them cannot differ between ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer

from experiments.common.errors import on_every_rank
from experiments.tasks.batches import pack
from experiments.tasks.corpus import Corpus
from experiments.tasks.tokenizer import SPECIAL_TOKENS, encode, train_tokenizer
from thinwire.comm import Communicator

__all__ = ["Tokens", "share_tokens", "unigram_entropy"]


@dataclass(frozen=True)
class Tokens:
    """A tokenized corpus: sequences, int32 `[count, length]`, the same on every rank.

    Attributes:
        vocabulary: number of different tokens, special ones included.
        training: sequences to train on.
        validation: held-out sequences.
        tokenizer: what made them; on rank 0 only.
    """

    vocabulary: int
    training: NDArray[np.int32]
    validation: NDArray[np.int32]
    tokenizer: Tokenizer | None


def share_tokens(
    comm: Communicator, read: Callable[[], Corpus], vocabulary: int, length: int, validation_sequences: int
) -> Tokens:
    """Rank 0 reads, learns a tokenizer and packs; every rank gets the same sequences.

    Args:
        comm: all ranks call together.
        read: gives the corpus; called on rank 0 only.
        vocabulary: most tokens to learn.
        length: tokens a sequence, `[CLS]` and `[SEP]` included.
        validation_sequences: how many held-out sequences to keep at most, evenly spread.

    Raises:
        InputError: on every rank, if rank 0 could not read or use the corpus.
    """

    def prepare() -> Tokens | None:
        if comm.rank:
            return None
        corpus = read()
        learned = train_tokenizer(corpus.training, vocabulary)
        training = pack(encode(learned, corpus.training), length)
        held_out = pack(encode(learned, corpus.validation), length)
        keep = np.linspace(0, len(held_out) - 1, min(len(held_out), validation_sequences)).astype(np.int64)
        return Tokens(learned.get_vocab_size(), training, held_out[keep], learned)

    tokens = on_every_rank(comm, prepare)
    header = torch.zeros(3, dtype=torch.int64)
    if tokens is not None:
        header = torch.tensor([tokens.vocabulary, len(tokens.training), len(tokens.validation)])
    comm.broadcast(header)
    size, training_count, validation_count = header.tolist()
    sequences = torch.empty((training_count + validation_count, length), dtype=torch.int32)
    if tokens is not None:
        sequences = torch.from_numpy(np.concatenate([tokens.training, tokens.validation]))
    comm.broadcast(sequences)
    rows = sequences.numpy()
    return Tokens(size, rows[:training_count], rows[training_count:], None if tokens is None else tokens.tokenizer)


def unigram_entropy(tokens: Tokens) -> float:
    """Loss, in nats, of guessing held-out tokens by how frequent each token is in the training text."""
    first = len(SPECIAL_TOKENS)
    seen = np.bincount(tokens.training.ravel(), minlength=tokens.vocabulary)[first:] + 1.0
    asked = np.bincount(tokens.validation.ravel(), minlength=tokens.vocabulary)[first:]
    return float(-(asked * np.log(seen / seen.sum())).sum() / asked.sum())
