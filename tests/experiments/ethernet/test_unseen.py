"""What the plan's accuracy is measured at, and what its command line refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from experiments.ethernet import unseen


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--probe-rate", "500"], "the plan would have seen it"),
        (["--hosts", "1"], "a single rank sends nothing"),
        (["--contenders", "onebit-adam"], "must name ddp-fp32"),
        (["--rates", "0"], "at least 1"),
    ],
)
def test_bad_command_lines_are_refused(
    arguments: list[str], complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert unseen.main([*arguments, "--output", str(tmp_path)]) == 2
    assert complaint in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_without_links_to_shape_nothing_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(unseen, "missing", lambda: "it takes root to make network namespaces")
    assert unseen.main(["--output", str(tmp_path)]) == 2
    assert "no links to shape: it takes root" in capsys.readouterr().err
