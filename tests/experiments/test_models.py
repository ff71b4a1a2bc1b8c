"""The two BERTs, and the peers of block-sparse attention."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from experiments.tasks.attention_peers import flex_mask, gathered_attention
from experiments.tasks.masking import IGNORED
from experiments.tasks.models import build_bert, build_pre_ln_bert
from experiments.tasks.sizes import BertSize
from thinwire.pld import ProgressiveLayerDrop, drop_layers
from thinwire.sparse_attn import BigBird, Custom, Fixed, reference_attention

SIZE = BertSize(layers=3, width=32, heads=2)
VOCABULARY, LENGTH = 61, 13


def batch(sequences: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randint(5, VOCABULARY, (sequences, LENGTH), generator=generator)
    labels = torch.where(torch.rand(inputs.shape, generator=generator) < 0.3, inputs, IGNORED)
    labels[:, 0] = inputs[:, 0]
    return inputs, labels


@pytest.mark.parametrize("build", [build_bert, build_pre_ln_bert])
def test_an_untrained_bert_guesses_and_counts_what_was_asked(build: type) -> None:
    inputs, labels = batch(7, 1)
    total, count = build(SIZE, VOCABULARY, LENGTH, 0.0, 5)(inputs, labels)
    assert count == int((labels != IGNORED).sum())
    assert total.item() / count == pytest.approx(math.log(VOCABULARY), rel=0.05)


def test_the_pre_ln_bert_sums_its_own_cross_entropy_over_the_chosen_tokens() -> None:
    model = build_pre_ln_bert(SIZE, VOCABULARY, LENGTH, 0.0, 2).eval()
    inputs, labels = batch(4, 3)
    total, _ = model(inputs, labels)
    hidden = model.roberta_prelayernorm(input_ids=inputs).last_hidden_state
    chances = model.lm_head(hidden).double().log_softmax(-1)
    reference = -sum(
        chances[row, place, labels[row, place]].item() for row, place in (labels != IGNORED).nonzero().tolist()
    )
    assert total.item() == pytest.approx(reference, rel=1e-5)
    total.backward()
    assert [name for name, parameter in model.named_parameters() if parameter.grad is None] == []


def test_layers_of_the_pre_ln_bert_can_be_dropped_and_those_of_the_other_cannot() -> None:
    schedule = ProgressiveLayerDrop(theta=0.0, gamma=0.0)
    model = build_pre_ln_bert(SIZE, VOCABULARY, LENGTH, 0.0, 2)
    drop = drop_layers(model, schedule)
    model(*batch(2, 3))
    assert drop.keep_rates == [1.0] * SIZE.layers
    with pytest.raises(ValueError, match="post-LN"):
        drop_layers(build_bert(SIZE, VOCABULARY, LENGTH, 0.0, 2), schedule)


@pytest.mark.parametrize("layout", [BigBird(2, block=16), Fixed(2, block=16), BigBird(1, 16, num_global_blocks=2)])
def test_gathered_attention_is_the_layouts(layout: BigBird | Fixed) -> None:
    q, k, v = (torch.randn(2, 2, 160, 8, requires_grad=True) for _ in range(3))
    d_out = torch.randn(2, 2, 160, 8)
    expected = reference_attention(q, k, v, layout)
    found = gathered_attention(layout.index(160))(q, k, v)
    torch.testing.assert_close(found, expected)
    for ours, theirs in zip(
        torch.autograd.grad(found, (q, k, v), d_out), torch.autograd.grad(expected, (q, k, v), d_out), strict=True
    ):
        torch.testing.assert_close(ours, theirs)


def test_gathered_attention_refuses_heads_that_differ() -> None:
    mask = torch.eye(3, dtype=torch.bool).repeat(2, 1, 1)
    mask[1, 0] = True
    with pytest.raises(ValueError, match="got 2 different"):
        gathered_attention(Custom(mask, 16).index(48))


@pytest.mark.parametrize("layout", [BigBird(2, 16), BigBird(2, 16, different_layout_per_head=True), Fixed(2, 16)])
def test_flex_has_the_same_blocks_both_ways(layout: BigBird | Fixed) -> None:
    index = layout.index(160)
    mask = flex_mask(index)
    assert torch.equal(mask.to_dense().bool()[0], index.dense())
    assert mask.kv_indices.device == index.columns.device
    columns = mask.full_q_num_blocks  # what a backward walks along
    assert columns is not None
    assert torch.equal(columns[0].flatten(), index.column_offsets.diff())
