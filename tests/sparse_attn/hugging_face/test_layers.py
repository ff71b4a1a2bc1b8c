"""Layers of a Hugging Face BERT, made sparse without the model: the same as `sparsify`, and undone by `densify`."""

from __future__ import annotations

import pytest
import torch

from thinwire.deepspeed.ops.sparse_attention import SparseAttentionUtils
from thinwire.sparse_attn import BigBird, densify, sparsify

transformers = pytest.importorskip("transformers")


def bert() -> torch.nn.Module:
    torch.manual_seed(0)
    config = transformers.BertConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        vocab_size=50,
        max_position_embeddings=64,
    )
    return transformers.BertForMaskedLM(config).eval()


def test_as_the_whole_model() -> None:
    layout = BigBird(2, 16)
    ids = torch.arange(2 * 100).view(2, 100) % 50
    mask = torch.ones_like(ids)
    mask[1, 70:] = 0
    expected = sparsify(bert(), layout, 128)
    model = SparseAttentionUtils.extend_position_embedding(bert(), 128)
    dense = model(ids, attention_mask=mask).logits
    SparseAttentionUtils.replace_self_attention_layer_with_sparse_self_attention_layer(
        model.config, model.bert.encoder.layer, layout
    )
    found = model(ids, attention_mask=mask).logits
    assert torch.equal(found, expected(ids, attention_mask=mask).logits)
    assert not torch.equal(found, dense)
    whole = SparseAttentionUtils.replace_model_self_attention_with_sparse_self_attention(bert(), 128, layout)
    assert torch.equal(whole(ids, attention_mask=mask).logits, found)
    assert torch.equal(densify(model)(ids, attention_mask=mask).logits, dense)
