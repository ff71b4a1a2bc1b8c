"""The 16-byte header that every packet starts with, so that a packet of another step, bucket, part or codec is
an error on every rank and never a silent wrong sum."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntFlag

import numpy as np
import torch
from torch import Tensor

from thinwire.comm import CommunicationError
from thinwire.compress.kernels.calls import WriteHeaders
from thinwire.compress.kernels.loading import execute
from thinwire.compress.packet_layout import HEADER_BYTES

# magic, format version, codec, flags, block size / 64, bucket, part, step, settings
_HEADER = struct.Struct("<HBBHHHHHH")
assert _HEADER.size == HEADER_BYTES
_MAGIC = 0x5754  # "TW", little-endian
_VERSION = 4
_FLAG_BYTES = slice(4, 6)
_NUMBER_BYTES = slice(12, 16)  # step and settings, which change from step to step
_FLAGS_INT16, _SETTINGS_INT16 = 2, 7  # places in the header seen as int16
_NUMBERS = ("bucket", "part", "step", "settings")
_LIMIT = 1 << 16  # they are sent modulo this


class Flags(IntFlag):
    """What a packet says about its sender besides the values it carries."""

    NONE = 0
    NON_FINITE = 1  # the owner's average is not finite: every rank skips this step
    INCOMPLETE = 2  # a parameter of this bucket had no gradient on the sender
    MISMATCH = 8  # a packet that the sender got was not the one it waited for
    UNPLACED = 4  # the sender has a trainable parameter that lies in no bucket yet
    SETTINGS = 16  # a packet that the sender got was of a rank with other hyperparameters
    MEET = 32  # a worker waits to join: after this exchange all meet
    TELL = 64  # a worker waits to look on: after this step all tell it of the state, and of further steps


_KNOWN_FLAGS = sum(Flags)


class PacketError(CommunicationError):
    """A packet that is not the one its receiver waits for."""

    final = True


class SettingsError(PacketError):
    """A packet from a rank whose optimizer has other hyperparameters."""


@dataclass(frozen=True)
class Outcome:
    """What the headers of one exchange said, the same on every rank.

    `finite`: every owner's average was finite. `incomplete`: some rank had no gradient for some parameter. `unplaced`:
    some rank has a trainable parameter that lies in no bucket yet. `calls`: MEET and TELL of any rank.
    """

    finite: bool = True
    incomplete: bool = False
    unplaced: bool = False
    calls: Flags = Flags.NONE

    @property
    def meet(self) -> bool:
        """Whether all have to meet."""
        return Flags.MEET in self.calls

    @classmethod
    def of(cls, flags: Flags) -> Outcome:
        """What flags of all headers say; raises PacketError or SettingsError for what another node has found."""
        if Flags.MISMATCH in flags:
            raise PacketError(
                "ranks of another node have lost step with each other. Every rank must call backward() and step() "
                "equally often"
            )
        if Flags.SETTINGS in flags:
            raise SettingsError("ranks of another node have other hyperparameters: set them alike on every rank")
        return cls(
            Flags.NON_FINITE not in flags,
            Flags.INCOMPLETE in flags,
            Flags.UNPLACED in flags,
            flags & (Flags.MEET | Flags.TELL),
        )


@dataclass(frozen=True)
class Header:
    """What the 16 bytes say.

    `settings`: a digest of the sender's hyperparameters; see `thinwire.zero.sharded_home.settings_digest`.
    """

    codec: int
    block_size: int
    bucket: int
    step: int
    flags: Flags = Flags.NONE
    part: int = 0
    settings: int = 0

    def pack(self, part: int | None = None, flags: Flags | None = None) -> bytes:
        """The 16 bytes of this header, little-endian; with another `part` or `flags` if they are given."""
        return _HEADER.pack(
            _MAGIC,
            _VERSION,
            self.codec,
            self.flags if flags is None else flags,
            self.block_size // 64,
            self.bucket % _LIMIT,
            (self.part if part is None else part) % _LIMIT,
            self.step % _LIMIT,
            self.settings % _LIMIT,
        )

    @classmethod
    def unpack(cls, raw: bytes) -> Header:
        """Read 16 bytes back; raises PacketError where they are no header of this format."""
        magic, version, codec, flags, block_units, bucket, part, step, settings = _HEADER.unpack(raw)
        if magic != _MAGIC or version != _VERSION:
            raise PacketError(
                f"not a thinwire packet of format {_VERSION}: it starts with {raw[:4].hex()}. Ranks that run "
                "different versions of thinwire, or a second user of the same communicator, cause this"
            )
        return cls(codec, block_units * 64, bucket, step, Flags(flags), part, settings)

    def check(self, expected: Header, sender: int) -> None:
        """Raise PacketError unless this header, flags aside, is the expected one; SettingsError for its settings."""
        for name in ("codec", "block_size", "bucket", "part", "step"):
            given, wanted = getattr(self, name), getattr(expected, name)
            if name in _NUMBERS:
                wanted %= _LIMIT
            if given != wanted:
                raise PacketError(
                    f"rank {sender} sent a packet of {name} {given} where {name} {wanted} was expected: the ranks "
                    "have lost step with each other. Every rank must call backward() and step() equally often"
                )
        if self.settings != expected.settings % _LIMIT:
            raise SettingsError(
                f"rank {sender}'s optimizer has other hyperparameters (a learning rate, betas, eps, weight decay, ...) "
                f"than this rank's in step {expected.step + 1}: set them alike on every rank"
            )


def write_headers(packets: Tensor, header: bytes, finite: bool | Tensor = True, scales: int = 0) -> None:
    """Put a packed `header` at the start of every row of `packets`, uint8 [rows, bytes], contiguous.

    Unless `finite`, it says NON_FINITE; as a bool scalar on the packets' device that is found out there, as is whether
    the first `scales` fp32 behind the header are all finite: one launch, and the host neither waits for the device nor
    copies anything to it.
    """
    if finite is False:
        flags = int.from_bytes(header[_FLAG_BYTES], "little") | Flags.NON_FINITE
        header = header[: _FLAG_BYTES.start] + flags.to_bytes(2, "little") + header[_FLAG_BYTES.stop :]
    condition = ~finite if isinstance(finite, Tensor) else None
    if packets.device.type == "cpu" and not scales and condition is None:
        packets.numpy()[:, :HEADER_BYTES] = np.frombuffer(header, dtype=np.uint8)
    else:
        execute(WriteHeaders(packets, header, scales, condition, Flags.NON_FINITE))


def step_and_settings(step: int, settings: int) -> bytes:
    """What `number_headers` puts into headers of this step."""
    return struct.pack("<HH", step % _LIMIT, settings % _LIMIT)


def number_headers(packets: Tensor, numbers: Tensor) -> None:
    """Have the headers of all rows name the step and settings of `numbers`, uint8 [4] on the packets' device: what is
    there by then, in a launch that is captured once for many steps."""
    packets[:, _NUMBER_BYTES].copy_(numbers)


def pass_on_flags(packets: Tensor, flags: Tensor) -> None:
    """Set `flags`, int16 [] on the packets' device, in every row's header."""
    packets[:, :HEADER_BYTES].view(torch.int16)[:, _FLAGS_INT16].bitwise_or_(flags)


def flags_on_device(headers: Tensor, expected: bytes) -> Tensor:
    """What `Headers.check` would find in `headers`, uint8 [senders, 16], as int16 [] on their device, without a wait.

    MISMATCH or SETTINGS stand for what it would raise.
    """
    wanted = torch.empty_like(headers[:1])
    write_headers(wanted, expected)
    fields = headers.contiguous().view(torch.int16)
    differs = fields != wanted.view(torch.int16)
    seen, *others = fields[:, _FLAGS_INT16].unbind()
    for flags in others:
        seen = seen | flags
    strange = differs[:, :_FLAGS_INT16].any() | differs[:, _FLAGS_INT16 + 1 : _SETTINGS_INT16].any()
    strange |= (seen & ~_KNOWN_FLAGS) != 0
    other_settings = differs[:, _SETTINGS_INT16].any()
    found = strange * int(Flags.MISMATCH) | other_settings * int(Flags.SETTINGS)
    return (seen & _KNOWN_FLAGS) | found.to(torch.int16)


@dataclass(frozen=True)
class Headers:
    """What came before the packets of one part's leg, uint8 [packets, 16], and their senders, if not ranks 0, 1, ..."""

    raw: Tensor
    part: int
    senders: Sequence[int] = range(1 << 31)

    def check(self, expected: Header) -> Flags:
        """All flags together; waits for the device where the headers are on one.

        Raises PacketError, naming the sender, unless each header is `expected` of this part, flags aside, and all flags
        are known.
        """
        if self.raw.shape[0] < 1 or self.raw.shape[1] != HEADER_BYTES:
            raise PacketError(
                f"{tuple(self.raw.shape)} bytes of headers came, where there should be {HEADER_BYTES} a packet"
            )
        raw, packed = self.raw.cpu().numpy(), expected.pack(self.part, Flags.NONE)
        if raw.tobytes() == packed * len(raw):
            return Flags.NONE
        alike = raw == np.frombuffer(packed, dtype=np.uint8)
        alike[:, _FLAG_BYTES] = True
        for row in np.flatnonzero(~alike.all(axis=1)):
            Header.unpack(raw[row].tobytes()).check(replace(expected, part=self.part), self.senders[int(row)])
        flags = np.ascontiguousarray(raw[:, _FLAG_BYTES]).view("<u2").reshape(-1)
        for row in np.flatnonzero(flags & ~np.uint16(_KNOWN_FLAGS)):
            raise PacketError(f"rank {self.senders[int(row)]} sent a packet with unknown flags, {int(flags[row]):#06x}")
        return Flags(int(np.bitwise_or.reduce(flags)))


def read_together(tensors: Sequence[Tensor]) -> list[Tensor]:
    """`tensors` on the host, in order: those that are there already themselves, copies of the others.

    Those on an accelerator must be on one; however many there are, of whatever dtypes, the host waits for it once. For
    small tensors: they are put together first.
    """
    away = [one for one in tensors if one.device.type != "cpu"]
    if not away:
        return list(tensors)
    raw = [one.detach().contiguous().view(-1).view(torch.uint8) for one in away]
    pieces = iter(torch.split((raw[0] if len(raw) == 1 else torch.cat(raw)).cpu(), [one.numel() for one in raw]))
    # A copy is aligned, whatever the offset of the piece.
    return [
        one if one.device.type == "cpu" else next(pieces).clone().view(one.dtype).view(one.shape) for one in tensors
    ]
