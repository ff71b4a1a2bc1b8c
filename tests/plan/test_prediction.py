"""What any prediction has to obey, whatever the model, the cluster and the method; closed forms beside simulations."""

import dataclasses
import math
import sys
from collections.abc import Callable
from functools import partial
from types import FrameType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.plan.strategies import bert, ethernet, jobs, rates
from tests.refusing import refused
from thinwire.plan import (
    Activations,
    Matrices,
    Method,
    PlanError,
    Schedule,
    StepPrediction,
    Transformer,
    Workload,
    methods_for,
    plain_model,
    plan,
    predict,
)
from thinwire.plan.cluster import NO_BUCKETS, Buckets, Cost, cut, seconds_beside
from thinwire.plan.methods import OuterSchedule, ZeroOneSteps

SLACK = 1 + 1e-9


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


def test_muon_inside_orthogonalises_every_matrix_on_every_worker() -> None:
    """Where one owner of each does, a rank takes its share of the time."""
    workload, cluster = bert("large"), ethernet(4)
    local = Schedule(outer=OuterSchedule(inner="Muon"))
    computed = [
        predict(workload, cluster, method, local).average.compute - workload.forward_seconds - workload.backward_seconds
        for method in (Method("diloco"), Method("onebit-muon"))
    ]
    assert computed[0] == pytest.approx(4 * computed[1])


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


@given(jobs(), st.floats(0, 1))
def test_more_computation_hides_more(job, longer) -> None:
    workload, cluster, method, schedule = job
    more = dataclasses.replace(workload, backward_seconds=workload.backward_seconds + longer)
    before, after = (predict(one, cluster, method, schedule).average for one in (workload, more))
    assert after.exposed <= before.exposed + 1e-9 * after.step
    assert after.step * SLACK >= before.step


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
    seconds = max(steady.wire, 1e-3)
    forward = seconds if method.stage == 3 else 0.0  # beside which weights come
    scaled = dataclasses.replace(workload, forward_seconds=forward, backward_seconds=seconds)
    hidden = predict(scaled, cluster, method, Schedule(warmup=0.0)).steady
    by_node = method.algorithm == "onebit-muon" and method.hierarchical
    after = by_node or method.algorithm == "zero-one-adam" or method.name == "diloco"
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


durations = st.floats(0, 1)
costs = st.builds(Cost, durations, durations, durations)


def simulated(computation: float, count: int, each: Cost) -> float:
    """Buckets one after the other through processor, link inside and link between, each machine serving in order."""
    processor = inside = between = 0.0
    for _ in range(count):
        processor += computation / count + each.codec
        inside = max(processor, inside) + each.inside
        between = max(inside, between) + each.between
    return max(processor, between)


@given(durations, st.integers(1, 40), costs)
def test_equal_buckets_take_what_a_simulation_takes(computation: float, count: int, each: Cost) -> None:
    closed = seconds_beside(computation, Buckets(count, each, Cost()), 1.0)
    assert closed == pytest.approx(simulated(computation, count, each))


@given(durations, st.integers(1, 40), costs, costs)
def test_without_overlap_everything_adds_up(computation: float, count: int, each: Cost, last: Cost) -> None:
    buckets = Buckets(count, each, last)
    assert seconds_beside(computation, buckets, 0.0) == pytest.approx(computation + buckets.total.total)
    assert seconds_beside(computation, NO_BUCKETS, each.codec) == pytest.approx(computation)


@given(durations, st.integers(1, 40), costs, costs, st.floats(0, 1))
def test_the_last_bucket_leaves_after_everything(computation, count, each, last, overlap) -> None:
    seconds = seconds_beside(computation, Buckets(count, each, last), overlap)
    assert seconds * (1 + 1e-9) >= computation + count * each.codec + last.total
    assert seconds <= (computation + count * each.total + last.total) * (1 + 1e-9)


@given(st.integers(1, 10**9), st.integers(0, 10**9), st.integers(1, 10**8))
def test_buckets_hold_every_element(elements: int, last: int, wanted: int) -> None:
    last = min(last, elements)
    buckets = cut(elements, last, wanted, lambda numel: Cost(bytes_sent=numel))
    assert elements <= buckets.total.bytes_sent < elements + buckets.count
    assert buckets.last.bytes_sent == last


# 0/1 Adam's intervals


def walked(steps: int, freeze: int, update_scaler: int, local_scaler: int, clipper: int) -> ZeroOneSteps:
    """The paper's rules, one step after the other."""
    exact = gradients = updates = local = 0
    interval, until_doubling = 1, update_scaler
    for step in range(1, min(freeze, steps) + 1):
        if step % interval:
            gradients += 1
            continue
        exact += 1
        until_doubling -= 1
        if not until_doubling:
            interval, until_doubling = 2 * interval, update_scaler
    interval = 1
    for step in range(min(freeze, steps) + 1, steps + 1):
        if step % interval:
            local += 1
        else:
            updates += 1
        if (step - min(freeze, steps)) % local_scaler == 0:
            interval = min(2 * interval, clipper)
    return ZeroOneSteps(exact, gradients, updates, local)


@given(st.integers(1, 3000), st.integers(0, 3000), st.integers(1, 40), st.integers(1, 1000), st.integers(1, 20))
def test_counts_are_those_of_a_walk(steps, freeze, update_scaler, local_scaler, clipper) -> None:
    schedule = Schedule(
        steps,
        var_freeze_step=freeze,
        var_update_scaler=update_scaler,
        local_step_scaler=local_scaler,
        local_step_clipper=clipper,
    )
    counted = schedule.zero_one_steps()
    assert counted == walked(steps, freeze, update_scaler, local_scaler, clipper)


def test_a_long_run_is_counted_at_once() -> None:
    counted = Schedule(10**12, 0.1, local_step_scaler=10**6).zero_one_steps()
    assert counted.exact + counted.gradients == 10**11
    assert counted.updates / (9 * 10**11) == pytest.approx(1 / 16, rel=1e-3)


OF_ONE_RANK_A_NODE = Method("onebit-adam", hierarchical=True)
REFUSED: list[tuple[str, Callable[[], object]]] = [
    ("'sgd' is not one of", lambda: Method("sgd")),
    ("works at ZeRO stage 0, not 1", lambda: Method("ddp-fp32", 1)),
    ("works at ZeRO stage 1 or 2 or 3, not 0", lambda: Method("sharded-adam")),
    ("a rank is given for powersgd", lambda: Method("powersgd")),
    ("nothing else, got 4", lambda: Method("onebit-adam", rank=4)),
    ("at least 1, got 0", lambda: Method("powersgd", rank=0)),
    ("hierarchy is for", lambda: Method("ddp-bf16", hierarchical=True)),
    ("several nodes of several ranks, not 1 of 4", lambda: predict(bert(), ethernet(1, 4), OF_ONE_RANK_A_NODE)),
    ("several nodes of several ranks, not 4 of 1", lambda: predict(bert(), ethernet(4, 1), OF_ONE_RANK_A_NODE)),
    *(
        ("must be a whole number, at least 1", partial(dataclasses.replace, ethernet(), nodes=count))
        for count in (0, -1, 2.0, True, "4", math.nan)
    ),
    *(
        (f"{name} must be a number of seconds", partial(dataclasses.replace, bert(), **{name: seconds}))
        for name in ("backward_seconds", "update_seconds")
        for seconds in (-1.0, math.nan, math.inf)
    ),
    ("steps", lambda: Schedule(steps=0)),
    ("warmup", lambda: Schedule(warmup=1.1)),
    ("warmup", lambda: Schedule(warmup=math.nan)),
    ("warmup_wire", lambda: Schedule(warmup_wire="fp8")),
    ("var_freeze_step", lambda: Schedule(var_freeze_step=-1)),
    ("powersgd_start", lambda: Schedule(powersgd_start=0.5)),
    ("local_step_clipper", lambda: Schedule(local_step_clipper=0)),
    ("bucket_bytes", lambda: Schedule(bucket_bytes=1.5)),
    ("3 and 2 buckets", lambda: Buckets(3, Cost(), Cost()) + Buckets(2, Cost(), Cost())),
    ("more elements in its matrices", lambda: Transformer("x", 10, (Matrices(4, 4),))),
    ("not among its matrices", lambda: Transformer("x", 100, (Matrices(4, 4),), Matrices(5, 5))),
    ("parameters must be a whole number", lambda: plain_model(0)),
    ("heads must be", lambda: Activations(1, 1, 0, 1, 1)),
    ("at least one method", lambda: plan(bert(), ethernet(), [])),
    *(
        ("memory limit", partial(plan, bert(), ethernet(), [Method("ddp-fp32")], memory_limit=limit))
        for limit in (0.0, -1.0, math.nan, math.inf)
    ),
]


@pytest.mark.parametrize(("told", "call"), REFUSED, ids=[told for told, _ in REFUSED])
def test_what_makes_no_sense(told: str, call: Callable[[], object]) -> None:
    refused((PlanError, ValueError), told, call)
