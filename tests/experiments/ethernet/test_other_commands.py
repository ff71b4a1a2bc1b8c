"""The commands beside the race: what they refuse, and what is made of the seconds of local steps and collectives."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

from experiments.ethernet import collectives, local_steps, unseen
from experiments.ethernet.race.collective_times import line_seconds
from experiments.ethernet.race.local_step_report import print_table, record, under_way
from experiments.ethernet.race.local_step_times import fragment_bytes
from thinwire.optim.diloco.fragments import Timetable


@pytest.mark.parametrize("command", [collectives, local_steps, unseen])
def test_without_links_to_shape_nothing_is_measured(
    command: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "missing", lambda: "it takes root to make network namespaces")
    assert command.main(["--output", str(tmp_path)]) == 2
    assert "no links to shape: it takes root" in capsys.readouterr().err


@pytest.mark.parametrize(("collective", "seconds"), [("all_to_all", 0.24), ("all_gather", 0.24), ("all_reduce", 0.48)])
def test_the_line_carries_what_a_rank_sends(collective: str, seconds: float) -> None:
    assert line_seconds(collective, 1_000_000, 4, 100) == pytest.approx(seconds)


def test_a_fragment_is_under_way_from_the_step_it_leaves_after_to_the_one_it_is_back_after() -> None:
    # Of 10 steps fragments leave after the fifth and the tenth; a turn begins with the third.
    assert under_way(Timetable(every=10, overlap=2, fragments=2)) == [False, False, True, True, True] * 2
    assert under_way(Timetable(every=4, overlap=1, fragments=1)) == [False, False, True, True]
    uneven = under_way(Timetable(every=7, overlap=1, fragments=2))  # after the fourth and the seventh
    assert uneven == [False, False, True, True, False, True, True]


def test_a_fragment_sends_two_legs() -> None:
    assert fragment_bytes([0, 0, 30, 10, 0, 20, 25, 0]) == 45
    assert fragment_bytes([5, 5]) == 10


def test_steps_are_multiples_of_steps_alone(capsys: pytest.CaptureFixture[str]) -> None:
    timetable = Timetable(every=4, overlap=1, fragments=1)
    alone = [[2.0, 2.0, 2.0, 2.0]] * 3
    local = [[2.0, 2.0, 3.0, 5.0], [2.0, 2.0, 3.0, 5.0], [2.0, 2.0, 2.0, 20.0]]
    found = record({"fill": 1.0, "megabits": 8.0, "alone": alone, "local": local}, timetable)
    assert found["alone"] == 2.0
    assert found["step"] == 1.0
    assert found["under_way"] == 2.0
    assert found["period"] == 1.5
    assert found["by_step"] == [1.0, 1.0, 1.5, 2.5]
    unlimited = {**found, "fill": None, "megabits": None}
    print_table({"overlap": 1, "fragment_bytes": 2_000_000, "rates": [unlimited, found]})
    assert "1 steps                          8.00    2000.0   1.000      2.000   1.500" in capsys.readouterr().out
