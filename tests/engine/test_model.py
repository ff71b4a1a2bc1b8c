"""What is converted for a precision, and what is left as it is; parameters without a gradient."""

from collections import OrderedDict, UserDict, namedtuple

import pytest
import torch
from torch import nn

from tests.engine.tiny import MICRO, make_engine, make_model, settings, train
from tests.launching import on_threads
from thinwire import initialize
from thinwire.comm import threads
from thinwire.engine.model import Precision, UnusedParametersError

CPU = torch.device("cpu")


Pair = namedtuple("Pair", "left right")


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


def test_without_a_precision_inputs_stay_and_with_one_gradients_flow_through_them() -> None:
    floats = torch.ones(2, dtype=torch.float64)
    assert Precision(None).place([floats], CPU)[0].dtype == torch.float64
    inputs = torch.ones(3, requires_grad=True)
    Precision(torch.bfloat16).place(inputs, CPU).sum().backward()
    assert torch.equal(inputs.grad, torch.ones(3))


def test_a_model_is_converted_but_for_what_trains() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 2), nn.Linear(2, 2, dtype=torch.float16))
    model[2].requires_grad_(False)
    model[0].statistics = model[2].statistics = nn.Buffer(torch.zeros(4))
    trained = model[0].weight
    Precision(torch.bfloat16).convert(model, held={id(one) for one in model.parameters() if one.requires_grad})
    assert trained is model[0].weight
    assert trained.dtype == torch.float32
    assert model[2].weight.dtype == torch.bfloat16
    assert model[0].statistics is model[2].statistics
    assert model[0].statistics.dtype == model[1].running_mean.dtype == torch.bfloat16
    assert model[1].num_batches_tracked.dtype == torch.int64
    assert model[3].weight.dtype == torch.float32  # master weights are its values, before they are rounded to bf16
    Precision(None).convert(model, held=set())
    assert model[2].weight.dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("stage", [0, 2])
@on_threads(2)
def test_what_is_quantised_stays_as_it_is(comm, tmp_path, stage: int, dtype: torch.dtype) -> None:
    """Rank 0's bytes on every rank, before and after a checkpoint."""
    model = make_model()
    model.weight = nn.Parameter(torch.full((4, 4), 2.0 - comm.rank).to(dtype), requires_grad=False)
    model.register_buffer("scale", torch.ones(4).to(dtype))
    engine = initialize(model=model, config=settings(stage, bf16={"enabled": True}), comm=comm)[0]
    train(engine, range(1))
    engine.save_checkpoint(tmp_path)
    engine.load_checkpoint(tmp_path)
    assert (model.weight.dtype, model.scale.dtype, model.calls.dtype) == (dtype, dtype, torch.bfloat16)
    assert torch.equal(model.weight.float(), torch.full((4, 4), 2.0))


class Forked(nn.Module):
    """Uses its second layer where it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.always = nn.Linear(3, 3)
        self.sometimes = nn.Linear(3, 3)
        self.frozen = nn.Linear(3, 3).requires_grad_(False)
        self.nothing = nn.Parameter(torch.zeros(0))
        generator = torch.Generator().manual_seed(5)  # not the global one, which ranks on threads share
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.normal_(generator=generator)

    def forward(self, inputs: torch.Tensor, both: bool) -> torch.Tensor:
        hidden = self.always(inputs)
        return (self.sometimes(hidden) if both else hidden).square().mean() + self.nothing.sum()


def config(stage: int, ignore: bool) -> dict:
    sgd = {"type": "SGD", "params": {"lr": 0.1}}
    zero = {"stage": stage, "ignore_unused_parameters": ignore}
    return settings(gradient_accumulation_steps=2, optimizer=sgd, zero_optimization=zero)


def steps(stage: int, ignore: bool, used: list[tuple[bool, bool]]) -> list[torch.Tensor]:
    """Weights after steps whose micro-batches use the second layer as `used` says on rank 1, and always on rank 0."""

    def body(comm):
        engine = make_engine(comm, config(stage, ignore), model=Forked())
        for micro_batches in used:
            for both in micro_batches:
                engine.backward(engine(torch.ones(MICRO, 3), both or comm.rank == 0))
                engine.step()
        return engine.module.always.weight.detach().clone()

    return threads.run(body, 2)


@pytest.mark.parametrize("stage", [1, 2])
def test_steps_that_use_every_parameter_are_as_ever(stage: int) -> None:
    """One of the micro-batches is enough."""
    used = [(True, True), (False, True), (True, False)]
    assert torch.equal(steps(stage, False, used)[0], steps(stage, True, used)[0])


@pytest.mark.parametrize("stage", [1, 2])
@on_threads(2)
def test_an_unused_parameter_is_an_error_by_name_on_every_rank(comm, stage: int) -> None:
    engine = make_engine(comm, config(stage, ignore=False), model=Forked())
    for _ in range(2):
        engine.backward(engine(torch.ones(MICRO, 3), comm.rank == 0))
        if engine.is_gradient_accumulation_boundary():
            kind, message = UnusedParametersError, "parameters.* 2 of 4 .*sometimes.weight, sometimes.bias"
            if comm.rank == 0:
                kind, message = ValueError, "rank 1 could not use all of its parameters"
            with pytest.raises(kind, match=message):
                engine.step()
        else:
            engine.step()
