"""Stages of torch's pipelines that send packets: activations forward, and their gradients back, through codecs.

All that a schedule of torch's sends passes four methods of a stage, which return the operations to start. Here they put
packets in the place of tensors; packets are read when the micro-batch that waits for them is computed."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from typing_extensions import override

from thinwire.comm import TorchCommunicator
from thinwire.comm.agreement import check_same_on_every_rank, on_every_rank, raise_together
from thinwire.compress.codecs import Codec, make_codec
from thinwire.compress.packet import Header, Headers, write_headers
from thinwire.compress.packet_layout import (
    ACTIVATION_BLOCKS,
    HEADER_BYTES,
    MemorylessCodec,
    activation_directions,
    activation_packet_bytes,
)


def activation_codec(name: MemorylessCodec | None, what: str = "activations") -> Codec | None:
    """The codec for what travels between stages; None where tensors travel as they are.

    Raises ValueError for another name; `what` says of what.
    """
    if name is None or name == "none":
        return None
    if name not in ACTIVATION_BLOCKS:
        raise ValueError(
            f"{what} must be {', '.join(map(repr, ACTIVATION_BLOCKS))}, 'none' or None, got {name!r}: codecs of one "
            "and two bits need what they lost back at the next step, and each step has activations of other samples"
        )
    return make_codec(name, ACTIVATION_BLOCKS[name])


def takes(codec: Codec, tensor: Tensor) -> bool:
    """Whether it travels as a packet: floating point that a packet of it is smaller than."""
    return tensor.is_floating_point() and _packet_bytes(codec, tensor.shape) < tensor.nbytes


@torch.no_grad()
def pack(codec: Codec, tensor: Tensor, header: Header) -> Tensor:
    """A packet, uint8, of a tensor of any layout, which stays as it is.

    `int4` rounds what a few leading singular directions leave of it, as a matrix X of places by features, and they
    follow in bf16, Q = orth(Xᵀ X Ω) and P = X Q of a random Ω, alike everywhere: activations have most of their energy
    there. None follow where something is not finite, or overflows in them. What is not finite makes all that shares
    its scale so.
    """
    numel, shard = tensor.numel(), _padded(codec, tensor.numel())
    payload = torch.empty(shard, dtype=torch.float32, device=tensor.device)
    payload[numel:].zero_()
    payload[:numel].view(tensor.shape).copy_(tensor)
    packet = torch.empty(_packet_bytes(codec, tensor.shape), dtype=torch.uint8, device=tensor.device)
    left, right = _factors(codec, packet, tensor.shape)
    if len(left):
        matrix = payload[:numel].view(left.size(1), right.size(1))
        with torch.autocast(tensor.device.type, enabled=False):
            found = _start(*right.shape, tensor.device) @ matrix.T @ matrix
            right.copy_(torch.linalg.qr(found.T).Q.T)
            left.copy_(right.float() @ matrix.T)
            spoilt = ~left.isfinite().all()  # all of it is not finite where something in `right` is not
            for one in (right, left):
                one.masked_fill_(spoilt, 0.0)
            matrix.addmm_(left.float().T, right.float(), alpha=-1)
    rounded = packet[: codec.packet_bytes(shard)].unsqueeze(0)
    write_headers(rounded, header.pack())
    codec.encode(payload, None, rounded, numel)
    return packet


@torch.no_grad()
def unpack(codec: Codec, packet: Tensor, output: Tensor) -> None:
    """Write what a packet carries into `output`, of any floating dtype and layout."""
    numel, shard = output.numel(), _padded(codec, output.numel())
    values = torch.empty(shard, dtype=torch.float32, device=output.device)
    codec.decode(packet[: codec.packet_bytes(shard)].unsqueeze(0), values, numel)
    left, right = _factors(codec, packet, output.shape)
    if len(left):
        with torch.autocast(output.device.type, enabled=False):
            values[:numel].view(left.size(1), right.size(1)).addmm_(left.float().T, right.float())
    _write(values[:numel].view(output.shape), output)


def _write(values: Tensor, output: Tensor) -> None:
    """Into a buffer that may require a gradient, and be expanded."""
    for dimension, stride in enumerate(output.stride()):
        if stride == 0 and output.size(dimension) > 1:
            values, output = values.narrow(dimension, 0, 1), output.narrow(dimension, 0, 1)
    output.detach().copy_(values)


def _matrix(shape: torch.Size) -> tuple[int, int]:
    """A tensor's rows and columns, its last dimension's."""
    columns = shape[-1] if shape else 1
    return shape.numel() // max(columns, 1), columns


def _packet_bytes(codec: Codec, shape: torch.Size) -> int:
    return activation_packet_bytes(codec.name, *_matrix(shape))


def _factors(codec: Codec, packet: Tensor, shape: torch.Size) -> tuple[Tensor, Tensor]:
    """Where a packet has its directions: bf16 [rank, rows], [rank, columns]."""
    rows, columns = _matrix(shape)
    rank = activation_directions(codec.name, rows, columns)
    behind = packet[codec.packet_bytes(_padded(codec, shape.numel())) :].view(torch.bfloat16)
    return behind[: rank * rows].view(rank, rows), behind[rank * rows :].view(rank, columns)


@functools.cache
def _start(rank: int, columns: int, device: torch.device) -> Tensor:
    plain: Any = {"dtype": torch.float32, "device": "cpu"}  # whatever the defaults are
    return torch.randn(rank, columns, generator=torch.Generator().manual_seed(0), **plain).to(device)


def _padded(codec: Codec, numel: int) -> int:
    return -(-numel // codec.block_size) * codec.block_size


class CompressedStage(PipelineStage):
    """A stage for torch's pipelines, any schedule, that sends activations and their gradients through codecs.

    It takes what `torch.distributed.pipelining.PipelineStage` takes, and beside it, alike on every rank:

    activations: the codec of what goes forward, `int8` unless told otherwise: `int4` (4.5 bits an element, and of each
        tensor twelve leading directions in bf16, for at most two bits more), `fp8`, `bf16`, `fp16`; `none` or None for
        tensors as they are.
    gradients: of what comes back.

    Nothing is remembered between micro-batches. Tensors that are not floating point, and those that a packet would not
    make smaller, travel as they are. What is not finite arrives so. Between two stages of one rank nothing travels, and
    nothing is rounded.

    Making one is collective over `group`. Raises ValueError on every rank for a codec that is none of these, or is not
    the same on all; in the first step for a boundary that only integers pass, which no codec takes; and on its own
    rank for a micro-batch of another shape or dtype than the first, which torch's schedules do not take either. Raises
    NotImplementedError for a codec in a torch that is older than 2.13.
    """

    def __init__(
        self,
        submodule: nn.Module,
        stage_index: int,
        num_stages: int,
        device: torch.device,
        *others: Any,
        activations: MemorylessCodec | None = "int8",
        gradients: MemorylessCodec | None = "int8",
        **options: Any,
    ) -> None:
        super().__init__(submodule, stage_index, num_stages, device, *others, **options)
        self._comm = TorchCommunicator(self.group)
        given = {"activations": activations, "gradients": gradients}
        codecs = on_every_rank(
            self._comm,
            lambda: [activation_codec(name, what) for what, name in given.items()],
            "make the codecs of a pipeline's stage",
            (ValueError,),
        )
        check_same_on_every_rank(self._comm, [], [], given)
        if any(codecs) and num_stages > 1 and not hasattr(PipelineStage, "_post_metadata_inference_cleanup"):
            raise NotImplementedError(
                f"packets between stages need torch 2.13, this is {torch.__version__}: pass activations=None and "
                "gradients=None, or take another torch"
            )
        self._codecs = dict(zip(given, codecs, strict=True))
        # What there is room for at the other end, by tensor.
        self._rooms: dict[str, list[tuple[torch.Size, torch.dtype]]] = {}
        self._steps = 0
        # By micro-batch: packets on their way, or tensors in another layout, and where to write what they carry.
        self._arriving: dict[tuple[str, int], list[tuple[dist.P2POp, Header | None, Tensor]]] = {}

    @override
    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        return self._send("activations", self.stage_index, fwd_chunk_id, super().get_fwd_send_ops(fwd_chunk_id))

    @override
    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        return self._receive("activations", self.stage_index - 1, fwd_chunk_id, super().get_fwd_recv_ops(fwd_chunk_id))

    @override
    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        return self._send("gradients", self.stage_index - 1, bwd_chunk_id, super().get_bwd_send_ops(bwd_chunk_id))

    @override
    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        return self._receive("gradients", self.stage_index, bwd_chunk_id, super().get_bwd_recv_ops(bwd_chunk_id))

    @override
    def forward_one_chunk(self, fwd_chunk_id: int, *arguments: Any, **options: Any) -> Any:
        self._read("activations", fwd_chunk_id)
        return super().forward_one_chunk(fwd_chunk_id, *arguments, **options)

    @override
    def backward_one_chunk(self, bwd_chunk_id: int, *arguments: Any, **options: Any) -> Any:
        self._read("gradients", bwd_chunk_id)
        return super().backward_one_chunk(bwd_chunk_id, *arguments, **options)

    @override
    def clear_runtime_states(self) -> None:
        self._steps += 1  # a schedule calls this as each step begins
        self._arriving.clear()
        super().clear_runtime_states()

    @override
    def _post_metadata_inference_cleanup(self) -> None:
        """Take note of what travels, which is known now: every rank comes by here, and has sent all it sends first."""
        super()._post_metadata_inference_cleanup()
        found = {"activations": self._stage_meta.outputs, "gradients": self._stage_meta.input_grads}
        self._rooms = {
            what: [(one.shape, one.dtype) for one in metas or () if one is not None] for what, metas in found.items()
        }
        dtypes = [one.dtype for one in self._stage_meta.outputs or () if one is not None and not self.is_last]
        error = None
        if self._codecs["activations"] and dtypes and not any(dtype.is_floating_point for dtype in dtypes):
            error = ValueError(
                f"stage {self.stage_index} gives the next one only {' and '.join(map(str, dtypes))}, which no codec "
                "takes. Split the model where floating-point activations pass, or make its stages with activations=None"
            )
        raise_together(self._comm, error, "send a pipeline's activations in packets")

    def _send(self, what: str, boundary: int, chunk: int, ops: list[dist.P2POp]) -> list[dist.P2POp]:
        """Put packets in the place of the tensors that `ops` send."""
        codec = self._codecs[what]
        for number, (op, (shape, dtype)) in enumerate(zip(ops, self._rooms.get(what, ()), strict=False)):
            if op.tensor.shape != shape:
                raise ValueError(
                    f"stage {self.stage_index}: of micro-batch {chunk} the {what} {number} have shape "
                    f"{tuple(op.tensor.shape)}, and of the first one {tuple(shape)}: torch's schedules take "
                    "micro-batches of one shape. Pad the last samples, or leave them out (drop_last=True)"
                )
            if op.tensor.dtype != dtype:
                raise ValueError(
                    f"stage {self.stage_index}: of micro-batch {chunk} the {what} {number} are {op.tensor.dtype}, and "
                    f"of the first step's {dtype}, for which there is room: run every step under the same autocast"
                )
            if codec is not None and takes(codec, op.tensor):
                op.tensor = pack(codec, op.tensor, self._header(codec, boundary, chunk, number))
            op.tensor = op.tensor.contiguous()
        return ops

    def _receive(self, what: str, boundary: int, chunk: int, ops: list[dist.P2POp]) -> list[dist.P2POp]:
        """Put buffers for packets in the place of those that `ops` receive into."""
        codec = self._codecs[what]
        waiting = self._arriving[what, chunk] = []
        for number, op in enumerate(ops):
            if codec is not None and takes(codec, op.tensor):
                waiting.append((op, self._header(codec, boundary, chunk, number), op.tensor))
                size = _packet_bytes(codec, op.tensor.shape)
                op.tensor = torch.empty(size, dtype=torch.uint8, device=op.tensor.device)
            elif not op.tensor.is_contiguous():
                waiting.append((op, None, op.tensor))
                op.tensor = torch.empty_like(op.tensor, memory_format=torch.contiguous_format)
        return ops

    def _read(self, what: str, chunk: int) -> None:
        """Write what packets of a micro-batch carry, if any came, to where torch looks for it."""
        for op, expected, output in self._arriving.pop((what, chunk), ()):
            if expected is None:
                _write(op.tensor, output)
                continue
            if op.tensor.device.type == "cpu":  # on an accelerator the host would wait for it
                header = op.tensor[:HEADER_BYTES].unsqueeze(0)
                Headers(header, expected.part, [op.peer]).check(expected)
            codec = self._codecs[what]
            assert codec is not None
            unpack(codec, op.tensor, output)

    def _header(self, codec: Codec, boundary: int, chunk: int, number: int) -> Header:
        """Of the packet of tensor `number` of a micro-batch."""
        return Header(codec.identifier, codec.block_size, boundary, self._steps, part=chunk << 6 | number)
