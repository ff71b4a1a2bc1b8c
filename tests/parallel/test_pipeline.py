"""How models are cut into stages; how these train: test_real_ranks.py."""

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from tests.refusing import refused
from thinwire.parallel.splitting import split_model


def test_a_head_takes_time_and_an_embedding_none() -> None:
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    model = GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=4, n_head=4, vocab_size=1000, n_positions=8, **ends))
    blocks = [[len(part.model.transformer.h) for part in split_model(model, 2, by)] for by in ("parameters", "time")]
    assert blocks == [[2, 2], [3, 1]]
    refused(ValueError, "nn.Sequential is not known", split_model, nn.Sequential(nn.Linear(1, 1)), 1, "time")


@pytest.mark.parametrize(("stages", "sizes"), [(1, [31]), (2, [16, 15]), (3, [11, 10, 10]), (4, [11, 5, 5, 10])])
def test_the_largest_stage_is_as_small_as_can_be(stages: int, sizes: list[int]) -> None:
    layers = [nn.Linear(width, 1, bias=False) for width in (11, 5, 5, 10)]
    parts = split_model(nn.Sequential(*layers), stages, "parameters")
    assert [sum(one.numel() for one in part.parameters()) for part in parts] == sizes
    assert [name for part in parts for name, _ in part.named_parameters()] == [f"{n}.weight" for n in range(4)]
    assert torch.equal(parts[-1][-1].weight, layers[-1].weight)


def test_a_stage_begins_with_parameters() -> None:
    layers = [nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Dropout(0.0), nn.Linear(4, 4), nn.ReLU(inplace=True)]
    parts = split_model(nn.Sequential(*layers), 2, "parameters")
    assert [[*part._modules] for part in parts] == [["0", "1", "2"], ["3", "4"]]
