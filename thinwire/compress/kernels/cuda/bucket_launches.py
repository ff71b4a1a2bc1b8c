"""Launches over many tensors, a whole bucket's or a step of Adam's, each with a table on the device that says where
they lie; nothing here needs a GPU."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from thinwire.compress.kernels.adam import AdamStep
from thinwire.compress.kernels.buckets import (
    AverageAndEncode,
    EncodePackedPayload,
    KernelCall,
    MovePacked,
    Part,
    Segments,
    keys,
)
from thinwire.compress.kernels.calls import DecodeAndMove, EncodePayload
from thinwire.compress.kernels.cuda.launch import (
    ELEMENTS_PER_THREAD,
    MOMENTUM_THREADS,
    NO_BLOCKS,
    STRUCTURES,
    TYPE_NAMES,
    Argument,
    Launch,
    address,
    aligned,
    averaged_rows,
    exact_inverse,
    integer,
    octets,
    part_argument,
    part_launch,
    structure,
)
from thinwire.compress.kernels.tables import on_device
from thinwire.compress.packet_layout import HEADER_BYTES

_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_NOTHING = 3


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


def moved_factors(rates: Sequence[float], decays: Sequence[float]) -> dict[str, Any]:
    """What runs whose weights move say of their factors."""
    return {"rate": rates, "decay": decays}


def encode_payload_launch(call: EncodePayload) -> Launch:
    """Launch that makes a part of the payload and encodes it."""
    arguments = (
        *_payload_table(call),
        aligned("momentum", call.momentum),
        aligned("denominators", call.denominators),
        aligned("residual", call.residual),
        aligned("lost", call.lost),
        aligned("packets", call.packets),
        part_argument(call.part, call.packets),
        call.part.header or bytes(HEADER_BYTES),
    )
    name = f"encode_payload_{call.form}_{call.codec}"
    return part_launch(f"bucket_{call.codec}", name, call.part, call.packets, arguments)


def decode_and_move_launch(call: DecodeAndMove) -> Launch:
    """Launch that decodes a part of what came back and moves weights by it."""
    kinds = _kinds(call.replicas)
    columns = {"weights": _addresses(call.weights), "replica": _addresses(call.replicas), "kind": kinds}
    columns |= moved_factors(call.rates, call.decays)
    arguments = (
        *_table(call, "MovedRun", call.segments, call.part.first, columns),
        aligned("packets", call.packets),
        aligned("output", call.output),
        aligned("denominators", call.denominators),
        integer(call.holds),
        part_argument(call.part, call.packets),
    )
    name = f"decode_and_move_{call.form}_{call.codec}"
    return part_launch(f"bucket_{call.codec}", name, call.part, call.packets, arguments)


def average_and_encode_launch(call: AverageAndEncode) -> Launch:
    """Launch that averages what an owner got and encodes that."""
    shard = call.lost.numel()
    part = Part(0, shard, shard, call.numel, call.block_size)
    arguments = (
        aligned("received", call.received),
        aligned("mask", call.mask),
        aligned("residual", call.residual),
        aligned("lost", call.lost),
        aligned("packets", call.packets),
        part_argument(part, call.packets),
        averaged_rows(call.received.size(0)),
    )
    return part_launch(f"bucket_{call.codec}", f"average_and_encode_{call.codec}", part, call.packets, arguments)


def encode_packed_payload_launch(call: EncodePackedPayload) -> Launch:
    """Launch that makes a part of the payload from packed state and encodes it."""
    arguments = (
        *_payload_table(call),
        aligned("state.packets", call.state.packets),
        integer(call.state.packets.size(1)),
        aligned("state.codes", call.state.codes),
        address(call.tables),
        aligned("residual", call.residual),
        aligned("lost", call.lost),
        aligned("packets", call.packets),
        part_argument(call.part, call.packets),
        call.part.header or bytes(HEADER_BYTES),
    )
    name = f"encode_packed_payload_{TYPE_NAMES[call.residual.dtype]}"
    return part_launch("packed_payload", name, call.part, call.packets, arguments)


def move_packed_launch(call: MovePacked) -> Launch:
    """Launch that moves the weights of a bucket, those among them that are no padding."""
    state, first = call.state, call.first
    numel = max(min(call.weights.numel(), state.numel - first), 0)
    codes = state.codes[first : first + numel]
    grid, of_range = octets(first, numel, state.shard, state.block_size, (call.weights, codes))
    columns = {"moves": call.moves, **moved_factors(call.rates, call.decays)}
    arguments = (
        *_table(call, "MovedRun", call.segments, first, columns),
        address(call.weights),
        aligned("state.packets", state.packets),
        address(codes),
        part_argument(replace(state.whole, numel=numel), state.packets),
        of_range,
        structure("Keys", *keys(call.seed)),
    )
    name = f"move_packed_{TYPE_NAMES[call.weights.dtype]}"
    return Launch("packed_moves", name, state.block_size, grid, MOMENTUM_THREADS, arguments)


def _payload_table(call: EncodePayload | EncodePackedPayload) -> tuple[Argument, Argument]:
    columns = {"gradient": _addresses(call.gradients), "kind": _kinds(call.gradients)}
    columns |= payload_factors(call.beta1, call.divisors)
    return _table(call, "PayloadRun", call.segments, call.part.first, columns)


def _table(
    call: KernelCall, structure_name: str, segments: Segments, part: int, columns: Mapping[str, Any]
) -> tuple[Argument, Argument]:
    """A table of the bucket's runs, on the device, for the part of it that begins at element `part`; and its length."""
    runs = np.zeros(len(segments), dtype=STRUCTURES[structure_name])
    runs["first"], runs["end"] = segments.table.T
    for name, values in columns.items():
        runs[name] = values
    return aligned("runs", segments.tables.on_device((call.kernel, part), runs, call.device)), integer(len(segments))


def _addresses(tensors: Iterable[Tensor | None]) -> list[int]:
    return [0 if one is None else one.data_ptr() for one in tensors]


def _kinds(tensors: Iterable[Tensor | None]) -> list[int]:
    return [_NOTHING if one is None else _KINDS[one.dtype] for one in tensors]


_BLOCK_ELEMENTS = MOMENTUM_THREADS * ELEMENTS_PER_THREAD


def adam_step_launch(call: AdamStep) -> Launch:
    """Launch that does the step, with a table of which thread blocks are about which tensor, and where it lies."""
    runs = np.zeros(len(call.variances), dtype=STRUCTURES["AdamRun"])
    runs["numel"] = [one.numel() for one in call.variances]
    runs["end"] = np.cumsum(-(-runs["numel"] // _BLOCK_ELEMENTS))
    runs["first"][1:] = runs["end"][:-1]
    output = call.denominators if call.weights is None else call.weights
    named = {"gradient": call.gradients, "momentum": call.momenta, "variance": call.variances, "output": output}
    for name, tensors in named.items():
        if tensors is not None:
            runs[name] = _addresses(tensors)
    table, grid = on_device(runs, call.device), (int(runs["end"][-1]), 1)
    arguments = (aligned("runs", table), integer(len(call.variances)), _factors(call))
    return Launch("adam", _name(call), NO_BLOCKS, grid, MOMENTUM_THREADS, arguments, keeps=table)


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
