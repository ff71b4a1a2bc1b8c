"""The two BERTs: one interface, weights that the seed decides, and layers that can be dropped or not."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from experiments.tasks.masking import IGNORED
from experiments.tasks.models import build_bert, build_pre_ln_bert
from experiments.tasks.sizes import BertSize
from thinwire.pld import ProgressiveLayerDrop, drop_layers

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


@pytest.mark.parametrize("build", [build_bert, build_pre_ln_bert])
def test_the_seed_decides_the_weights(build: type) -> None:
    one, same, other = (build(SIZE, VOCABULARY, LENGTH, 0.0, seed).state_dict() for seed in (5, 5, 6))
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not all(torch.equal(one[name], other[name]) for name in one)


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


def test_every_weight_of_the_pre_ln_bert_learns() -> None:
    model = build_pre_ln_bert(SIZE, VOCABULARY, LENGTH, 0.0, 2)
    model(*batch(4, 3))[0].backward()
    assert [name for name, parameter in model.named_parameters() if parameter.grad is None] == []


@pytest.mark.parametrize("layers", [2, 18])
def test_branches_of_the_pre_ln_bert_start_smaller_the_more_there_are(layers: int) -> None:
    model = build_pre_ln_bert(BertSize(layers, 64, 2), VOCABULARY, LENGTH, 0.0, 4)
    top = model.roberta_prelayernorm.encoder.layer[-1]
    for projection in (top.attention.output.dense, top.output.dense):
        assert projection.weight.std().item() == pytest.approx(0.02 / math.sqrt(2 * layers), rel=0.1)
    assert top.intermediate.dense.weight.std().item() == pytest.approx(0.02, rel=0.1)


def test_layers_of_the_pre_ln_bert_can_be_dropped_and_those_of_the_other_cannot() -> None:
    schedule = ProgressiveLayerDrop(theta=0.0, gamma=0.0)
    model = build_pre_ln_bert(SIZE, VOCABULARY, LENGTH, 0.0, 2)
    drop = drop_layers(model, schedule)
    model(*batch(2, 3))
    assert drop.keep_rates == [1.0] * SIZE.layers
    with pytest.raises(ValueError, match="post-LN"):
        drop_layers(build_bert(SIZE, VOCABULARY, LENGTH, 0.0, 2), schedule)
