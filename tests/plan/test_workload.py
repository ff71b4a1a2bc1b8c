"""Models by name are the models of that name; low rank is torch's; activations are the paper's."""

from __future__ import annotations

import pytest

from experiments.tasks.models import build_bert
from experiments.tasks.sizes import SIZES
from thinwire.plan import Activations, Matrices, PlanError, Transformer, named_model, plain_model


@pytest.mark.parametrize("size", ["tiny", "mini", "small"])
def test_named_models_are_hugging_face_s(size: str) -> None:
    model = build_bert(SIZES[size], 30522, 512, 0.1, seed=0)
    named = named_model(f"bert-{size}")
    assert named.parameters == sum(one.numel() for one in model.parameters())
    two_dimensional = [one for one in model.parameters() if one.dim() == 2]
    assert sum(one.numel for one in named.matrices) == sum(one.numel() for one in two_dimensional)
    assert sum(one.count for one in named.matrices) == len(two_dimensional)
    assert named.last_elements == model.bert.embeddings.word_embeddings.weight.numel()


def test_the_papers_sizes() -> None:
    assert named_model("bert-base").parameters == pytest.approx(110e6, rel=0.01)
    assert named_model("bert-large").parameters == pytest.approx(336e6, rel=0.01)


@pytest.mark.parametrize(("rank", "factors"), [(1, 1000 + 400), (4, 4 * 1400), (142, 142 * 1400), (143, 0), (9999, 0)])
def test_low_rank_only_where_it_halves(rank: int, factors: int) -> None:
    assert Matrices(1000, 400).low_rank_elements(rank) == factors
    assert Matrices(1000, 400, 3).low_rank_elements(rank) == 3 * factors


@pytest.mark.parametrize("parameters", [1, 2, 17, 1024**2, 10**9 + 7])
def test_a_count_alone(parameters: int) -> None:
    model = plain_model(parameters)
    assert model.parameters == parameters
    assert parameters * 0.5 <= sum(one.numel for one in model.matrices) <= parameters


def test_activations() -> None:
    """Korthikanti et al.: s·b·h·L·(34 + 5·a·s/h) in 16 bits, of which the masks, 2 + a·s/h, are bytes in any case."""
    activations = Activations(layers=24, hidden=1024, heads=16, sequence=128, micro_batch=16)
    whole = 128 * 16 * 1024 * 24 * (34 + 5 * 16 * 128 / 1024)
    masks = 128 * 16 * 1024 * 24 * (2 + 16 * 128 / 1024)
    assert activations.nbytes("bf16") == whole
    assert activations.nbytes("fp32") == 2 * whole - masks


def test_what_is_no_model() -> None:
    with pytest.raises(PlanError, match=r"'gpt' is not known here.*Did you mean gpt2"):
        named_model("gpt")
    with pytest.raises(PlanError, match="more elements in its matrices"):
        Transformer("x", 10, (Matrices(4, 4),))
    with pytest.raises(PlanError, match="not among its matrices"):
        Transformer("x", 100, (Matrices(4, 4),), Matrices(5, 5))
    with pytest.raises(PlanError, match="parameters must be a whole number"):
        plain_model(0)
    with pytest.raises(PlanError, match="heads must be"):
        Activations(1, 1, 0, 1, 1)
