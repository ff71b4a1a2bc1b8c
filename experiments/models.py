"""BERT in the sizes of Google's miniatures and of the paper, with random weights and no download."""

from __future__ import annotations

import os

# Before the import: nothing here may reach for the network, not even to look for a newer version.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_OFFLINE", "1")

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from transformers import BertConfig, BertForMaskedLM

from experiments.masking import IGNORED
from experiments.sizes import BertSize

__all__ = ["MaskedBert", "build_bert"]


class MaskedBert(BertForMaskedLM):
    """Hugging Face's BERT, whose forward is the loss: what wraps or shards it sees nothing but calls of the module."""

    def forward(self, inputs: Tensor, labels: Tensor) -> tuple[Tensor, int]:
        """Summed cross-entropy, in nats, over the chosen tokens, and how many those are.

        `inputs` and `labels` are int64 `[sequences, length]`. The vocabulary's logits are computed where a label asks
        for them only: 15% of the places, and the widest product of a small model.
        """
        hidden = self.bert(input_ids=inputs).last_hidden_state
        chosen = labels != IGNORED
        logits = self.cls(hidden[chosen])
        return F.cross_entropy(logits.float(), labels[chosen], reduction="sum"), int(chosen.sum())


def build_bert(size: BertSize, vocabulary: int, positions: int, dropout: float, seed: int) -> MaskedBert:
    """A BERT with random weights that depend on the seed only, in training mode."""
    torch.manual_seed(seed)
    config = BertConfig(
        vocab_size=vocabulary,
        hidden_size=size.width,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        intermediate_size=4 * size.width,
        max_position_embeddings=positions,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )
    return MaskedBert(config).train()
