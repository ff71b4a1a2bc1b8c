"""What is converted for a precision, and what is left as it is."""

from __future__ import annotations

from collections import OrderedDict, UserDict, namedtuple

import pytest
import torch
from torch import nn

from thinwire.engine.config import load_config
from thinwire.engine.model import Precision, check_model

CPU = torch.device("cpu")


def test_of_a_configuration() -> None:
    for section, dtype in (
        ({}, None),
        ({"bf16": {"enabled": True}}, torch.bfloat16),
        ({"fp16": {"enabled": True}}, torch.float16),
    ):
        assert Precision.of(load_config({"train_batch_size": 1} | section, 1)).dtype == dtype


class Pair(namedtuple("Pair", "left right")):
    pass


class Encoding(UserDict):
    def __init__(self, data, tokenizer) -> None:
        super().__init__(data)
        self.tokenizer = tokenizer


def test_inputs_keep_their_types() -> None:
    floats, numbers = torch.ones(2, dtype=torch.float64), torch.arange(3)
    inputs = {
        "list": [floats, 1, "text", None],
        "tuple": (numbers, Pair(floats, numbers)),
        "ordered": OrderedDict(a=floats),
        "encoding": Encoding({"ids": numbers, "weights": floats}, "tokenizer"),
        "flags": torch.tensor([True]),
    }
    placed = Precision(torch.bfloat16).place(inputs, CPU)
    assert placed["list"][0].dtype == torch.bfloat16
    assert placed["list"][1:] == [1, "text", None]
    assert placed["tuple"][0].dtype == torch.int64
    assert type(placed["tuple"][1]) is Pair
    assert placed["tuple"][1].left.dtype == torch.bfloat16
    assert type(placed["ordered"]) is OrderedDict
    assert placed["ordered"]["a"].dtype == torch.bfloat16
    assert type(placed["encoding"]) is Encoding
    assert placed["encoding"].tokenizer == "tokenizer"
    assert placed["encoding"]["weights"].dtype == torch.bfloat16
    assert placed["flags"].dtype == torch.bool
    assert inputs["encoding"]["weights"].dtype == inputs["list"][0].dtype == torch.float64


def test_without_a_precision_inputs_stay() -> None:
    floats = torch.ones(2, dtype=torch.float64)
    assert Precision(None).place([floats], CPU)[0].dtype == torch.float64


def test_gradients_flow_through_inputs() -> None:
    inputs = torch.ones(3, requires_grad=True)
    Precision(torch.bfloat16).place(inputs, CPU).sum().backward()
    assert torch.equal(inputs.grad, torch.ones(3))


def test_a_model_is_converted_but_for_what_trains() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 2), nn.Linear(2, 2, dtype=torch.float16))
    model[2].requires_grad_(False)
    trained = model[0].weight
    Precision(torch.bfloat16).convert(model, held={id(one) for one in model.parameters() if one.requires_grad})
    assert trained is model[0].weight
    assert trained.dtype == torch.float32
    assert model[2].weight.dtype == torch.bfloat16
    assert model[1].running_mean.dtype == torch.bfloat16
    assert model[1].num_batches_tracked.dtype == torch.int64
    assert model[3].weight.dtype == torch.float32  # masters come from its values, before they are rounded to bf16
    Precision(None).convert(model, held=set())
    assert model[2].weight.dtype == torch.bfloat16


def test_the_device_of_a_model() -> None:
    model = nn.Linear(2, 2)
    assert check_model(model) == (model, CPU)
    model.frozen = nn.Parameter(torch.zeros(2, dtype=torch.complex64), requires_grad=False)
    assert check_model(model) == (model, CPU)
    model.far = nn.Parameter(torch.zeros(2, device="meta"))
    with pytest.raises(ValueError, match="'far' is on the meta device"):
        check_model(model)


def test_parameters_that_no_optimizer_holds_are_converted_too() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 1))
    shared = torch.zeros(4)
    model[0].register_buffer("statistics", shared)
    model[1].register_buffer("statistics", shared)
    Precision(torch.bfloat16).convert(model, held={id(one) for one in model[1].parameters()})
    assert {one.dtype for one in model[0].parameters()} == {torch.bfloat16}
    assert {one.dtype for one in model[1].parameters()} == {torch.float32}
    assert model[0].statistics is model[1].statistics
