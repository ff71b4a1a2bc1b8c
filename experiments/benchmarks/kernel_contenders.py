"""The jobs that the kernel benchmark times: copies and fills, the fused kernels, and the same work in eager torch.

Each says the least bytes it must move, all work on the same buffers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from experiments.benchmarks.kernel_peers import (
    cpu_copies,
    cpu_fills,
    eager_decode_mean,
    eager_encode,
    eager_encode_as_deepspeed,
)
from thinwire.compress.kernels import buckets
from thinwire.compress.kernels.buckets import Segments
from thinwire.compress.kernels.calls import Decode, Encode, StoreRounded
from thinwire.compress.kernels.loading import execute
from thinwire.compress.packet_layout import CODE_BITS, HEADER_BYTES, packet_bytes, scale_block

__all__ = ["BLOCK_SIZE", "Kind", "Peer", "contenders"]

BLOCK_SIZE = 2048

_WORKERS = 4
_ENCODE, _DECODE, _MEAN = "encode", "decode", f"decode and average {_WORKERS}"

Kind = Literal["copy", "fill", "kernel", "eager"]


@dataclass(frozen=True)
class Peer:
    """One contender at a job: `bytes_per_element` is the least that the job must read and write."""

    name: str
    kind: Kind
    job: str
    bytes_per_element: float
    run: Callable[[], None]


def contenders(device: str, elements: int) -> list[Peer]:
    """Every contender, on vectors of `elements`."""
    buffers = _Buffers(device, elements)
    codecs = [peer for codec in CODE_BITS for peer in _kernels(buffers, codec)]
    return [*_copies(buffers), *_fills(buffers), *codecs, *_frozen_stage(buffers), *_eager(buffers)]


class _Buffers:
    """The memory that all peers share: equal conditions, and a working set far beyond the caches."""

    def __init__(self, device: str, elements: int) -> None:
        self.device, self.elements = device, elements
        self.source, self.target, self.payload, self.residual = (torch.randn(elements, device=device) for _ in range(4))
        self.packets = {codec: self._packets(codec) for codec in CODE_BITS}

    def coded_bytes(self, codec: str) -> float:
        """Bytes an element of one packet."""
        return self.packets[codec].size(1) / self.elements

    def _packets(self, codec: str) -> Tensor:
        block_size = scale_block(codec, BLOCK_SIZE)
        row_bytes = packet_bytes(codec, self.elements, block_size)
        packets = torch.zeros(_WORKERS, row_bytes, dtype=torch.uint8, device=self.device)
        for row in range(_WORKERS):
            values = torch.randn_like(self.source)
            execute(Encode(codec, values, None, packets[row : row + 1], self.elements, block_size))
        return packets


def _copies(buffers: _Buffers) -> list[Peer]:
    if buffers.device == "cpu":
        ways = cpu_copies(buffers.source, buffers.target)
    else:
        ways = {"copy, torch": lambda: _discard(buffers.target.copy_(buffers.source))}
    return [Peer(name, "copy", "copy", 8, run) for name, run in ways.items()]


def _fills(buffers: _Buffers) -> list[Peer]:
    if buffers.device == "cpu":
        ways = cpu_fills(buffers.target)
    else:
        ways = {"fill, torch": lambda: _discard(buffers.target.fill_(1.0))}
    return [Peer(name, "fill", "fill", 4, run) for name, run in ways.items()]


def _kernels(buffers: _Buffers, codec: str) -> list[Peer]:
    packets, coded = buffers.packets[codec], buffers.coded_bytes(codec)
    elements, target, block_size = buffers.elements, buffers.target, scale_block(codec, BLOCK_SIZE)

    def encode() -> None:
        execute(Encode(codec, buffers.payload, buffers.residual, packets[:1], elements, block_size))

    def decode() -> None:
        execute(Decode(codec, packets[:1], target, elements, block_size))

    def decode_mean() -> None:
        execute(Decode(codec, packets, target, elements, block_size, mean=True))

    jobs = ((_ENCODE, 12 + coded, encode), (_DECODE, 4 + coded, decode), (_MEAN, 4 + _WORKERS * coded, decode_mean))
    return [Peer(f"{codec} {job}", "kernel", f"{codec} {job}", floor, run) for job, floor, run in jobs]


def _frozen_stage(buffers: _Buffers) -> list[Peer]:
    """What sharded 1-bit Adam's step does besides, on a bf16 model."""
    elements, packets, coded = buffers.elements, buffers.packets["sign1"][:1], buffers.coded_bytes("sign1")
    codes = torch.randint(0, 256, (elements,), dtype=torch.uint8, device=buffers.device)
    tables = torch.rand(1, 256, device=buffers.device)
    gradient, residual, weights = (buffers.source.bfloat16() for _ in range(3))
    state = buckets.PackedState(packets.clone(), codes, elements, elements, BLOCK_SIZE)
    segments = Segments([(0, elements)])

    def payload() -> None:
        given = [gradient], [0.9], [1.0], tables, residual, residual, packets
        execute(buckets.EncodePackedPayload(state, segments, *given, part=state.whole))

    def move() -> None:
        execute(buckets.MovePacked(state, segments, weights, 0, [True], [1e-4], [1.0], seed=3), [weights])

    def rounded() -> None:
        execute(StoreRounded(weights, buffers.target, seed=5))

    jobs = (
        ("packed payload, bf16", 7 + 2 * coded, payload),
        ("packed move, bf16", 5 + coded, move),
        ("store rounded, bf16", 6, rounded),
    )
    return [Peer(name, "kernel", name, floor, run) for name, floor, run in jobs]


def _eager(buffers: _Buffers) -> list[Peer]:
    coded = buffers.coded_bytes("sign1")
    bodies = torch.zeros_like(buffers.packets["sign1"][:, HEADER_BYTES:])
    payload, residual, target = buffers.payload, buffers.residual, buffers.target

    def as_deepspeed() -> None:
        eager_encode_as_deepspeed(payload, residual, bodies[0], BLOCK_SIZE)

    def few_passes() -> None:
        eager_encode(payload, residual, bodies[0], BLOCK_SIZE)

    def decode_mean() -> None:
        eager_decode_mean(bodies, target, BLOCK_SIZE)

    encode, mean = f"sign1 {_ENCODE}", f"sign1 {_MEAN}"
    return [
        Peer(f"{encode}, eager, DeepSpeed's passes", "eager", encode, 12 + coded, as_deepspeed),
        Peer(f"{encode}, eager, fewest passes", "eager", encode, 12 + coded, few_passes),
        Peer(f"{mean}, eager", "eager", mean, 4 + _WORKERS * coded, decode_mean),
    ]


def _discard(_: object) -> None:
    """Turn an expression into a statement."""
