"""How near MPI's and Gloo's collectives come to what the links carry, by size, rate and number in flight.

On emulated hosts of one rank each, as root on Linux: `python -m experiments.ethernet.collectives`.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Any

from experiments.common import machine
from experiments.common.command_line import Parser, positive
from experiments.ethernet.cluster.clusters import EmulatedCluster
from experiments.ethernet.cluster.commands import missing
from experiments.ethernet.jobs import job, links
from experiments.ethernet.race.collective_times import COLLECTIVES, WAYS
from experiments.ethernet.study import Study, add_limit_and_output, check_hosts, ready

__all__ = ["main"]

_NAME = "collectives"
_BACKENDS = ("mpi", "gloo")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures over each backend, prints a table and writes JSON; the exit code."""
    return Study("collectives", _NAME, _parse, missing, _measure, _print).run(arguments)


def _measure(options: argparse.Namespace) -> dict[str, Any]:
    found = []
    with EmulatedCluster(options.hosts).running() as cluster:
        for backend in options.backends:
            arguments: list[object] = ["--backend", backend, "--repetitions", options.repetitions]
            for name in ("collectives", "kilobytes", "in_flight", "ways", "rates"):
                arguments += [f"--{name.replace('_', '-')}", *getattr(options, name)]
            arguments += links(cluster, cluster)
            measured = job(cluster, "experiments.ethernet.race.collective_times", arguments, 1, options.limit)
            found += [{"backend": backend, **one} for one in measured["found"]]
    return {
        "machine": machine.describe(),
        "tcp": cluster.congestion_control,
        "load_before": options.load,
        "subject": f"{options.hosts} hosts of one rank that share {os.cpu_count()} cores",
        "found": found,
    }


def _print(content: dict[str, Any]) -> None:
    print(f"{content['subject']}: times of the line's, medians (least to most)")
    for one in content["found"]:
        where = f"{one['backend']:4} {one['collective']:10} {one['rate']:5} Mb/s {one['bytes_a_peer'] / 1e6:6.2f} MB"
        spread = f"({min(one['each']):.2f} to {max(one['each']):.2f})"
        print(f"{where}  in flight {one['in_flight']}  {one['way']:8} {one['of_the_lines_time']:6.2f} {spread}")


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = Parser("experiments.ethernet.collectives", "Times collectives beside the line.", "two minutes")
    parser.add_argument("--backends", nargs="+", choices=_BACKENDS, default=list(_BACKENDS), help="which")
    parser.add_argument("--collectives", nargs="+", choices=COLLECTIVES, default=["all_to_all", "all_gather"])
    parser.add_argument("--kilobytes", nargs="+", type=positive, default=[1000], metavar="N", help="to one peer")
    parser.add_argument(
        "--in-flight", nargs="+", type=positive, default=[1, 4], metavar="N", help="collectives that share the bytes"
    )
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), help="what the caller does meanwhile")
    parser.add_argument("--rates", nargs="+", type=positive, default=[100, 300, 1000], metavar="N", help="Mb/s")
    parser.add_argument("--repetitions", type=positive, default=9, metavar="N", help="of which the median counts")
    parser.add_argument("--hosts", type=positive, default=4, metavar="N", help="of one rank each")
    add_limit_and_output(parser, 900)
    options = parser.parse_args(arguments)
    check_hosts(options.hosts)
    return ready(options)


if __name__ == "__main__":
    sys.exit(main())
