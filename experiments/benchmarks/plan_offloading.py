"""What `thinwire plan` makes of published sizes of models on shards and offloaded, beside what was said to fit, and of
ZeRO++'s volume. No activations are counted, as they are not published."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.common.results import OUTPUT, write_json
from thinwire.plan import Cluster, Link, Method, Processor, Workload, plain_model, predict
from thinwire.plan.recommendation import fits
from thinwire.plan.workload import Host, named_device

ZERO = "Rajbhandari et al. 2020, arXiv 1910.02054, table 1"
INFINITY = "Rajbhandari et al. 2021, arXiv 2104.07857"
OFFLOAD = "Ren et al. 2021, arXiv 2101.06840, abstract"
ZERO3_OFFLOAD = "DeepSpeed, ZeRO-3 Offload, March 2021"
ZEROPP = "Wang et al. 2023, arXiv 2306.10209"
_ADAM, _MEMORY = "sharded-adam", 32e9  # of a V100


def dgx2(nodes: int, ranks: int = 16) -> Cluster:
    """DGX-2 nodes: 1.5 TB of memory, 28 TB of NVMe at 25 GB/s, 100 GB/s between them."""
    device = named_device("v100")
    host = Host(1.5e12, disk=28e12, disk_rate=25e9)
    between, inside = Link.of(100e9, 5e-6, 1e-6), Link.of(device.inside, 5e-6, 1e-6)
    return Cluster(nodes, ranks, between, inside, Processor.of_memory(device.memory_rate), host=host)


def largest(cluster: Cluster, method: Method) -> float:
    """Parameters of the largest model, in bf16, that `_MEMORY` a rank and the host hold, to a thousandth."""

    def held(parameters: float) -> bool:
        workload = Workload(plain_model(round(parameters)), 1.0, 2.0, dtype="bf16")
        return fits(predict(workload, cluster, method), cluster, _MEMORY)

    low, high = 1e6, 1e14
    while high > 1.001 * low:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if held(middle) else (low, middle)
    return low


@dataclass(frozen=True)
class Size:
    """A model of `billions` that was said to fit."""

    source: str
    what: str
    billions: float
    cluster: Cluster
    method: Method


SIZES = (
    Size(OFFLOAD, "DDP, one V100", 1.4, dgx2(1, 1), Method("ddp-bf16")),
    Size(OFFLOAD, "stage 2, state in memory, one V100", 13, dgx2(1, 1), Method(_ADAM, 2, offload="memory")),
    Size(ZERO3_OFFLOAD, "stage 3, all in memory, one V100 (over)", 40, dgx2(1, 1), Method(_ADAM, 3, offload="memory")),
    Size(ZERO3_OFFLOAD, "the same, 256 V100s", 1000, dgx2(16), Method(_ADAM, 3, offload="memory")),
    Size(ZERO3_OFFLOAD, "the same, 512 V100s", 2000, dgx2(32), Method(_ADAM, 3, offload="memory")),
    Size(INFINITY, "stage 3, 800 V100s", 1000, dgx2(50), Method(_ADAM, 3)),
    Size(INFINITY, "stage 3, state on disk, one DGX-2", 1000, dgx2(1), Method(_ADAM, 3, offload="disk")),
)


def state_of_a_trillion() -> float:
    """Bytes a GPU at stage 3 of 1024."""
    found = predict(Workload(plain_model(10**12), 1.0, 2.0, dtype="bf16"), dgx2(64), Method(_ADAM, 3))
    return found.memory_bytes


def volume(weights: Any, gradients: Any, nodes: int = 64) -> float:
    """Bytes between nodes of 16, of exact stage 3's."""
    workload, cluster = Workload(plain_model(18 * 10**9), 1.0, 2.0, dtype="bf16"), dgx2(nodes)
    through = Method(_ADAM, 3, hierarchical=True, weights=weights, gradients=gradients)
    sent = [predict(workload, cluster, one).average.bytes_between for one in (through, Method(_ADAM, 3))]
    return sent[0] / sent[1]


def compare() -> dict[str, Any]:
    """Every published figure, what is predicted, and the error."""
    rows: list[tuple[str, str, float, float]] = [
        (one.source, f"largest model, billions: {one.what}", one.billions, largest(one.cluster, one.method) / 1e9)
        for one in SIZES
    ]
    rows += [
        (ZERO, "GB a GPU, 1T on 1024, stage 3", 15.6, state_of_a_trillion() / 1e9),
        (ZEROPP, "bytes between 64 nodes, of exact stage 3's", 0.25, volume("int8", "int4")),
    ]
    keys = ("source", "what", "published", "predicted")
    return {"rows": [{**dict(zip(keys, row, strict=True)), "error": row[3] / row[2] - 1} for row in rows]}


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the table, and writes it as JSON; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=OUTPUT, help="the folder of plan_offloading.json")
    output = parser.parse_args(arguments).output
    found = compare()
    print("| published | | predicted | error |\n| --- | --- | --- | --- |")
    for row in found["rows"]:
        print(f"| {row['what']} | {row['published']:g} | {row['predicted']:.3g} | {row['error']:+.0%} |")
    output.mkdir(parents=True, exist_ok=True)
    write_json(output / "plan_offloading.json", found)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
