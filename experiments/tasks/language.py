"""Masked-language modelling: the task that `experiments.training.trainer` trains BERT on."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from experiments.tasks.batches import MaskedBatches, Purpose, random_at
from experiments.tasks.masking import IGNORED
from experiments.tasks.models import MaskedBert, PreLayerNormBert, build_bert, build_pre_ln_bert
from experiments.tasks.sizes import BertSize
from experiments.tasks.tokens import Tokens

__all__ = ["GlobalBatchTask", "MaskedLanguageTask"]

Losses = Callable[[Tensor, Tensor], tuple[Tensor, int]]
"""A BERT, post-LN or pre-LN, or what runs one."""


class MaskedLanguageTask:
    """BERT restores masked tokens; batches, masks and dropout are functions of (seed, step, rank) only."""

    def __init__(
        self, tokens: Tokens, size: BertSize, batch_size: int, dropout: float, *, pre_ln: bool = False
    ) -> None:
        """Takes the sequences, the model's size and kind, sequences a rank a step, and the dropout rate."""
        self.size = size
        self.batch_size = batch_size
        self.dropout = dropout
        self.pre_ln = pre_ln
        self.vocabulary = tokens.vocabulary
        self.length = tokens.training.shape[1]
        self._training = MaskedBatches(tokens.training, tokens.vocabulary)
        self._validation = MaskedBatches(tokens.validation, tokens.vocabulary)

    def build_model(self, seed: int) -> MaskedBert | PreLayerNormBert:
        """A BERT for this vocabulary and sequence length."""
        build = build_pre_ln_bert if self.pre_ln else build_bert
        return build(self.size, self.vocabulary, self.length, self.dropout, seed)

    def training_loss(self, model: Losses, seed: int, step: int, rank: int, ranks: int) -> Tensor:
        """Mean over this rank's chosen tokens; dropout, too, depends on (seed, step, rank) only."""
        inputs, labels = self._training.training(seed, step, rank, ranks, self.batch_size)
        torch.manual_seed(int(random_at(Purpose.DROPOUT, seed, step, rank).integers(2**63)))
        total, count = model(inputs, labels)
        return total / max(1, count)

    def validation_sum(self, model: Losses, rank: int, ranks: int) -> tuple[float, int]:
        """Every `ranks`-th batch of the held-out sequences, under masks that never change."""
        sequences = len(self._validation.sequences)
        total, count = 0.0, 0
        for first in range(0, sequences, ranks * self.batch_size):
            start = first + rank * self.batch_size
            rows = range(start, min(start + self.batch_size, sequences))
            # ZeRO stage 3 gathers layers in every forward: a rank that has no batch left takes part all the same.
            loss, chosen = model(*self._validation.fixed(rows or range(1)))
            if rows:
                total, count = total + loss.item(), count + chosen
        return total, count


class GlobalBatchTask(MaskedLanguageTask):
    """The same batch for any number of ranks: `batch_size` counts sequences over all of them, dropout is off."""

    def __init__(self, tokens: Tokens, size: BertSize, batch_size: int) -> None:
        """Takes the sequences, the model's size, and sequences a step."""
        super().__init__(tokens, size, batch_size, dropout=0.0)

    def training_loss(self, model: Losses, seed: int, step: int, rank: int, ranks: int) -> Tensor:
        """The rank's share of the batch, scaled so that the mean over ranks is the mean over all chosen tokens."""
        inputs, labels = self._training.training(seed, step, 0, 1, self.batch_size)
        mine = slice(rank * self.batch_size // ranks, (rank + 1) * self.batch_size // ranks)
        total, _ = model(inputs[mine], labels[mine])
        chosen = int((labels != IGNORED).sum())
        return total * (ranks / max(1, chosen))
