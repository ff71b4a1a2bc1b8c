"""How gradients add up over backwards, travel and are averaged, on gradients that are known beforehand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from thinwire.comm import Communicator, threads
from thinwire.optim import OneBitAdam, OneBitLamb, OneBitLion, ZeroOneAdam
from thinwire.zero import Averaging, ShardedOptimizer

SHAPES = {"matrix": (7, 5), "vector": (13,)}
MICRO_BATCHES = 8
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


class Known(nn.Module):
    """Its loss has the gradients that are asked for."""

    def __init__(self) -> None:
        super().__init__()
        for name, shape in SHAPES.items():
            setattr(self, name, nn.Parameter(torch.zeros(shape)))

    def loss(self, gradients: dict[str, Tensor]) -> Tensor:
        of_each = [(one * gradients[name].to(one.dtype)).float().sum() for name, one in self.named_parameters()]
        return torch.stack(of_each).sum()


def gradients_of(rank: int, micro: int, dtype: torch.dtype = BF16, scale: float = 1.0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(100 * rank + micro)
    return {name: (scale * torch.randn(shape, generator=generator)).to(dtype) for name, shape in SHAPES.items()}


def mean_of(ranks: int, micros: int, name: str, dtype: torch.dtype = BF16) -> Tensor:
    """The float32 sum of the micro-batches' 16-bit gradients, averaged over the ranks."""
    sums = [sum(gradients_of(rank, micro, dtype)[name].float() for micro in range(micros)) for rank in range(ranks)]
    return torch.stack([one for one in sums if isinstance(one, Tensor)]).mean(0)


def backward(optimizer: Any, model: Known, rank: int, micros: int, dtype: torch.dtype = BF16) -> None:
    for micro in range(micros - 1):
        with optimizer.no_sync():
            model.loss(gradients_of(rank, micro, dtype)).backward()
            optimizer.end_backward()
    model.loss(gradients_of(rank, micros - 1, dtype)).backward()


def sgd(comm: Communicator, model: Known, stage: int, averaging: Averaging, **options: Any) -> ShardedOptimizer:
    return ShardedOptimizer(
        model.parameters(),
        torch.optim.SGD,
        stage=stage,
        comm=comm,
        named_parameters=model.named_parameters(),
        bucket_bytes=100,
        block_size=4,
        lr=1.0,
        averaging=averaging,
        **options,
    )


def stepped_by(comm: Communicator, optimizer: Any, kind: str = "master") -> dict[str, Tensor]:
    """What one step of SGD from zero has put on, or another kind of state, whole. Collective."""
    found = {}
    slices = [one for one in optimizer.saved_slices() if one.kind == kind]
    for name, shape in SHAPES.items():
        values = torch.zeros(shape)
        for one in slices:
            if one.name == name:
                values.view(-1)[one.start : one.start + one.tensor.numel()] = one.tensor.detach().view(-1)
        comm.all_reduce(values)
        found[name] = values
    return found


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_backwards_of_16_bit_models_add_up_in_fp32(stage: int, ranks: int, dtype: torch.dtype) -> None:
    def body(comm: Communicator, averaging: Averaging) -> float:
        model = Known()
        optimizer = sgd(comm, model, stage, averaging, param_dtype=dtype)
        backward(optimizer, model, comm.rank, MICRO_BATCHES, dtype)
        optimizer.step()
        found = stepped_by(comm, optimizer)
        off = [found[name].neg() - mean_of(ranks, MICRO_BATCHES, name, dtype) for name in SHAPES]
        return max(float(one.abs().max()) for one in off)

    assert max(threads.run(lambda comm: body(comm, Averaging(accumulate_dtype=FP32)), ranks)) < 2e-6
    assert min(threads.run(lambda comm: body(comm, Averaging()), ranks)) > 1e-4


@pytest.mark.parametrize(
    ("optimizer_class", "stage", "options"),
    [
        *[(OneBitAdam, stage, {"freeze_step": 1}) for stage in (0, 1, 2)],
        *[(OneBitLamb, stage, {"freeze_step": 1}) for stage in (0, 1)],
        *[(ZeroOneAdam, stage, {"var_freeze_step": 1, "local_step_scaler": 1}) for stage in (0, 1)],
        *[(OneBitLion, stage, {}) for stage in (0, 1)],
    ],
)
def test_compressed_optimizers_take_the_sums(optimizer_class: Any, stage: int, options: dict[str, Any]) -> None:
    def body(comm: Communicator) -> None:
        model = Known()
        optimizer = optimizer_class(
            model.named_parameters(),
            comm=comm,
            stage=stage,
            param_dtype=BF16,
            averaging=Averaging(accumulate_dtype=FP32),
            **options,
        )
        for step in range(4):
            optimizer.zero_grad()
            for micro in range(MICRO_BATCHES - 1):
                with optimizer.no_sync():
                    model.loss(gradients_of(comm.rank, micro)).backward()
                    optimizer.end_backward()
            for name, parameter in model.named_parameters() if stage < 2 or step > 1 else ():
                own = sum(gradients_of(comm.rank, micro)[name].float() for micro in range(MICRO_BATCHES - 1))
                torch.testing.assert_close(parameter.grad, own, rtol=0, atol=2e-6)
            model.loss(gradients_of(comm.rank, MICRO_BATCHES - 1)).backward()
            optimizer.step()
            assert optimizer.last_step.applied
        optimizer.close()

    threads.run(body, 2)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_the_warmup_of_a_compressed_optimizer_averages_the_sums(stage: int) -> None:
    def body(comm: Communicator) -> None:
        model = Known()
        optimizer = OneBitAdam(
            model.named_parameters(),
            freeze_step=9,
            comm=comm,
            stage=stage,
            param_dtype=BF16,
            averaging=Averaging(accumulate_dtype=FP32),
        )
        backward(optimizer, model, comm.rank, MICRO_BATCHES)
        optimizer.step()
        momentum = stepped_by(comm, optimizer, "exp_avg")
        for name in SHAPES:
            torch.testing.assert_close(momentum[name], 0.1 * mean_of(2, MICRO_BATCHES, name), rtol=0, atol=1e-6)

    threads.run(body, 2)


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("wire", [BF16, FP16])
def test_gradients_travel_in_the_dtype_that_is_asked_for(stage: int, wire: torch.dtype) -> None:
    def body(comm: Communicator, averaging: Averaging) -> tuple[dict[str, Tensor], int]:
        model = Known()
        optimizer = sgd(comm, model, stage, averaging)
        model.loss(gradients_of(comm.rank, 0, FP32)).backward()
        optimizer.step()
        return stepped_by(comm, optimizer, "weight"), optimizer.bytes_sent

    as_it_is = threads.run(lambda comm: body(comm, Averaging()), 3)
    narrow = threads.run(lambda comm: body(comm, Averaging(wire_dtype=wire)), 3)
    for name in SHAPES:
        rounded = torch.stack([gradients_of(rank, 0, FP32)[name].to(wire).float() for rank in range(3)]).mean(0)
        expected = rounded.to(wire).float() if stage == 0 else rounded
        torch.testing.assert_close(narrow[0][0][name].neg(), expected, rtol=1e-6, atol=1e-7)
        assert not torch.equal(narrow[0][0][name], as_it_is[0][0][name])
    assert narrow[0][1] < as_it_is[0][1]


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_wider_wire_changes_nothing_but_rounding_at_the_end(stage: int) -> None:
    def body(comm: Communicator, averaging: Averaging) -> dict[str, Tensor]:
        model = Known()
        optimizer = sgd(comm, model, stage, averaging, param_dtype=BF16)
        backward(optimizer, model, comm.rank, 1)
        optimizer.step()
        return stepped_by(comm, optimizer)

    plain = threads.run(lambda comm: body(comm, Averaging()), 2)[0]
    wide = threads.run(lambda comm: body(comm, Averaging(wire_dtype=FP32)), 2)[0]
    for name in SHAPES:
        assert torch.equal(plain[name], wide[name])


@pytest.mark.parametrize(("optimizer_class", "stage"), [(OneBitAdam, 0), (OneBitAdam, 1), (ZeroOneAdam, 1)])
@pytest.mark.parametrize("wire", [BF16, FP16])
def test_the_exact_steps_of_compressed_optimizers_travel_so_too(
    optimizer_class: Any, stage: int, wire: torch.dtype
) -> None:
    def body(comm: Communicator) -> dict[str, Tensor]:
        model = Known()
        averaging = Averaging(wire_dtype=wire, divide_first=4.0)
        optimizer = optimizer_class(model.named_parameters(), comm=comm, stage=stage, averaging=averaging)
        model.loss(gradients_of(comm.rank, 0, FP32)).backward()
        optimizer.step()
        return stepped_by(comm, optimizer, "exp_avg")

    found = threads.run(body, 3)[0]
    for name in SHAPES:
        sent = [4 * (gradients_of(rank, 0, FP32)[name] / 4).to(wire).float() for rank in range(3)]
        rounding = 2**-8 if wire == BF16 else 2**-10  # of leg 2
        torch.testing.assert_close(found[name], 0.1 * torch.stack(sent).mean(0), rtol=rounding, atol=1e-6)


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("factor", [2.0, 3.0, 8.0])
def test_gradients_are_divided_before_they_are_summed(stage: int, factor: float) -> None:
    least = 2.0**-24  # fp16's smallest number

    def body(comm: Communicator, averaging: Averaging, tiny: bool) -> dict[str, Tensor]:
        model = Known()
        optimizer = sgd(comm, model, stage, averaging, param_dtype=FP16)
        gradients = {name: torch.full(shape, least) for name, shape in SHAPES.items()}
        model.loss(gradients if tiny else gradients_of(comm.rank, 0, FP16)).backward()
        optimizer.step()
        return stepped_by(comm, optimizer)

    divided, plain = Averaging(divide_first=factor), Averaging()
    for name, found in threads.run(lambda comm: body(comm, divided, False), 2)[0].items():
        mean = torch.stack([gradients_of(rank, 0, FP16)[name].float() for rank in range(2)]).mean(0)
        torch.testing.assert_close(found.neg(), mean, rtol=2e-3, atol=1e-3)
    # What is too small to be divided is lost on the way, as it is in DeepSpeed.
    assert all(bool((one == 0).all()) for one in threads.run(lambda comm: body(comm, divided, True), 2)[0].values())
    assert all(bool((one < 0).all()) for one in threads.run(lambda comm: body(comm, plain, True), 2)[0].values())


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_sum_in_place_of_a_mean_with_its_norm_and_clipping(stage: int) -> None:
    def body(comm: Communicator, max_norm: float) -> tuple[dict[str, Tensor], float]:
        model = Known()
        optimizer = sgd(comm, model, stage, Averaging(op="sum"), max_norm=max_norm)
        optimizer.loss_scale = 16.0
        (16.0 * model.loss(gradients_of(comm.rank, 0, FP32))).backward()
        assert optimizer.loss_scale == 16.0
        optimizer.step()
        return stepped_by(comm, optimizer, "weight"), optimizer.last_step.grad_norm

    sums = {name: 3 * mean_of(3, 1, name, FP32) for name in SHAPES}
    norm = float(torch.cat([one.flatten() for one in sums.values()]).norm())
    for clip in (0.0, norm / 2):
        found, told = threads.run(lambda comm, clip=clip: body(comm, clip), 3)[1]
        assert told == pytest.approx(norm, rel=1e-5)
        for name in SHAPES:
            expected = sums[name] * (0.5 if clip else 1.0)
            torch.testing.assert_close(found[name].neg(), expected, rtol=1e-5, atol=1e-5)


def test_a_sum_in_the_steps_of_a_compressed_optimizer() -> None:
    def body(comm: Communicator, averaging: Averaging) -> dict[str, Tensor]:
        model = Known()
        optimizer = OneBitAdam(
            model.named_parameters(), freeze_step=2, comm=comm, codec="none", compress="momentum", averaging=averaging
        )
        for step in range(4):
            optimizer.zero_grad()
            model.loss(gradients_of(comm.rank, step, FP32)).backward()
            optimizer.step()
        return stepped_by(comm, optimizer, "exp_avg")

    mean = threads.run(lambda comm: body(comm, Averaging()), 2)[0]
    total = threads.run(lambda comm: body(comm, Averaging(op="sum")), 2)[0]
    for name in SHAPES:
        torch.testing.assert_close(total[name], 2 * mean[name])


def test_what_cannot_work_is_told() -> None:
    with pytest.raises(TypeError, match=r"wire_dtype must be torch.float32, .* or None, got torch.int8"):
        sgd(threads.single(10.0), Known(), 1, Averaging(wire_dtype=torch.int8))
    for factor in (0, -1.0, float("inf"), "2"):
        with pytest.raises(ValueError, match="divide_first must be a number above 0, got"):
            sgd(threads.single(10.0), Known(), 1, Averaging(divide_first=factor))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="op must be 'mean' or 'sum', got 'max'"):
        sgd(threads.single(10.0), Known(), 1, Averaging(op="max"))  # type: ignore[arg-type]
    narrower = Averaging(accumulate_dtype=BF16)
    with pytest.raises(ValueError, match=r"gradients of torch.float32 parameters add up in torch.float32 or their own"):
        sgd(threads.single(10.0), Known(), 1, narrower)
    with pytest.raises(ValueError, match=r"gradients of torch.float16 parameters add up in torch.float32 or their own"):
        OneBitAdam(Known().named_parameters(), comm=threads.single(10.0), param_dtype=FP16, averaging=narrower)
    with pytest.raises(ValueError, match="warmup_wire and averaging's wire_dtype say the same"):
        OneBitAdam(
            Known().named_parameters(),
            comm=threads.single(10.0),
            warmup_wire="bf16",
            averaging=Averaging(wire_dtype=FP32),
        )
