"""Muon against torch's own Muon and AdamW, each on its own part of a model."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from thinwire.optim import Muon
from thinwire.optim.exact import mark_matrices


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.convolution = nn.Conv1d(6, 4, 3)
        self.wide = nn.Linear(4, 9)
        self.lm_head = nn.Linear(9, 11)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.convolution(self.embedding(tokens).mT).mT
        return self.lm_head(torch.tanh(self.wide(hidden)))


def make_model() -> Model:
    torch.manual_seed(7)
    return Model()


def train(model: Model, *optimizers: torch.optim.Optimizer) -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(6):
        tokens = torch.randint(0, 11, (5, 8), generator=generator)
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens[:, 2:].flatten())
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("settings", [{"lr": 0.05}, {"muon_lr": 0.03, "adam_lr": 2e-3, "weight_decay": 0.1}, {}])
def test_it_is_torchs_muon_and_adamw(settings: dict) -> None:
    model, other = make_model(), make_model()
    mark_matrices(model.named_parameters())
    train(model, Muon(model.parameters(), **settings))

    kernel = other.convolution.weight
    matrix = kernel.detach().view(4, -1)  # a matrix of its own, that shares the kernel's memory
    decay = settings.get("weight_decay", 0.0)
    muon_lr = settings.get("muon_lr", settings.get("lr", 0.02))
    adam_lr = settings.get("adam_lr", settings.get("lr", 3e-4))
    muon = torch.optim.Muon([matrix, other.wide.weight], lr=muon_lr, weight_decay=decay)
    rest = [one for name, one in other.named_parameters() if one is not kernel and name != "wide.weight"]
    adam = torch.optim.AdamW(rest, lr=adam_lr, betas=(0.9, 0.95), eps=1e-10, weight_decay=decay)

    class Bridge(torch.optim.SGD):
        def step(self, closure=None) -> None:
            matrix.grad = kernel.grad.view_as(matrix)

    train(other, Bridge([kernel], lr=0.0), muon, adam)
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_groups() -> None:
    model = make_model()
    mark_matrices(model.named_parameters())
    optimizer = Muon(model.parameters(), lr=0.1, adam_lr=0.2, momentum=0.8)
    matrices, rest = optimizer.param_groups
    assert {id(one) for one in matrices["params"]} == {id(model.convolution.weight), id(model.wide.weight)}
    assert (matrices["use_muon"], matrices["lr"], matrices["momentum"]) == (True, 0.1, 0.8)
    assert (rest["use_muon"], rest["lr"]) == (False, 0.2)
    assert len(matrices["params"]) + len(rest["params"]) == len(list(model.parameters()))
    for state in (optimizer.state[one] for one in optimizer.state):
        assert not state
    given = [{"params": model.wide.parameters(), "lr": 0.5}, {"params": [model.lm_head.bias], "use_muon": False}]
    assert [(len(one["params"]), one["lr"]) for one in Muon(given).param_groups] == [(1, 0.5), (1, 0.5), (1, 3e-4)]


def test_what_the_user_has_marked_holds() -> None:
    model = make_model()
    model.embedding.weight.use_muon = True
    model.wide.weight.use_muon = False
    mark_matrices(model.named_parameters())
    matrices = Muon(model.parameters()).param_groups[0]["params"]
    assert {id(one) for one in matrices} == {id(model.embedding.weight), id(model.convolution.weight)}


def test_state_goes_through_a_state_dict() -> None:
    model, other = make_model(), make_model()
    first = Muon(model.parameters(), lr=0.1)
    train(model, first)
    other.load_state_dict(model.state_dict())
    second = Muon(other.parameters(), lr=0.7)
    second.load_state_dict(copy.deepcopy(first.state_dict()))  # torch shares its memory
    train(model, first)
    train(other, second)
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr": -1.0}, "lr must be at least 0"),
        ({"ns_steps": 0}, "ns_steps must be from 1 to 99, got 0"),
        ({"betas": (0.9,)}, "betas must be two numbers"),
    ],
)
def test_what_cannot_work(settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Muon([nn.Parameter(torch.ones(2, 2))], **settings)


def test_a_vector_is_no_matrix() -> None:
    with pytest.raises(ValueError, match="fewer than two dimensions: set its attribute use_muon to False"):
        Muon([{"params": [nn.Parameter(torch.ones(3))], "use_muon": True}])
