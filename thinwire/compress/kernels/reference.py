"""The kernels in plain torch: slow, readable, on any device. This file is the specification.

Blocks are [blocks, block_size] in float32; scales [blocks, scales a block] in float32, as on the wire; codes uint8
[blocks, bytes]. float64 payloads are accepted too, so that a test can hold the fast backends against exact arithmetic;
scales are rounded to float32 in any case. Nothing about headers makes the host wait for a device."""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.compress.kernels.buckets import Part, keys
from thinwire.compress.kernels.calls import Decode, Encode, StoreRounded, WriteHeaders
from thinwire.compress.packet_layout import BLOCK_SCALES, CODE_BITS, HEADER_BYTES, SCALE_BYTES, codes_offset

_TOP_LEVEL = {"int8": 127.0, "int4": 7.0, "fp8": 448.0}
"""What a block's largest magnitude becomes; for fp8 the largest number of its format."""
_SPLIT = 0.98
"""Of stat2, in root mean squares. For a Gaussian the best is 0.9816 (Max 1960, Table I)."""
_SUMS = 64


def encode_blocks(codec: str, blocks: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and codes of `blocks`, which hold 0 where not `valid`, bool alike."""
    counts = valid.sum(dim=1).clamp(min=1).to(blocks.dtype)
    if codec == "sign1":
        scales = (blocks.abs().sum(dim=1) / counts).to(torch.float32)
        return scales.unsqueeze(1), _pack((blocks >= 0) & valid)
    if codec == "stat2":
        return _encode_in_two_magnitudes(blocks, valid, counts)
    scales = (blocks.abs().amax(dim=1, keepdim=True) / like(_TOP_LEVEL[codec], blocks)).to(torch.float32)
    return scales, _levels(codec, blocks, scales)


def _levels(codec: str, blocks: Tensor, scales: Tensor) -> Tensor:
    values = _in_scales(blocks, scales.to(blocks.dtype), _TOP_LEVEL[codec])
    if codec == "fp8":
        return values.to(torch.float8_e4m3fn).view(torch.uint8)
    levels = values.round().to(torch.int8).view(torch.uint8)
    return levels if codec == "int8" else (levels[:, ::2] & 0xF) | (levels[:, 1::2] << 4)


def encode_decoded(codec: str, blocks: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    """The same, in which rounding has changed nothing of blocks that were decoded from such scales and codes."""
    scales, codes = encode_blocks(codec, blocks, valid)
    magnitudes = blocks.abs()
    large = magnitudes.amax(dim=1, keepdim=True)
    others: list[tuple[Tensor, Tensor]]
    if codec == "sign1":
        others = [(large, codes)]
    elif codec == "stat2":
        small = magnitudes.masked_fill(~valid, torch.inf).amin(dim=1, keepdim=True)
        bits = [_pack((blocks >= 0) & valid), _pack((magnitudes == large) & valid)]
        others = [(torch.cat([small, large], dim=1), torch.cat(bits, dim=1))]
    else:  # the quotient by the top level may round to either side of what was multiplied by it
        ends = (torch.zeros_like(scales), torch.full_like(scales, torch.inf))
        others = [(near, _levels(codec, blocks, near)) for near in (torch.nextafter(scales, end) for end in ends)]
    for near, theirs in others:
        same = decode_blocks(codec, near, theirs, blocks.dtype) == blocks
        whole = (same | ~valid).all(dim=1, keepdim=True)
        scales, codes = torch.where(whole, near, scales.view_as(near)), torch.where(whole, theirs, codes)
    return scales, codes


def decode_blocks(codec: str, scales: Tensor, codes: Tensor, dtype: torch.dtype) -> Tensor:
    """What `codes`, uint8 [blocks, bytes], say: [blocks, block_size] in `dtype`."""
    values = scales.view(len(codes), BLOCK_SCALES[codec]).to(dtype)
    if codec == "sign1":
        return torch.where(_unpack(codes), values, -values)
    if codec == "stat2":
        positive, large = _unpack(codes).chunk(2, dim=1)
        magnitudes = torch.where(large, values[:, 1:], values[:, :1])
        return torch.where(positive, magnitudes, -magnitudes)
    if codec == "fp8":
        return codes.view(torch.float8_e4m3fn).to(dtype) * values
    if codec == "int4":
        codes = torch.stack([codes << 4, codes & 0xF0], dim=2).flatten(1)
        return (codes.view(torch.int8) >> 4).to(dtype) * values
    return codes.view(torch.int8).to(dtype) * values


def like(value: float, other: Tensor) -> Tensor:
    """A scalar tensor of the same dtype and device: on a GPU, division by a number is a product with its reciprocal."""
    return torch.full((), value, dtype=other.dtype, device=other.device)


def _encode_in_two_magnitudes(blocks: Tensor, valid: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """One step of Lloyd's algorithm from a split at 0.98 root mean squares: mean magnitudes below it, and of the rest.

    Squares are added up in float64, as those of 1e-30 or 1e30 are no float32. Sums are taken in one order, so that
    backends split alike. Where a magnitude is not finite, both are that.
    """
    magnitudes = blocks.abs()
    mean_square = _sum(blocks.double().square()) / counts.double()
    split = (mean_square.sqrt() * _SPLIT).to(torch.float32).to(blocks.dtype)
    large = (magnitudes >= split.unsqueeze(1)) & valid
    small = ~large & valid
    scales = torch.stack([_mean(magnitudes, small), _mean(magnitudes, large)], dim=1).to(torch.float32)
    both = scales.sum(dim=1, keepdim=True)
    return torch.where(both.isfinite(), scales, both), torch.cat([_pack((blocks >= 0) & valid), _pack(large)], dim=1)


def _mean(magnitudes: Tensor, which: Tensor) -> Tensor:
    """Of those of each block; 0 of none."""
    total = _sum(torch.where(which, magnitudes, 0.0))
    return total / which.sum(dim=1).clamp(min=1).to(total.dtype)


def _sum(values: Tensor) -> Tensor:
    """The sum of each row: 64 sums side by side, of every 64th value in order, then of their halves, and so on."""
    sums = torch.zeros_like(values[:, :_SUMS])
    for some in torch.split(values, _SUMS, dim=1):
        sums = sums + some
    while sums.size(1) > 1:
        low, high = sums.chunk(2, dim=1)
        sums = low + high
    return sums.squeeze(1)


def _in_scales(blocks: Tensor, scales: Tensor, top: float) -> Tensor:
    """u / scale, at most `top`; 0 where the scale is 0 or not finite."""
    usable = (scales > 0) & torch.isfinite(scales)
    return torch.where(usable, (blocks / scales).clamp(-top, top), 0.0)


def _pack(bits: Tensor) -> Tensor:
    """Bits of a boolean tensor [blocks, n], least significant first: uint8 [blocks, n / 8]."""
    weights = 2 ** torch.arange(8, device=bits.device, dtype=torch.uint8)
    return (bits.view(len(bits), bits.size(1) // 8, 8) * weights).sum(dim=2, dtype=torch.uint8)


def _unpack(codes: Tensor) -> Tensor:
    shifts = torch.arange(8, device=codes.device, dtype=torch.uint8)
    return ((codes.unsqueeze(2) >> shifts) & 1).flatten(1).to(torch.bool)


_FLAG_BYTES = slice(4, 6)


def write_headers(call: WriteHeaders) -> None:
    """Put the header into every row, with the flag where something that it tells of holds."""
    packets = call.packets
    if packets.device.type == "cpu":
        packets[:, :HEADER_BYTES] = torch.frombuffer(bytearray(call.header), dtype=torch.uint8)
    else:
        for place, byte in enumerate(call.header):  # filled: bytes of the host's would have to be copied
            packets[:, place].fill_(byte)
    raised = None
    if call.scales:
        scales = packets[:, HEADER_BYTES : HEADER_BYTES + SCALE_BYTES * call.scales].clone().view(torch.float32)
        raised = ~scales.isfinite().all(dim=1, keepdim=True)
    if call.condition is not None:
        raised = call.condition.reshape(1, 1) if raised is None else raised | call.condition
    if raised is not None:
        low, high = (raised.to(torch.uint8) * byte for byte in (call.flag & 0xFF, call.flag >> 8))
        packets[:, _FLAG_BYTES] |= torch.cat([low, high], dim=1)


_AT_ONCE = 1 << 20  # elements whose random bits, 8 bytes each, are in memory


def encode(call: Encode) -> None:
    """Encode u = payload + residual into `packets`, and leave u - decoded(u) in `payload`, or rounded to nearest in
    `new_residual`."""
    part, rows = call.part, call.packets.size(0)
    payload = _part_of(call.payload, part, rows)
    corrected = payload if call.residual is None else payload + _part_of(call.residual, part, rows).to(payload.dtype)
    blocks = corrected.reshape(-1, part.block_size)
    valid = _valid(part, rows, blocks)
    blocks = torch.where(valid, blocks, 0.0)
    scales, codes = encode_blocks(call.codec, blocks, valid)
    decoded = decode_blocks(call.codec, scales, codes, blocks.dtype)
    split = codes_offset(call.codec, part.last - part.first, part.block_size)
    call.packets[:, HEADER_BYTES:split] = scales.reshape(-1).view(torch.uint8).view(rows, -1)
    call.packets[:, split:] = codes.reshape(rows, -1)
    lost = torch.where(valid, blocks - decoded, 0.0).view(rows, -1)
    (payload if call.new_residual is None else _part_of(call.new_residual, part, rows)).copy_(lost)


def decode(call: Decode) -> None:
    """Write what `packets` carry to `output`, row after row, or its mean over the rows; and 0 on the padding."""
    part, values = call.part, _values(call)
    if call.mean:
        total = values[0]
        for row in values[1:]:
            total = total + row
        values = total / like(call.packets.size(0), total)
    blocks = values.view(-1, part.block_size)
    decoded = torch.where(_valid(part, call.rows, blocks), blocks, 0.0)
    _part_of(call.output, part, call.rows).copy_(decoded.view(call.rows, -1))


def store_rounded(call: StoreRounded) -> None:
    """Write `values` into `weights`, so many at a time."""
    for first in range(0, call.weights.numel(), _AT_ONCE):
        some = slice(first, first + _AT_ONCE)
        store(call.weights[some], call.values[some], call.seed, first)


def store(weights: Tensor, values: Tensor, seed: int, first: int) -> None:
    """Write float32 `values` into `weights`, of any width; 16 bits get one of the two neighbours at random, with the
    probability that keeps the mean, the same for the same seed and element number. `weights` begin at `first`."""
    if weights.dtype == torch.bfloat16:
        values = _round_bfloat16(values, random_bits(seed, _numbers(weights, first)))
    elif weights.dtype == torch.float16:
        values = _round_float16(values, random_bits(seed, _numbers(weights, first)))
    weights.copy_(values)


def _numbers(vector: Tensor, first: int) -> Tensor:
    return torch.arange(first, first + vector.numel(), device=vector.device)


_MASK = 0xFFFFFFFF
# A multiplication that spreads the count over the word, then two rounds of xor-shift and multiplication, of the
# well-studied kind that finishes a hash. Below 2^31, so that a product of one with 32 bits is exact in int64.
_MULTIPLIERS = (0x1E3779B9, 0x21F0AAAD, 0x735A2D97)
_SHIFTS = (16, 15, 15)


def random_bits(seed: int, numbers: Tensor) -> Tensor:
    """16 random bits, int64 in [0, 65536), for each element number, int64 of any shape, modulo 2^33: the same on every
    rank, device and backend, whatever the order of the elements, so that replicas that are rounded stay replicas.

    Elements 2k and 2k + 1 get the lower and the upper half of a bijection of k. So for any seed every value comes
    exactly 131072 times among 2^33 consecutive elements, and what is rounded with them is unbiased. Adequate for
    rounding, not for cryptography.
    """
    first_key, second_key = keys(seed)
    bits = ((numbers >> 1 & _MASK) * _MULTIPLIERS[0] & _MASK) ^ first_key
    bits = ((bits ^ bits >> _SHIFTS[0]) * _MULTIPLIERS[1] & _MASK) ^ second_key
    bits = (bits ^ bits >> _SHIFTS[1]) * _MULTIPLIERS[2] & _MASK
    bits = bits ^ bits >> _SHIFTS[2]
    return bits >> 16 * (numbers & 1) & 0xFFFF


def _round_bfloat16(values: Tensor, random: Tensor) -> Tensor:
    """Neighbouring bfloat16 of float32 values, the upper one with the probability that keeps the mean.

    The noise is below the last bit kept: what is representable, infinities among it, stays as it is, and beyond
    the largest finite value the neighbour is infinity.
    """
    rounded = values.view(torch.int32).long() + random >> 16 << 16
    return torch.where(values.isnan(), values, _floats_of(rounded))


def _round_float16(values: Tensor, random: Tensor) -> Tensor:
    """The same for float16, with 13 random bits, as many as float32 has more.

    Below 2^-14 the spacing of float16 stays what it is just above: there, 2^-14 is added while rounding, which
    first brings the value, to nearest, to a multiple of 2^-37. What reaches 65536 is infinity.
    """
    magnitudes = values.abs()
    lift = (magnitudes < 2.0**-14).float() * 2.0**-14
    rounded = (magnitudes + lift).view(torch.int32).long() + (random >> 3) >> 13 << 13
    rounded_values = (_floats_of(rounded) - lift).copysign(values)
    return torch.where(values.isfinite(), rounded_values, values)


def _floats_of(bits: Tensor) -> Tensor:
    return bits.to(torch.int32).view(torch.float32)


def _part_of(vector: Tensor, part: Part, rows: int) -> Tensor:
    """What packets carry of a vector of so many shards: [rows, elements], a view."""
    return vector.view(rows, part.shard)[:, part.first : part.last]


def _valid(part: Part, rows: int, blocks: Tensor) -> Tensor:
    """Mask of the elements that are not padding, in the shape of `blocks`."""
    firsts = torch.arange(rows, device=blocks.device).unsqueeze(1) * part.shard
    numbers = firsts + torch.arange(part.first, part.last, device=blocks.device)
    return (numbers < part.numel).view(blocks.shape)


def _values(call: Decode) -> Tensor:
    """What the packet rows decode to, padding not yet cleared: [packets, elements] in the dtype of `output`."""
    part, packets = call.part, call.packets
    split = codes_offset(call.codec, part.last - part.first, part.block_size)
    scale_bytes = packets[:, HEADER_BYTES:split].clone()  # a copy is aligned, whatever the offset of the row
    codes = packets[:, split:].reshape(-1, part.block_size * CODE_BITS[call.codec] // 8)
    values = decode_blocks(call.codec, scale_bytes.view(-1).view(torch.float32), codes, call.output.dtype)
    return values.view(packets.size(0), part.last - part.first)
