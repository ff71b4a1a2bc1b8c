"""A newcomer of an elastic job: seconds to its first counted step beside those in which a link carries its state, and
what the others' steps take meanwhile.

On emulated hosts of one worker each, as root on Linux: `python -m experiments.ethernet.joining`.
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
from experiments.ethernet.study import Study, add_limit_and_output, check_hosts, ready

__all__ = ["main"]

_STAGES = {"frozen": ["--frozen"], "int4 warmup": ["--warmup-wire", "int4"], "warmup": []}
"""In which the newcomer comes, by name, and what makes the job be in it."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures in the frozen stage and in warmups, prints and writes JSON; the exit code."""
    return Study("joining", "joining", _parse, missing, _measure, _print).run(arguments)


def _measure(options: argparse.Namespace) -> dict[str, Any]:
    found = {}
    with EmulatedCluster(options.hosts).running() as cluster:
        shared = ["--megabits", options.megabits, "--layers", options.layers, "--address", cluster.address(0)]
        shared += ["--seconds", options.seconds, *links(cluster, cluster)]
        for stage in options.stages:
            arguments = [*shared, *_STAGES[stage]]
            found[stage] = job(cluster, "experiments.ethernet.race.joining_times", arguments, 1, options.limit)
    return {
        "machine": machine.describe(),
        "tcp": cluster.congestion_control,
        "load_before": options.load,
        "subject": f"a newcomer on the last of {options.hosts} hosts that share {os.cpu_count()} cores, "
        f"{options.megabits} Mb/s, {options.seconds:g} s of a step slept",
        "found": found,
    }


def _print(content: dict[str, Any]) -> None:
    print(content["subject"])
    for stage, one in content["found"].items():
        link, took = one["link carries it in, s"], one["from its start to its first counted step, s"]
        before, longest = one["step before, s"], one["longest step meanwhile, s"]
        print(
            f"{stage:<11} {one['state, MB']:,.0f} MB of state in {took:.1f} s, {took / link:.2f} of the link's; "
            f"{one['steps meanwhile']} steps of others meanwhile at {one['mean step meanwhile, s'] / before:.2f} of "
            f"{before:.2f} s, the longest {longest:.2f} s"
        )


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = Parser("experiments.ethernet.joining", "Times a newcomer of an elastic job.", "five minutes")
    parser.add_argument("--stages", nargs="+", choices=tuple(_STAGES), default=[*_STAGES])
    parser.add_argument("--layers", type=positive, default=96, metavar="N", help="of a million parameters each")
    parser.add_argument("--megabits", type=positive, default=1000, metavar="N", help="of every link")
    parser.add_argument("--seconds", type=float, default=1.0, help="of a step, an accelerator's: slept")
    parser.add_argument("--hosts", type=positive, default=4, metavar="N", help="the newcomer's included")
    add_limit_and_output(parser, 900)
    options = parser.parse_args(arguments)
    check_hosts(options.hosts)
    return ready(options)


if __name__ == "__main__":
    sys.exit(main())
