"""The compressed all-reduce of one bucket: leg 1 to the owners, leg 2 back, with error feedback on both, a large bucket
part by part. Two collectives a part; nothing that must survive a skipped step changes before `commit`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from thinwire.comm import Communicator, Work
from thinwire.compress.codecs import Codec, cut_shard, least_part, zeros_with_room
from thinwire.compress.legs import Leg, Trim
from thinwire.compress.packet import Flags, Header, Headers, Outcome, number_headers, read_together, write_headers
from thinwire.compress.packet_layout import HEADER_BYTES, shard_numel, valid_in_shard

Adjust = Callable[[Tensor, slice], None]
"""Changes a part of an owner's average, fp32, in place; the slice says which part of the shard it is."""

EncodePart = Callable[[slice, Tensor, bytes], None]
"""Encodes a part of every shard into packets, with this header, and leaves what was lost in `next_residual`."""


@dataclass(frozen=True)
class Division:
    """How a vector is cut: into so many `shards`, of which a rank encodes `sent` and owns number `own`, if it does."""

    shards: int
    sent: int
    own: int | None


@dataclass(frozen=True)
class Arrived:
    """Where an exchange that was captured in a graph has its results, whenever that is replayed."""

    headers: Sequence[Headers]
    legs: Sequence[Leg]
    average: Tensor


class Exchange:
    """Average a vector of `numel` fp32 over the ranks of `comm`, both legs through `codec`.

    Every shard is cut alike into `parts`, and each part of all shards goes its own way: while one is on the wire the
    next is encoded, and the last one decoded. Blocks and owners are what they were without parts, so residuals and
    results are too, to the last bit.

    1-bit Adam, Algorithm 1 (Tang et al. 2021). With C the codec, e and s the residuals:

        leg 1, worker i:  p_i = C(payload_i + e_i),  e_i += payload_i - p_i
        leg 2, owner:     a = mean_i p_i,  out = C(a + s),  s += a - out

    Use: write into `payload`, then `start`, `advance`, `wait`, `outcome`, `read` in this order, and at the end either
    `commit`, which takes the new residuals over, or nothing, which leaves the old ones as they were.
    `error_feedback=False` keeps no residuals. In place of `read`, `take_packets` leaves the result as it came.

    `keeps_payload`: its memory stays from step to step, beside fp32 residuals that are `reversible`; else it goes as
    soon as it has left. `reversible`: residuals before a step are kept until `commit` or `revert`, at the price of a
    second worker residual; without, a step that is not applied leaves zeros, and `scale_step` cannot shrink it.

    `worker_place`, `owner_place`: the elements of the vector, padding included, that this rank's residuals are of.
    `mask`: uint8 [shard], if there is one; where it is 0 the average is times 0, so that what is not finite stays so.
    `brought`: what leg 2 has brought and nothing has read. `takes_encoder`: whether `start` takes an encoder, as
    vectors leave as they are and the codec has kernels.
    """

    takes_gradients: ClassVar[bool] = False
    """Whether `start` can be given what casts gradients into packets, since nothing else is sent, and nothing lost."""

    def __init__(
        self,
        comm: Communicator,
        numel: int,
        codec: Codec,
        *,
        bucket: int = 0,
        error_feedback: bool = True,
        device: torch.device | str = "cpu",
        division: Division | None = None,
        part: int | None = None,
        residual_dtype: torch.dtype = torch.float32,
        reversible: bool = True,
        keeps_payload: bool = True,
        grows: bool = False,
    ) -> None:
        """`division`: a shard for each rank of `comm` by default. `part`: the fewest elements of a shard sent on their
        own, alike on all ranks, by default `least_part`'s. `residual_dtype`: fp32 or bf16. `grows`: fp32, with room."""
        if division is None:
            division = Division(comm.size, comm.size, comm.rank)
        self.numel = numel
        self.codec = codec
        self.bucket = bucket
        self.shard = shard_numel(numel, division.shards, codec.block_size)
        self.padded_numel = self.shard * division.shards
        owned, first = 0 if division.own is None else self.shard, (division.own or 0) * self.shard
        self.owner_place = slice(first, first + owned)
        self.worker_place = slice(0, self.shard * division.sent)
        self.parts = cut_shard(self.shard, codec.block_size, least_part(codec, comm.backend) if part is None else part)
        valid = 0 if division.own is None else valid_in_shard(numel, self.shard, division.own)
        # Of each part: the bytes of a packet, and the elements of the own shard that are not padding.
        self._part_bytes = [codec.packet_bytes(part.stop - part.start) for part in self.parts]
        self._part_valid = [min(max(valid - part.start, 0), part.stop - part.start) for part in self.parts]
        self._comm = comm
        self._device = torch.device(device)
        self._payload: Tensor | None = None
        self.worker_residual: Tensor | None = None
        self.owner_residual: Tensor | None = None
        if error_feedback:
            make = zeros_with_room if grows else partial(torch.zeros, dtype=residual_dtype)
            self.worker_residual = make(self.worker_place.stop, device=self._device)
            self.owner_residual = torch.zeros(owned, device=self._device)
        self.reversible = reversible
        kept = reversible and residual_dtype == torch.float32
        self.takes_encoder = codec.has_kernels and error_feedback and kept
        self.keeps_payload = keeps_payload and kept
        self._next: Tensor | None = None  # from `start` to `commit` what becomes the worker's residual
        self._free = zeros_with_room(self.padded_numel, device=self._device) if grows else None  # the last one's memory
        self.mask: Tensor | None = None
        self.weights: Sequence[float] | None = None  # of leg 1's packets in the mean, if `advance` adjusts it
        self.numbers: Tensor | None = None  # of the step, see `number_headers`; None where headers are of one step
        self._average: Tensor | None = None
        self._next_average: Tensor | None = None
        self._leg_1, self.brought = list[Leg](), list[Leg]()
        self.trim: Trim | None = None
        self._passes_on_flags = False
        self._headers: list[Headers] = []
        self._expected = Header(codec.identifier, codec.block_size, bucket, step=0)

    @property
    def payload(self) -> Tensor:
        """What to average, fp32 [padded_numel]: write it before `start`. New memory holds zeros."""
        if self._payload is None:
            free, self._free = self._free, None
            self._payload = torch.zeros(self.padded_numel, device=self._device) if free is None else free
        return self._payload

    def start(self, step: int, flags: Flags = Flags.NONE, settings: int = 0, encode: EncodePart | None = None) -> None:
        """Leg 1: encode `payload` and send each owner its shard. `payload` becomes the new worker residual.

        `settings`: a digest of what must be alike on every rank. `encode`: what makes and encodes the payload part by
        part, residual included, where `takes_encoder` holds; then it has not been written before.
        """
        self._expect(step, settings)
        for number, place in enumerate(self.parts):
            send, receive = self._packets(self._comm.size, number), self._packets(self._comm.size, number)
            header = self._expected.pack(number, flags)
            if encode is None:
                self._encode_part(place, send)
                write_headers(send, header)
            else:
                encode(place, send, header)
            if self.numbers is not None:
                number_headers(send, self.numbers)
            if self.trim is None:
                work = self._comm.all_to_all(receive.view(-1), send.view(-1), async_op=True)
            else:
                work = self.trim.start(self._comm.all_to_all, number, send, receive)
            self._leg_1.append(Leg(send, receive, work))
        if not self.keeps_payload:
            self._payload = None
        if not self.reversible:
            self.worker_residual, self._next = self._next, None

    def advance(self, adjust: Adjust | None = None) -> None:
        """Wait for leg 1, average the own shard, and start leg 2: encode the average and send it to every worker.

        `adjust` may change the average before it is masked and encoded.
        """
        assert self._leg_1, "advance() follows start()"
        average = torch.empty(self.shard, device=self._device) if self._next_average is None else self._next_average
        for number, place in enumerate(self.parts):
            send, valid = self._packets(1, number), self._part_valid[number]
            received = self._receive(number)
            before = None if self.owner_residual is None else self.owner_residual[place]
            mask = None if self.mask is None else self.mask[place]
            if adjust is None:
                self.codec.average_and_encode(received, before, average[place], send, valid, mask)
            else:
                self.codec.decode_mean_of(received, average[place], valid, self.weights)
                adjust(average[place], place)
                if mask is not None:
                    average[place].mul_(mask.ne(0))
                self.codec.encode(average[place], before, send, valid)
            self._send_average(number, send)
        self._average = average

    def wait(self) -> None:
        """Wait for leg 2. The packets stay until `read`."""
        assert self.brought, "wait() follows advance()"
        for number, leg in enumerate(self.brought):
            leg.work.wait()
            # Packets are read and let go; on an accelerator their headers are copied once a step, together.
            headers = leg.received[:, :HEADER_BYTES]
            kept = headers.clone() if self._device.type == "cpu" else headers
            self._headers.append(Headers(kept, number, self._comm.global_ranks))

    @property
    def leg_1_is_over(self) -> bool:
        """Whether `advance` would not have to wait."""
        return all(leg.work.is_completed() for leg in self._leg_1)

    @property
    def has_arrived(self) -> bool:
        """Whether leg 2 has brought what `read` decodes."""
        return bool(self._headers) and bool(self.brought)

    def outcome(self) -> Outcome:
        """Check every header of both legs and say what they said; after `bring_headers` without a wait.

        Raises PacketError, on every rank, where a rank sent a packet of another step, bucket, part, codec or block
        size, and SettingsError where one has other hyperparameters.
        """
        if self._device.type != "cpu":
            bring_headers([self])
        flags = Flags.NONE
        for headers in self._headers:
            if said := headers.check(self._expected):
                flags |= said
        return Outcome.of(flags) if flags else Outcome()

    def read(self, output: Tensor) -> None:
        """Decode what leg 2 brought into `output`, fp32 [padded_numel]: the same bits on every rank."""
        self.read_parts(lambda place, packets: self.codec.decode(packets, output, self.numel, place))

    def read_parts(self, decode: Callable[[slice, Tensor], None]) -> None:
        """Give each part of every shard, and the packets that leg 2 brought for it, to `decode`."""
        assert self.brought, "read() follows wait()"
        for place, leg in zip(self.parts, self.brought, strict=True):
            decode(place, leg.received)
        self.brought = []

    def take_packets(self) -> Tensor:
        """What leg 2 brought, uint8 [shards, packet_bytes], instead of `read`."""
        assert self.brought, "take_packets() follows wait()"
        legs, self.brought = self.brought, []
        return legs[0].received if len(legs) == 1 else self.codec.join([leg.received for leg in legs])

    def commit(self) -> None:
        """Take over the new residuals. The old ones' memory becomes the next payload, if that is kept."""
        if self.worker_residual is None:
            return
        if self._next is not None:
            if self._next is self._payload:
                self._payload = None
            self._free = self.worker_residual if self.keeps_payload else None
            self.worker_residual, self._next = self._next, None
        if self._average is not None:
            if self._next_average is not None:
                self._next_average = self.owner_residual
            self.owner_residual, self._average = self._average, None

    def places(self) -> tuple[int, ...]:
        """Addresses that a step captured now depends on, of what takes turns: from now on the owner's residuals, too,
        in two places as the worker's do, so that the next step but one finds them where this one did."""
        if self._next_average is None and self.owner_residual is not None:
            self._next_average = torch.empty_like(self.owner_residual)
        kept = (self.worker_residual, self.payload, self.owner_residual, self._next_average)
        return tuple(0 if one is None else one.data_ptr() for one in kept)

    def hold_arrived(self) -> Arrived:
        """What `wait` has brought, to be had again by `arrive_again`."""
        assert self._average is not None, "hold_arrived() follows wait()"
        return Arrived(tuple(self._headers), tuple(self.brought), self._average)

    def arrive_again(self, arrived: Arrived, step: int, settings: int) -> None:
        """Be where `wait` ends, in a step whose legs a graph's replay has brought."""
        self._expect(step, settings)
        self._headers, self.brought, self._average = list(arrived.headers), list(arrived.legs), arrived.average
        self._next = self.payload

    def revert(self) -> None:
        """Go back to the residuals before a step that was not committed."""
        if not self.keeps_payload:
            self._payload = None  # which what came back may have been read into
        if self._average is None:
            return
        if not self.reversible and self.worker_residual is not None:
            self.worker_residual.zero_()  # it holds this step's, however large, by now
        self._next = self._average = None

    def scale_step(self, coefficient: float | Tensor) -> None:
        """Change the new worker residual to what it were had this step's change been `coefficient` times as large.

        With e the residual before and e' after, payload x and packet p: e' = x + e - p, so that e + c·(e' - e) is the
        residual of a payload c·x sent as c·p. After `start`.
        """
        assert self.worker_residual is not None
        torch.lerp(self.worker_residual, self.next_residual, coefficient, out=self.next_residual)

    def average(self, vector: Tensor, step: int = 0) -> Tensor:
        """All of the above at once: the compressed average of `vector`, fp32 [numel], over the ranks.

        Where some rank's vector is not finite, neither is the result, and the residuals stay as they were.
        """
        self.payload[: self.numel].copy_(vector)
        self.start(step)
        self.advance()
        self.wait()
        finite = self.outcome().finite
        output = torch.empty_like(self.payload)
        self.read(output)
        if finite:
            self.commit()
        return output[: self.numel]

    def _expect(self, step: int, settings: int) -> None:
        """Begin an exchange in which headers have to name this step and these settings."""
        self._next = None
        self._expected = Header(self.codec.identifier, self.codec.block_size, self.bucket, step, settings=settings)
        self._headers, self._leg_1, self.brought = [], [], []

    @property
    def next_residual(self) -> Tensor:
        """What leg 1 encodes, of `worker_place`; from `start` to `commit` what becomes the worker's residual."""
        residual = self.worker_residual
        if self._next is None:
            in_payload = self.keeps_payload or self._payload is not None
            if residual is None or (residual.dtype == torch.float32 and in_payload):
                self._next = self.payload
            else:
                self._next = torch.empty_like(residual) if self.reversible else residual
        return self._next

    def _encode_part(self, place: slice, packets: Tensor) -> None:
        before, after, valid = self.worker_residual, self.next_residual, self.numel - self.worker_place.start
        if before is None or before.dtype == torch.float32:
            self.codec.encode(after, before, packets, valid, place)
        else:
            self.codec.encode(self.payload, before, packets, valid, place, after)

    def _receive(self, number: int) -> Tensor:
        """Wait for a part of leg 1, and return what came, uint8 [workers, packet_bytes]."""
        leg = self._leg_1.pop(0)
        leg.work.wait()
        self._headers.append(Headers(leg.received[:, :HEADER_BYTES].clone(), number, self._comm.global_ranks))
        return leg.received

    def _send_average(self, number: int, send: Tensor) -> None:
        """Send an encoded part of the own shard to every worker, flagged where it is not finite."""
        receive = self._packets(self._comm.size, number)
        scales = 0 if send.device.type == "cpu" else self.codec.finite_scales(send)
        finite = True if scales else self.codec.all_finite(send)
        write_headers(send, self._expected.pack(number), finite, scales)
        if self.numbers is not None:
            number_headers(send, self.numbers)
        if self._passes_on_flags:
            self._pass_on_flags(send)
        if self.trim is None:
            work = self._comm.all_gather(receive.view(-1), send.view(-1), async_op=True)
        else:
            work = self.trim.start(self._comm.all_gather, number, send, receive)
        self.brought.append(Leg(send, receive, work))

    def _pass_on_flags(self, packets: Tensor) -> None:
        """Let leg 2 tell of leg 1, where not every rank sees its headers; without nodes every owner does."""

    def _packets(self, rows: int, number: int) -> Tensor:
        return torch.empty(rows, self._part_bytes[number], dtype=torch.uint8, device=self._device)


def bring_headers(exchanges: Iterable[Exchange], others: Sequence[Tensor] = ()) -> list[Tensor]:
    """Bring the headers of all `exchanges`, whose `outcome` then waits for nothing, to the host; return `others` there.

    On an accelerator, which must be the same for all, the host waits once; after `wait` of each.
    """
    away = [one for one in exchanges if one._device.type != "cpu" and one._headers]
    if not away:
        return read_together(others) if others else []
    held = [headers.raw for exchange in away for headers in exchange._headers]
    together, *found = read_together([torch.cat(held), *others])
    brought = iter(torch.split(together, [len(one) for one in held]))
    for exchange in away:
        exchange._headers = [replace(headers, raw=next(brought)) for headers in exchange._headers]
    return found


def look_on(exchange: Exchange, packets: Sequence[Tensor]) -> None:
    """Have it be where `wait` ends in a step of other ranks, which these packets of leg 2 are of; residuals stay."""
    exchange._headers = [Headers(one[:, :HEADER_BYTES], number) for number, one in enumerate(packets)]
    exchange.brought = [Leg(one, one, Work()) for one in packets]


def zero_held(values: Tensor, held: Tensor, place: slice) -> None:
    """Zero, in place, the coordinates of `values` that are held; they are the elements `place` of the vector."""
    if held.dtype == torch.bool:
        values.masked_fill_(held[place], 0.0)
        return
    first, last = torch.searchsorted(held, torch.tensor([place.start, place.stop])).tolist()
    values.index_fill_(0, held[first:last] - place.start, 0.0)


def hold_zero(exchange: Exchange, held: Tensor) -> None:
    """Zero an exchange's residuals at these `held_coordinates` of [padded_numel]; between steps."""
    if exchange.worker_residual is not None and exchange.owner_residual is not None:
        zero_held(exchange.worker_residual, held, exchange.worker_place)
        zero_held(exchange.owner_residual, held, exchange.owner_place)
