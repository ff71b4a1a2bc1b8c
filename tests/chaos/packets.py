"""Packets that were damaged on their way, given to what receives them: a header that is not the expected one is
noticed, and whatever bytes follow it, nothing crashes and nothing is written beside the output."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tests.chaos.harness import each_seed
from tests.compress.kernels.body import backends
from thinwire.compress import Header, PacketError
from thinwire.compress.codecs import Codec, make_codec, scales
from thinwire.compress.exchange import Headers
from thinwire.compress.kernels.calls import Decode
from thinwire.compress.packet import Flags, write_headers
from thinwire.compress.packet_layout import CODE_BITS, HEADER_BYTES

_FLAGS = slice(4, 6)
_KNOWN = int(sum(Flags))
_GUARD = 64
_SENTINEL = 12345.0
_CODECS = ("sign1", "stat2", "int4", "fp8", "int8", "bf16", "none")
_ANSWERS = (PacketError, ValueError, TypeError)


@dataclass
class Transfer:
    """Packets as they were sent, uint8 [rows, bytes], and as they came: `received`, of which damage makes another.

    Rows carry `shard` elements each, of which `numel` in all are no padding.
    """

    codec: Codec
    rows: int
    shard: int
    numel: int
    header: Header
    received: Tensor

    @classmethod
    def random(cls, source: random.Random) -> Transfer:
        """Values of one of the codecs, as it is received."""
        codec = make_codec(source.choice(_CODECS), 64 * source.choice((1, 1, 2, 5)))
        rows, shard = source.randrange(1, 5), codec.block_size * source.randrange(1, 5)
        numel = rows * shard - source.choice((0, 1, source.randrange(codec.block_size)))
        generator = torch.Generator().manual_seed(source.randrange(1 << 30))
        payload = torch.randn(rows * shard, generator=generator) * 10.0 ** source.randrange(-30, 30)
        payload[numel:] = 0.0
        packets = torch.zeros(rows, codec.packet_bytes(shard), dtype=torch.uint8)
        codec.encode(payload, None, packets, numel)
        numbers = (source.randrange(1 << 16) for _ in range(4))
        bucket, step, part, settings = numbers
        header = Header(codec.identifier, codec.block_size, bucket, step, Flags.NONE, part, settings)
        write_headers(packets, header.pack(flags=source.choice(list(Flags))))
        return cls(codec, rows, shard, numel, header, packets)


Damage = Callable[[random.Random, Transfer], None]


def nothing(source: random.Random, transfer: Transfer) -> None:
    """What is sound has to be taken."""


def bits_anywhere(source: random.Random, transfer: Transfer) -> None:
    _flip(source, transfer.received, range(transfer.received.shape[1]))


def bits_of_headers(source: random.Random, transfer: Transfer) -> None:
    _flip(source, transfer.received, range(HEADER_BYTES))


def bits_of_values(source: random.Random, transfer: Transfer) -> None:
    _flip(source, transfer.received, range(HEADER_BYTES, transfer.received.shape[1]))


def _flip(source: random.Random, packets: Tensor, places: range) -> None:
    for _ in range(source.choice((1, 1, 2, 30))):
        packets[source.randrange(packets.shape[0]), source.choice(places)] ^= 1 << source.randrange(8)


def rows_cut_short(source: random.Random, transfer: Transfer) -> None:
    length = source.choice((0, 1, HEADER_BYTES, HEADER_BYTES + 2, source.randrange(transfer.received.shape[1])))
    transfer.received = transfer.received[:, :length].contiguous()


def rows_too_long(source: random.Random, transfer: Transfer) -> None:
    more = torch.zeros(transfer.received.shape[0], source.randrange(1, 200), dtype=torch.uint8)
    transfer.received = torch.cat([transfer.received, more], dim=1)


def the_end_never_came(source: random.Random, transfer: Transfer) -> None:
    transfer.received.view(-1)[source.randrange(transfer.received.numel()) :] = source.choice((0, 255))


def rows_lost(source: random.Random, transfer: Transfer) -> None:
    transfer.received = transfer.received[: source.randrange(transfer.received.shape[0])].contiguous()


def rows_twice(source: random.Random, transfer: Transfer) -> None:
    transfer.received = torch.cat([transfer.received, transfer.received[:1]])


def senders_swapped(source: random.Random, transfer: Transfer) -> None:
    order = list(range(transfer.received.shape[0]))
    source.shuffle(order)
    transfer.received = transfer.received[order].contiguous()


def bytes_shifted(source: random.Random, transfer: Transfer) -> None:
    transfer.received = transfer.received.view(-1).roll(source.randrange(1, 40)).view_as(transfer.received)


def another_header(source: random.Random, transfer: Transfer) -> None:
    name = source.choice(("codec", "block_size", "bucket", "part", "step", "settings"))
    value = 64 * source.randrange(1, 1024) if name == "block_size" else source.randrange(1 << 8)
    row = source.randrange(transfer.received.shape[0])
    write_headers(transfer.received[row : row + 1], replace(transfer.header, **{name: value}).pack())


def another_version(source: random.Random, transfer: Transfer) -> None:
    transfer.received[source.randrange(transfer.received.shape[0]), 2] = source.randrange(256)


def another_codec(source: random.Random, transfer: Transfer) -> None:
    name = source.choice(_CODECS)
    other = make_codec(name, transfer.codec.block_size)
    packets = torch.zeros(transfer.rows, other.packet_bytes(transfer.shard), dtype=torch.uint8)
    other.encode(torch.ones(transfer.rows * transfer.shard), None, packets, transfer.numel)
    write_headers(packets, replace(transfer.header, codec=other.identifier).pack())
    transfer.received = packets


def scales_that_are_no_numbers(source: random.Random, transfer: Transfer) -> None:
    codec, packets = transfer.codec, transfer.received
    value = source.choice((float("nan"), float("inf"), -float("inf"), -1.0, 3e38, 1e-45))
    if codec.name in CODE_BITS:
        found = scales(codec.name, packets, codec.scale_block)
        found[source.randrange(found.shape[0]), source.randrange(found.shape[1])] = value
    else:
        dtype = torch.bfloat16 if codec.name == "bf16" else torch.float32
        packets[:, HEADER_BYTES:].view(dtype)[:, source.randrange(transfer.shard)] = value


def random_bytes(source: random.Random, transfer: Transfer) -> None:
    row = source.randrange(transfer.received.shape[0])
    numbers = source.randbytes(transfer.received.shape[1])
    transfer.received[row] = torch.frombuffer(bytearray(numbers), dtype=torch.uint8)


DAMAGES: list[Damage] = [
    *(nothing, bits_anywhere, bits_of_headers, bits_of_headers, bits_of_values, rows_cut_short, rows_too_long),
    *(the_end_never_came, rows_lost, rows_twice, senders_swapped, bytes_shifted, another_header, another_version),
    *(another_codec, scales_that_are_no_numbers, random_bytes),
]


def faults_of_headers(transfer: Transfer) -> list[str]:
    """What is wrong with how the headers are looked at."""
    raw = transfer.received[:, :HEADER_BYTES]
    expected = torch.frombuffer(bytearray(transfer.header.pack()), dtype=torch.uint8)
    sound = raw.shape[0] > 0 and raw.shape[1] == HEADER_BYTES
    if sound:
        differs = raw != expected
        differs[:, _FLAGS] = False
        flags = raw[:, _FLAGS].clone(memory_format=torch.contiguous_format).view(torch.int16)
        sound = not differs.any() and not (flags & ~_KNOWN).any()
    try:
        Headers(raw.clone(), transfer.header.part).check(transfer.header)
    except Exception as error:
        if not isinstance(error, PacketError) or not str(error):
            return [f"headers: {type(error).__name__}: {error}"]
        return [f"sound headers are refused: {error}"] if sound else []
    return [] if sound else ["damage of a header goes unnoticed"]


def faults_of_values(transfer: Transfer, mean: bool) -> list[str]:
    """What is wrong with how the values are decoded, by the codec and by each backend of the kernels."""
    codec, packets = transfer.codec, transfer.received
    rows = 1 if mean else transfer.rows
    fits = packets.shape[1] == codec.packet_bytes(transfer.shard)
    fits = fits and packets.shape[0] > 0 and (mean or packets.shape[0] == rows)
    numel = min(transfer.numel, rows * transfer.shard)
    before = packets.clone()
    decoders: dict[str, Callable[[Tensor], None]] = {
        "codec": lambda output: (codec.decode_mean if mean else codec.decode)(packets, output, numel)
    }
    for name, backend in backends().items() if codec.name in CODE_BITS else ():

        def decode(output: Tensor, backend: Any = backend) -> None:
            call = Decode(codec.name, packets, output, numel, codec.scale_block, mean)
            call.check()
            backend.decode(call)

        decoders[name] = decode
    found, outputs = [], []
    for name, decoder in decoders.items():
        whole = torch.full((2 * _GUARD + rows * transfer.shard,), _SENTINEL)
        inside = whole[_GUARD:-_GUARD]
        try:
            decoder(inside)
        except Exception as error:
            if fits or not isinstance(error, _ANSWERS) or not str(error):
                found.append(f"{name}: {type(error).__name__}: {error}")
        else:
            outputs.append(inside.clone())
            if not fits:
                found.append(f"{name} decodes packets of another size")
        if (whole[:_GUARD] != _SENTINEL).any() or (whole[-_GUARD:] != _SENTINEL).any():
            found.append(f"{name} writes beside its output")
    if any(not torch.equal(one.nan_to_num(7.0), outputs[0].nan_to_num(7.0)) for one in outputs):
        found.append("the backends decode other values")
    if not torch.equal(packets, before):
        found.append("decoding changes the packets")
    return found


@each_seed
def run(seed: str) -> list[str]:
    """What is wrong with how the transfer of that seed is received."""
    source = random.Random(seed)
    transfer = Transfer.random(source)
    damage = source.choice(DAMAGES)
    damage(source, transfer)
    found = faults_of_headers(transfer)
    for mean in (False, True):
        found += faults_of_values(transfer, mean)
    told = f"{damage.__name__} of {transfer.rows} rows of {transfer.shard}, {transfer.codec.name}"
    return [f"{told}: {fault}" for fault in found]
