"""Exchanges that take less than one that keeps residuals: for exact averages fewer passes over memory
(`ExactExchange`), or one leg of the two, with what is too large to round beside it (`LeadingDirections`)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor
from typing_extensions import override

from thinwire.comm import Communicator
from thinwire.compress.codecs import CastCodec, Codec, all_finite
from thinwire.compress.exchange import Adjust, EncodePart, Exchange
from thinwire.compress.legs import Leg
from thinwire.compress.packet import Flags, Headers, write_headers
from thinwire.compress.packet_layout import HEADER_BYTES, leading_rank

# Exact averages with fewer passes over memory than an exchange that keeps residuals takes: values leave as they are,
# or rounded to 16 bits, and nothing is kept of what that loses.


class ExactExchange(Exchange):
    """An Exchange through a codec that casts, without error feedback: the same packets, and the same average. `start`
    leaves the payload as it is, or takes gradients in its place; the owner averages fp32 right into what it sends."""

    takes_gradients: ClassVar[bool] = True
    codec: CastCodec

    @override
    def advance(self, adjust: Adjust | None = None) -> None:
        assert self._leg_1, "advance() follows start()"
        for number, place in enumerate(self.parts):
            received = self._receive(number)
            send = self._packets(1, number)
            (sent,) = self.codec.values(send)
            average = sent if sent.dtype == torch.float32 else torch.empty(len(sent), device=self._device)
            self.codec.decode_mean(received, average, self._part_valid[number])
            if adjust is not None:
                adjust(average, place)
            if average is not sent:
                sent.copy_(average)
            self._send_average(number, send)

    @override
    def _encode_part(self, place: slice, packets: Tensor) -> None:
        self.codec.values(packets).copy_(self.payload.view(-1, self.shard)[:, place])


class SoleExchange(Exchange):
    """An ExactExchange of one rank and fp32, whose payload is the average: nothing is copied, and nothing leaves."""

    _arrived = False

    @override
    def start(self, step: int, flags: Flags = Flags.NONE, settings: int = 0, encode: EncodePart | None = None) -> None:
        assert encode is None, "the payload is the average"
        self._expect(step, settings)
        self._arrived = False
        self._add_header(flags, True)

    @override
    def advance(self, adjust: Adjust | None = None) -> None:
        if adjust is not None:
            adjust(self.payload, slice(0, self.shard))
        self._add_header(Flags.NONE, all_finite(self.payload))

    @override
    def wait(self) -> None:
        self._arrived = True

    @property
    @override
    def leg_1_is_over(self) -> bool:
        return True

    @property
    @override
    def has_arrived(self) -> bool:
        return self._arrived

    @override
    def read(self, output: Tensor) -> None:
        assert self._arrived, "read() follows wait()"
        self._arrived = False
        if output.data_ptr() != self.payload.data_ptr():
            output.copy_(self.payload)

    def _add_header(self, flags: Flags, finite: bool | Tensor) -> None:
        """Have `outcome` find what a leg's packet would say."""
        header = torch.empty(1, HEADER_BYTES, dtype=torch.uint8, device=self._device)
        write_headers(header, self._expected.pack(0, flags), finite)
        self._headers.append(Headers(header, 0, [self._comm.global_ranks[self._comm.rank]]))


def make_exact_exchange(
    comm: Communicator, numel: int, codec: Codec, *, bucket: int, device: torch.device | str = "cpu"
) -> Exchange:
    """The exchange that averages over `comm`, with all of its ranks alike, and keeps no residuals; `codec` casts."""
    assert isinstance(codec, CastCodec), "nothing else is averaged exactly"
    kind = SoleExchange if comm.size == 1 and codec.name == "none" else ExactExchange
    return kind(comm, numel, codec, bucket=bucket, error_feedback=False, device=device)


# One leg each, where something happens to an average between them that only its owner does


class ExchangeToOwners(Exchange):
    """Leg 1 alone: owners keep the average of their shards, `average_of_own`, fp32 [shard], until the next `start`."""

    buddies: ClassVar[bool] = False
    """Whether what goes to an owner goes to the next rank too."""

    def __init__(self, *between: Any, **options: Any) -> None:
        super().__init__(*between, **options)
        self.owner_residual = None
        self.average_of_own = torch.empty(self.shard, device=self._device)
        self._leading: LeadingDirections | None = None

    def send_apart(self, matrices: Sequence[tuple[int, torch.Size]], low_rank: int) -> None:
        """From now on let LeadingDirections carry what they can of `matrices`: offsets in the vector, and shapes."""
        held = [
            (offset - self.worker_place.start, shape)
            for offset, shape in matrices
            if self.worker_place.start <= offset < self.worker_place.stop
        ]
        self._leading = LeadingDirections(self._comm, self.shard, held, low_rank, self._device, self.buddies)

    @override
    def advance(self, adjust: Adjust | None = None) -> None:
        assert adjust is None, "owners do that"
        for number, place in enumerate(self.parts):
            received = self._receive(number)
            self.codec.decode_mean(received, self.average_of_own[place], self._part_valid[number])
        if self._leading is not None:
            self._leading.add_mean(self.average_of_own)

    @override
    def wait(self) -> None:
        """Return at once: what leg 1 brought is there since `advance`."""

    @override
    def _encode_part(self, place: slice, packets: Tensor) -> None:
        if self._leading is not None and place.start == 0:
            self._leading.take_and_send(self.next_residual.view(-1, self.shard))
        super()._encode_part(place, packets)


class ExchangeFromOwners(Exchange):
    """Leg 2 alone, without error feedback: `start_from_owners`, `wait`, `outcome`, `read`."""

    def __init__(self, *between: Any, **options: Any) -> None:
        super().__init__(*between, error_feedback=False, **options)

    def start_from_owners(self, own: Tensor, step: int) -> None:
        """Encode `own`, fp32 [shard], and send it to every rank. It becomes what the codec lost."""
        self._expect(step, 0)
        for number, place in enumerate(self.parts):
            send = self._packets(1, number)
            self.codec.encode(own[place], None, send, self._part_valid[number])
            self._send_average(number, send)


_Kind = TypeVar("_Kind")

_ITERATIONS = 2
_DEPENDENT = 1e-5  # what is left of a unit vector beyond the span of others, in fp32


@dataclass(frozen=True)
class _Factors:
    """Where a matrix lies, in which owner's shard, and where its two factors do in what is sent to this owner."""

    owner: int
    matrix: slice
    shape: tuple[int, int]
    rank: int
    left: slice
    right: slice


class LeadingDirections:
    """Carries the leading singular directions of each matrix to its owner, in bf16, beside an exchange of what is left.

    A gradient's energy lies in few directions, and a codec of few bits loses as much in each direction: more than all
    but the first have, which is what an optimizer that orthogonalises then steps along. Of X, [rows, columns], by
    randomised subspace iteration (Halko et al. 2011, arXiv 0909.4061, algorithm 4.4), from the same start every time:

        P = orth(X Ω);  P = orth(X orth(Xᵀ P)), twice;  Q = Xᵀ P;  X ← X - P Qᵀ, with P and Q in bf16

    As many as `leading_rank` says. Factors lie transposed: a thin product of rows is several times as fast.
    """

    def __init__(
        self,
        comm: Communicator,
        shard: int,
        matrices: Sequence[tuple[int, torch.Size]],
        low_rank: int,
        device: torch.device,
        buddies: bool = False,
    ) -> None:
        """`matrices`: offsets in [comm.size, shard], and shapes, of which dimensions beyond the first count as one.
        `buddies`: send an owner's to the next rank too."""
        self._comm, self._copies = comm, 1 + (buddies and comm.size > 1)
        self._factors: list[_Factors] = []
        self._widths = [0] * comm.size
        for offset, (rows, *others) in matrices:
            columns = math.prod(others)
            if rank := leading_rank(rows, columns, low_rank):
                owner, first = divmod(offset, shard)
                middle = self._widths[owner] + rows * rank
                left, right = slice(self._widths[owner], middle), slice(middle, middle + columns * rank)
                place = slice(first, first + rows * columns)
                self._factors.append(_Factors(owner, place, (rows, columns), rank, left, right))
                self._widths[owner] = right.stop
        widest = max((one.shape[1] for one in self._factors), default=0)
        self._start = torch.randn(low_rank, widest, generator=torch.Generator().manual_seed(0)).to(device)
        self._legs: list[Leg] = []

    def take_and_send(self, values: Tensor) -> None:
        """Take them out of `values`, fp32 [comm.size, shard], whose rows are for the owners, and send them."""
        if not self._factors:
            return
        matrices = [values[one.owner, one.matrix].view(one.shape) for one in self._factors]
        bases = [self._start[: one.rank, : one.shape[1]] for one in self._factors]
        bases = _orthonormal([basis @ matrix.T for matrix, basis in zip(matrices, bases, strict=True)])
        for _ in range(_ITERATIONS):
            bases = _orthonormal([basis @ matrix for matrix, basis in zip(matrices, bases, strict=True)])
            bases = _orthonormal([basis @ matrix.T for matrix, basis in zip(matrices, bases, strict=True)])
        send = values.new_empty(sum(self._widths), dtype=torch.bfloat16)
        for_owners = torch.split(send, self._widths)
        for one, matrix, basis in zip(self._factors, matrices, bases, strict=True):
            packet = for_owners[one.owner]
            packet[one.left] = basis.reshape(-1)
            packet[one.right] = (basis @ matrix).reshape(-1)
            left, right = self._read(packet[None], one)
            matrix.addmm_(left.T, right, alpha=-1)
        self._legs = [self._send(send, behind) for behind in range(self._copies)]

    def _send(self, send: Tensor, behind: int) -> Leg:
        """Send each rank what `send` has for the owner so many ranks before it."""
        widths = rolled(self._widths, behind)
        if behind:
            send = torch.cat(rolled(torch.split(send, self._widths), behind))
        received = send.new_empty(self._comm.size, widths[self._comm.rank])
        return Leg(send, received, self._comm.all_to_all(received, send, sizes=widths, async_op=True))

    def add_mean(self, average: Tensor, behind: int = 0) -> None:
        """Wait for them, and add their mean over the senders to `average`, fp32 [shard], of the owner so many ranks
        before this one."""
        if not self._factors:
            return
        leg = self._legs[behind]
        leg.work.wait()
        for one in self._factors:
            if one.owner == (self._comm.rank - behind) % self._comm.size:
                left, right = self._read(leg.received, one)
                average[one.matrix].view(one.shape).addmm_(left.T, right, alpha=1 / len(leg.received))

    def _read(self, packets: Tensor, one: _Factors) -> tuple[Tensor, Tensor]:
        """Both factors of a matrix, fp32, of all senders: [senders · rank, rows], [the same, columns]."""
        rows, columns = one.shape
        return packets[:, one.left].float().view(-1, rows), packets[:, one.right].float().view(-1, columns)


def rolled(of_owners: Sequence[_Kind], behind: int) -> list[_Kind]:
    """For each rank what is of the owner so many ranks before it."""
    return [*of_owners[len(of_owners) - behind :], *of_owners[: len(of_owners) - behind]]


def _orthonormal(bases: Sequence[Tensor]) -> list[Tensor]:
    """Orthonormal rows that span those of each basis, [rank, columns], zeros where they are dependent.

    Gram-Schmidt, twice over, for all of them together: on an accelerator a few small kernels, and no wait.
    """
    most, longest = (max(basis.size(dim) for basis in bases) for dim in (0, 1))
    together = bases[0].new_zeros(len(bases), most, longest)
    for basis, one in zip(bases, together, strict=True):
        one[: basis.size(0), : basis.size(1)] = basis
    together.div_(together.norm(dim=2, keepdim=True).clamp(min=torch.finfo(together.dtype).tiny))
    for number in range(1, most):
        row, before = together[:, number : number + 1], together[:, :number]
        for _ in range(2):
            row.baddbmm_(row @ before.mT, before, alpha=-1)
        left = row.norm(dim=2, keepdim=True)
        row.mul_(torch.where(left > _DEPENDENT, 1 / left, 0.0))
    return [one[: basis.size(0), : basis.size(1)] for basis, one in zip(bases, together, strict=True)]
