"""The kernels of packets' headers in plain torch: the specification, and what CPUs run. Nothing here makes the host
wait for a device."""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.compress.kernels.header_calls import FLAG_SHIFT, CheckHeaders, WriteHeaders
from thinwire.compress.packet_layout import HEADER_BYTES, SCALE_BYTES

__all__ = ["check_headers", "write_headers"]

_FLAG_BYTES = slice(4, 6)
_NOT_FLAGS = ~(0xFFFF << FLAG_SHIFT)


def write_headers(call: WriteHeaders) -> None:
    """See `thinwire.compress.kernels.headers`."""
    packets = call.packets
    if packets.device.type == "cpu":
        packets[:, :HEADER_BYTES] = torch.frombuffer(bytearray(call.raw), dtype=torch.uint8)
    else:
        for place, byte in enumerate(call.raw):  # filled: bytes of the host's would have to be copied
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


def check_headers(call: CheckHeaders) -> None:
    """See `thinwire.compress.kernels.headers`."""
    words = call.headers[:, :HEADER_BYTES].clone(memory_format=torch.contiguous_format).view(torch.int64)
    flags = words[:, 0] >> FLAG_SHIFT & 0xFFFF
    odd = (words[:, 0] & _NOT_FLAGS) != (call.first & _NOT_FLAGS)
    odd |= (words[:, 1] != call.second) | ((flags & ~call.known) != 0)
    report = call.report
    report[0] |= _union(flags)
    row = odd.to(torch.uint8).argmax().reshape(1)
    found = torch.cat([row + 1, words[row].view(-1)])
    report[1:] = torch.where(odd.any() & (report[1] == 0), found, report[1:])


def _union(flags: Tensor) -> Tensor:
    """All bits that any of them has."""
    bits = torch.arange(16, device=flags.device)
    return ((flags.unsqueeze(1) >> bits & 1).amax(dim=0) << bits).sum()
