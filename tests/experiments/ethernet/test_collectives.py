"""What collectives are held against, and what the command line of their times refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from experiments.ethernet import collectives
from experiments.ethernet.race.collective_times import line_seconds


@pytest.mark.parametrize(("collective", "seconds"), [("all_to_all", 0.24), ("all_gather", 0.24), ("all_reduce", 0.48)])
def test_the_line_carries_what_a_rank_sends(collective: str, seconds: float) -> None:
    assert line_seconds(collective, 1_000_000, 4, 100) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--hosts", "1"], "from 2 to 250"),
        (["--rates", "0"], "at least 1"),
        (["--backends", "nccl"], "invalid choice"),
        (["--ways", "away"], "invalid choice"),
    ],
)
def test_bad_command_lines_are_refused(
    arguments: list[str], complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert collectives.main([*arguments, "--output", str(tmp_path)]) == 2
    assert complaint in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_without_links_to_shape_nothing_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(collectives, "missing", lambda: "it takes root to make network namespaces")
    assert collectives.main(["--output", str(tmp_path)]) == 2
    assert "no links to shape: it takes root" in capsys.readouterr().err
