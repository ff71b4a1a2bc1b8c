"""How gradients add up over backwards, travel and are averaged, on gradients that are known beforehand; and the seal
that tells an edit of a gradient from a write of the values that are there already."""

import math
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.launching import on_threads
from tests.refusing import refused
from thinwire.comm import Communicator, threads
from thinwire.optim import OneBitAdam, OneBitLamb, OneBitLion, ZeroOneAdam
from thinwire.zero import Averaging, ShardedOptimizer, gradients
from thinwire.zero.gradient_seal import Seal

SHAPES = {"matrix": (7, 5), "vector": (13,)}
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
STAGES = pytest.mark.parametrize("stage", [0, 1, 2])
WIRES = pytest.mark.parametrize("wire", [BF16, FP16])


class Known(nn.Module):
    """Its loss has the gradients that are asked for."""

    def __init__(self) -> None:
        super().__init__()
        for name, shape in SHAPES.items():
            setattr(self, name, nn.Parameter(torch.zeros(shape)))

    def loss(self, gradients: dict[str, Tensor]) -> Tensor:
        of_each = [(one * gradients[name].to(one.dtype)).float().sum() for name, one in self.named_parameters()]
        return torch.stack(of_each).sum()


def gradients_of(rank: int, micro: int, dtype: torch.dtype = FP32) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(100 * rank + micro)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in SHAPES.items()}


def mean_of(ranks: int, micros: int, name: str, dtype: torch.dtype = FP32) -> Tensor:
    """The float32 sum of the micro-batches' gradients, averaged over the ranks."""
    sums = [sum(gradients_of(rank, micro, dtype)[name].float() for micro in range(micros)) for rank in range(ranks)]
    return torch.stack([one for one in sums if isinstance(one, Tensor)]).mean(0)


def sgd(comm: Communicator, model: nn.Module, **options: Any) -> ShardedOptimizer:
    """Weights that begin with zeros are the averaged gradients, negative."""
    options = {"lr": 1.0, "bucket_bytes": 100, "block_size": 4, "named_parameters": model.named_parameters()} | options
    return ShardedOptimizer(model.parameters(), torch.optim.SGD, comm=comm, **options)


class Stepped(NamedTuple):
    """A kind of state after the steps, whole, and what the optimizer says of them."""

    state: dict[str, Tensor]
    bytes_sent: int
    grad_norm: float


def stepped(
    make: Callable[..., Any],
    ranks: int = 2,
    *,
    gradients: Callable[[int, int], dict[str, Tensor]] = gradients_of,
    micros: int = 1,
    steps: int = 1,
    kind: str = "weight",
    scale: float = 1.0,
    **options: Any,
) -> list[Stepped]:
    """What every rank has after steps of an optimizer of a `Known` model, of micro-batches that are numbered on."""

    def body(comm: Communicator) -> Stepped:
        model = Known()
        if make is not sgd:
            optimizer = make(model.named_parameters(), comm=comm, **options)
        else:
            optimizer = make(comm, model, **options)
        optimizer.loss_scale = scale
        for step in range(steps):
            optimizer.zero_grad()
            for micro in range(step * micros, (step + 1) * micros):
                last = (micro + 1) % micros == 0
                with nullcontext() if last else optimizer.no_sync():
                    (scale * model.loss(gradients(comm.rank, micro))).backward()
                    None if last else optimizer.end_backward()
            optimizer.step()
        found = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
        for one in optimizer.saved_slices():
            if one.kind == kind:
                found[one.name].view(-1)[one.start : one.start + one.tensor.numel()] = one.tensor.detach().view(-1)
        for values in found.values():
            comm.all_reduce(values)  # each slice is held by one rank
        return Stepped(found, optimizer.bytes_sent, optimizer.last_step.grad_norm)

    return threads.run(body, ranks)


@STAGES
@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_backwards_of_16_bit_models_add_up_in_fp32(stage: int, ranks: int, dtype: torch.dtype) -> None:
    gradients = partial(gradients_of, dtype=dtype)
    step = partial(stepped, sgd, ranks, gradients=gradients, micros=8, kind="master", stage=stage, param_dtype=dtype)
    expected = {name: mean_of(ranks, 8, name, dtype) for name in SHAPES}
    off = [
        [
            max(float((one.state[name] + mean).abs().max()) for name, mean in expected.items())
            for one in step(averaging=how)
        ]
        for how in (Averaging(accumulate_dtype=FP32), Averaging())
    ]
    assert max(off[0]) < 2e-6
    assert min(off[1]) > 1e-4


@pytest.mark.parametrize(
    ("optimizer_class", "stage", "options"),
    [
        *[(OneBitAdam, stage, {"freeze_step": 1}) for stage in (0, 1, 2)],
        *[(OneBitLamb, stage, {"freeze_step": 1}) for stage in (0, 1)],
        *[(ZeroOneAdam, stage, {"var_freeze_step": 1, "local_step_scaler": 1}) for stage in (0, 1)],
        *[(OneBitLion, stage, {}) for stage in (0, 1)],
    ],
)
@on_threads(2)
def test_compressed_optimizers_take_the_sums(
    comm: Communicator, optimizer_class: Any, stage: int, options: dict[str, Any]
) -> None:
    model = Known()
    options["averaging"] = Averaging(accumulate_dtype=FP32)
    optimizer = optimizer_class(model.named_parameters(), comm=comm, stage=stage, param_dtype=BF16, **options)
    gradients = [gradients_of(comm.rank, micro, BF16) for micro in range(8)]
    for step in range(4):
        optimizer.zero_grad()
        for one in gradients[:-1]:
            with optimizer.no_sync():
                model.loss(one).backward()
                optimizer.end_backward()
        for name, parameter in model.named_parameters() if stage < 2 or step > 1 else ():
            own = sum(one[name].float() for one in gradients[:-1])
            torch.testing.assert_close(parameter.grad, own, rtol=0, atol=2e-6)
        model.loss(gradients[-1]).backward()
        optimizer.step()
        assert optimizer.last_step.applied
    optimizer.close()


@STAGES
def test_the_warmup_of_a_compressed_optimizer_averages_the_sums(stage: int) -> None:
    options = {"freeze_step": 9, "param_dtype": BF16, "averaging": Averaging(accumulate_dtype=FP32)}
    gradients = partial(gradients_of, dtype=BF16)
    found = stepped(OneBitAdam, gradients=gradients, micros=8, kind="exp_avg", stage=stage, **options)[0].state
    for name, one in found.items():
        torch.testing.assert_close(one, 0.1 * mean_of(2, 8, name, BF16), rtol=0, atol=1e-6)


@STAGES
@WIRES
def test_gradients_travel_in_the_dtype_that_is_asked_for(stage: int, wire: torch.dtype) -> None:
    as_it_is, narrow = (
        stepped(sgd, 3, stage=stage, averaging=how)[0] for how in (Averaging(), Averaging(wire_dtype=wire))
    )
    for name in SHAPES:
        rounded = torch.stack([gradients_of(rank, 0)[name].to(wire).float() for rank in range(3)]).mean(0)
        expected = rounded.to(wire).float() if stage == 0 else rounded
        torch.testing.assert_close(narrow.state[name].neg(), expected, rtol=1e-6, atol=1e-7)
        assert not torch.equal(narrow.state[name], as_it_is.state[name])
    assert narrow.bytes_sent < as_it_is.bytes_sent


@STAGES
def test_a_wider_wire_changes_nothing_but_rounding_at_the_end(stage: int) -> None:
    step = partial(stepped, sgd, gradients=partial(gradients_of, dtype=BF16), kind="master", stage=stage)
    plain, wide = (step(param_dtype=BF16, averaging=how)[0] for how in (Averaging(), Averaging(wire_dtype=FP32)))
    assert all(torch.equal(one, wide.state[name]) for name, one in plain.state.items())


@pytest.mark.parametrize(("optimizer_class", "stage"), [(OneBitAdam, 0), (OneBitAdam, 1), (ZeroOneAdam, 1)])
@WIRES
def test_the_exact_steps_of_compressed_optimizers_travel_so_too(
    optimizer_class: Any, stage: int, wire: torch.dtype
) -> None:
    averaging = Averaging(wire_dtype=wire, divide_first=4.0)
    found = stepped(optimizer_class, 3, kind="exp_avg", stage=stage, averaging=averaging)[0].state
    for name in SHAPES:
        sent = [4 * (gradients_of(rank, 0)[name] / 4).to(wire).float() for rank in range(3)]
        rounding = 2**-8 if wire == BF16 else 2**-10  # of leg 2
        torch.testing.assert_close(found[name], 0.1 * torch.stack(sent).mean(0), rtol=rounding, atol=1e-6)


@STAGES
@pytest.mark.parametrize("factor", [2.0, 3.0, 8.0])
def test_gradients_are_divided_before_they_are_summed(stage: int, factor: float) -> None:
    def tiny(rank: int, micro: int) -> dict[str, Tensor]:
        return {name: torch.full(shape, 2.0**-24) for name, shape in SHAPES.items()}  # fp16's smallest number

    step = partial(stepped, sgd, kind="master", stage=stage, param_dtype=FP16)
    divided, plain = Averaging(divide_first=factor), Averaging()
    for name, found in step(gradients=partial(gradients_of, dtype=FP16), averaging=divided)[0].state.items():
        torch.testing.assert_close(found.neg(), mean_of(2, 1, name, FP16), rtol=2e-3, atol=1e-3)
    # What is too small to be divided is lost on the way, as it is in DeepSpeed.
    assert all(bool((one == 0).all()) for one in step(gradients=tiny, averaging=divided)[0].state.values())
    assert all(bool((one < 0).all()) for one in step(gradients=tiny, averaging=plain)[0].state.values())


@STAGES
@pytest.mark.parametrize(("op", "factor"), [("mean", 1), ("sum", 3)])
def test_a_mean_or_a_sum_with_its_norm_and_clipping(stage: int, op: Any, factor: int) -> None:
    averages = {name: factor * mean_of(3, 1, name) for name in SHAPES}
    norm = float(torch.cat([one.flatten() for one in averages.values()]).norm())
    for clip in (0.0, norm / 2):
        one = stepped(sgd, 3, scale=16.0, stage=stage, averaging=Averaging(op=op), max_norm=clip)[1]
        assert one.grad_norm == pytest.approx(norm, rel=1e-5)
        for name, found in one.state.items():
            torch.testing.assert_close(found.neg(), averages[name] * (0.5 if clip else 1.0), rtol=1e-5, atol=1e-5)


def test_a_sum_in_the_steps_of_a_compressed_optimizer() -> None:
    step = partial(stepped, OneBitAdam, steps=4, kind="exp_avg", freeze_step=2, codec="none", compress="momentum")
    mean, total = (step(averaging=how)[0].state for how in (Averaging(), Averaging(op="sum")))
    for name, one in total.items():
        torch.testing.assert_close(one, 2 * mean[name])


@pytest.mark.parametrize(
    ("make", "averaging", "options", "error", "message"),
    [
        (
            sgd,
            {"wire_dtype": torch.int8},
            {},
            TypeError,
            "wire_dtype must be torch.float32, .* or None, got torch.int8",
        ),
        *((sgd, {"divide_first": one}, {}, ValueError, "divide_first must be") for one in (0, -1.0, math.inf, "2")),
        (sgd, {"op": "max"}, {}, ValueError, "op must be 'mean' or 'sum', got 'max'"),
        (sgd, {"accumulate_dtype": BF16}, {}, ValueError, "of torch.float32 parameters add up in torch.float32 or"),
        (OneBitAdam, {"accumulate_dtype": BF16}, {"param_dtype": FP16}, ValueError, "of torch.float16 parameters add"),
        (
            OneBitAdam,
            {"wire_dtype": FP32},
            {"warmup_wire": "bf16"},
            ValueError,
            "warmup_wire and averaging's wire_dtype",
        ),
    ],
)
def test_what_cannot_work_is_told(make, averaging, options, error, message) -> None:
    refused(error, message, stepped, make, 1, averaging=Averaging(**averaging), **options)


# The seal


def sealed(taken: range = range(3)) -> tuple[list[Tensor], Seal]:
    parameters = [torch.zeros(shape, requires_grad=True) for shape in ((3,), (0,), (40, 50))]
    for one in parameters:
        one.grad = torch.randn(one.shape)
    parameters[0].grad[1] = math.nan
    seal = Seal(parameters, "parameter {}".format)
    seal.take(taken)
    return parameters, seal


def changed(number: int) -> Any:
    return pytest.raises(RuntimeError, match=f"parameter {number} was changed")


def test_a_write_is_known_by_the_version_and_an_edit_by_the_values() -> None:
    parameters, seal = sealed()
    for parameter in parameters:
        parameter.grad.mul_(1.0)
    assert seal._edited() == [0, 1, 2]
    seal.check()
    parameters[2].grad.mul_(1.0625)
    with changed(2):
        seal.check()
    parameters[0].grad[2] = 7.0  # of a small gradient every element counts
    with changed(0):
        seal.check()
    seal.check(may_write=True)
    parameters[0].grad = None
    with changed(0):
        seal.check(may_write=True)


def test_a_gradient_whose_average_may_arrive_has_no_known_value() -> None:
    parameters, seal = sealed()
    seal.expect_averages([0, 2])
    seal.check()
    parameters[2].grad.mul_(1.0)
    with changed(2):
        seal.check()
    parameters[0].grad.data.fill_(1.0)
    seal.averages_are_there([0, 2])
    seal.take_again()
    parameters[0].grad.mul_(1.0)
    assert seal._edited() == [0, 2]
    with changed(2):
        seal.check()


def test_what_was_not_sampled_may_be_written_to() -> None:
    parameters, seal = sealed(range(0))
    seal.samples_values = False
    seal.take([0])
    parameters[0].grad.mul_(2.0)
    seal.check()
    parameters[0].grad = parameters[0].grad.clone()
    with changed(0):
        seal.check()


def test_memory_that_was_swapped_is_no_untouched_gradient() -> None:
    parameters, seal = sealed()
    parameters[0].grad.data = torch.ones(3)
    assert seal._edited() == [0]


@pytest.mark.parametrize("stage", [1, 2])
def test_buckets_pass_their_memory_on_until_the_step_ends(stage: int, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []

    def empty(nbytes: int, dtype: Any) -> Any:
        made.append(nbytes)
        return np.empty(nbytes, dtype)

    monkeypatch.setattr(gradients, "np", SimpleNamespace(empty=empty, uint8=np.uint8))

    def train(comm: Communicator) -> list[Tensor]:
        layers = nn.ParameterList(torch.zeros(64) for _ in range(12))
        optimizer = sgd(comm, layers, stage=stage, bucket_bytes=256)
        for _ in range(2):
            torch.stack([(one * (number + comm.rank)).sum() for number, one in enumerate(layers)]).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return [one.detach().clone() for one in layers]

    for weights in threads.run(train, 2):
        assert all(torch.equal(one, torch.full((64,), -2 * (number + 0.5))) for number, one in enumerate(weights))
    steps, ranks, in_flight = 2, 2, 2
    assert 0 < len(made) <= steps * ranks * in_flight * stage
