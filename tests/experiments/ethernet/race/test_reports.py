"""What measured steps and losses become: records, sentences, pictures; and what the stopwatch counts."""

from __future__ import annotations

import socket
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from experiments.ethernet.race import loss_report, step_plots, step_report
from experiments.ethernet.race.contenders import BASELINE, CONTENDERS, FAIR_BASELINE
from experiments.ethernet.race.findings import ALONE
from experiments.ethernet.race.stopwatch import Interface, Stopwatch

MACHINE = {"cpu": "some", "cores": 2}


def run(seconds_a_step: float, losses: list[float]) -> dict[str, Any]:
    steps = list(range(10, 10 * len(losses) + 1, 10))
    return {
        "steps": steps,
        "losses": losses,
        "seconds": [seconds_a_step * step for step in steps],
        "bytes_sent": [100 * step for step in steps],
        "seconds_a_step": {"exact": seconds_a_step},
    }


@pytest.fixture
def runs() -> dict[str, dict[str, Any]]:
    return {
        BASELINE: run(2.0, [6.0, 5.0, 4.0]),
        FAIR_BASELINE: run(1.0, [6.0, 5.0, 4.0]),
        "ddp-powersgd-1": run(0.1, [6.0, 5.9, 5.8]),
        "onebit-adam": run(0.25, [6.0, 5.0, 4.0]),
    }


def test_arrivals_lie_between_points(runs: dict[str, dict[str, Any]]) -> None:
    goal = loss_report.goal_of(runs)
    assert goal.loss == pytest.approx(4.04)
    assert goal.steps == 30
    reached = loss_report.arrivals(runs, goal)
    assert reached[FAIR_BASELINE] == pytest.approx(29.6)
    assert reached["ddp-powersgd-1"] is None
    assert "1-bit Adam reaches the same loss 4.0x as soon" in loss_report.sentence(runs, goal)


def test_the_picture_of_losses_is_drawn(tmp_path: Path, runs: dict[str, dict[str, Any]]) -> None:
    loss_report.print_table(runs, loss_report.goal_of(runs))
    content = {"machine": MACHINE, "subject": "BERT", "findings": ["one"], "megabits": 50, "runs": runs}
    loss_report.draw(content, tmp_path / "losses.png")
    assert (tmp_path / "losses.png").read_bytes()[1:4] == b"PNG"


def turns_at(megabits: float) -> dict[str, list[dict[str, float]]]:
    """All compute for 0.1 s; fp32 sends 100 Mb, bf16 half of that; others send a twentieth and encode for 0.2 s."""
    megabits_sent = {BASELINE: 100.0, FAIR_BASELINE: 50.0}
    turns = {}
    for name in (ALONE, *CONTENDERS):
        sent = 0.0 if name == ALONE else megabits_sent.get(name, 5.0)
        encode = 0.0 if name == ALONE or name in megabits_sent else 0.2
        waited = sent / megabits
        one = {
            "seconds": 0.1 + encode + waited,
            "waited": waited,
            "cpu": 0.1 + encode,
            "interface_bytes": 1e6 * sent / 8,
            "counted_bytes": 1e6 * sent / 8,
        }
        turns[name] = [one] * 3
    return turns


@pytest.fixture
def entries() -> list[dict[str, Any]]:
    return step_report.at_rates({str(rate): turns_at(rate) for rate in (1000, 300, 200, 100, 60, 10)})


def test_rates_ascend_and_parts_are_told_apart(entries: list[dict[str, Any]]) -> None:
    assert [entry["megabits"] for entry in entries] == [10, 60, 100, 200, 300, 1000]
    record = entries[1]["contenders"]["onebit-adam"]
    assert record["encode"] == pytest.approx(0.2)
    assert record["wire"] == pytest.approx(5 / 60)
    assert record["speedup_over_fp32"] == pytest.approx((0.1 + 100 / 60) / (0.3 + 5 / 60))


def test_the_rate_under_which_ours_win(entries: list[dict[str, Any]]) -> None:
    winners = step_report.winning_rates(entries)
    assert winners.keys() == {name for name, one in CONTENDERS.items() if one.ours}
    # 50 / rate = 0.2 + 5 / rate, up to what a straight line between rates makes of it.
    assert winners["onebit-adam"] == pytest.approx(225, rel=0.05)


def test_fairness_is_a_fraction_of_the_line() -> None:
    fair = step_report.fairness({"bytes": 10**8, "bytes_sent": 150 * 10**6, "seconds": [9.0, 1.25, 1.2]}, 1000)
    assert fair["fraction_of_line_rate"] == pytest.approx(1.2 / 1.25)


@pytest.mark.parametrize("rates", [("10", "60", "1000"), ("None",)])
def test_the_picture_of_steps_is_drawn(tmp_path: Path, rates: tuple[str, ...]) -> None:
    entries = step_report.at_rates({rate: turns_at(100.0 if rate == "None" else float(rate)) for rate in rates})
    step_report.print_table(entries)
    content = {"machine": MACHINE, "subject": "BERT", "findings": ["one", "two"], "waiting": 0.94, "rates": entries}
    step_plots.draw(content, tmp_path / "steps.png")
    assert (tmp_path / "steps.png").read_bytes()[1:4] == b"PNG"


linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the kernel's accounts are Linux's")


def test_sleep_is_waiting() -> None:
    stopwatch = Stopwatch(Interface("lo"))
    time.sleep(0.2)
    reading = stopwatch.stop()
    assert reading.seconds >= 0.2
    assert 0.15 <= reading.waited <= reading.seconds


@linux
def test_computing_is_not_waiting_however_crowded_the_cores() -> None:
    stopwatch = Stopwatch(Interface("lo"))
    end = time.thread_time() + 0.2
    while time.thread_time() < end:
        pass
    reading = stopwatch.stop()
    assert reading.waited < 0.5 * reading.seconds
    assert reading.cpu > 0.1


@linux
def test_bytes_are_the_interfaces() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as receiver:
        receiver.bind(("127.0.0.1", 0))
        stopwatch = Stopwatch(Interface("lo"))
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
            sender.sendto(bytes(5000), receiver.getsockname())
        reading = stopwatch.stop()
    assert reading.sent >= 5000
    assert reading.received >= 5000
