"""Pipelines on emulated hosts: how long stages are idle in each schedule, and how many tokens a second packets save.

Stages wait in place of computing, as hosts share this machine's cores; all else is real. As root on Linux: `make
pipelines`.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

from experiments.common import machine
from experiments.common.command_line import Parser, positive
from experiments.ethernet.cluster.clusters import EmulatedCluster
from experiments.ethernet.cluster.commands import missing
from experiments.ethernet.jobs import job, links
from experiments.ethernet.race.pipeline_times import COMPUTING, EAGER, MICRO_BATCHES, WIRES
from experiments.ethernet.study import Study, add_limit_and_output, ready
from experiments.training import plotting
from thinwire.plan.meshes import bubble_share

__all__ = ["draw", "idle_share", "main"]

_NAME = "pipelines"
_MODULE = "experiments.ethernet.race.pipeline_times"
_SCHEDULES = ("GPipe", "1F1B", "Eager1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble")
_SINGLE = _SCHEDULES[:3]
_STAGES_A_RANK = 2  # of the others
_WIRES = (*WIRES, *(f"{name}{EAGER}" for name in WIRES if name != "fp32"))
_BF16 = 2
_LETTERS = {"FORWARD": "F", "FULL_BACKWARD": "B", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W"}


def idle_share(schedule: str, ranks: int, forward: float, backward: float) -> float:
    """The part of a step in which ranks have nothing to do, by the schedule's own order of operations, on links that
    cost nothing. Backward in halves takes as long for activations as for weights, and a first stage does both at once.
    """
    orders = _orders(schedule, ranks)
    last = max(stage for order in orders for stage, _, _ in order)
    done: dict[tuple[str, int, int], float] = {}
    clocks, busy, places = [0.0] * ranks, [0.0] * ranks, [0] * ranks
    while any(place < len(order) for place, order in zip(places, orders, strict=True)):
        for rank, order in enumerate(orders):
            while places[rank] < len(order):
                stage, letter, number = order[places[rank]]
                needed = []
                if letter == "F" and stage:
                    needed.append(("F", stage - 1, number))
                if letter in "BI":
                    needed += [("F", stage, number)] if stage == last else [("B", stage + 1, number)]
                if any(one not in done for one in needed):
                    break
                whole = {"F": forward, "B": backward, "I": backward / 2, "W": backward / 2}[letter]
                if stage == 0 and letter in "IW":
                    whole = backward if letter == "W" else 0.0
                clocks[rank] = max([clocks[rank], *(done[one] for one in needed)]) + whole
                done["B" if letter in "BI" else letter, stage, number] = clocks[rank]
                busy[rank] += whole
                places[rank] += 1
    return 1 - sum(busy) / ranks / max(clocks)


def _orders(schedule: str, ranks: int) -> list[list[tuple[int, str, int]]]:
    """Of each rank: stage, operation and micro-batch. What torch shows of 1F1B lacks first micro-batches."""
    if schedule in _SINGLE:
        orders = []
        for rank in range(ranks):
            hops = ranks - 1 - rank
            ahead = min(MICRO_BATCHES, {"1F1B": hops + 1, "Eager1F1B": 3 * hops + 1}.get(schedule, MICRO_BATCHES))
            order = [(rank, "F", number) for number in range(ahead)]
            for number in range(MICRO_BATCHES):
                order.append((rank, "B", number))
                order += [(rank, "F", number + ahead)] if number + ahead < MICRO_BATCHES else []
            orders.append(order)
        return orders
    return [
        [
            (one.stage_index, _LETTERS[one.computation_type.name], int(one.microbatch_index))
            for one in order
            if one is not None and one.computation_type.name in _LETTERS and one.microbatch_index is not None
        ]
        for order in get_schedule_ops(schedule, ranks, MICRO_BATCHES)
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, prints tables, writes JSON and a picture; the exit code."""
    return Study("pipelines", _NAME, _parse, missing, _measure, _print).run(arguments)


def _measure(options: argparse.Namespace) -> dict[str, Any]:
    content: dict[str, Any] = {
        "machine": machine.describe(),
        "load_before": options.load,
        "micro_batches": MICRO_BATCHES,
        "seconds_a_stage": options.seconds,
        "bubbles": [],
        "wires": [],
        "replicas": [],
    }
    for stages in options.stages:
        with EmulatedCluster(stages).running() as cluster:
            content["bubbles"] += _bubbles(cluster, options)
            for rate in options.rates:
                content["wires"].append(_wires(cluster, options, rate, list(_WIRES), 1, 0.7))
            if stages == 4:
                wires = [name for name in _WIRES if name != "fp32"]
                content["replicas"].append(_wires(cluster, options, options.rates[-1], wires, 2, 0.8))
    draw(content, options.output / f"{_NAME}.png")
    return content


def _bubbles(cluster: EmulatedCluster, options: argparse.Namespace) -> list[dict[str, Any]]:
    computing = [f"{name}{COMPUTING}" for name in _SCHEDULES[:2]] if cluster.hosts == 2 else []
    arguments = ["--task", "bubbles", "--seconds", options.seconds, "--schedules", *_SCHEDULES, *computing]
    found = job(cluster, _MODULE, [*arguments, *links(cluster, cluster)], 1, options.limit)["found"]
    rows = []
    for one in found:
        name, computes = one["schedule"].removesuffix(COMPUTING), one["schedule"].endswith(COMPUTING)
        times = (one["forward"], one["backward"]) if computes else (options.seconds, 2 * options.seconds)
        expected, measured = idle_share(name, cluster.hosts, *times), one["idle"]
        rows.append(
            {
                **one,
                "stages": cluster.hosts,
                "formula": expected,
                "measured": measured,
                "error": measured / expected - 1,
            }
        )
    return rows


def _wires(
    cluster: EmulatedCluster, options: argparse.Namespace, rate: int, wires: list[str], replicas: int, waits: float
) -> dict[str, Any]:
    """Steps by what travels, with stages that take as long as makes bf16 wait for `waits` of its step."""
    stages, weights = cluster.hosts // replicas, options.weights if replicas > 1 else 1
    guess = math.prod(options.shape) * _BF16 * 8e-6 / rate / 6
    arguments = ["--task", "wires", "--wires", *wires, "--seconds", guess, "--waits", waits, "--megabits", rate]
    arguments += ["--shape", *options.shape, "--replicas", replicas, "--weights", weights]
    found = job(cluster, _MODULE, [*arguments, *links(cluster, cluster)], 1, options.limit)["found"]
    tokens = replicas * MICRO_BATCHES * options.shape[0] * options.shape[1]
    exact = next(one["step"] for one in found if one["wire"] == "bf16")
    rows = [
        {
            **one,
            "tokens_a_second": tokens / one["step"],
            "waits": 1 - one["computing"] / one["step"],
            "beside_bf16": exact / one["step"],
        }
        for one in found
    ]
    setting = {"stages": stages, "replicas": replicas, "megabits": rate, "weights": weights}
    return {**setting, "shape": options.shape, "rows": rows}


def _print(content: dict[str, Any]) -> None:
    print(
        f"Idle shares of a step of {MICRO_BATCHES} micro-batches; stages wait in place of computing, unless it says so"
    )
    print("| schedule | ranks | (p - 1) / (vm + p - 1) | slot by slot | measured | error |")
    print("| --- | --- | --- | --- | --- | --- |")
    for one in content["bubbles"]:
        name = one["schedule"].removesuffix(COMPUTING)
        several = 1 if name in _SINGLE else _STAGES_A_RANK
        closed = "" if "Zero" in name else f"{bubble_share(one['stages'], several * MICRO_BATCHES):.1%}"
        print(
            f"| {one['schedule']} | {one['stages']} | {closed} | {one['formula']:.1%} | {one['measured']:.1%} "
            f"| {one['error']:+.0%} |"
        )
    for setting in [*content["wires"], *content["replicas"]]:
        shape = "x".join(map(str, setting["shape"]))
        print(
            f"\n{setting['stages']} stages x {setting['replicas']} at {setting['megabits']} Mb/s, activations of "
            f"{shape}; stages wait in place of computing"
        )
        print("| between stages | s a step | tokens/s | waits | beside bf16 |\n| --- | --- | --- | --- | --- |")
        for row in setting["rows"]:
            print(
                f"| {row['wire']} | {row['step']:.2f} | {row['tokens_a_second']:.0f} | {row['waits']:.0%} "
                f"| {row['beside_bf16']:.2f}x |"
            )


def draw(content: Mapping[str, Any], path: Path) -> None:
    """Draws what the JSON holds."""
    figure = Figure(figsize=(12, 5.6))
    best, replicated = (
        max((row["beside_bf16"] for setting in content[kind] for row in setting["rows"]), default=1.0)
        for kind in ("wires", "replicas")
    )
    worst = max(abs(one["error"]) for one in content["bubbles"] if one["schedule"] in _SCHEDULES[:5])
    title = f"Packets between stages that run ahead: up to {best:.1f}x bf16's tokens"
    title += f", {replicated:.1f}x with replicas" if content["replicas"] else ""
    note = (
        f"Schedules of whole backwards are idle as their order says, to {worst:.0%}. Stages wait in place of computing"
    )
    top = plotting.write_head(figure, title, f"{note}; {machine.in_words(content['machine'])}")
    left, right = figure.subplots(1, 2)
    figure.subplots_adjust(left=0.07, right=0.98, top=top, bottom=0.3, wspace=0.15)
    places = range(len(content["bubbles"]))
    left.bar(places, [100 * one["measured"] for one in content["bubbles"]], color="#3d6b8f", label="measured")
    left.plot(places, [100 * one["formula"] for one in content["bubbles"]], "o", color="#d1495b", label="by its order")
    names = [f"{one['schedule']}, {one['stages']}" for one in content["bubbles"]]
    left.set_xticks(places, names, rotation=60, ha="right", fontsize=8)
    left.set_ylabel("idle, % of a step")
    left.legend(frameon=False)
    settings = [*content["wires"], *content["replicas"]]
    for number, wire in enumerate(WIRES):
        for name, pale in ((f"{wire}{EAGER}", True), (wire, False)):
            found = [
                (place, row["beside_bf16"])
                for place, one in enumerate(settings)
                for row in one["rows"]
                if row["wire"] == name
            ]
            at, times = [place + 0.16 * (number - 2) for place, _ in found], [times for _, times in found]
            label = "" if pale else wire
            right.bar(at, times, 0.15, label=label, color=f"C{number}", alpha=0.4 if pale else 1.0)
    labels = [f"{one['stages']} stages x {one['replicas']}\n{one['megabits']} Mb/s" for one in settings]
    right.set_xticks(range(len(settings)), labels, fontsize=8)
    right.set_ylabel("tokens a second beside bf16 in 1F1B")
    right.legend(frameon=False, fontsize=8, title="pale: in Eager1F1B", title_fontsize=8, loc="upper left")
    for panel in (left, right):
        panel.spines[["top", "right"]].set_visible(False)
    plotting.save(figure, path)


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = Parser("experiments.ethernet.pipelines", "Times pipelines on emulated hosts.", "about 20 minutes")
    parser.add_argument(
        "--stages", nargs="+", type=positive, default=[2, 4], metavar="N", help="and hosts, of one each"
    )
    parser.add_argument("--rates", nargs="+", type=positive, default=[1000, 100], metavar="Mb/s", help="of the links")
    parser.add_argument("--seconds", type=float, default=0.1, metavar="S", help="of a stage's forward, for idle shares")
    parser.add_argument(
        "--shape",
        nargs=3,
        type=positive,
        default=(4, 256, 1024),
        metavar="N",
        help="a micro-batch: rows, tokens, width",
    )
    parser.add_argument("--weights", type=positive, default=32_000_000, metavar="N", help="of a stage with replicas")
    add_limit_and_output(parser, 1800)
    return ready(parser.parse_args(arguments))


if __name__ == "__main__":
    sys.exit(main())
