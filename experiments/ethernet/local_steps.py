"""What DiLoCo's steps take while a fragment is under way behind them, over links that need all of those steps for it.

On emulated hosts of one rank, no more than there are cores, as root on Linux: `python -m
experiments.ethernet.local_steps`.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Any, get_args

from experiments.common import machine
from experiments.common.command_line import Parser, positive, rate
from experiments.common.errors import InputError
from experiments.ethernet.cluster.clusters import EmulatedCluster
from experiments.ethernet.cluster.commands import missing
from experiments.ethernet.jobs import job, links
from experiments.ethernet.race.local_step_report import print_table, record
from experiments.ethernet.study import Study, add_limit_and_output, check_hosts, ready
from experiments.tasks.sizes import SIZES
from thinwire.compress.codecs import CodecName
from thinwire.optim.diloco.fragments import Timetable

__all__ = ["main"]

_NAME = "local_steps"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures with each overlap, prints a table and writes JSON; the exit code."""
    return Study("local_steps", _NAME, _parse, missing, _measure, _print).run(arguments)


def _measure(options: argparse.Namespace) -> dict[str, Any]:
    settings = []
    parameters = 0
    with EmulatedCluster(options.hosts).running() as cluster:
        for overlap in options.overlaps:
            arguments: list[object] = ["--overlap", overlap, "--fills", *options.fills]
            for name in ("model", "batch_size", "every", "fragments", "codec", "rounds"):
                arguments += [f"--{name.replace('_', '-')}", getattr(options, name)]
            arguments += links(cluster, cluster)
            raw = job(cluster, "experiments.ethernet.race.local_step_times", arguments, 1, options.limit)
            timetable = Timetable(options.every, overlap, options.fragments)
            records = [record(one, timetable) for one in raw["found"]]
            settings.append({"overlap": overlap, "fragment_bytes": raw["fragment_bytes"], "rates": records})
            parameters = raw["parameters"]
    model = f"BERT-{options.model}, {parameters / 1e6:.1f} M parameters, {options.batch_size} sequences a rank"
    diloco = f"DiLoCo every {options.every} steps, {options.fragments} fragments, {options.codec}"
    return {
        "machine": machine.describe(),
        "tcp": cluster.congestion_control,
        "load_before": options.load,
        "subject": f"{model}, {diloco}, {options.hosts} hosts of one rank that share {os.cpu_count()} cores",
        "settings": settings,
    }


def _print(content: dict[str, Any]) -> None:
    print(f"{content['subject']}: multiples of steps that send nothing")
    for setting in content["settings"]:
        print_table(setting)


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = Parser(
        "experiments.ethernet.local_steps", "Times DiLoCo's steps beside steps that send nothing.", "about 8 minutes"
    )
    parser.add_argument("--model", choices=tuple(SIZES), default="mini", help="which BERT")
    parser.add_argument("--batch-size", type=positive, default=8, metavar="N", help="sequences a rank")
    parser.add_argument("--every", type=positive, default=30, metavar="N", help="steps between outer steps")
    parser.add_argument(
        "--overlaps", nargs="+", type=positive, default=[1, 5], metavar="N", help="steps for which a fragment is away"
    )
    parser.add_argument("--fragments", type=positive, default=2, metavar="N", help="into which the model is cut")
    parser.add_argument("--codec", choices=get_args(CodecName), default="int4", help="of the outer gradients")
    parser.add_argument(
        "--fills",
        nargs="+",
        type=rate,
        default=[0.5, 1.0],
        metavar="X",
        help="parts of those steps in which the links carry a fragment",
    )
    parser.add_argument("--rounds", type=positive, default=12, metavar="N", help="turns of each, at each rate")
    parser.add_argument("--hosts", type=positive, default=2, metavar="N", help="of one rank each")
    add_limit_and_output(parser, 1800)
    options = parser.parse_args(arguments)
    check_hosts(options.hosts)
    if max(options.overlaps) >= options.every // options.fragments:
        raise InputError(
            f"--overlaps must be less than --every / --fragments, {options.every // options.fragments}, got "
            f"{max(options.overlaps)}: each fragment has to be back before the next one leaves"
        )
    return ready(options)


if __name__ == "__main__":
    sys.exit(main())
