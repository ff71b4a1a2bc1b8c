"""What is recommended is the fastest that fits, and break-even rates are where one becomes faster than the other."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.plan.strategies import GIGABIT, bert, ethernet, jobs
from thinwire import Elastic
from thinwire.plan import (
    Cluster,
    Link,
    Method,
    PlanError,
    Processor,
    Schedule,
    Workload,
    break_even_rate,
    methods_for,
    plain_model,
    plan,
    predict,
)
from thinwire.plan.answer import as_answer, as_json
from thinwire.plan.recommendation import (
    BASELINE,
    LOSSES,
    WORTH_IT,
    Failures,
    Plan,
    better_buckets,
    keeps_the_loss,
    local_updates_loss,
)
from thinwire.plan.workload import Host

RESULTS = Path(__file__).parents[2] / "experiments" / "results"


@settings(max_examples=30)
@given(jobs(), st.none() | st.floats(1e6, 1e13), st.booleans())
def test_the_best_is_the_fastest_that_fits(job, limit, speed_only) -> None:
    """And keeps the loss, unless only speed counts; the baseline where nothing is a tenth faster."""
    workload, cluster, _, schedule = job
    methods = methods_for(cluster)
    made = plan(workload, cluster, methods, schedule, limit, speed_only=speed_only)
    assert [one.method for one in made.predictions] == methods
    allowed = [one for one in made.predictions if made.fits(one) and (speed_only or keeps_the_loss(one.method))]
    if not allowed:
        assert made.best is None
        return
    assert made.best in allowed
    fastest = min(one.step_seconds for one in allowed)
    if speed_only or made.best.method != BASELINE:
        assert made.best.step_seconds == fastest
    else:
        assert made.best.step_seconds <= WORTH_IT * fastest
    for one in made.faster():
        assert made.fits(one)
        assert one.step_seconds < made.best.step_seconds


def test_speed_that_costs_loss_is_never_recommended() -> None:
    """PowerSGD above all, which is the fastest on a thin wire, unless it is asked for."""
    cluster = ethernet(16, gbps=0.1)
    careful = plan(bert("large"), cluster, methods_for(cluster))
    assert careful.best.method == Method("onebit-muon")
    ahead = {one.method.algorithm for one in careful.faster()}
    assert ahead == {"powersgd", "diloco", "zero-one-adam", "onebit-lion"}
    reckless = plan(bert("large"), cluster, methods_for(cluster), speed_only=True)
    assert reckless.best.method.algorithm == "powersgd"
    alone = plan(bert("large"), cluster, methods_for(cluster, ["powersgd"]))
    assert alone.best is None


def test_losses_are_those_of_the_experiments() -> None:
    """What is told of an optimizer's loss stands in experiments/results, and every optimizer has been measured."""
    text = json.loads((RESULTS / "convergence.json").read_text())["tasks"]["text"]
    lion = json.loads((RESULTS / "lion.json").read_text())["methods"]["onebit-lion"]
    measured = {
        name: (finding["difference_percent"] / 100, len(text["runs"][name]))
        for name, finding in text["findings"].items()
    }
    standings = json.loads((RESULTS / "frontier_text.json").read_text())["standings"].values()
    muon = max((one["onebit-muon-sign1"] for one in standings), key=lambda one: one["percent_above"]["adamw"])
    measured["onebit-muon"] = (muon["percent_above"]["adamw"] / 100, muon["seeds"])
    bert = json.loads((RESULTS / "pretrain_bert.json").read_text())["findings"]["onebit-muon"]
    assert bert["difference_percent"] < 0
    measured["onebit-lion"] = (lion["difference_percent"]["adamw"] / 100, len(lion["runs"]))
    assert set(LOSSES) == set(measured) == {one.algorithm for one in methods_for(ethernet()) if one.entry}
    for name, (difference, seeds) in measured.items():
        assert (LOSSES[name].difference, LOSSES[name].seeds) == (pytest.approx(difference, abs=5e-4), seeds), name


def test_published_losses_of_local_updates() -> None:
    """At published sizes those that were published (arXiv 2503.09799, table 4), between them linear in logarithms."""
    for parameters, workers, percent in ((35e6, 4, 2.0), (35e6, 8, 3.9), (180e6, 2, 0.24), (2.4e9, 1, -0.4)):
        assert 100 * local_updates_loss(int(parameters), workers) == pytest.approx(percent, abs=0.06)
    ends = [local_updates_loss(int(size), 4) for size in (90e6, 180e6)]
    assert local_updates_loss(round(math.sqrt(90e6 * 180e6)), 4) == pytest.approx(sum(ends) / 2)
    assert local_updates_loss(10**6, 64) == local_updates_loss(35_000_000, 8)
    assert local_updates_loss(10**11, 3) == pytest.approx(local_updates_loss(2_400_000_000, 3))
    assert local_updates_loss(10**8, 2) < local_updates_loss(10**8, 3) < local_updates_loss(10**8, 4)


@settings(max_examples=10)
@given(jobs())
def test_break_even_is_where_the_faster_one_changes(job) -> None:
    workload, cluster, _, schedule = job
    for method in (one for one in methods_for(cluster) if one.entry):
        rate = break_even_rate(workload, cluster, method, schedule)
        if 0 < rate < math.inf:
            which = "between" if cluster.nodes > 1 else "inside"

            def gain(factor: float, which: str = which, rate: float = rate, method: Method = method) -> float:
                there = replace(cluster, **{which: getattr(cluster, which).with_rate(rate * factor)})
                ours = predict(workload, there, method, schedule).step_seconds
                return predict(workload, there, BASELINE, schedule).step_seconds - ours

            assert gain(1 - 1e-6) > 0 >= gain(1 + 1e-6)


def test_one_bit_wins_below_it_and_only_there() -> None:
    schedule = Schedule(warmup=0.1)
    for nodes in (4, 64):
        cluster = ethernet(nodes)
        rate = break_even_rate(bert("large"), cluster, Method("onebit-adam"), schedule)
        assert 0.1 * GIGABIT < rate < 400 * GIGABIT
        slower, faster = (
            plan(
                bert("large"), ethernet(nodes, 1, rate * factor / GIGABIT), [BASELINE, Method("onebit-adam")], schedule
            )
            for factor in (0.5, 2.0)
        )
        assert slower.best.method.entry
        assert faster.best.method == BASELINE


def test_never_and_always() -> None:
    workload = bert("large")
    only_warmup = Schedule(warmup=1.0)
    # A warmup in fp32 sends twice what DDP sends in bf16; on one rank, casting to bf16 and back is for nothing.
    assert break_even_rate(workload, ethernet(4), Method("onebit-adam"), only_warmup) == 0.0
    assert break_even_rate(workload, ethernet(1), Method("onebit-adam"), only_warmup) == math.inf


def test_memory_decides_for_shards() -> None:
    cluster = ethernet(4)
    methods = methods_for(cluster, ("ddp-bf16", "onebit-adam", "sharded-adam"))
    everything = plan(bert("large"), cluster, methods)
    assert everything.best.method.stage in (0, 1)
    narrow = plan(bert("large"), cluster, methods, memory_limit=2e9)
    assert narrow.best.method == Method("sharded-adam", 3)
    assert plan(bert("large"), cluster, methods, memory_limit=1e6).best is None


OFFLOADED = st.sampled_from([(stage, place) for stage in (1, 2, 3) for place in ("memory", "disk")])


@given(OFFLOADED, st.sampled_from(("fp32", "bf16")))
def test_what_devices_do_not_hold_hosts_do(how: tuple[int, Any], dtype: Any) -> None:
    """In bf16 no byte is lost or held twice; in fp32 master weights lie apart from weights at stages 1 and 2."""
    stage, place = how
    host = Host(1e12, disk=1e13, disk_rate=1e9)
    cluster, model = replace(ethernet(2, 4), host=host), plain_model(80_000_000)
    workload = Workload(model, 0.1, 0.2, dtype=dtype)
    moved, whole = (predict(workload, cluster, Method("sharded-adam", stage, offload=one)) for one in (place, None))
    again = 4 * model.parameters / 8 if dtype == "fp32" and stage < 3 else 0
    state, shown = 4e7 * (12 if dtype == "bf16" or stage < 3 else 8), 4 if stage == 3 else workload.element_bytes
    beside = state + 4e7 * shown if place == "disk" else 0  # steps ahead
    held = 4 * (moved.memory_bytes - again) + sum(moved.offloaded.values())
    assert held == pytest.approx(4 * whole.memory_bytes + beside)
    assert moved.offloaded["disk"] == (state + beside if place == "disk" else 0)
    way = (1 if stage == 3 else 2) * 1e7 * workload.element_bytes / host.link
    on_disk = 4e7 * (24 + 2 * shown) / host.disk_rate - workload.backward_seconds
    computed = 0.3 + way + (on_disk if place == "disk" else 4e7 * 28 / host.rate)
    assert moved.average.compute == pytest.approx(computed)


def test_the_fastest_that_fits_goes_only_as_far_from_the_device_as_it_must() -> None:
    workload = Workload(plain_model(10**10), 1.0, 2.0, dtype="bf16")

    def best(memory: float, host: Host) -> tuple[int, str | None]:
        cluster = replace(ethernet(4, 4, 100.0), host=host)
        found = plan(workload, cluster, methods_for(cluster, ("sharded-adam",)), memory_limit=memory).best
        return found.method.stage, found.method.offload

    slow = 10e9
    assert best(50e9, Host(1e12, slow))[1] is None
    assert best(5e9, Host(1e12, slow)) == (3, "memory")
    assert best(5e9, Host(3e10, slow, disk=1e12, disk_rate=3e9)) == (3, "disk")


@pytest.mark.parametrize("given", [{"weights": "int8"}, {"offload": "tape"}, {"hierarchical": True}])
def test_what_shards_cannot_be(given: Any) -> None:
    with pytest.raises(PlanError):
        Method("sharded-adam", 1, **given)


def test_stage_3_through_codecs_sends_what_zero_plus_plus_does() -> None:
    """Between many nodes 8 and 4.5 bits of three times 16, as scales of int4 take half a bit; with 4-bit differences
    4.5 twice; alike where steps accumulate."""
    cluster = ethernet(64, 8)
    for accumulation in (1, 3):
        workload = Workload(plain_model(10**10), 1.0, 2.0, accumulation, dtype="bf16")
        many = Method("sharded-adam", 3)
        exact = predict(workload, cluster, many).average.bytes_between
        for weights, bits in (("int8", 8), ("int4", 4.5)):
            method = replace(many, hierarchical=True, weights=weights, gradients="int4")  # type: ignore[arg-type]
            sent = predict(workload, cluster, method)
            share = (bits + 4.5 * accumulation) / (48 * accumulation)
            assert sent.average.bytes_between / exact == pytest.approx(share, rel=0.03)
            assert not keeps_the_loss(method)


# Buckets follow the link: larger ones where latency is high, and none are named that would not help

ONE_BIT = Method("onebit-adam")


def planned(latency: float, method: Method = ONE_BIT, **schedule: object) -> Plan:
    cluster = Cluster(8, 1, Link.of(1e9 / 8, latency, 5e-6), Link.of(1e10, 1e-5, 1e-6), Processor.of_memory(2e10))
    workload = Workload(plain_model(50_000_000), 0.05, 0.1)
    return plan(workload, cluster, [method], Schedule(**schedule), speed_only=True)  # type: ignore[arg-type]


def test_what_failing_nodes_cost() -> None:
    """By hand: 8 nodes, each every 80,000 s; 0.6 GB of state, over a link of 1 Gb/s, and to storage of 1 GB/s."""
    made = planned(latency=1e-5)
    found = Failures.of(made, 80_000.0)
    assert (found.every, found.interval) == (10_000.0, pytest.approx((2 * 0.6 * 10_000) ** 0.5))
    assert found.elastic == pytest.approx((Elastic(workers=1).silence + made.best.step_seconds + 4.8) / 10_000)
    assert found.restarting == pytest.approx(0.6 / found.interval + (found.interval / 2 + 120.6) / 10_000)
    assert "every 2.78 h: elastic 1-bit steps lose 0.15% of the time" in as_answer(made, failures=found)
    on_disk = replace(made, cluster=replace(made.cluster, host=Host(0.0, disk=1e12, disk_rate=2e9)))
    assert Failures.of(on_disk, 80_000.0).restarting < found.restarting


def test_high_latency_asks_for_larger_buckets_and_says_what_they_save() -> None:
    slow = planned(latency=5e-3)
    advice = better_buckets(slow)
    size, seconds = advice
    assert size > 16 << 20
    again = replace(slow.schedule, bucket_bytes=size)
    assert predict(slow.workload, slow.cluster, ONE_BIT, again).step_seconds == seconds
    assert seconds < 0.97 * slow.best.step_seconds
    assert f"bucket_bytes={size >> 20} << 20" in as_answer(slow)
    assert as_json(slow)["better_buckets"] == {"bucket_bytes": size, "step_seconds": seconds}


@pytest.mark.parametrize(
    "given",
    [
        planned(latency=1e-5),
        planned(latency=5e-3, bucket_bytes=4 << 20),
        planned(latency=5e-3, method=Method("onebit-adam", stage=1)),
        planned(latency=5e-3, method=Method("ddp-bf16")),
    ],
    ids=["low latency", "given", "sharded", "DDP"],
)
def test_no_advice(given: Plan) -> None:
    assert better_buckets(given) is None
    assert "  buckets" not in as_answer(given)
    assert as_json(given)["better_buckets"] is None
