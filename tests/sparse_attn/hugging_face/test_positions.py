"""Longer position tables: which rows, which buffers, which numbers."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from thinwire.sparse_attn import extend_position_embedding, update_tokenizer_model_max_length

transformers = pytest.importorskip("transformers")

SIZES = {"vocab_size": 20, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}


@pytest.mark.parametrize(("kind", "unused"), [("Bert", 0), ("Roberta", 2)])
def test_the_table_repeats_and_everything_follows(kind: str, unused: int) -> None:
    config = getattr(transformers, f"{kind}Config")(max_position_embeddings=10 + unused, **SIZES)
    model = getattr(transformers, f"{kind}Model")(config).to(torch.bfloat16)
    old = model.embeddings.position_embeddings.weight.detach().clone()
    assert extend_position_embedding(model, 33) is model
    table = model.embeddings.position_embeddings
    rows = 33 + unused
    assert (table.num_embeddings, model.config.max_position_embeddings) == (rows, rows)
    assert (table.weight.dtype, table.weight.requires_grad) == (torch.bfloat16, True)
    assert torch.equal(table.weight[: 10 + unused], old)
    for i in range(33):
        assert torch.equal(table.weight[unused + i], old[unused + i % 10])
    assert torch.equal(model.embeddings.position_ids, torch.arange(rows)[None])
    assert torch.equal(model.embeddings.token_type_ids, torch.zeros(1, rows, dtype=torch.int64))
    assert model(torch.randint(5, 20, (2, 33))).last_hidden_state.isfinite().all()
    weight = table.weight
    assert extend_position_embedding(model, 33).embeddings.position_embeddings.weight is weight


def test_refusals() -> None:
    model = transformers.BertModel(transformers.BertConfig(max_position_embeddings=10, **SIZES))
    with pytest.raises(ValueError, match="reads 10 tokens"):
        extend_position_embedding(model, 9)
    with pytest.raises(TypeError, match="rotary"):
        extend_position_embedding(nn.Linear(2, 2), 9)
    with pytest.raises(TypeError, match="tokenizer"):
        update_tokenizer_model_max_length(nn.Linear(2, 2), 9)


def test_the_tokenizer_truncates_later() -> None:
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, model_max_length=4)
    text = " ".join("a" * 20)
    assert len(tokenizer(text, truncation=True)["input_ids"]) == 4
    update_tokenizer_model_max_length(tokenizer, 9)
    assert len(tokenizer(text, truncation=True)["input_ids"]) == 9
    assert tokenizer.init_kwargs["model_max_length"] == 9
