"""Padding to whole blocks: what is added is never attended, whatever form the mask has."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from thinwire.sparse_attn import pad_to_block_size, unpad_sequence_output

transformers = pytest.importorskip("transformers")


@settings(max_examples=30, deadline=None)
@given(block=st.integers(1, 70), length=st.integers(1, 150))
def test_whole_blocks_and_back(block: int, length: int) -> None:
    ids = torch.randint(5, 50, (2, length))
    pad, padded, mask, types, positions, embeds = pad_to_block_size(block, ids, pad_token_id=3)
    assert padded is not None
    assert padded.shape[1] % block == 0
    assert 0 <= pad < block
    assert (padded[:, length:] == 3).all()
    assert (types, positions, embeds) == (None, None, None)
    assert (mask is None) == (pad == 0)
    assert mask is None or torch.equal(mask.sum(1), torch.tensor([length, length]))
    assert torch.equal(unpad_sequence_output(pad, padded), ids)


def test_every_form_of_mask_hides_what_was_added() -> None:
    ids = torch.randint(5, 50, (2, 10))
    for mask in (torch.ones(2, 10, dtype=torch.int64), torch.ones(2, 1, 10, 10, dtype=torch.bool), torch.ones(2, 10)):
        padded = pad_to_block_size(16, ids, mask)[2]
        assert padded is not None
        assert padded.dtype == mask.dtype
        assert not padded[..., 10:].any()
        assert padded[..., :10].all()
    for shape in ((2, 1, 1, 10), (2, 1, 10, 10)):
        padded = pad_to_block_size(16, ids, torch.zeros(shape))[2]
        assert padded is not None
        assert (padded[..., 10:] == torch.finfo(torch.float32).min).all()
        assert (padded[..., :10] == 0).all()
        assert padded.shape[-2] == (1 if shape[-2] == 1 else 16)


@pytest.mark.parametrize("kind", ["Bert", "Roberta"])
@pytest.mark.parametrize("embeds", [False, True])
def test_a_model_says_the_same_of_padded_inputs(kind: str, embeds: bool) -> None:
    sizes = {"vocab_size": 50, "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = getattr(transformers, f"{kind}Config")(intermediate_size=8, max_position_embeddings=40, **sizes)
    model = getattr(transformers, f"{kind}Model")(config).eval()
    first = config.pad_token_id + 1 if kind == "Roberta" else 0
    positions = torch.arange(first, first + 21)[None]
    ids, types = torch.randint(5, 50, (2, 21)), torch.randint(0, config.type_vocab_size, (2, 21))
    words = model.get_input_embeddings()
    given_ids, given_embeds = (None, words(ids)) if embeds else (ids, None)
    pad, *inputs = pad_to_block_size(
        16, given_ids, None, types, positions, given_embeds, pad_token_id=config.pad_token_id, model_embeddings=words
    )
    names = ("input_ids", "attention_mask", "token_type_ids", "position_ids", "inputs_embeds")
    out = model(**dict(zip(names, inputs, strict=True))).last_hidden_state
    expected = model(ids, token_type_ids=types, position_ids=positions).last_hidden_state
    torch.testing.assert_close(unpad_sequence_output(pad, out), expected, atol=1e-5, rtol=1e-4)


def test_refusals() -> None:
    ids = torch.zeros(2, 5, dtype=torch.int64)
    with pytest.raises(ValueError, match="exactly one"):
        pad_to_block_size(16, ids, inputs_embeds=nn.Embedding(3, 4)(ids))
    with pytest.raises(ValueError, match="attention_mask has shape"):
        pad_to_block_size(16, ids, torch.ones(2, 6))
    with pytest.raises(ValueError, match="block_size is 0"):
        pad_to_block_size(0, ids)
