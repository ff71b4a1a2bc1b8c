"""Stage 3 over thin wires: bytes between hosts on their interfaces' counters, and steps, exact and through codecs.

On emulated hosts, as root on Linux: `python -m experiments.ethernet.shards`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from experiments.common import machine
from experiments.common.command_line import Parser, positive
from experiments.common.errors import InputError
from experiments.ethernet.cluster.clusters import EmulatedCluster
from experiments.ethernet.cluster.commands import missing
from experiments.ethernet.jobs import job, links
from experiments.ethernet.race.shard_times import CONTENDERS, EXACT
from experiments.ethernet.study import Study, add_limit_and_output, ready
from thinwire.plan import Cluster, Link, Method, Processor, Workload, plain_model, predict

__all__ = ["main"]

_NAME = "shards"
_SETTINGS = ((2, 2), (4, 2), (4, 1))
"""Hosts, and ranks of each."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, prints tables and writes JSON; the exit code."""
    return Study("shards", _NAME, _parse, missing, _measure, _print).run(arguments)


def _measure(options: argparse.Namespace) -> dict[str, Any]:
    settings = []
    for hosts, ranks in _SETTINGS:
        names = [name for name in CONTENDERS if ranks > 1 or "by-node" not in name]
        arguments: list[object] = ["--contenders", *names]
        for name in ("layers", "width", "steps", "waits", "megabits"):
            arguments += [f"--{name}", getattr(options, name)]
        with EmulatedCluster(hosts).running() as cluster:
            arguments += links(cluster, cluster)
            found = job(cluster, "experiments.ethernet.race.shard_times", arguments, ranks, options.limit)["found"]
        plans = planned(options, hosts, ranks, found)
        exact = next(one for one in found if one["name"] == EXACT)
        rows = [
            {
                **one,
                "waits": 1 - one["work"] / one["step"],
                "bytes_beside_exact": one["sent"] / exact["sent"],
                "times_as_fast": exact["step"] / one["step"],
                "planned": plans.get(one["name"]),
            }
            for one in found
        ]
        settings.append({"hosts": hosts, "ranks_a_host": ranks, "rows": rows})
    return {
        "machine": machine.describe(),
        "tcp": cluster.congestion_control,
        "load_before": options.load,
        "subject": f"{options.layers} layers of {options.width}x{options.width} in bf16 at {options.megabits} Mb/s",
        "settings": settings,
    }


def planned(
    options: argparse.Namespace, hosts: int, ranks: int, found: Sequence[Mapping[str, Any]]
) -> dict[str, dict[str, float]]:
    """What `thinwire plan` makes of each contender but torch's over Gloo, given its own work: seconds of a step, and
    bytes between hosts, in which the wire's headers are not; exact ones of a ring."""
    link = Link.of(1e6 * options.megabits / 8, 50e-6, 5e-6)
    cluster = Cluster(hosts, ranks, link, Link.of(1e10, 1e-5, 1e-6), Processor.of_memory(5e9, overlap=0.0))
    plans = {}
    for one in found:
        codecs = {EXACT: {}, "torch": None}.get(one["name"], CONTENDERS[one["name"]])
        if codecs is not None:
            method = Method("sharded-adam", 3, hierarchical="by-node" in one["name"], **codecs)
            model = plain_model(options.layers * options.width**2)
            step = predict(Workload(model, one["work"] / 3, one["work"] / 1.5, dtype="bf16"), cluster, method).average
            plans[one["name"]] = {"step": step.step, "sent": step.bytes_between}
    return plans


def _print(content: dict[str, Any]) -> None:
    print(f"{content['subject']}; layers wait in place of computing")
    for one in content["settings"]:
        print(f"\n{one['hosts']} hosts of {one['ranks_a_host']}")
        print("| stage 3 | MB a host and step | of exact bf16 | s a step | waits | times as fast | planned |")
        print("| --- | --- | --- | --- | --- | --- | --- |")
        for row in one["rows"]:
            print(
                f"| {row['name']} | {row['sent'] / 1e6:.2f} | {row['bytes_beside_exact']:.3f} | {row['step']:.2f} "
                f"| {row['waits']:.0%} | {row['times_as_fast']:.2f}x "
                + ("| |" if row["planned"] is None else "| {step:.2f} s, {sent:.3g} B |".format(**row["planned"]))
            )


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = Parser("experiments.ethernet.shards", "Times stage 3 on emulated hosts.", "about 12 minutes")
    parser.add_argument("--layers", type=positive, default=4, metavar="N", help="each sharded by itself")
    parser.add_argument("--width", type=positive, default=1024, metavar="N", help="of a layer, a square matrix")
    parser.add_argument("--megabits", type=positive, default=20, metavar="Mb/s", help="of the links")
    parser.add_argument(
        "--waits", type=float, default=0.8, metavar="X", help="for its links, of its step, the exact one"
    )
    parser.add_argument("--steps", type=positive, default=3, metavar="N", help="of which the median counts")
    add_limit_and_output(parser, 1800)
    options = parser.parse_args(arguments)
    if not 0 < options.waits < 1:
        raise InputError(f"--waits is a part of a step, between 0 and 1, got {options.waits}")
    return ready(options)


if __name__ == "__main__":
    sys.exit(main())
