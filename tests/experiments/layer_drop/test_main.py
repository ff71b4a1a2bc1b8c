"""The study of layer drop: what its command line refuses, and a whole tiny run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from experiments.layer_drop.__main__ import main
from tests.experiments.helpers import write_text


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("--sequence-length", "7"), "--sequence-length 7 must be at least 8"),
        (("--lr", "0.002"), "--higher-lr takes rates that differ"),
        (("--higher-lr", "0.1", "0.1"), "--higher-lr takes rates that differ"),
        (("--steps", "1"), "--steps must be at least 2"),
        (("--theta", "1"), "--theta"),
        (("--rounds", "0"), "--rounds"),
        (("--corpus", "absent"), "absent"),
    ],
)
def test_a_command_line_that_cannot_work_is_refused(
    arguments: tuple[str, ...], complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*arguments, "--output", str(tmp_path)]) == 2
    assert complaint in capsys.readouterr().err


def test_a_run_writes_numbers_and_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    corpus = write_text(tmp_path / "shopping.txt", 2000)
    data = ["--model", "tiny", "--vocab-size", "120", "--sequence-length", "16", "--validation-sequences", "8"]
    training = ["--steps", "6", "--batch-size", "4", "--seeds", "2", "--higher-lr", "0.01"]
    timing = ["--layers", "5", "--rounds", "3", "--timed-sequences", "1", "--timed-length", "16"]
    counting = ["--keep-rate-steps", "300", "--output", str(tmp_path)]
    assert main(["--corpus", str(corpus), *data, *training, *timing, *counting]) == 0
    assert (tmp_path / "layer_drop.png").read_bytes().startswith(b"\x89PNG")
    found = json.loads((tmp_path / "layer_drop.json").read_text())
    assert str(tmp_path) not in json.dumps(found)
    assert len(found["runs"]) == 2 * 2 + 1 + 3
    assert {run["curve"]["steps"][-1] for run in found["runs"]} == {6}
    assert found["step_time"]["the stack"]["layers"] == len(found["keep_rates"]["measured"]) == 5
    assert found["findings"][0] in capsys.readouterr().out
