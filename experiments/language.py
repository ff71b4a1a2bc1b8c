"""Masked-language modelling: the task that `experiments.training` trains BERT on."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import BertForMaskedLM

from experiments.batches import MaskedBatches, Purpose, random_at
from experiments.models import build_bert, masked_loss
from experiments.sizes import BertSize
from experiments.tokens import Tokens

__all__ = ["MaskedLanguageTask"]


class MaskedLanguageTask:
    """BERT restores masked tokens; batches, masks and dropout are functions of (seed, step, rank) only."""

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
