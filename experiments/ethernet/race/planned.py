"""What `thinwire plan` says of the steps that were raced, beside what they took."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

from experiments.ethernet.race.contenders import CONTENDERS
from experiments.ethernet.race.findings import ALONE, Turn
from thinwire.plan import Calibration, Cluster, Matrices, Schedule, Transformer, Workload, predict

__all__ = ["compare", "foresee", "median_error"]

_SCHEDULE = Schedule(warmup=0.5, warmup_wire="bf16")
"""Phases are looked up by name, so that their shares do not matter."""


def compare(
    turns: Mapping[str, Sequence[Turn]],
    probe: Mapping[str, Any],
    shapes: Sequence[Sequence[int]],
    computing: Turn,
    cores: int | None = None,
) -> dict[str, dict[str, float]]:
    """Predicted and measured seconds of every contender's step at one rate, and the prediction's relative error.

    Args:
        turns: by contender; those of `ALONE` say what a step computes.
        probe: what `thinwire probe` measured of the same links, before.
        shapes: of the model's parameters, the one whose gradient comes last first.
        computing: seconds of forward, backward and update, of which the proportions count.
        cores: that all ranks share, while they are probed and while they train; None: enough.
    """
    cluster = _cluster(Calibration.model_validate_json(json.dumps(probe)), cores)
    computed = median(turn["seconds"] for turn in turns[ALONE]) / cluster.ranks_a_core
    scale = computed / sum(computing.values())
    workload = Workload(
        _model(shapes),
        scale * computing["forward"],
        scale * computing["backward"],
        update_seconds=scale * computing["update"],
    )
    return _beside(turns, workload, cluster)


def foresee(
    turns: Mapping[str, Sequence[Turn]],
    calibration: Calibration,
    megabits: float,
    hosts: int,
    cores_a_host: float,
    measured: Mapping[str, Any],
) -> dict[str, dict[str, float]]:
    """The same for a cluster, a rate and a model that were not probed.

    Args:
        turns: by contender.
        calibration: of a rank a core, at another rate.
        megabits: the links' rate, in 10⁶ bits a second.
        hosts: of one rank each.
        cores_a_host: fewer than one where hosts share a core.
        measured: of the model: "shapes" of its parameters, and "computing_one_rank", seconds of forward, backward and
            update of one rank while no other computed.
    """
    probed = calibration.link("between")
    assert probed is not None, "a probe has several hosts"
    link = probed.with_rate(1e6 * megabits / 8)
    cluster = Cluster(hosts, 1, link, link, calibration.processor, cores_a_host)
    computing = measured["computing_one_rank"]
    model = _model(measured["shapes"])
    workload = Workload(model, computing["forward"], computing["backward"], update_seconds=computing["update"])
    return _beside(turns, workload, cluster)


def _beside(turns: Mapping[str, Sequence[Turn]], workload: Workload, cluster: Cluster) -> dict[str, dict[str, float]]:
    found = {}
    for name in turns:
        one = CONTENDERS.get(name)
        if one is None or one.method is None:
            continue  # what computes alone, and what the plan does not know
        by_node = one.ours and one.by_node and cluster.has_hierarchy
        steps = predict(workload, cluster, replace(one.method, hierarchical=by_node), _SCHEDULE).phases
        seconds = [turn["seconds"] for turn in turns[name]]
        predicted, measured = steps[one.phase].step, median(seconds)
        found[name] = {"predicted": predicted, "measured": measured, "error": predicted / measured - 1}
    return found


def median_error(rates: Sequence[Mapping[str, Mapping[str, float]]]) -> float:
    """Of all contenders at all rates, absolute."""
    return median(abs(one["error"]) for by_name in rates for one in by_name.values())


def _cluster(calibration: Calibration, cores: int | None) -> Cluster:
    between, inside = calibration.link("between"), calibration.link("inside")
    link = between or inside
    assert link is not None, "a race has several ranks"
    nodes, ranks = calibration.nodes, calibration.ranks_per_node
    cores_a_node = None if cores is None else cores / nodes
    processor = calibration.processor.slower(1 / calibration.ranks_a_core(cores_a_node))
    return Cluster(nodes, ranks, between or link, inside or link, processor, cores_a_node)


def _model(shapes: Sequence[Sequence[int]]) -> Transformer:
    matrices = tuple(Matrices(rows, columns) for rows, columns in (shape for shape in shapes if len(shape) == 2))
    vectors = sum(shape[0] for shape in shapes if len(shape) == 1)
    return Transformer("BERT", sum(one.numel for one in matrices) + vectors, matrices, matrices[0])
