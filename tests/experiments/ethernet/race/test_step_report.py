"""What measured steps become: records, sentences, a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from experiments.ethernet.race import step_plots, step_report
from experiments.ethernet.race.contenders import BASELINE, CONTENDERS, FAIR_BASELINE
from experiments.ethernet.race.findings import ALONE

MACHINE = {"cpu": "some", "cores": 2}


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


def test_sentences_name_rate_and_winner(entries: list[dict[str, Any]]) -> None:
    speed, wins = step_report.sentences(entries, step_report.winning_rates(entries), 0.94)
    assert "at 60 Mb/s, where fp32 waits 94%" in speed
    assert "on links slower than" in wins


def test_unshaped_links_have_no_winning_rate() -> None:
    entries = step_report.at_rates({"None": turns_at(1e4)})
    assert step_report.winning_rates(entries) == {}
    assert "without shaped links" in step_report.sentences(entries, {}, 0.94)[0]


def test_fairness_is_a_fraction_of_the_line() -> None:
    fair = step_report.fairness({"bytes": 10**8, "bytes_sent": 150 * 10**6, "seconds": [9.0, 1.25, 1.2]}, 1000)
    assert fair["fraction_of_line_rate"] == pytest.approx(1.2 / 1.25)


@pytest.mark.parametrize("rates", [("10", "60", "1000"), ("None",)])
def test_the_picture_of_steps_is_drawn(tmp_path: Path, rates: tuple[str, ...]) -> None:
    entries = step_report.at_rates({rate: turns_at(100.0 if rate == "None" else float(rate)) for rate in rates})
    step_report.print_table(entries)
    content = {
        "machine": MACHINE,
        "subject": "BERT",
        "findings": ["one", "two"],
        "waiting": 0.94,
        "rates": entries,
    }
    step_plots.draw(content, tmp_path / "steps.png")
    assert (tmp_path / "steps.png").read_bytes()[1:4] == b"PNG"
