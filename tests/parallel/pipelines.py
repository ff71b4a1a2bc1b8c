"""``python -m tests.parallel.pipelines TASK...``: what one rank of a pipeline does, in real processes, as schedules of
torch need; and the same model in one process, with what its boundaries do to activations and gradients."""

import copy
import sys
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleMulti

from tests.refusing import refused
from thinwire import comm
from thinwire.compress import Header, PacketError
from thinwire.compress.codecs import Codec
from thinwire.parallel import CompressedStage
from thinwire.parallel.compressed_stage import activation_codec, pack, takes, unpack
from thinwire.parallel.pipeline import schedule_class

SINGLE = ("GPipe", "1F1B", "Eager1F1B")
V_SHAPED = ("ZBVZeroBubble", "DualPipeV")
SCHEDULES = (*SINGLE, "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", *V_SHAPED)
CPU = torch.device("cpu")
LOSS = nn.MSELoss()
CODECS = {"activations": "int4", "gradients": "int8"}


def through(codec: Codec | None, tensor: Tensor) -> Tensor:
    """What arrives of it."""
    if codec is None or not takes(codec, tensor):
        return tensor.clone()
    arrived = torch.empty_like(tensor)
    unpack(codec, pack(codec, tensor, Header(codec.identifier, codec.block_size, 0, 0)), arrived)
    return arrived


class Boundary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, there: Codec | None, back: Codec | None, tensor: Tensor) -> Tensor:
        ctx.back = back
        return through(there, tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, Tensor]:
        return None, None, through(ctx.back, gradient)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inside = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.inside(hidden)


def blocks(stages: int, width: int = 33) -> list[nn.Module]:
    torch.manual_seed(5)
    return [Block(width) for _ in range(stages)]


def stages_of(schedule: str, rank: int, size: int) -> list[int]:
    if schedule in V_SHAPED:
        return [rank, 2 * size - 1 - rank]
    return [rank] if schedule in SINGLE else [rank, rank + size]


def build(
    schedule: str, modules: Sequence[nn.Module], micro_batches: int, kind: Callable[..., PipelineStage], **codecs: Any
):
    """This rank's part of a pipeline: the schedule, and its stages' modules."""
    rank, size = dist.get_rank(), dist.get_world_size()
    mine = stages_of(schedule, rank, size)
    stages = [kind(modules[one], one, len(modules), CPU, **codecs) for one in mine]
    make = schedule_class(schedule)
    several = issubclass(make, PipelineScheduleMulti)
    return make(stages if several else stages[0], micro_batches, loss_fn=LOSS), stages


def step(
    schedule: Any, stages: Sequence[PipelineStage], inputs: Tensor, target: Tensor, run: str = "step"
) -> list[float]:
    first, last = (any(getattr(one, which) for one in stages) for which in ("is_first", "is_last"))
    losses: list[Tensor] = []
    getattr(schedule, run)(
        *([inputs] if first else []), target=target if last else None, losses=losses if last else None
    )
    return [float(loss) for loss in losses]


def reference(
    schedule: str, modules: Sequence[nn.Module], inputs: Tensor, target: Tensor, micro_batches: int, **codecs: Any
):
    there, back = (activation_codec(codecs[name]) for name in ("activations", "gradients"))
    size, losses = dist.get_world_size(), []
    at = {stage: rank for rank in range(size) for stage in stages_of(schedule, rank, size)}
    for some, wanted in zip(inputs.tensor_split(micro_batches), target.tensor_split(micro_batches), strict=True):
        hidden = some
        for stage, module in enumerate(modules):
            hidden = module(hidden)
            if stage + 1 < len(modules) and at[stage] != at[stage + 1]:
                hidden = Boundary.apply(there, back, hidden)
        losses.append(LOSS(hidden, wanted))
    for loss in reversed(losses) if schedule == "LoopedBFS" else losses:  # sums of gradients depend on the order
        loss.backward()
    for parameter in nn.ModuleList(modules).parameters():
        parameter.grad.div_(micro_batches)
    return [float(loss) for loss in losses]


def gradients(modules: Sequence[nn.Module]) -> list[Tensor]:
    return [parameter.grad for module in modules for parameter in module.parameters()]


def check_schedule(name: str) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    mine = stages_of(name, rank, size)
    modules = blocks(size * len(mine))
    micro_batches = 2 * size
    torch.manual_seed(1)
    inputs, target = torch.randn(2, 3 * micro_batches, 7, 33)
    for codecs, other in (({"activations": None, "gradients": "none"}, PipelineStage), (CODECS, None)):
        whole, parts = copy.deepcopy(modules), copy.deepcopy(modules)
        schedule, stages = build(name, parts, micro_batches, CompressedStage, **codecs)
        found = [step(schedule, stages, inputs, target) for _ in range(2)]
        if other is not None:
            schedule, stages = build(name, whole, micro_batches, other)
            expected = [step(schedule, stages, inputs, target) for _ in range(2)]
        else:
            expected = [reference(name, whole, inputs, target, micro_batches, **codecs) for _ in range(2)]
            if not any(one.is_last for one in stages):
                expected = [[], []]
        print(name, codecs, found[0][:2], expected[0][:2])
        assert found == expected, (name, found, expected)
        for one in mine:
            for got, wanted in zip(gradients([parts[one]]), gradients([whole[one]]), strict=True):
                assert torch.equal(got, wanted), (name, one, (got - wanted).abs().max())


def schedules() -> None:
    """Of four ranks some are neither first nor last where each has one stage; two that have two show the same."""
    of_four = ("1F1B", "Eager1F1B", "InterleavedZeroBubble", "DualPipeV")
    for name in SCHEDULES if dist.get_world_size() == 2 else of_four:
        check_schedule(name)


class Several(nn.Module):
    """Tensors of many kinds to the next stage, and what has come in there."""

    def __init__(self, first: bool) -> None:
        super().__init__()
        self.first, self.seen = first, list[tuple[Tensor, ...]]()
        self.weights = nn.Parameter(torch.linspace(0.5, 2.0, 30))

    def forward(self, *given: Tensor) -> Any:
        if self.first:
            hidden = given[0] * self.weights
            halves = (hidden.transpose(0, 1), hidden.bfloat16(), hidden.half(), hidden.double())
            return *halves, hidden > 0, given[0].long(), hidden[:0], hidden[0, :1]
        self.seen.append(tuple(one.detach().clone() for one in given))
        return sum(
            (one.float() * self.weights.view(30, 1) if n == 0 else one.float() * self.weights).mean()
            for n, one in enumerate(given[:4])
        )


def tensors() -> None:
    """Of every dtype and layout: the codec's round trip arrives, also of what is not finite; all else as it is."""
    rank = dist.get_rank()
    there = activation_codec("int8")
    inputs = torch.randn(22, 30, generator=torch.Generator().manual_seed(3)).mul_(5)
    inputs[0, 3], inputs[-1, -1] = float("nan"), float("-inf")
    modules = [Several(True), Several(False)]
    stage = CompressedStage(modules[rank], rank, 2, CPU, activations="int8", gradients="int4")
    schedule = schedule_class("1F1B")(stage, 2, loss_fn=lambda output, target: output)
    schedule.step(*([inputs] if rank == 0 else []), target=torch.zeros(2) if rank else None, return_outputs=False)
    if rank == 1:
        for some, arrived in zip(inputs.chunk(2), modules[1].seen[-2:], strict=True):
            for index, (sent, got) in enumerate(zip(modules[0](some), arrived, strict=True)):
                expected = through(there, sent.detach())
                assert torch.equal(expected.isfinite(), got.isfinite()), index
                assert torch.equal(expected.nan_to_num(0, 0, 0), got.nan_to_num(0, 0, 0)), index
                assert got.isfinite().all() == sent.isfinite().all(), index
                assert (index > 3) == torch.equal(sent.nan_to_num(0, 0, 0), got.nan_to_num(0, 0, 0)), index


class Laid(nn.Module):
    """Gives, and takes the gradient of, tensors that are not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Linear(33, 33)

    def forward(self, hidden: Tensor, *others: Tensor) -> Any:
        hidden = self.inside(hidden.transpose(0, 1).contiguous()).transpose(0, 1)
        return hidden + others[0] if others else (hidden, hidden[:, :, :1].expand(-1, -1, 33))


def layouts() -> None:
    """Of any layout, expanded too, it arrives through codecs and as it is."""
    torch.manual_seed(1)
    modules = [Laid(), Laid()]
    inputs, target = torch.randn(2, 6, 7, 33)
    whole = copy.deepcopy(modules)
    losses = [
        LOSS(whole[1](*whole[0](some)), to).detach() for some, to in zip(inputs.chunk(2), target.chunk(2), strict=True)
    ]
    for codec, near in ((None, 1e-6), ("int8", 5e-3), ("int4", 2e-2)):
        schedule, stages = build(
            "Eager1F1B", copy.deepcopy(modules), 2, CompressedStage, activations=codec, gradients=codec
        )
        found = step(schedule, stages, inputs, target)
        assert found == ([pytest.approx(float(one), rel=near) for one in losses] if stages[0].is_last else []), codec


def evaluations() -> None:
    """Between steps, of other micro-batches: torch looks at shapes anew."""
    torch.manual_seed(1)
    modules = blocks(2)
    schedule, stages = build("1F1B", copy.deepcopy(modules), 2, CompressedStage, **CODECS)
    for run, rows in (("step", 4), ("eval", 10), ("step", 6)):
        inputs, target = torch.randn(2, rows, 7, 33)
        found = step(schedule, stages, inputs, target, run)
        assert found == (reference("1F1B", modules, inputs, target, 2, **CODECS) if stages[0].is_last else []), run


def bad_codecs() -> None:
    rank, module = dist.get_rank(), nn.Linear(4, 4)
    for told, given in (
        ("activations must be 'int8', .*got 'sign1': codecs of one and two bits", {"activations": "sign1"}),
        ("gradients must be .*got 'int7'", {"gradients": "int7" if rank else "int8"}),
        ("rank 1 and rank 0 differ: activations is 'int4' against 'int8'", {"activations": "int4" if rank else "int8"}),
    ):
        refused(ValueError, told, CompressedStage, module, rank, 2, CPU, **given)


class Integers(nn.Module):
    def forward(self, given: Tensor) -> Tensor:
        return given.long()


def integers() -> None:
    schedule, stages = build("GPipe", [Integers(), Integers()], 2, CompressedStage)
    inputs = torch.ones(4, 3)
    refused(
        ValueError,
        "stage 0 gives the next one only torch.int64, which no codec takes. Split",
        schedule.eval,
        *([inputs] if stages[0].is_first else []),
    )


def uneven() -> None:
    """Of 7 samples torch makes micro-batches of 4 and 3."""
    schedule, stages = build("GPipe", blocks(2), 2, CompressedStage)
    inputs, target = torch.randn(2, 7, 7, 33)
    told = (
        r"of micro-batch 1 the activations 0 have shape \(3, 7, 33\), and of the first one \(4, 7, 33\)"
        if stages[0].is_first
        else ""
    )
    refused(ValueError if told else RuntimeError, told, step, schedule, stages, inputs, target)


def lowered() -> None:
    """Under autocast after a first step without."""
    schedule, stages = build("GPipe", [nn.Linear(33, 33), nn.Linear(33, 33)], 2, CompressedStage, activations=None)
    inputs, target = torch.randn(2, 8, 7, 33)
    step(schedule, stages, inputs, target)
    told = "activations 0 are torch.bfloat16, and of the first step's torch.float32" if stages[0].is_first else ""
    with torch.autocast("cpu", torch.bfloat16):
        refused(ValueError if told else RuntimeError, told, step, schedule, stages, inputs, target)


def astray() -> None:
    """A rank that is a step ahead of the others."""
    schedule, stages = build("GPipe", blocks(2), 2, CompressedStage)
    inputs, target = torch.randn(2, 8, 7, 33)
    stages[0]._steps += 1 - dist.get_rank()
    error, told = (
        (PacketError, "rank 0 sent a packet of step 2 where step 1 was expected")
        if dist.get_rank()
        else (RuntimeError, "")
    )
    refused(error, told, step, schedule, stages, inputs, target)


if __name__ == "__main__":
    comm.init(timeout=60.0)
    for task in sys.argv[1:]:
        globals()[task]()
