"""BERT in the sizes of Google's miniatures and of the paper, with random weights and no download."""

from __future__ import annotations

import os
from typing import Any

# Before the import: nothing here may reach for the network, not even to look for a newer version.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_OFFLINE", "1")

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    RobertaPreLayerNormConfig,
    RobertaPreLayerNormForMaskedLM,
)

from experiments.tasks.batches import seeded
from experiments.tasks.masking import IGNORED
from experiments.tasks.sizes import BertSize
from experiments.tasks.tokenizer import CLS, PAD, SEP

__all__ = ["MaskedBert", "PreLayerNormBert", "build_bert", "build_pre_ln_bert"]


class MaskedBert(BertForMaskedLM):
    """Hugging Face's BERT, whose forward is the loss: what wraps or shards it sees nothing but calls of the module."""

    def forward(self, inputs: Tensor, labels: Tensor) -> tuple[Tensor, int]:
        """Summed cross-entropy, in nats, over the chosen tokens, and how many those are.

        `inputs` and `labels` are int64 `[sequences, length]`. The vocabulary's logits are computed where a label asks
        for them only: 15% of the places, and the widest product of a small model.
        """
        hidden = self.bert(input_ids=inputs).last_hidden_state
        return _masked_loss(self.cls, hidden, labels)


class PreLayerNormBert(RobertaPreLayerNormForMaskedLM):
    """Hugging Face's BERT that normalises what enters a branch, not what leaves the sum: its layers can be dropped."""

    def forward(self, inputs: Tensor, labels: Tensor) -> tuple[Tensor, int]:
        """As `MaskedBert.forward`."""
        hidden = self.roberta_prelayernorm(input_ids=inputs).last_hidden_state
        return _masked_loss(self.lm_head, hidden, labels)


def build_bert(size: BertSize, vocabulary: int, positions: int, dropout: float, seed: int) -> MaskedBert:
    """A BERT with random weights that depend on the seed only, in training mode."""
    config = BertConfig(vocab_size=vocabulary, max_position_embeddings=positions, **_shape(size), **_dropout(dropout))
    with seeded(seed):
        return MaskedBert(config).train()


def build_pre_ln_bert(size: BertSize, vocabulary: int, positions: int, dropout: float, seed: int) -> PreLayerNormBert:
    """A pre-LN BERT of the same size, likewise."""
    config = RobertaPreLayerNormConfig(
        vocab_size=vocabulary,
        # Places are counted from the padding token's number + 1 on.
        max_position_embeddings=positions + PAD + 1,
        pad_token_id=PAD,
        bos_token_id=CLS,
        eos_token_id=SEP,
        type_vocab_size=1,
        **_shape(size),
        **_dropout(dropout),
    )
    with seeded(seed):
        model = PreLayerNormBert(config).train()
    _shrink_branches(model)
    return model


def _shape(size: BertSize) -> dict[str, Any]:
    return {
        "hidden_size": size.width,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "intermediate_size": 4 * size.width,
    }


def _dropout(probability: float) -> dict[str, Any]:
    return {"hidden_dropout_prob": probability, "attention_probs_dropout_prob": probability}


def _shrink_branches(model: PreLayerNormBert) -> None:
    """Scales what every branch adds by 1/sqrt(2 layers), as in GPT-2: the sum of all of them, which nothing normalises
    on the way, then starts out as large at any depth."""
    layers = model.config.num_hidden_layers
    with torch.no_grad():
        for name, parameter in model.roberta_prelayernorm.encoder.named_parameters():
            if name.endswith("output.dense.weight"):
                parameter.mul_((2 * layers) ** -0.5)


def _masked_loss(head: nn.Module, hidden: Tensor, labels: Tensor) -> tuple[Tensor, int]:
    """Summed cross-entropy of the chosen tokens, and their number; `hidden` is `[sequences, length, width]`."""
    chosen = labels != IGNORED
    logits = head(hidden[chosen])
    return F.cross_entropy(logits.float(), labels[chosen], reduction="sum"), int(chosen.sum())
