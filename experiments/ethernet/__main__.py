"""The race over Ethernet: DDP, its compressed forms and thinwire, on a cluster of its own with links of any rate.

As root on Linux it makes hosts from network namespaces and shapes their links; elsewhere it says so and uses loopback.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from math import prod

from experiments.common import machine
from experiments.common.errors import InputError, refuse
from experiments.common.results import write_json
from experiments.ethernet import losses
from experiments.ethernet.cluster.clusters import Cluster, EmulatedCluster, LoopbackCluster
from experiments.ethernet.cluster.commands import ClusterError, missing
from experiments.ethernet.command_line import parse
from experiments.ethernet.jobs import job, links, setting
from experiments.ethernet.race import overlap_report, planned, step_plots, step_report
from experiments.ethernet.race.contenders import CONTENDERS

__all__ = ["main"]

_NAME = "ethernet"
_FAIR_RATE, _FAIR_SECONDS = 1000, 300.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the races, prints tables, writes JSON and pictures; the exit code."""
    try:
        options = parse(sys.argv[1:] if arguments is None else arguments)
        lack = missing()
        if lack is not None:
            print(f"No shaped links: {lack}. Racing over loopback, which is faster than any.", file=sys.stderr)
        with EmulatedCluster(options.hosts).running() if lack is None else nullcontext() as emulated:
            cluster: Cluster = emulated or LoopbackCluster(options.hosts)
            if options.retime:
                losses.retime(options, emulated)
                return 0
            rate = None
            if "steps" in options.races:
                rate = _race_steps(options, cluster, emulated)
            if "losses" in options.races:
                losses.race(options, cluster, emulated, options.loss_rate or rate)
        if "overlap" in options.races:
            if lack is None:
                _measure_overlap(options)
            else:
                print("Nothing to overlap: links were not shaped", file=sys.stderr)
    except InputError as error:
        return refuse("experiments.ethernet", error)
    except ClusterError as error:
        print(f"experiments.ethernet: {error}", file=sys.stderr)
        return 1
    return 0


def _race_steps(options: argparse.Namespace, cluster: Cluster, emulated: EmulatedCluster | None) -> float | None:
    """Step times at every rate; returns the one at which fp32 waits as long as asked for, None without rates."""
    fair = None if emulated is None else _check_fairness(emulated)
    racing = [name for name in options.contenders if CONTENDERS[name].steps_alike]
    arguments = ["--model", options.model, "--contenders", *racing, *_stepping(options, emulated, cluster)]
    arguments += ["--waiting", options.waiting, "--probe-seconds", options.probe_seconds]
    if emulated is not None:
        arguments += ["--rates", *options.rates]
    raw = job(cluster, "experiments.ethernet.race.step_times", arguments, options.ranks_a_host, options.limit)
    entries = step_report.at_rates(raw["turns"])
    plans = {
        key: planned.compare(by_name, raw["probes"][key], raw["shapes"], raw["computing"], os.cpu_count())
        for key, by_name in raw["turns"].items()
    }
    winners = step_report.winning_rates(entries)
    content = {
        "machine": machine.describe(),
        "tcp": cluster.congestion_control,
        "subject": _subject(options.model, raw["shapes"], options),
        "findings": step_report.sentences(entries, winners, options.waiting),
        "waiting": options.waiting,
        "plan_median_error": planned.median_error(list(plans.values())),
        "plan_by_megabits": plans,
        "computing_alone": raw["computing"],
        "probes": raw["probes"],
        "fairness": fair,
        "wins_against_bf16_under_megabits": {name: _finite(rate) for name, rate in winners.items()},
        "rates": entries,
    }
    name = _NAME if options.ranks_a_host == 1 else f"{_NAME}_{options.ranks_a_host}_ranks_a_host"
    write_json(options.output / f"{name}.json", content)
    step_report.print_table(entries)
    print("\n" + "\n".join(content["findings"]))
    print(f"thinwire plan is off by {100 * content['plan_median_error']:.0f}% in the median of all of these")
    step_plots.draw(content, options.output / f"{name}.png")
    print(f"Written: {options.output / name}.json and .png", flush=True)
    rate: float | None = step_report.most_waiting(entries, options.waiting)["megabits"]
    return rate


def _measure_overlap(options: argparse.Namespace) -> None:
    """How much of the wire's time hides behind backward where both take as long, of every contender alone.

    On no more hosts than there are cores: ranks that wait for a core hide nothing.
    """
    alone = argparse.Namespace(**{**vars(options), "hosts": max(2, min(options.hosts, os.cpu_count() or 2))})
    alone.ranks_a_host = 1
    racing = [name for name in options.contenders if CONTENDERS[name].steps_alike and CONTENDERS[name].sends]
    with EmulatedCluster(alone.hosts).running() as cluster:
        arguments = ["--model", options.overlap_model, "--contenders", *racing, "--balanced"]
        arguments += _stepping(options, cluster, cluster)
        raw = job(cluster, "experiments.ethernet.race.step_times", arguments, alone.ranks_a_host, options.limit)
    content = {
        "machine": machine.describe(),
        "tcp": cluster.congestion_control,
        "subject": _subject(options.overlap_model, raw["shapes"], alone),
        "computing_alone": raw["computing"],
        "contenders": overlap_report.records(raw["balanced"]),
    }
    write_json(options.output / f"{_NAME}_overlap.json", content)
    overlap_report.print_table(content["contenders"])
    print(f"Written: {options.output / _NAME}_overlap.json", flush=True)


def _stepping(options: argparse.Namespace, emulated: EmulatedCluster | None, cluster: Cluster) -> list[object]:
    return ["--batch-size", options.batch_size, "--seconds", options.seconds, *links(emulated, cluster)]


def _subject(model: str, shapes: Sequence[Sequence[int]], options: argparse.Namespace) -> str:
    parameters = sum(prod(shape) for shape in shapes)
    return f"BERT-{model}, {parameters / 1e6:.1f} M parameters, {setting(options)}"


def _check_fairness(emulated: EmulatedCluster) -> dict[str, float]:
    emulated.shape(_FAIR_RATE)
    measured = job(emulated, "experiments.ethernet.race.line_rate", [], 1, _FAIR_SECONDS)
    emulated.shape(None)
    fair = step_report.fairness(measured, _FAIR_RATE)
    print(f"Gloo's all-reduce of 100 MB at 1 Gb/s: {100 * fair['fraction_of_line_rate']:.0f}% of line rate", flush=True)
    return fair


def _finite(rate: float) -> float | str | None:
    """JSON knows neither infinity nor NaN."""
    if rate != rate:
        return None
    return "all" if rate == float("inf") else rate


if __name__ == "__main__":
    sys.exit(main())
