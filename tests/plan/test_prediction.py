"""What any prediction has to obey, whatever the model, the cluster and the method."""

from __future__ import annotations

import dataclasses
import math
import sys
from types import FrameType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.plan.strategies import bert, ethernet, jobs, rates
from thinwire.plan import Cluster, Method, PlanError, Schedule, StepPrediction, Workload, methods_for, predict

SLACK = 1 + 1e-9


@settings(deadline=None)
@given(jobs())
def test_a_step_is_its_parts_and_never_less_than_its_computation(job) -> None:
    workload, cluster, method, schedule = job
    prediction = predict(workload, cluster, method, schedule)
    least = workload.accumulation * (workload.forward_seconds + workload.backward_seconds)
    for step in (prediction.average, prediction.steady, *prediction.phases.values()):
        assert all(math.isfinite(value) and value >= 0 for value in dataclasses.astuple(step))
        assert step.step == pytest.approx(step.compute + step.encode + step.exposed)
        assert step.step * SLACK >= step.compute >= least / SLACK
        assert step.exposed <= step.wire * SLACK + 1e-9 * step.step
        assert 0 <= step.waiting <= 1
    assert sum(prediction.shares.values()) == pytest.approx(1)
    assert all(share > 0 for share in prediction.shares.values())
    assert prediction.memory_bytes > 0
    for field in dataclasses.fields(StepPrediction):
        values = [getattr(step, field.name) for step in prediction.phases.values()]
        average = getattr(prediction.average, field.name)
        assert min(values) / SLACK <= average <= max(values) * SLACK


@settings(deadline=None)
@given(jobs(), rates, rates)
def test_a_faster_link_never_makes_a_step_longer(job, one, other) -> None:
    workload, cluster, method, schedule = job
    for which in ("between", "inside"):
        slow, fast = (
            dataclasses.replace(cluster, **{which: getattr(cluster, which).with_rate(rate)})
            for rate in sorted((one, other))
        )
        slower, faster = (predict(workload, there, method, schedule) for there in (slow, fast))
        assert faster.step_seconds <= slower.step_seconds * SLACK
        assert faster.average.bytes_sent == slower.average.bytes_sent


@settings(deadline=None)
@given(jobs(), st.floats(0, 1), st.floats(0, 1))
def test_more_overlap_never_makes_a_step_longer(job, one, other) -> None:
    workload, cluster, method, schedule = job
    less, more = (
        predict(
            workload,
            dataclasses.replace(cluster, processor=dataclasses.replace(cluster.processor, overlap=overlap)),
            method,
            schedule,
        )
        for overlap in sorted((one, other))
    )
    assert more.step_seconds <= less.step_seconds * SLACK
    assert more.average.wire == less.average.wire


@settings(deadline=None)
@given(jobs())
def test_more_nodes_never_make_the_wire_shorter(job) -> None:
    workload, cluster, method, schedule = job
    if cluster.nodes == 1:
        return  # its one node has no link to others yet, which may be the faster one
    # On more nodes less of an all-to-all stays inside them: that can only help where inside is the slow link.
    cluster = dataclasses.replace(cluster, inside=cluster.between.with_rate(1e15))
    more = dataclasses.replace(cluster, nodes=2 * cluster.nodes)
    before, after = (predict(workload, there, method, schedule).average for there in (cluster, more))
    # Blocks that are cut otherwise, and packet headers of 16 bytes.
    assert after.wire >= before.wire * 0.999
    assert after.bytes_sent >= before.bytes_sent * 0.999


@settings(deadline=None)
@given(jobs(), st.floats(0, 1))
def test_more_computation_hides_more(job, longer) -> None:
    workload, cluster, method, schedule = job
    more = dataclasses.replace(workload, backward_seconds=workload.backward_seconds + longer)
    before, after = (predict(one, cluster, method, schedule).average for one in (workload, more))
    assert after.exposed <= before.exposed + 1e-9 * after.step
    assert after.step * SLACK >= before.step


@settings(deadline=None)
@given(jobs())
def test_one_rank_sends_nothing(job) -> None:
    workload, cluster, method, schedule = job
    alone = dataclasses.replace(cluster, nodes=1, ranks_per_node=1)
    if not method.hierarchical:
        step = predict(workload, alone, method, schedule).average
        assert (step.wire, step.exposed, step.bytes_sent, step.bytes_between) == (0, 0, 0, 0)


@pytest.mark.parametrize("method", methods_for(ethernet(2, 2)), ids=lambda method: method.name)
def test_a_wire_that_takes_as_long_as_backward_mostly_hides(method: Method) -> None:
    """Where buckets leave during backward. What is left is the first bucket's wait, the last one, and the embedding."""
    workload = Workload(bert("base").model, 0.0, 1.0)
    cluster = ethernet(4, 2)
    steady = predict(workload, cluster, method, Schedule(warmup=0.0)).steady
    scaled = dataclasses.replace(workload, backward_seconds=max(steady.wire, 1e-3))
    hidden = predict(scaled, cluster, method, Schedule(warmup=0.0)).steady
    after = method.name in ("zero-one-adam", "zero-one-adam by node", "zero-one-adam ZeRO-1", "diloco")
    if after or (method.algorithm == "sharded-adam" and method.stage < 3):
        assert hidden.exposed > 0.4 * hidden.wire  # updates, weights and outer gradients leave after backward
    else:
        assert hidden.exposed < 0.6 * hidden.wire


def test_hand_counted_ring() -> None:
    """DDP over 4 hosts at 1 Gb/s without overlap: 2·¾·4n bytes at 125 MB/s, 2·2 rounds of 50 µs a bucket."""
    workload = bert("base")
    step = predict(workload, ethernet(4, 1, 1.0, overlap=0.0), Method("ddp-fp32")).average
    nbytes = 4 * workload.model.parameters
    buckets = round((workload.model.parameters - 30522 * 768) / (25 * 2**20 / 4)) + 1
    assert step.wire == pytest.approx(1.5 * nbytes / 125e6 + buckets * 4 * 50e-6, rel=1e-6)
    assert step.exposed == pytest.approx(step.wire)
    assert step.bytes_sent == step.bytes_between == pytest.approx(1.5 * nbytes, rel=1e-6)


def test_bf16_halves_what_ddp_sends_but_not_of_a_model_in_bf16() -> None:
    for dtype, ratio in (("fp32", 2.0), ("bf16", 1.0)):
        plain, half = (predict(bert("large", dtype), ethernet(), Method(name)) for name in ("ddp-fp32", "ddp-bf16"))
        assert plain.average.bytes_sent / half.average.bytes_sent == pytest.approx(ratio, rel=1e-3)


def test_hierarchy_halves_what_crosses_nodes() -> None:
    cluster = ethernet(2, 2)
    schedule = Schedule(warmup=0.0)
    flat = predict(bert("large"), cluster, Method("onebit-adam"), schedule).steady
    by_node = predict(bert("large"), cluster, Method("onebit-adam", hierarchical=True), schedule).steady
    # To one of two nodes: each of two ranks sends half of its packets, and an all-gather three quarters; by node, half
    # and half of a packet half as large each.
    assert by_node.bytes_between / flat.bytes_between == pytest.approx(1.0 / 1.75, rel=0.02)


def calls_of_a_prediction(nodes: int, method: Method) -> int:
    """Python functions that predicting calls: time that does not depend on the machine."""
    calls = 0

    def count(_frame: FrameType, event: str, _argument: object) -> None:
        nonlocal calls
        calls += event == "call"

    cluster = ethernet(nodes, 8)
    sys.setprofile(count)
    try:
        predict(bert("large"), cluster, method)
    finally:
        sys.setprofile(None)
    return calls


@pytest.mark.parametrize("method", methods_for(ethernet(2, 2)), ids=lambda method: method.name)
def test_ten_thousand_ranks_take_no_longer_than_sixteen(method: Method) -> None:
    assert calls_of_a_prediction(1250, method) <= 1.1 * calls_of_a_prediction(2, method)


def test_a_hierarchy_needs_one() -> None:
    for nodes, ranks in ((1, 4), (4, 1)):
        with pytest.raises(PlanError, match=f"needs several nodes of several ranks, not {nodes} of {ranks}"):
            predict(bert(), ethernet(nodes, ranks), Method("onebit-adam", hierarchical=True))


@pytest.mark.parametrize("value", [0, -1, 2.0, True, "4", float("nan")])
def test_ranks_are_whole_numbers(value) -> None:
    cluster = ethernet()
    with pytest.raises(PlanError, match="must be a whole number, at least 1"):
        Cluster(value, 1, cluster.between, cluster.inside, cluster.processor)


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_seconds_are_seconds(value) -> None:
    with pytest.raises(PlanError, match="backward_seconds must be a number of seconds"):
        Workload(bert().model, 0.0, value)
    with pytest.raises(PlanError, match="update_seconds"):
        Workload(bert().model, 0.0, 0.0, update_seconds=value)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"algorithm": "sgd"}, "'sgd' is not one of"),
        ({"algorithm": "ddp-fp32", "stage": 1}, "works at ZeRO stage 0, not 1"),
        ({"algorithm": "sharded-adam"}, "works at ZeRO stage 1 or 2 or 3, not 0"),
        ({"algorithm": "powersgd"}, "a rank is given for powersgd"),
        ({"algorithm": "onebit-adam", "rank": 4}, "nothing else, got 4"),
        ({"algorithm": "powersgd", "rank": 0}, "at least 1, got 0"),
        ({"algorithm": "onebit-adam", "stage": 1, "hierarchical": True}, "hierarchy is for"),
        ({"algorithm": "ddp-bf16", "hierarchical": True}, "hierarchy is for"),
    ],
)
def test_methods_that_do_not_exist(arguments, told) -> None:
    with pytest.raises(PlanError, match=told):
        Method(**arguments)
