"""Starts a measuring module on a cluster, and reads what its ranks wrote."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.common.results import read_json
from experiments.ethernet.cluster.clusters import Cluster, EmulatedCluster
from experiments.ethernet.cluster.commands import ClusterError

__all__ = ["job", "links", "setting"]


def job(
    cluster: Cluster, module: str, arguments: Sequence[object], ranks_a_host: int, seconds: float
) -> dict[str, Any]:
    """What the module's ranks wrote to their `--output`.

    Raises:
        ClusterError: the job failed or took too long; with the end of what it printed.
    """
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "measured.json"
        program = ["-m", module, *map(str, arguments), "--output", str(output)]
        finished = cluster.run(program, ranks_a_host=ranks_a_host, seconds=seconds)
        if finished.code != 0:
            ended = f"took longer than {seconds:.0f} s" if finished.code is None else f"ended with {finished.code}"
            raise ClusterError(f"{module} {ended}:\n{finished.output[-4000:]}")
        return read_json(output)


def links(emulated: EmulatedCluster | None, cluster: Cluster) -> list[object]:
    """The arguments that say whose links a job shapes; none are shaped where nothing is emulated."""
    shared: list[object] = ["--hosts", cluster.hosts, "--device", cluster.device]
    return shared if emulated is None else [*shared, "--cluster", emulated.name]


def setting(options: argparse.Namespace) -> str:
    """Who computes how much, in words: for the results of a race."""
    ranks = "one rank" if options.ranks_a_host == 1 else f"{options.ranks_a_host} ranks"
    return f"{options.batch_size} sequences a rank, {options.hosts} hosts of {ranks}, Gloo"
