"""Times what a rank computes besides the model, on all ranks at once, as they share their node's cores and memory."""

from __future__ import annotations

from collections.abc import Callable

import torch

from thinwire.compress import make_codec
from thinwire.plan.probe_link import Stopwatch

__all__ = ["processor_rates"]

_ELEMENTS = 4 << 20  # a bucket of 16 MiB
_MOST_PACKETS = 16
_REPETITIONS = 5


def processor_rates(watch: Stopwatch) -> dict[str, float]:
    """The rates of `thinwire.plan.Processor`, by name, all but `overlap`; the same on every rank. Collective."""
    codec = make_codec("sign1")
    device = watch.device
    workers = min(max(watch.comm.size, 2), _MOST_PACKETS)
    shard = _ELEMENTS // workers // codec.block_size * codec.block_size
    payload, residual = torch.randn(2, _ELEMENTS, device=device)
    packet = torch.empty(1, codec.packet_bytes(_ELEMENTS), dtype=torch.uint8, device=device)
    packets = torch.empty(workers, codec.packet_bytes(shard), dtype=torch.uint8, device=device)
    codec.encode(torch.randn(workers * shard, device=device), None, packets, workers * shard)
    average, decoded = torch.empty(shard, device=device), torch.empty_like(payload)
    weight = torch.nn.Parameter(torch.zeros_like(payload))
    weight.grad = torch.zeros_like(payload)
    adam = torch.optim.AdamW([weight], foreach=True)

    def rate(amount: float, run: Callable[[], object]) -> float:
        run()
        return amount / watch.typical(run, _REPETITIONS)

    return {
        "memory": rate(2 * decoded.nbytes, lambda: decoded.copy_(payload)),
        "encode": rate(_ELEMENTS, lambda: codec.encode(payload, residual, packet, _ELEMENTS)),
        "decode": rate(_ELEMENTS, lambda: codec.decode(packet, decoded, _ELEMENTS)),
        "average": rate(workers * shard, lambda: codec.decode_mean(packets, average, shard)),
        "adam": rate(_ELEMENTS, adam.step),
    }
