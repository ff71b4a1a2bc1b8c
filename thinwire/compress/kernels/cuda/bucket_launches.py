"""Launches over many tensors, a whole bucket's or a step of Adam's: tables of its runs, which have to lie on the
device, and launches that are given where; nothing here needs a GPU."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from thinwire.compress.kernels.adam_reference import AdamStep
from thinwire.compress.kernels.bucket_calls import (
    AverageAndEncode,
    DecodeAndMove,
    DigestGradients,
    EncodePayload,
    Part,
    Segments,
)
from thinwire.compress.kernels.cuda.launch import (
    ELEMENTS_PER_THREAD,
    MAX_ROWS,
    MOMENTUM_THREADS,
    NO_BLOCKS,
    STRUCTURES,
    TYPE_NAMES,
    Argument,
    Launch,
    address,
    aligned,
    averaged_rows,
    block_threads,
    exact_inverse,
    integer,
    octets,
    structure,
    write_headers_launch,
)
from thinwire.compress.kernels.headers import WriteHeaders, header_words
from thinwire.compress.kernels.noise import keys
from thinwire.compress.kernels.packed_calls import EncodePackedPayload, MovePacked
from thinwire.compress.kernels.tables import Table

__all__ = [
    "Runs",
    "adam_runs",
    "adam_step_launch",
    "average_and_encode_launch",
    "decode_and_move_launch",
    "digest_gradients_launch",
    "encode_packed_payload_launch",
    "encode_payload_launch",
    "gradient_runs",
    "move_packed_launch",
    "moved_factors",
    "moved_runs",
    "packed_runs",
    "payload_factors",
    "payload_runs",
]

Runs = Table
"""Structures of csrc/runs.cuh, one a run."""

_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_NOTHING = 3


def payload_runs(call: EncodePayload | EncodePackedPayload) -> Runs:
    """The runs that a payload is made of."""
    runs = _runs("PayloadRun", call.segments)
    runs["gradient"] = _addresses(call.gradients)
    runs["kind"] = _kinds(call.gradients)
    for name, values in payload_factors(call.beta1, call.divisors).items():
        runs[name] = values
    return runs


def gradient_runs(call: DigestGradients) -> Runs:
    """The runs of gradients that are only looked at."""
    runs = _runs("PayloadRun", call.segments)
    runs["gradient"] = _addresses(call.gradients)
    runs["kind"] = _kinds(call.gradients)
    return runs


def payload_factors(beta1: Sequence[float], divisors: Sequence[float]) -> dict[str, Any]:
    """What runs of a payload say of their factors."""
    gain = np.array([1.0 - one for one in beta1], dtype=np.float32)
    return {
        "beta1": beta1,
        "gain": gain,
        "weight": np.where(gain < 0.5, gain, gain - np.float32(1.0)),  # as torch.lerp does it
        "divisor": divisors,
        "inverse": [exact_inverse(one) for one in divisors],
    }


def moved_runs(call: DecodeAndMove) -> Runs:
    """The runs whose weights move, and what is rounded from them."""
    runs = _runs("MovedRun", call.segments)
    runs["weights"] = _addresses(call.weights)
    runs["replica"] = _addresses(call.replicas)
    runs["kind"] = _kinds(call.replicas)
    for name, values in moved_factors(call.rates, call.decays).items():
        runs[name] = values
    return runs


def moved_factors(rates: Sequence[float], decays: Sequence[float]) -> dict[str, Any]:
    """What runs whose weights move say of their factors."""
    return {"rate": rates, "decay": decays}


def packed_runs(call: MovePacked) -> Runs:
    """The runs of which some move, in one run of memory."""
    runs = _runs("MovedRun", call.segments)
    runs["moves"], runs["rate"], runs["decay"] = call.moves, call.rates, call.decays
    return runs


def encode_payload_launch(call: EncodePayload, runs: Tensor) -> Launch:
    """Launch that makes a part of the payload and encodes it; `runs`: its runs' table, as bytes on the device."""
    arguments = (
        *_table(call.segments, runs),
        aligned("momentum", call.momentum),
        aligned("denominators", call.denominators),
        aligned("residual", call.residual),
        aligned("lost", call.lost),
        aligned("packets", call.packets),
        _part(call.part, call.packets),
        _header(call.part.header),
    )
    name = f"encode_payload_{call.form}_{call.codec}"
    return _part_launch(f"bucket_{call.codec}", name, call.part, call.packets, arguments)


def decode_and_move_launch(call: DecodeAndMove, runs: Tensor) -> Launch:
    """Launch that decodes a part of what came back and moves weights by it."""
    arguments = (
        *_table(call.segments, runs),
        aligned("packets", call.packets),
        aligned("output", call.output),
        aligned("denominators", call.denominators),
        integer(call.holds),
        _part(call.part, call.packets),
    )
    name = f"decode_and_move_{call.form}_{call.codec}"
    return _part_launch(f"bucket_{call.codec}", name, call.part, call.packets, arguments)


def average_and_encode_launch(call: AverageAndEncode) -> Launch:
    """Launch that averages what an owner got and encodes that."""
    blocks = call.lost.numel() // call.block_size
    arguments = (
        aligned("received", call.received),
        aligned("residual", call.residual),
        aligned("lost", call.lost),
        aligned("packets", call.packets),
        structure("Layout", call.numel, blocks, call.packets.size(1)),
        averaged_rows(call.received.size(0)),
    )
    source, threads = f"bucket_{call.codec}", block_threads(call.block_size)
    return Launch(source, f"average_and_encode_{call.codec}", call.block_size, (blocks, 1), threads, arguments)


def encode_packed_payload_launch(call: EncodePackedPayload, runs: Tensor) -> Launch:
    """Launch that makes a part of the payload from packed state and encodes it."""
    arguments = (
        *_table(call.segments, runs),
        aligned("state.packets", call.state.packets),
        integer(call.state.packets.size(1)),
        aligned("state.codes", call.state.codes),
        address(call.tables),
        aligned("residual", call.residual),
        aligned("lost", call.lost),
        aligned("packets", call.packets),
        _part(call.part, call.packets),
        _header(call.part.header),
    )
    name = f"encode_packed_payload_{TYPE_NAMES[call.residual.dtype]}"
    return _part_launch("packed_payload", name, call.part, call.packets, arguments)


def move_packed_launch(call: MovePacked, runs: Tensor) -> Launch:
    """Launch that moves the weights of a bucket, those among them that are no padding."""
    state, first = call.state, call.first
    numel = max(min(call.weights.numel(), state.numel - first), 0)
    codes = state.codes[first : first + numel]
    grid, of_range = octets(first, numel, state.shard, state.block_size, (call.weights, codes))
    arguments = (
        *_table(call.segments, runs),
        address(call.weights),
        aligned("state.packets", state.packets),
        address(codes),
        structure("Layout", numel, state.shard // state.block_size, state.packets.size(1)),
        of_range,
        structure("Keys", *keys(call.seed)),
    )
    name = f"move_packed_{TYPE_NAMES[call.weights.dtype]}"
    return Launch("packed_moves", name, state.block_size, grid, MOMENTUM_THREADS, arguments)


def _runs(name: str, segments: Segments) -> Runs:
    runs = np.zeros(len(segments), dtype=STRUCTURES[name])
    runs["first"], runs["end"] = segments.table.T
    return runs


def _addresses(tensors: Iterable[Tensor | None]) -> list[int]:
    return [0 if one is None else one.data_ptr() for one in tensors]


def _kinds(tensors: Iterable[Tensor | None]) -> list[int]:
    return [_NOTHING if one is None else _KINDS[one.dtype] for one in tensors]


def _table(segments: Segments, runs: Tensor) -> tuple[Argument, Argument]:
    return aligned("runs", runs), integer(len(segments))


def _part(part: Part, packets: Tensor) -> Argument:
    row_blocks = (part.last - part.first) // part.block_size
    return structure("Part", part.numel, row_blocks, packets.size(1), part.shard, part.first)


def _header(header: bytes | None) -> Argument:
    return structure("Header", *((0, 0) if header is None else header_words(header)))


def _part_launch(
    source: str,
    function: str,
    part: Part,
    packets: Tensor,
    arguments: Sequence[Argument],
) -> Launch:
    """Launch of one thread block for each block of a part, a row of them for each packet; of an empty part's packets of
    what writes their header, if there is one."""
    grid = ((part.last - part.first) // part.block_size, packets.size(0))
    if grid[1] > MAX_ROWS:
        raise ValueError(f"{grid[1]} packets at once: a GPU takes {MAX_ROWS} at most")
    if not grid[0] and part.header is not None:
        return write_headers_launch(WriteHeaders(packets, *header_words(part.header), 0, None, 0))
    return Launch(source, function, part.block_size, grid, block_threads(part.block_size), tuple(arguments))


_BLOCK_ELEMENTS = MOMENTUM_THREADS * ELEMENTS_PER_THREAD


def adam_runs(call: AdamStep) -> Runs:
    """Which thread blocks are about which tensor, and where it lies."""
    runs = np.zeros(len(call.variances), dtype=STRUCTURES["AdamRun"])
    runs["numel"] = [one.numel() for one in call.variances]
    runs["end"] = np.cumsum(-(-runs["numel"] // _BLOCK_ELEMENTS))
    runs["first"][1:] = runs["end"][:-1]
    output = call.denominators if call.weights is None else call.weights
    named = {"gradient": call.gradients, "momentum": call.momenta, "variance": call.variances, "output": output}
    for name, tensors in named.items():
        if tensors is not None:
            runs[name] = _addresses(tensors)
    return runs


def adam_step_launch(call: AdamStep, runs: Tensor) -> Launch:
    """Launch that does the step; `runs`: its table, as bytes on the device."""
    blocks = sum(-(-one.numel() // _BLOCK_ELEMENTS) for one in call.variances)
    arguments = (aligned("runs", runs), integer(len(call.variances)), _factors(call))
    return Launch("adam", _name(call), NO_BLOCKS, (blocks, 1), MOMENTUM_THREADS, arguments)


def _factors(call: AdamStep) -> Argument:
    given = call.factors
    ways = (given.from_momentum, given.eps_inside_root, given.holds_zero)
    return structure("AdamFactors", float(given.weight), *given.others, *ways)


def _name(call: AdamStep) -> str:
    parts = ["adam"]
    if call.gradients is not None:
        parts.append("variances" if call.momenta is None else "moments")
    if call.denominators is not None:
        parts.append("denominators")
    if call.weights is not None:
        parts.append("weights")
    return "_".join(parts)


_THREADS = 256
_NO_BLOCKS = 64  # the block size of a source that knows no blocks


def digest_gradients_launch(call: DigestGradients, runs: Tensor) -> Launch:
    """Launch of a thread block for each digest; `runs`: the gradients' table, as bytes on the device."""
    segments = call.segments
    arguments = (
        aligned("runs", runs),
        integer(len(segments)),
        aligned("digests", call.digests),
        integer(segments.end),
    )
    return Launch("seal", "digest_gradients", _NO_BLOCKS, (call.digests.numel(), 1), _THREADS, arguments)
