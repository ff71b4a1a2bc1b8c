"""The study of Lion in small: a whole run on ranks in threads, and what its command line refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from experiments.common.errors import InputError
from experiments.lion.__main__ import main, parse, study
from tests.experiments.helpers import write_text
from thinwire.comm import threads


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--methods", "lion"], "--methods must name adamw"),
        (["--methods", "adamw", "adamw"], "something to compare"),
        (["--methods", "sgd"], "sgd"),
        (["--seeds", "0"], "--seeds"),
        (["--corpus", "absent"], "absent"),
    ],
)
def test_a_command_line_that_cannot_work_is_refused(arguments: list[str], complaint: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=complaint):
        parse([*arguments, "--output", str(tmp_path)])


def test_its_command_line_runs_and_says_whose_refusal_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--methods", "lion", "--output", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith("experiments.lion: error: --methods must name adamw")


def test_a_run_writes_numbers_and_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    corpus = write_text(tmp_path / "shopping.txt", 500)
    methods = ["--methods", "adamw", "lion", "onebit-adam"]
    short = ["--steps", "3", "--seeds", "2", "--validation-windows", "8"]
    options = parse(["--corpus", str(corpus), *methods, *short, "--output", str(tmp_path)])
    threads.run(lambda comm: study(comm, options), 2)
    assert (tmp_path / "lion.png").read_bytes().startswith(b"\x89PNG")
    found = json.loads((tmp_path / "lion.json").read_text())
    assert str(tmp_path) not in json.dumps(found)
    assert list(found["methods"]) == ["adamw", "lion", "onebit-adam"]
    for one in found["methods"].values():
        assert [run["seed"] for run in one["runs"]] == [0, 1]
        losses = one["final_loss_by_learning_rate"]
        assert min(losses.values()) == losses[f"{one['learning_rate']:g}"] == one["runs"][0]["final_loss"]
        assert one["final_loss"] == pytest.approx(sum(run["final_loss"] for run in one["runs"]) / 2)
        assert one["plan"]["learning_rate"] == one["learning_rate"]
    sent = {name: one["bytes_sent"] for name, one in found["methods"].items()}
    assert sent["lion"] == sent["adamw"] > 2 * sent["onebit-adam"]
    assert found["findings"][0] in capsys.readouterr().out
