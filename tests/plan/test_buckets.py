"""Buckets follow the link: larger ones where latency is high, and none are named that would not help."""

from __future__ import annotations

from dataclasses import replace

import pytest

from thinwire.plan import Cluster, Link, Method, Processor, Schedule, Workload, plain_model, plan, predict
from thinwire.plan.answer import as_answer, as_json, better_buckets
from thinwire.plan.recommendation import Plan

ONE_BIT = Method("onebit-adam")


def planned(latency: float, method: Method = ONE_BIT, **schedule: object) -> Plan:
    cluster = Cluster(8, 1, Link.of(1e9 / 8, latency, 5e-6), Link.of(1e10, 1e-5, 1e-6), Processor.of_memory(2e10))
    workload = Workload(plain_model(50_000_000), 0.05, 0.1)
    return plan(workload, cluster, [method], Schedule(**schedule), speed_only=True)  # type: ignore[arg-type]


def test_high_latency_asks_for_larger_buckets_and_says_what_they_save() -> None:
    slow = planned(latency=5e-3)
    advice = better_buckets(slow)
    assert advice is not None
    assert advice.bucket_bytes > 16 << 20
    again = replace(slow.schedule, bucket_bytes=advice.bucket_bytes)
    assert predict(slow.workload, slow.cluster, ONE_BIT, again).step_seconds == advice.step_seconds
    assert slow.best is not None
    assert advice.step_seconds < 0.97 * slow.best.step_seconds
    assert f"bucket_bytes={advice.bucket_bytes >> 20} << 20" in as_answer(slow)
    assert as_json(slow)["better_buckets"]["bucket_bytes"] == advice.bucket_bytes


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
