"""How far `thinwire plan` is off where it was not calibrated: other models, other link rates, several ranks a core.

One probe, of one rank a core at one link rate, and what each model computes on one rank alone, are all that the plan is
given. As root on Linux; `make plan-accuracy`.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from experiments.common import machine
from experiments.common.command_line import Parser, positive
from experiments.common.errors import InputError
from experiments.ethernet.cluster.clusters import EmulatedCluster
from experiments.ethernet.cluster.commands import ClusterError, missing
from experiments.ethernet.jobs import job, links
from experiments.ethernet.race import planned
from experiments.ethernet.race.contenders import CONTENDERS
from experiments.ethernet.study import Study, add_limit_and_output, ready
from experiments.tasks.sizes import SIZES
from thinwire.plan import Calibration, load_calibration

__all__ = ["main"]

_NAME = "plan_accuracy"
_PLANNED = tuple(name for name, one in CONTENDERS.items() if one.steps_alike)
_CONTENDERS = ("ddp-fp32", "ddp-bf16", "ddp-powersgd-1", "onebit-adam", "onebit-adam-warmup")


def main(arguments: Sequence[str] | None = None) -> int:
    """Probes once, measures at every other setting, prints a table and writes JSON; the exit code."""
    return Study("unseen", _NAME, _parse, missing, _measure, _print).run(arguments)


def _measure(options: argparse.Namespace) -> dict[str, Any]:
    cores = os.cpu_count() or 1
    probe = _probe(cores, options)
    settings = []
    for model in options.models:
        for hosts in options.hosts:
            raw = _steps(model, hosts, options)
            rates = {
                rate: planned.foresee(turns, probe, int(rate), hosts, cores / hosts, raw)
                for rate, turns in raw["turns"].items()
            }
            setting = {"model": model, "hosts": hosts, "ranks_a_core": hosts / cores, "rates": rates}
            settings.append({**setting, "tcp": raw["tcp"], "computing_one_rank": raw["computing_one_rank"]})
            print(f"BERT-{model} on {hosts} hosts measured", file=sys.stderr, flush=True)
    errors = [one for setting in settings for one in setting["rates"].values()]
    return {
        "machine": machine.describe(),
        "load_before": options.load,
        "subject": f"BERT, {options.batch_size} sequences a rank, hosts of one rank that share {cores} cores, Gloo",
        "calibrated_at": {"hosts": cores, "megabits": options.probe_rate},
        "median_error": planned.median_error(errors),
        "median_error_by_contender": {
            name: median(abs(one[name]["error"]) for one in errors) for name in options.contenders
        },
        "median_error_by_ranks_a_core": {
            f"{hosts / cores:g}": planned.median_error(
                [one for setting in settings if setting["hosts"] == hosts for one in setting["rates"].values()]
            )
            for hosts in options.hosts
        },
        "probe": probe.model_dump(),
        "settings": settings,
    }


def _probe(cores: int, options: argparse.Namespace) -> Calibration:
    """What `thinwire probe` says of one rank a core at one rate, started as a user starts it."""
    with tempfile.TemporaryDirectory() as folder, EmulatedCluster(cores).running() as cluster:
        cluster.shape(options.probe_rate)
        output = Path(folder) / "calibration.json"
        program = ["-m", "thinwire", "probe", str(output), "--seconds", str(options.probe_seconds), "--backend", "gloo"]
        finished = cluster.run(program, seconds=options.limit)
        if finished.code != 0:
            raise ClusterError(f"thinwire probe ended with {finished.code}:\n{finished.output[-4000:]}")
        return load_calibration(output)


def _steps(model: str, hosts: int, options: argparse.Namespace) -> dict[str, Any]:
    with EmulatedCluster(hosts).running() as cluster:
        arguments = ["--model", model, "--contenders", *options.contenders, "--rates", *options.rates]
        arguments += ["--batch-size", options.batch_size, "--seconds", options.seconds, "--probe-seconds", 0]
        arguments += ["--waiting", 0, *links(cluster, cluster)]
        raw = job(cluster, "experiments.ethernet.race.step_times", arguments, 1, options.limit)
        return {**raw, "tcp": cluster.congestion_control}


def _print(content: dict[str, Any]) -> None:
    for setting in content["settings"]:
        for rate, by_name in setting["rates"].items():
            where = (
                f"BERT-{setting['model']}, {setting['hosts']} ranks, {setting['ranks_a_core']:g} a core, {rate} Mb/s"
            )
            print(f"\n{where:44} {'predicted ms':>13} {'measured':>9} {'error':>7}")
            for name, one in by_name.items():
                times = f"{1e3 * one['predicted']:13.0f} {1e3 * one['measured']:9.0f} {100 * one['error']:+6.0f}%"
                print(f"{CONTENDERS[name].label:44} {times}")
    print(f"\nMedian error {100 * content['median_error']:.0f}%", end="")
    for what in ("ranks_a_core", "contender"):
        each = content[f"median_error_by_{what}"]
        print(f"; by {what.replace('_', ' ')}: " + ", ".join(f"{key} {100 * one:.0f}%" for key, one in each.items()))


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = Parser(
        "experiments.ethernet.unseen",
        "Holds thinwire plan against steps at settings it has not seen.",
        "about 15 minutes",
    )
    parser.add_argument("--models", nargs="+", choices=tuple(SIZES), default=["tiny", "small"], help="which BERTs")
    parser.add_argument("--hosts", nargs="+", type=positive, default=[2, 4], metavar="N", help="of one rank each")
    parser.add_argument("--rates", nargs="+", type=positive, default=[50, 500, 1000], metavar="N", help="Mb/s")
    parser.add_argument("--contenders", nargs="+", choices=_PLANNED, default=list(_CONTENDERS))
    parser.add_argument("--batch-size", type=positive, default=8, metavar="N", help="sequences a rank")
    parser.add_argument("--seconds", type=positive, default=20, metavar="N", help="for each setting and rate")
    parser.add_argument("--probe-rate", type=positive, default=200, metavar="N", help="Mb/s, none of --rates")
    parser.add_argument("--probe-seconds", type=positive, default=30, metavar="N", help="of thinwire probe")
    add_limit_and_output(parser, 1800)
    options = parser.parse_args(arguments)
    if options.probe_rate in options.rates:
        raise InputError(f"--probe-rate {options.probe_rate} is one of --rates: the plan would have seen it")
    if "ddp-fp32" not in options.contenders:
        raise InputError("--contenders must name ddp-fp32, the race's baseline")
    if min(options.hosts) < 2:
        raise InputError("a single rank sends nothing: give at least 2 --hosts")
    return ready(options)


if __name__ == "__main__":
    sys.exit(main())
