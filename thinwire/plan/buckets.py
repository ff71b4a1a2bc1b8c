"""How large the buckets of gradients should be on a link: what each costs by itself, latency above all, against what
the last one leaves with nothing to hide behind."""

from __future__ import annotations

from dataclasses import dataclass, replace

from thinwire.plan.prediction import predict
from thinwire.plan.recommendation import Plan

__all__ = ["BucketAdvice", "better_buckets"]

_MEBIBYTE = 1 << 20
_TRIED = tuple(_MEBIBYTE << power for power in range(9))
WORTH_SAYING = 0.03
"""The part of a step that other buckets have to save."""


@dataclass(frozen=True)
class BucketAdvice:
    """`bucket_bytes` to give the optimizer, and the average step, in seconds, with it."""

    bucket_bytes: int
    step_seconds: float


def better_buckets(plan: Plan) -> BucketAdvice | None:
    """The buckets with which the recommended optimizer's steps are shortest; None where its own are as good, or given.

    At stage 0, where the size costs no memory. The smallest that is within a hundredth of the best.
    """
    best = plan.best
    if best is None or best.method.entry is None or best.method.stage or plan.schedule.bucket_bytes is not None:
        return None
    tried = {
        size: predict(plan.workload, plan.cluster, best.method, replace(plan.schedule, bucket_bytes=size)).step_seconds
        for size in _TRIED
    }
    shortest = min(tried.values())
    if shortest > (1 - WORTH_SAYING) * best.step_seconds:
        return None
    size = next(size for size, seconds in tried.items() if seconds <= 1.01 * shortest)
    return BucketAdvice(size, tried[size])
