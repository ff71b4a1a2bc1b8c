"""What `thinwire plan` makes of published runs on meshes, beside what they reached.

TFLOP/s a GPU, a second forward counted where layers were recomputed. Twice: at the 40% of a data sheet's peak that a
plan assumes of any software, and with what the first run of each source reached.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from experiments.common.results import OUTPUT, write_json
from thinwire.plan import Cluster, Link, Method, Processor, Transformer
from thinwire.plan.meshes import Mesh, MeshJob, MeshPrediction, predict_mesh
from thinwire.plan.models import model_of
from thinwire.plan.workload import named_device

MEGATRON = "Narayanan et al. 2021, arXiv 2104.04473, table 1"
MT_NLG = "Smith et al. 2022, arXiv 2201.11990, §2.4"
TURING = "Rajbhandari et al. 2020, arXiv 1910.02054, §10.6"
_GPUS_A_NODE = {"a100": 8, "v100": 16}
_NODE_RATE = {"a100": 200e9, "v100": 100e9}  # bytes a second: 8 HDR or EDR InfiniBand adapters


@dataclass(frozen=True)
class Run:
    """`billions` of parameters, as published; `shape` of a GPT: layers, width, heads, tokens of a sequence, words."""

    source: str
    billions: float
    shape: tuple[int, int, int, int, int]
    mesh: Mesh
    batch: int
    teraflops: float
    device: str = "a100"

    @property
    def model(self) -> Transformer:
        """The GPT-2 of this shape."""
        keys = ("n_layer", "n_embd", "n_head", "n_positions", "vocab_size")
        return model_of("gpt", {"model_type": "gpt2", **dict(zip(keys, self.shape, strict=True))})

    def predicted(self, faster: float = 1.0) -> MeshPrediction:
        """On the cluster that it ran on, with GPUs `faster` than plans assume."""
        device, inside = named_device(self.device), _GPUS_A_NODE[self.device]
        nodes = self.mesh.pp * self.mesh.dp * self.mesh.tp // inside
        between, within = Link.of(_NODE_RATE[self.device], 5e-6, 1e-6), Link.of(device.inside, 5e-6, 1e-6)
        cluster = Cluster(nodes, inside, between, within, Processor.of_memory(device.memory_rate))
        device = replace(device, flops=device.flops * faster)
        return predict_mesh(MeshJob(self.model, cluster, device, self.batch, self.shape[3]), self.mesh)


def _megatron(
    billions: float, heads: int, width: int, layers: int, tp: int, pp: int, gpus: int, batch: int, teraflops: float
) -> Run:
    mesh = Mesh(pp, gpus // pp // tp, tp, recompute=True)
    return Run(MEGATRON, billions, (layers, width, heads, 2048, 51_200), mesh, batch, teraflops)


def _mt_nlg(nodes: int, teraflops: float) -> Run:
    mesh = Mesh(35, nodes // 35, 8, recompute=True)
    return Run(MT_NLG, 530, (105, 20480, 128, 2048, 50_257), mesh, 1920, teraflops)


PUBLISHED = (
    _megatron(1.7, 24, 2304, 24, 1, 1, 32, 512, 137),
    _megatron(3.6, 32, 3072, 30, 2, 1, 64, 512, 138),
    _megatron(7.5, 32, 4096, 36, 4, 1, 128, 512, 142),
    _megatron(18.4, 48, 6144, 40, 8, 1, 256, 1024, 135),
    _megatron(39.1, 64, 8192, 48, 8, 2, 512, 1536, 138),
    _megatron(76.1, 80, 10240, 60, 8, 4, 1024, 1792, 140),
    _megatron(145.6, 96, 12288, 80, 8, 8, 1536, 2304, 148),
    _megatron(310.1, 128, 16384, 96, 8, 16, 1920, 2160, 155),
    _megatron(529.6, 128, 20480, 105, 8, 35, 2520, 2520, 163),
    _megatron(1008.0, 160, 25600, 128, 8, 64, 3072, 3072, 163),
    _mt_nlg(280, 126),
    _mt_nlg(350, 121),
    _mt_nlg(420, 113),
    Run(
        TURING,
        17.2,
        (78, 4256, 28, 1024, 50_257),
        Mesh(1, 64, 4, Method("sharded-adam", 1), micro_batch=8, recompute=True),
        512,
        41.4,
        "v100",
    ),
)


def compare() -> dict[str, Any]:
    """Every run: its mesh, what it reached, and what is predicted, both ways."""
    reached: dict[str, float] = {}
    rows = []
    for run in PUBLISHED:
        usual = run.predicted()
        if run.source not in reached:
            # Of what is computed alone: the rest of the step is predicted.
            rest = usual.step_seconds - usual.seconds["compute"] - usual.seconds["bubble"]
            computing = usual.operations / (run.teraflops * 1e12) - rest
            reached[run.source] = (usual.step_seconds - rest) / computing
        fitted = run.predicted(reached[run.source])
        found = {name: one.operations_a_second / 1e12 for name, one in (("usual", usual), ("fitted", fitted))}
        rows.append(
            {
                "source": run.source,
                "billions": run.billions,
                "mesh": [run.mesh.pp, run.mesh.dp, run.mesh.tp],
                "bubble": usual.bubble,
                "published": run.teraflops,
                **found,
                **{f"{name}_error": value / run.teraflops - 1 for name, value in found.items()},
            }
        )
    errors = {name: median(abs(row[f"{name}_error"]) for row in rows) for name in ("usual", "fitted")}
    return {"assumed_efficiency": 0.4, "median_error": errors, "runs": rows}


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the table, and writes it as JSON; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=OUTPUT, help="the folder of plan_meshes.json")
    output = parser.parse_args(arguments).output
    found = compare()
    print("| parameters | pp x dp x tp | bubble | published | at 40% | error | fitted | error |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for row in found["runs"]:
        print(
            f"| {row['billions']:g}B | {' x '.join(map(str, row['mesh']))} | {row['bubble']:.1%} "
            f"| {row['published']:g} | {row['usual']:.0f} | {row['usual_error']:+.0%} "
            f"| {row['fitted']:.0f} | {row['fitted_error']:+.0%} |"
        )
    print("median error", json.dumps(found["median_error"]))
    output.mkdir(parents=True, exist_ok=True)
    write_json(output / "plan_meshes.json", found)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
