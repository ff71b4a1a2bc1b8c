"""The main job end to end, with the smallest BERT: results on real ranks, resume, refusals."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from experiments.common.errors import BAD_INPUT, InputError
from experiments.pretrain_bert.__main__ import main, pretrain
from experiments.pretrain_bert.settings import parse
from tests.experiments.helpers import write_text
from tests.launching import Jobs
from thinwire.comm import Communicator, threads

MODULE = "experiments.pretrain_bert"
STEPS, STOP = 6, 4
OPTIONS = {
    "--ranks": 2,
    "--steps": STEPS,
    "--checkpoint-every": STOP,
    "--freeze-step": 2,
    "--evaluate-every": 1,
    "--print-every": 2,
    "--vocab-size": 120,
    "--sequence-length": 16,
    "--batch-size": 2,
    "--validation-sequences": 8,
    "--dropout": 0.1,
}


def command_line(folder: Path, corpus: Path, *arguments: str) -> list[str]:
    places = {"--output": folder / "results", "--checkpoints": folder / "runs", "--corpus": corpus}
    return [*(str(part) for pair in (OPTIONS | places).items() for part in pair), *arguments]


def on_one_rank(folder: Path, corpus: Path, *arguments: str) -> int:
    """In this process; the exit code."""
    return main(command_line(folder, corpus, *arguments, "--ranks", "1"))


def results(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "results" / "pretrain_bert.json").read_text())
    return content


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("corpus") / "shopping.txt", 2000)


@pytest.mark.launch
def test_a_run_writes_numbers_and_a_picture(jobs: Jobs, tmp_path: Path, corpus: Path) -> None:
    folder, ended = tmp_path, jobs.alone("-m", MODULE, *command_line(tmp_path, corpus))
    assert ended.returncode == 0, ended.stderr
    assert (folder / "results" / "pretrain_bert.png").read_bytes().startswith(b"\x89PNG")
    found = results(folder)
    assert found["ranks"] == 2
    assert found["settings"]["corpus"] == "shopping.txt"
    assert str(folder) not in json.dumps(found)
    for run in found["runs"].values():
        assert run["curve"]["steps"] == list(range(1, STEPS + 1))
        assert run["curve"]["bytes_sent"][-1] == run["bytes_sent"]
    assert found["runs"]["onebit-adam"]["frozen_at"] == 2
    assert found["findings"]["onebit-adam"]["fewer_bytes_frozen"] > 20
    assert "1-bit Adam  6/6" in ended.stderr
    assert "1-bit Adam: validation loss" in ended.stdout


def test_a_pre_ln_bert_trains_and_drops_layers_where_the_configuration_says(
    tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"progressive_layer_drop": {"enabled": True, "theta": 0.5, "gamma": 0.5}}))
    assert on_one_rank(tmp_path, corpus, "--pre-ln", "--optimizer", "adamw", "--config", str(config)) == 0
    found = results(tmp_path)
    assert found["settings"]["pre_ln"] is True
    losses = found["runs"]["adamw"]["curve"]["losses"]
    assert losses[-1] < losses[0]
    assert on_one_rank(tmp_path, corpus, "--optimizer", "adamw", "--config", str(config)) == BAD_INPUT
    assert "give --pre-ln" in capsys.readouterr().err


def test_a_resumed_run_repeats_the_uninterrupted_one(
    tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert on_one_rank(tmp_path, corpus) == 0
    whole = results(tmp_path)["runs"]
    for run in (tmp_path / "runs" / "pretrain_bert").glob("*/"):
        shutil.rmtree(run / f"step-{STEPS:08}")
    assert on_one_rank(tmp_path, corpus, "--resume") == 0
    assert f"continuing after step {STOP}" in capsys.readouterr().err
    for optimizer, run in whole.items():
        repeated = results(tmp_path)["runs"][optimizer]
        assert repeated["curve"] == run["curve"]
        assert repeated["frozen_at"] == run["frozen_at"]


def test_a_corpus_that_is_too_short_is_refused_on_every_rank(tmp_path: Path) -> None:
    short = tmp_path / "short.txt"
    short.write_text("abc abd abe")
    settings = parse(command_line(tmp_path, short))

    def refuse(comm: Communicator) -> str:
        with pytest.raises(InputError, match="the corpus is too short") as caught:
            pretrain(comm, settings)
        return str(caught.value)

    complaints = threads.run(refuse, 2)
    assert [complaint.count("the corpus is too short") for complaint in complaints] == [1, 1]
    assert not list((tmp_path / "results").iterdir())


def test_unreadable_input_is_refused_before_ranks_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("experiments.common.launching._start_ranks", lambda *_: pytest.fail("ranks were started"))
    binary = tmp_path / "binary"
    binary.write_bytes(bytes(range(256)))
    assert main(command_line(tmp_path, binary)) == BAD_INPUT
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith(f"{MODULE}: error: corpus file")
    assert said.err.count("\n") == 1
