"""Masked-language modelling on one text for all ranks: rank 0 reads and tokenizes, the others receive."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor
from transformers import BertForMaskedLM

from experiments import tokenizer as wordpiece
from experiments.batches import MaskedBatches, Purpose, pack, random_at
from experiments.corpus import Corpus
from experiments.errors import on_every_rank
from experiments.models import build_bert, masked_loss
from experiments.sizes import BertSize
from thinwire.comm import Communicator

__all__ = ["MaskedLanguageTask", "Tokens", "share_tokens", "unigram_entropy"]


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
        learned = wordpiece.train(corpus.training, vocabulary)
        training = pack(wordpiece.encode(learned, corpus.training), length)
        held_out = pack(wordpiece.encode(learned, corpus.validation), length)
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
    return Tokens(size, rows[:training_count], rows[training_count:], tokens and tokens.tokenizer)


def unigram_entropy(tokens: Tokens) -> float:
    """Loss, in nats, of guessing held-out tokens by how frequent each token is in the training text."""
    first = len(wordpiece.SPECIAL_TOKENS)
    seen = np.bincount(tokens.training.ravel(), minlength=tokens.vocabulary)[first:] + 1.0
    asked = np.bincount(tokens.validation.ravel(), minlength=tokens.vocabulary)[first:]
    return float(-(asked * np.log(seen / seen.sum())).sum() / asked.sum())


class MaskedLanguageTask:
    """The task that `experiments.training` trains: BERT restores masked tokens."""

    def __init__(self, tokens: Tokens, size: BertSize, batch_size: int, dropout: float) -> None:
        """Takes the sequences, the model's size, sequences a rank a step, and the dropout rate."""
        self.size = size
        self.batch_size = batch_size
        self.dropout = dropout
        self.vocabulary = tokens.vocabulary
        self.length = tokens.training.shape[1]
        self._training = MaskedBatches(tokens.training, tokens.vocabulary)
        self._validation = MaskedBatches(tokens.validation, tokens.vocabulary)

    def build_model(self, seed: int) -> BertForMaskedLM:
        """A BERT for this vocabulary and sequence length."""
        return build_bert(self.size, self.vocabulary, self.length, self.dropout, seed)

    def training_loss(self, model: BertForMaskedLM, seed: int, step: int, rank: int, ranks: int) -> Tensor:
        """Mean over this rank's chosen tokens; dropout, too, depends on (seed, step, rank) only."""
        inputs, labels = self._training.training(seed, step, rank, ranks, self.batch_size)
        torch.manual_seed(int(random_at(Purpose.DROPOUT, seed, step, rank).integers(2**63)))
        total, count = masked_loss(model, inputs, labels)
        return total / max(1, count)

    def validation_sum(self, model: BertForMaskedLM, rank: int, ranks: int) -> tuple[float, int]:
        """Every `ranks`-th batch of the held-out sequences, under masks that never change."""
        sequences = len(self._validation.sequences)
        total, count = 0.0, 0
        for start in range(rank * self.batch_size, sequences, ranks * self.batch_size):
            rows = range(start, min(start + self.batch_size, sequences))
            loss, chosen = masked_loss(model, *self._validation.fixed(rows))
            total, count = total + loss.item(), count + chosen
        return total, count
