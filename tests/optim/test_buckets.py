"""Whole buckets: held gradients are cast into the packets that a payload written from them would have carried, and
compiled kernels make the steps of their specification, but for the last bit of a block's scale, a sum that each adds up
in its own order."""

import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import thinwire
from tests.launching import on_threads
from thinwire.comm import Communicator, threads
from thinwire.comm.traffic import sent_bytes
from thinwire.compress import make_codec
from thinwire.compress.codecs import CodecName
from thinwire.compress.kernels import loading
from thinwire.compress.light_exchanges import ExactExchange
from thinwire.compress.packet import Header
from thinwire.optim.wire import cast_gradients
from thinwire.zero import BucketLayout, Slot
from thinwire.zero.rank_checks import NormSketch
from thinwire.zero.replica import Replica, Stages

BLOCK = 64


def layout_of(seed: int, ranks: int) -> BucketLayout:
    """Some slots empty, some with room in between."""
    chosen = random.Random(seed)
    slots, end = [], 0
    for parameter in range(chosen.randint(1, 7)):
        end += chosen.choice((0, 0, 5))
        slots.append(Slot(parameter, end, chosen.choice((0, 1, 63, 200, 300))))
        end += slots[-1].numel
    return BucketLayout(tuple(slots), ranks, BLOCK)


def packets_of(comm: Communicator, layout: BucketLayout, codec: CodecName, divisor: float) -> tuple[Tensor, Tensor]:
    """All parts' packets: from the gradients, and from a payload."""
    made = make_codec(codec, BLOCK)
    exchange = ExactExchange(comm, layout.numel, made, bucket=2, error_feedback=False)  # type: ignore[arg-type]
    gradients = {}
    for slot in layout.slots:
        gradient = torch.randn(slot.numel, generator=torch.Generator().manual_seed(slot.parameter))
        if slot.parameter % 3 != 1:
            gradients[slot.parameter] = gradient
            exchange.payload[slot.offset : slot.offset + slot.numel] = gradient / divisor
    cast = cast_gradients(exchange, layout, gradients, divisor)
    header = Header(made.identifier, BLOCK, 2, step=9).pack()
    found, wanted = [], []
    for place in (slice(0, BLOCK), slice(BLOCK, exchange.shard)) if exchange.shard > BLOCK else (slice(0, BLOCK),):
        packets = torch.full((comm.size, made.packet_bytes(place.stop - place.start)), 0xA5, dtype=torch.uint8)
        cast(place, packets, header)
        found.append(packets.view(-1))
        other = torch.zeros_like(packets)
        made.values(other).copy_(exchange.payload.view(comm.size, -1)[:, place])  # type: ignore[attr-defined]
        other[:, :16] = packets[0, :16]
        wanted.append(other.view(-1))
        assert packets[:, :16].eq(torch.frombuffer(bytearray(header), dtype=torch.uint8)).all()
    return torch.cat(found), torch.cat(wanted)


@pytest.mark.parametrize("codec", ["none", "bf16", "fp16"])
@pytest.mark.parametrize("ranks", [1, 2, 3])
@on_threads("ranks")
def test_what_is_cast_is_what_a_payload_would_carry(comm: Communicator, codec: CodecName, ranks: int) -> None:
    for seed in range(20):
        for divisor in (1.0, 3.0):
            found, wanted = packets_of(comm, layout_of(seed, ranks), codec, divisor)
            assert torch.equal(found, wanted)


CASES = [
    ("OneBitAdam", {"freeze_step": 3}),
    ("OneBitAdam", {"freeze_step": 3, "compress": "momentum", "weight_decay": 0.1}),
    ("OneBitAdam", {"freeze_step": 3, "codec": "int8", "max_norm": 0.5}),
    ("OneBitAdam", {"freeze_step": 3, "codec": "stat2"}),
    ("OneBitAdam", {"freeze_step": 3, "codec": "fp8"}),
    ("OneBitAdam", {"freeze_step": 3, "codec": "int4", "block_size": 256}),
    ("OneBitAdam", {"freeze_step": 3, "stage": 1}),
    ("OneBitLamb", {"freeze_step": 3}),
    ("OneBitLion", {}),
    ("OneBitAdam", {"freeze_step": 3, "nodes": [0, 0]}),
]


def train(name: str, options: dict[str, Any], dtype: torch.dtype) -> list[Tensor]:
    """Weights after 8 steps of 2 ranks, with one parameter that does not train and one without gradient at times."""

    def rank(comm: Communicator) -> Tensor:
        generator = torch.Generator().manual_seed(3)
        shapes = [(7, 31), (5,), (65, 3), (1,), (33, 17)]
        parameters = [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]
        parameters[4] = nn.Parameter(parameters[4].detach().t().contiguous().t())  # lies in another order
        parameters[1].requires_grad_(False)
        optimizer = getattr(thinwire, name)(
            parameters, lr=1e-2, comm=comm, **{"block_size": 64, "bucket_bytes": 2048, **options}
        )
        generator.manual_seed(10 + comm.rank)
        for step in range(8):
            missing = step % 3 == 2
            loss = torch.zeros(())
            for number, parameter in enumerate(parameters):
                noise = torch.randn(parameter.shape, generator=generator).to(dtype)
                if not (missing and number == 3):
                    loss = loss + (parameter * noise).sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return torch.cat([parameter.detach().float().reshape(-1) for parameter in parameters])

    return threads.run(rank, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("name", "options"), CASES)
def test_steps_are_those_of_the_specification(
    name: str, options: dict[str, Any], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("numba")
    compiled = train(name, options, dtype)
    monkeypatch.setattr(loading, "compiled_backend", lambda device: None)
    specified = train(name, options, dtype)
    torch.testing.assert_close(compiled, specified, rtol=1e-5 if dtype == torch.float32 else 1e-2, atol=1e-5)
    assert torch.equal(compiled[0], compiled[1])


@on_threads(3)
def test_a_norm_is_known_before_the_average_is(comm: Communicator) -> None:
    """In half the bytes where that is less than a sketch, which is right to some standard deviations of 0.55%."""
    for numels, tolerance in (({0: 30_000, 2: 2_768}, 1e-3), ({0: 30_000, 2: 2_769}, 0.02)):
        parameters = {number: torch.empty(numel) for number, numel in numels.items()}
        sketch = NormSketch(comm, parameters, torch.device("cpu"))
        for step in range(3):
            sketch.begin(step)
            generator = torch.Generator().manual_seed(3 * step + comm.rank)
            own = torch.randn(sum(numels.values()), generator=generator)
            vectors = dict(zip(numels, own.split(list(numels.values())), strict=True))
            for number in sorted(numels, reverse=comm.rank == 1):
                sketch.add(vectors[number].to(torch.float16), number)
            before, found = comm.traffic.bytes_sent, float(sketch.norm())
            assert comm.traffic.bytes_sent - before == sent_bytes("all_reduce", 65536, 3)
            comm.all_reduce(own, "mean")
            assert found == pytest.approx(float(own.norm()), rel=tolerance)


@on_threads(4)
def test_stages_share_one_sketch(comm: Communicator) -> None:
    """Two replicas of two stages, of which one has a quarter of the elements, and then all that is not zero of them."""
    stage, numel = comm.rank // 2, (30_000, 90_000)[comm.rank // 2]
    averaging, stages = comm.split(stage), comm.split(comm.rank % 2)
    parameter, pipeline = torch.zeros(numel), Stages(stages, {}, set())
    pipeline.note([parameter])
    replica = Replica.among(averaging, [parameter])
    replica.check([parameter], ["one"], {})
    sketch = NormSketch(averaging, {0: parameter}, torch.device("cpu"), replica)
    for step, (scale, tolerance) in enumerate([(1.0, 0.02), (1.0, 0.02), (0.0, 0.04), (0.0, 0.04)]):
        sketch.begin(step)
        own = torch.randn(numel, generator=torch.Generator().manual_seed(4 * step + comm.rank))
        own *= scale if stage else 1.0
        sketch.add(own, 0)
        before, found = averaging.traffic.bytes_sent, float(sketch.norm())
        assert averaging.traffic.bytes_sent - before == (49152 if stage else 16384)
        averaging.all_reduce(own, "mean")
        square = own.double().square().sum()
        stages.all_reduce(square)
        assert found == pytest.approx(float(square.sqrt()), rel=tolerance)
