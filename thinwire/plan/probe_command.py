"""What `thinwire probe` does."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from thinwire import comm as communication
from thinwire.comm.agreement import raise_together
from thinwire.plan.calibration import Calibration, save_calibration
from thinwire.plan.errors import PlanError
from thinwire.plan.probing import probe

__all__ = ["run_probe"]


def run_probe(arguments: argparse.Namespace) -> int:
    """Measure the cluster this runs on, and write the calibration on rank 0; returns the exit code. Collective."""
    world = communication.init(arguments.backend, timeout=arguments.timeout)
    raise_together(world, _refusal(arguments, world.rank), "write the calibration")
    calibration = probe(world, arguments.seconds, torch.device(arguments.device))
    if world.rank == 0:
        save_calibration(calibration, arguments.output)
        print(_in_words(calibration, arguments.output))
    return 0


def _refusal(arguments: argparse.Namespace, rank: int) -> PlanError | None:
    """What would waste the probe's time, told before it begins."""
    if arguments.device == "cuda" and not torch.cuda.is_available():
        return PlanError("--device cuda, and this rank sees no GPU")
    if rank == 0 and not arguments.output.absolute().parent.is_dir():
        return PlanError(f"the folder of {arguments.output} does not exist")
    return None


def _in_words(calibration: Calibration, path: Path) -> str:
    lines = [f"{path}: {calibration.nodes} nodes of {calibration.ranks_per_node}, backend {calibration.backend}"]
    for name, link in (("between nodes", calibration.between), ("inside nodes", calibration.inside)):
        for collective, fit in link.collectives.items() if link is not None else ():
            lines.append(
                f"{name}, {collective}: {8 * fit.bytes_per_second / 1e9:.3g} Gb/s, {1e6 * fit.intercept:.0f} us, "
                f"fits to {100 * fit.error:.0f}%"
            )
    rates = calibration.processor
    lines.append(
        f"encode {rates.encode / 1e9:.2f}, decode {rates.decode / 1e9:.2f}, average {rates.average / 1e9:.2f}, AdamW "
        f"{rates.adam / 1e9:.2f} billion elements a second; {100 * rates.overlap:.0f}% of a transfer goes on beside "
        "computation"
    )
    return "\n".join(lines)
