"""The study in small: it runs on ranks in threads, loses nothing when it is stopped, and refuses what cannot work."""

from __future__ import annotations

from pathlib import Path

import pytest

from experiments.common.errors import InputError
from experiments.common.results import read_json, write_json
from experiments.frontier import learning
from experiments.frontier.__main__ import main, parse
from experiments.frontier.contenders import CONTENDERS
from experiments.frontier.store import Run
from experiments.training.optimizers import OPTIMIZERS
from tests.experiments.helpers import write_text


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--task", "images"], "images"),
        (["--contenders", "sgd"], "sgd"),
        (["--task", "mini", "--contenders", "lamb"], "lamb learns none of --task mini"),
        (["--workers", "0"], "--workers"),
        (["--quick"], "no measurement: give another folder"),
        (["--output", "/proc/nowhere"], "cannot be written"),
    ],
)
def test_a_command_line_that_cannot_work_is_refused(arguments: list[str], complaint: str) -> None:
    with pytest.raises(InputError, match=complaint):
        parse(arguments)


def test_every_optimizer_of_the_experiments_is_compared() -> None:
    assert {one.optimizer for one in CONTENDERS.values()} == OPTIMIZERS.keys()
    assert len({(one.colour, one.marker) for one in CONTENDERS.values()}) == len(CONTENDERS)
    assert {one.beside for one in CONTENDERS.values()} - {None} <= CONTENDERS.keys()


def test_a_stopped_study_goes_on_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    corpus = write_text(tmp_path / "shopping.txt", 400)
    command = ["--quick", "--task", "text", "--contenders", "adamw", "diloco-10-none", "--output", str(tmp_path)]
    command += ["--corpus", str(corpus)]
    results = tmp_path / "frontier_text.json"
    trained: list[str] = []

    def stop_after_4(*arguments: object) -> Run:
        if len(trained) == 4:
            raise KeyboardInterrupt
        trained.append("run")
        return train(*arguments)  # type: ignore[arg-type]

    train = learning.train
    monkeypatch.setattr(learning, "train", stop_after_4)
    assert main(command) == 130
    before = read_json(results)["runs"]
    assert len(before) == 4
    monkeypatch.setattr(learning, "train", train)
    assert main(command) == 0
    found = read_json(results)
    assert {name: found["runs"][name] for name in before} == before
    assert list(found["standings"]["2"]) == ["adamw", "diloco-10-none"]
    adamw, diloco = found["standings"]["2"].values()
    assert diloco["seeds"] == 1
    assert (
        diloco["fewer_bytes"] == pytest.approx(adamw["bytes_sent"] / diloco["bytes_sent"]) == pytest.approx(2, rel=0.01)
    )
    assert found["findings"][0] in capsys.readouterr().out
    assert any(line.startswith("1-bit Adam, 2 workers: 0 of 1 seeds") for line in found["not_run"])
    assert str(tmp_path) not in results.read_text()
    assert (tmp_path / "frontier_text.png").read_bytes().startswith(b"\x89PNG")
    # Runs of other settings are not mixed.
    found["settings"]["steps"] += 1
    write_json(results, found)
    assert main(command) == 2
    assert "runs of other settings" in capsys.readouterr().err
