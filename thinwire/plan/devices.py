"""What well-known devices compute and read, from their data sheets: what a plan assumes where nothing was measured."""

from __future__ import annotations

from dataclasses import dataclass

from thinwire.plan.errors import PlanError

__all__ = ["DEFAULT_DEVICE", "DEVICES", "EFFICIENCY", "Device", "named_device"]

EFFICIENCY = 0.4
"""The part of a data sheet's peak that training transformers commonly reaches."""

_TERA, _GIGA = 1e12, 1e9


@dataclass(frozen=True)
class Device:
    """`flops`: dense operations a second at the peak, in 16 bits on tensor cores, or on CPUs in fp32. `memory_rate`:
    bytes a second that it reads and writes. `inside`: bytes a second to its neighbours in a node."""

    name: str
    flops: float
    memory_rate: float
    inside: float

    @property
    def sustained_flops(self) -> float:
        """What a training reaches of them."""
        return EFFICIENCY * self.flops


def _device(name: str, teraflops: float, memory_gigabytes: float, inside_gigabytes: float) -> tuple[str, Device]:
    return name, Device(name, teraflops * _TERA, memory_gigabytes * _GIGA, inside_gigabytes * _GIGA)


_PCIE3, _PCIE4, _PCIE5 = 12, 24, 48

DEVICES: dict[str, Device] = dict(
    (
        _device("t4", 65, 320, _PCIE3),
        _device("v100", 125, 900, 130),
        _device("a10", 125, 600, _PCIE4),
        _device("a10g", 70, 600, _PCIE4),
        _device("l4", 121, 300, _PCIE4),
        _device("l40s", 362, 864, _PCIE4),
        _device("a100", 312, 2039, 300),
        _device("h100", 989, 3350, 450),
        _device("h200", 989, 4800, 450),
        _device("rtx3090", 71, 936, _PCIE4),
        _device("rtx4090", 165, 1008, _PCIE4),
        _device("rtx5090", 210, 1792, _PCIE5),
        # One core at 3 GHz with AVX2: 2 products and sums of 8 numbers a cycle. With its share of the memory.
        _device("cpu-core", 0.096, 10, 10),
    )
)
DEFAULT_DEVICE = "a100"


def named_device(name: str) -> Device:
    """One of `DEVICES`, however its name is written. Raises PlanError for another."""
    known = name.lower().replace("-", "").replace(" ", "").replace("_", "")
    for device in DEVICES.values():
        if device.name.replace("-", "") == known:
            return device
    raise PlanError(
        f"--device {name!r} is not one of {', '.join(DEVICES)}; give any other by what it does: --forward 36ms "
        "--backward 61ms --memory-bandwidth 2TB/s, or --measure script.py"
    )
