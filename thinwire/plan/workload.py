"""Workloads: what one rank computes in a step, the devices that may compute it, and estimates of what it takes."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from itertools import accumulate
from typing import Literal

from thinwire.compress.packet_layout import LOW_RANK, leading_rank
from thinwire.plan.units import PlanError, require_positive, require_seconds, require_whole

ParameterDtype = Literal["fp32", "bf16"]

# A model given by its parameter count alone is taken for matrices of this many rows and columns.
_SIDE = 1024


@dataclass(frozen=True)
class Matrices:
    """`count` parameters of `rows` x `columns`."""

    rows: int
    columns: int
    count: int = 1

    @property
    def numel(self) -> int:
        """Elements of all of them."""
        return self.rows * self.columns * self.count

    @property
    def newton_schulz_operations(self) -> float:
        """Of Muon's five iterations on all of them, three products each."""
        less, more = sorted((self.rows, self.columns))
        return self.count * 5.0 * (4 * less**2 * more + 2 * less**3)

    def low_rank_elements(self, rank: int) -> int:
        """Elements of the two factors of `rank` that PowerSGD makes of each, together.

        0 where they would not halve the matrix, which is then sent whole, as torch's powerSGD_hook decides.
        """
        factors = min(rank, self.rows, self.columns) * (self.rows + self.columns)
        return factors * self.count if 2 * factors < self.rows * self.columns else 0

    @property
    def leading_elements(self) -> int:
        """Of the two factors of each that 1-bit Muon sends beside the codec, together."""
        return leading_rank(self.rows, self.columns, LOW_RANK) * (self.rows + self.columns) * self.count


@dataclass(frozen=True)
class Blocks:
    """Of a transformer: `layers` of `hidden` units with `heads`; `sequence`: tokens that it is usually trained on."""

    layers: int
    hidden: int
    heads: int
    sequence: int

    def __post_init__(self) -> None:
        for field in fields(self):
            require_whole(field.name, getattr(self, field.name))


@dataclass(frozen=True)
class Transformer:
    """A model: `parameters` trained elements, of which `matrices` are two-dimensional; the rest are vectors.

    `last`: the one of the matrices whose gradient is complete at backward's end only, the embedding; it is never cut.
    `blocks`: its layers, where they are known.
    """

    name: str
    parameters: int
    matrices: tuple[Matrices, ...]
    last: Matrices | None = None
    blocks: Blocks | None = None

    def __post_init__(self) -> None:
        require_whole("parameters", self.parameters)
        if sum(one.numel for one in self.matrices) > self.parameters:
            raise PlanError(f"{self.name} has more elements in its matrices than its {self.parameters} parameters")
        if self.last is not None and self.last not in self.matrices:
            raise PlanError(f"the last matrix of {self.name} is not among its matrices")

    @property
    def hidden(self) -> list[Matrices]:
        """All matrices but the last."""
        return [one for one in self.matrices if one is not self.last]

    def padded_elements(self, ranks: int) -> int:
        """Elements without the last matrix, and of padding, if each matrix has one of `ranks` owners."""
        hidden = sorted(self.hidden, key=lambda one: -one.rows * one.columns)
        numbers = accumulate(one.count for one in hidden)
        # Of the largest k · ranks + 1 one owner has at least k + 1.
        shares = (math.ceil(n / ranks) * one.rows * one.columns for n, one in zip(numbers, hidden, strict=True))
        most = max(shares, default=0)
        return self.parameters - self.last_elements + max(0, most * ranks - sum(one.numel for one in hidden))

    @property
    def last_elements(self) -> int:
        """Elements of the matrix that comes last."""
        return 0 if self.last is None else self.last.numel


def plain_model(parameters: int, hidden: int | None = None) -> Transformer:
    """A model of which only the parameter count is known: square matrices of `hidden` rows, 1024 by default.

    Raises PlanError for counts that are not whole and positive.
    """
    require_whole("parameters", parameters)
    require_whole("hidden", hidden if hidden is not None else _SIDE)
    side = min(hidden or _SIDE, math.isqrt(parameters))
    return Transformer("a model", parameters, (Matrices(side, side, parameters // side**2),))


@dataclass(frozen=True)
class Activations(Blocks):
    """What backward needs from forward of these blocks, where nothing is recomputed, in `micro_batch` sequences
    (Korthikanti et al. 2022, eq. 1)."""

    micro_batch: int

    def nbytes(self, dtype: ParameterDtype, *, recompute: bool = False) -> float:
        """Bytes a rank: s·b·h·L·(34 + 5·a·s/h) in 16 bits, twice that in fp32 but for the masks of dropout; with
        `recompute` those of one layer, and the inputs of all."""
        if recompute:
            inputs = self.sequence * self.micro_batch * self.hidden * self.layers * (4.0 if dtype == "fp32" else 2.0)
            return inputs + replace(self, layers=1).nbytes(dtype)
        places = self.sequence * self.micro_batch * self.hidden * self.layers
        scores = self.heads * self.sequence / self.hidden
        masks = 2 + scores
        values = 32 + 4 * scores
        return places * (masks + values * (2 if dtype == "fp32" else 1))


@dataclass(frozen=True)
class Workload:
    """A model and what one step of it computes on one rank.

    Args:
        model: what is trained.
        forward_seconds, backward_seconds: of one micro-batch.
        accumulation: micro-batches a step; gradients leave during the last backward.
        update_seconds: of AdamW on all parameters; None: from the processor's rate.
        dtype: of the weights; bf16 has fp32 master weights.
        activations: for the memory a rank needs; None: left out.
        tokens: of one micro-batch.
        recompute: whether layers run forward again in backward, the seconds of which have that.
    """

    model: Transformer
    forward_seconds: float
    backward_seconds: float
    accumulation: int = 1
    update_seconds: float | None = None
    dtype: ParameterDtype = "fp32"
    activations: Activations | None = None
    tokens: int = 4096
    recompute: bool = False

    def __post_init__(self) -> None:
        require_whole("accumulation", self.accumulation)
        for name in ("forward_seconds", "backward_seconds", "update_seconds"):
            value = getattr(self, name)
            if value is not None:
                require_seconds(name, value)
        if self.dtype not in ("fp32", "bf16"):
            raise PlanError(f"dtype must be 'fp32' or 'bf16', got {self.dtype!r}")

    @property
    def seconds_an_operation(self) -> float:
        """Of products of matrices, as fast as forward makes two a parameter and token."""
        return self.forward_seconds / (2.0 * self.model.parameters * self.tokens)

    @property
    def element_bytes(self) -> int:
        """Bytes of a weight and of a gradient."""
        return 4 if self.dtype == "fp32" else 2


# Devices, from their data sheets

EFFICIENCY = 0.4
"""The part of a data sheet's peak that training transformers commonly reaches."""


ADAM_BYTES = 28
"""Of memory, an element: AdamW reads weight, gradient and both moments, and writes all but the gradient."""
STATE_BYTES = 12  # moments and a master weight


@dataclass(frozen=True)
class Host:
    """What a node has beside its devices: bytes of `memory` and of `disk`, and bytes a second that they read and write,
    `rate` and `disk_rate`, which its ranks share; `link`: bytes a second between a rank's device and the memory."""

    memory: float
    rate: float = 150e9
    link: float = 12e9
    disk: float = 0.0
    disk_rate: float = 1.0

    def __post_init__(self) -> None:
        for name in ("rate", "link", "disk_rate"):
            require_positive(f"a host's {name}", getattr(self, name))
        if not (self.memory >= 0 and self.disk >= 0 and self.memory + self.disk > 0):
            raise PlanError(f"a host has memory or a disk, got {self.memory!r} and {self.disk!r} bytes")

    def adam_seconds(self, elements: float, ranks: int) -> float:
        """Of AdamW on the `elements` of each of a node's `ranks`."""
        return ranks * elements * ADAM_BYTES / self.rate

    def adam_seconds_on_disk(self, elements: float, ranks: int, shown: float, backward: float) -> float:
        """The same on a disk, of which `backward` seconds hide the step itself, with `shown` bytes an element of new
        weights; those are read once the step is known not to be clipped."""
        weights = ranks * elements * shown / self.disk_rate
        step = max(self.adam_seconds(elements, ranks), ranks * elements * 2 * STATE_BYTES / self.disk_rate + weights)
        return max(0.0, step - backward) + weights


@dataclass(frozen=True)
class Device:
    """`flops`: dense operations a second at the peak, in 16 bits on tensor cores, or on CPUs in fp32. `memory_rate`:
    bytes a second that it reads and writes. `inside`: bytes a second to its neighbours in a node."""

    name: str
    flops: float
    memory_rate: float
    inside: float


_PCIE3, _PCIE4, _PCIE5 = 12, 24, 48

# Tera-operations, gigabytes of memory and gigabytes to a neighbour, a second.
_DATA_SHEETS = {
    "t4": (65, 320, _PCIE3),
    "v100": (125, 900, 130),
    "a10": (125, 600, _PCIE4),
    "a10g": (70, 600, _PCIE4),
    "l4": (121, 300, _PCIE4),
    "l40s": (362, 864, _PCIE4),
    "a100": (312, 2039, 300),
    "h100": (989, 3350, 450),
    "h200": (989, 4800, 450),
    "rtx3090": (71, 936, _PCIE4),
    "rtx4090": (165, 1008, _PCIE4),
    "rtx5090": (210, 1792, _PCIE5),
    # One core at 3 GHz with AVX2: 2 products and sums of 8 numbers a cycle. With its share of the memory.
    "cpu-core": (0.096, 10, 10),
}
DEVICES = {
    name: Device(name, teraflops * 1e12, memory * 1e9, inside * 1e9)
    for name, (teraflops, memory, inside) in _DATA_SHEETS.items()
}
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


def forward_operations(model: Transformer, sequences: int, length: int) -> float:
    """Of `sequences` of `length` tokens: two a parameter and token, and those of attention, 4 · layers · width · length
    a token where layers are known. Backward makes twice as many (Kaplan et al. 2020, arXiv 2001.08361, §2.1)."""
    operations = 2.0 * model.parameters
    if model.blocks is not None:
        operations += 4.0 * model.blocks.layers * model.blocks.hidden * length
    return operations * (sequences * length)


def forward_seconds(model: Transformer, sequences: int, length: int, device: Device) -> float:
    """Of as many, at the speed that a device reaches."""
    return forward_operations(model, sequences, length) / (EFFICIENCY * device.flops)
