"""The model beside published step times of 1-bit Adam. The errors that it has are told in docs/measurements/plan.md."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.plan.published import (
    ADAM_16_BITS,
    BY_NODE,
    FLAT,
    ROWS,
    Row,
    cluster,
    end_to_end_speedup,
    frozen_speedup,
    workload,
)
from tests.plan.strategies import bert, ethernet
from thinwire.plan import Method, Schedule, StepPrediction, predict

ETHERNET = [row for row in ROWS if row.network == "Ethernet" and row.nodes > 1]
INFINIBAND = [row for row in ROWS if row.network == "InfiniBand" and row.nodes > 1]
ON_ONE_NODE = [row for row in ROWS if row.nodes == 1]


def adam(row: Row, *, calibrated: bool) -> StepPrediction:
    return predict(workload(row), cluster(row, calibrated=calibrated), ADAM_16_BITS).average


def error(row: Row, *, calibrated: bool) -> float:
    """Of the all-reduce's time."""
    return adam(row, calibrated=calibrated).wire * 1e3 / row.all_reduce - 1


@pytest.mark.parametrize("row", ETHERNET, ids=str)
def test_all_reduce_on_ethernet(row: Row) -> None:
    assert 0.12 < error(row, calibrated=False) < 0.22  # NCCL reached more than what iperf did
    assert abs(error(row, calibrated=True)) < 0.07


@pytest.mark.parametrize("row", ETHERNET, ids=str)
def test_part_of_a_step_on_ethernet(row: Row) -> None:
    """94% at batch 1 on 64 GPUs, 83% with accumulation 4."""
    for calibrated in (False, True):
        assert adam(row, calibrated=calibrated).waiting == pytest.approx(row.waiting, abs=0.02)


@pytest.mark.parametrize("row", ON_ONE_NODE, ids=str)
def test_all_reduce_on_one_node(row: Row) -> None:
    assert abs(error(row, calibrated=True)) < 0.05


@pytest.mark.parametrize("row", INFINIBAND, ids=str)
def test_all_reduce_on_infiniband_is_not_understood(row: Row) -> None:
    """On 2 nodes it took 1.8 times what 100 Gb/s need, on 8 nodes 3 times: more than latency and rate can say."""
    assert -0.7 < error(row, calibrated=False) < -0.4
    assert error(row, calibrated=True) == pytest.approx(0.0 if row.nodes == 2 else -0.39, abs=0.05)


def test_frozen_stage_on_64_gpus() -> None:
    """Published: up to 6.6x the speed of 16-bit Adam."""
    speedups = [frozen_speedup(row, FLAT, calibrated=True) for row in ETHERNET if row.nodes == 16]
    assert max(speedups) == pytest.approx(6.6, rel=0.2)
    assert max(speedups) < 6.6
    # Their nodes are joined inside by PCIe, over which exact fp32 sums are slow.
    assert frozen_speedup(ETHERNET[0], BY_NODE, calibrated=True) < max(speedups)


def test_end_to_end_on_256_gpus() -> None:
    """Published: up to 3.3x."""
    at_batch_16 = ETHERNET[1]
    for calibrated in (False, True):
        assert end_to_end_speedup(at_batch_16, FLAT, calibrated=calibrated, nodes=64) == pytest.approx(3.3, rel=0.06)


@settings(deadline=None)
@given(st.floats(0, 1), st.integers(2, 64))
def test_volume_is_the_paper_s_formula(warmup: float, nodes: int) -> None:
    """16-bit Adam sends 1/(w + (1-w)/16) times as much; ours up to 4% less than that, for scales, headers, padding."""
    there = ethernet(nodes)
    sixteen_bits = predict(bert("large", "bf16"), there, ADAM_16_BITS).average.bytes_sent
    schedule = Schedule(warmup=warmup, warmup_wire="bf16")
    ours = predict(bert("large", "bf16"), there, Method("onebit-adam"), schedule).average.bytes_sent
    published = 1 / (warmup + (1 - warmup) / 16)
    assert 0.96 * published < sixteen_bits / ours <= published
