"""Runs every stage that a GPU's machine can run, one after another, each with a record of its own."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from experiments.common import machine
from experiments.common.command_line import Parser
from experiments.common.errors import InputError, refuse
from experiments.common.results import OUTPUT, check_writable, write_json
from experiments.gpu.stages import STAGES, chosen, run

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the stages, prints a line for each and writes its JSON; 1 where one failed."""
    try:
        options = _parse(sys.argv[1:] if arguments is None else arguments)
    except InputError as error:
        return refuse("experiments.gpu", error)
    gpus = torch.cuda.device_count()
    made_on = {**machine.describe(), "cuda": torch.version.cuda}
    made_on["gpus"] = [torch.cuda.get_device_name(number) for number in range(gpus)]  # type: ignore[assignment]
    failed = []
    for stage in chosen(options.stages):
        record = run(stage, options.output, gpus)
        write_json(options.output / f"stage_{stage.name}.json", {"machine": made_on, **record})
        about = f"lacks {', '.join(record['lacks'])}" if record["lacks"] else f"{record['seconds']} s"
        print(f"{stage.name:24} {record['status']:12} {about}", flush=True)
        if record["status"] not in ("passed", "skipped"):
            failed.append(stage.name)
    return 1 if failed else 0


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    names = [stage.name for stage in STAGES]
    parser = Parser("experiments.gpu", "Runs the GPU's tests and benchmarks in stages of under eight minutes.")
    parser.add_argument("stages", nargs="*", metavar="STAGE", help=f"else all: {', '.join(names)}")
    parser.add_argument("--output", type=Path, default=OUTPUT / "gpu", metavar="DIR", help="for JSON and logs")
    options = parser.parse_args(arguments)
    unknown = sorted(set(options.stages) - set(names))
    if unknown:
        raise InputError(f"there is no stage {unknown[0]!r}: choose from {', '.join(names)}")
    check_writable(options.output, "--output")
    return options


if __name__ == "__main__":
    sys.exit(main())
