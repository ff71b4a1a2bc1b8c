"""Published figures of 1-bit Adam (Tang et al. 2021, arXiv 2102.02888), and the clusters they were measured on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from thinwire.plan import Cluster, Link, Method, Processor, Schedule, Workload, named_model, predict

FLAT = Method("onebit-adam")
BY_NODE = Method("onebit-adam", hierarchical=True)
ADAM_16_BITS = Method("ddp-fp32")  # of a model in 16 bits: gradients travel in the model's own precision
STEPS, WARMUP_STEPS = 152_000, 23_000

# Both clusters have V100s: 900 GB/s. What the paper states of the links: 4.1 Gb/s by iperf on 40 GbE; EDR InfiniBand.
_MEMORY = 900e9
_STATED_GBPS = {"Ethernet": 4.1, "InfiniBand": 100.0}
_LATENCY = {"Ethernet": (50e-6, 5e-6), "InfiniBand": (5e-6, 1e-6)}


@dataclass(frozen=True)
class Row:
    """One row of its table of step times of BERT-Large, sequence length 128, ms; backward without the all-reduce."""

    network: Literal["Ethernet", "InfiniBand"]
    nodes: int
    ranks_per_node: int
    accumulation: int
    forward: float
    all_reduce: float
    backward: float
    step: float

    @property
    def waiting(self) -> float:
        """The all-reduce's part of a step."""
        return self.all_reduce / (self.forward + self.all_reduce + self.backward + self.step)


ROWS = (
    Row("Ethernet", 16, 4, 1, 36.65, 2205.86, 33.63, 74.96),  # batch 1 a GPU
    Row("Ethernet", 16, 4, 1, 35.71, 2275.43, 60.81, 75.59),  # batch 16 a GPU, as in all that follow
    Row("Ethernet", 16, 4, 4, 137.80, 2259.36, 243.72, 74.92),
    Row("Ethernet", 8, 4, 1, 37.91, 2173.35, 60.71, 75.63),
    Row("Ethernet", 4, 4, 1, 36.94, 2133.24, 62.82, 76.85),
    Row("Ethernet", 2, 4, 1, 34.95, 1897.21, 61.23, 75.26),
    Row("Ethernet", 1, 4, 1, 35.99, 239.76, 59.95, 74.21),
    Row("InfiniBand", 8, 8, 1, 25.36, 316.18, 23.25, 58.49),  # batch 1
    Row("InfiniBand", 8, 8, 1, 32.81, 336.40, 59.99, 57.79),
    Row("InfiniBand", 8, 8, 4, 131.04, 339.52, 237.92, 56.91),
    Row("InfiniBand", 4, 8, 1, 33.45, 297.28, 56.81, 57.98),
    Row("InfiniBand", 2, 8, 1, 32.86, 183.74, 56.49, 58.60),
    Row("InfiniBand", 1, 8, 1, 32.74, 28.18, 59.73, 57.29),
)


def workload(row: Row) -> Workload:
    return Workload(
        named_model("bert-large"),
        row.forward / 1e3 / row.accumulation,
        row.backward / 1e3 / row.accumulation,
        row.accumulation,
        row.step / 1e3,
        "bf16",
    )


def cluster(row: Row, *, calibrated: bool, nodes: int | None = None) -> Cluster:
    """The row's cluster; its link as stated, or fitted to the all-reduce on two nodes; inside, to that on one."""
    latency = _LATENCY[row.network]
    inside = _fit(_row(row.network, 1), inside=True)
    between = _fit(_row(row.network, 2), inside=False) if calibrated else _STATED_GBPS[row.network] * 1e9 / 8
    # DeepSpeed's gradients and momenta leave after backward.
    processor = Processor.of_memory(_MEMORY, overlap=0.0)
    return Cluster(
        nodes or row.nodes, row.ranks_per_node, Link.of(between, *latency), Link.of(inside, 5e-6, 1e-6), processor
    )


def _row(network: str, nodes: int) -> Row:
    return next(row for row in ROWS if row.network == network and row.nodes == nodes)


def _fit(row: Row, *, inside: bool) -> float:
    """The rate at which an all-reduce without latency takes as long as the row's."""
    element_bytes = 2
    ranks = row.nodes * row.ranks_per_node
    sent = 2 * (ranks - 1) / ranks * named_model("bert-large").parameters * element_bytes
    assert row.nodes == (1 if inside else 2)
    return sent / (row.all_reduce / 1e3)


def deepspeed_schedule(row: Row) -> Schedule:
    """One exchange of the whole model, as DeepSpeed makes it."""
    return Schedule(STEPS, WARMUP_STEPS / STEPS, bucket_bytes=4 * workload(row).model.parameters)


def frozen_speedup(row: Row, method: Method, *, calibrated: bool, nodes: int | None = None) -> float:
    """A step with 16-bit gradients over a frozen one."""
    there = cluster(row, calibrated=calibrated, nodes=nodes)
    adam = predict(workload(row), there, ADAM_16_BITS).step_seconds
    return adam / predict(workload(row), there, method, deepspeed_schedule(row)).phases["frozen"].step


def end_to_end_speedup(row: Row, method: Method, *, calibrated: bool, nodes: int) -> float:
    """Over a run whose warmup steps are those of 16-bit Adam, as DeepSpeed's are."""
    warmup = WARMUP_STEPS / STEPS
    return 1 / (warmup + (1 - warmup) / frozen_speedup(row, method, calibrated=calibrated, nodes=nodes))
