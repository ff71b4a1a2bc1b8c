"""The main job: its command line and configuration; and results, resume and refusals with the smallest BERT."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from experiments.common.errors import BAD_INPUT, InputError
from experiments.pretrain_bert.__main__ import main, pretrain
from experiments.pretrain_bert.engine_settings import load
from experiments.pretrain_bert.settings import PretrainSettings, parse
from tests.experiments.helpers import write_text, written
from tests.launching import Jobs
from thinwire.comm import Communicator, threads

MODULE = "experiments.pretrain_bert"
STEPS, STOP = 6, 4
OPTIONS = (
    f"--ranks 2 --steps {STEPS} --checkpoint-every {STOP} --freeze-step 2 --evaluate-every 1 --print-every 2 "
    "--vocab-size 120 --sequence-length 16 --batch-size 2 --validation-sequences 8 --dropout 0.1"
)


def command_line(folder: Path, corpus: Path, *arguments: str) -> list[str]:
    places = {"--output": folder / "results", "--checkpoints": folder / "runs", "--corpus": corpus}
    return [*OPTIONS.split(), *(str(part) for pair in places.items() for part in pair), *arguments]


def on_one_rank(folder: Path, corpus: Path, *arguments: str) -> int:
    """In this process; the exit code."""
    return main(command_line(folder, corpus, *arguments, "--ranks", "1"))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("corpus") / "shopping.txt", 2000)


@pytest.mark.launch
def test_a_run_writes_numbers_and_a_picture(jobs: Jobs, tmp_path: Path, corpus: Path) -> None:
    folder, ended = tmp_path, jobs.alone("-m", MODULE, *command_line(tmp_path, corpus))
    assert ended.returncode == 0, ended.stderr
    found = written(folder / "results", "pretrain_bert")
    assert found["ranks"] == 2
    assert found["settings"]["corpus"] == "shopping.txt"
    for run in found["runs"].values():
        assert run["curve"]["steps"] == list(range(1, STEPS + 1))
        assert run["curve"]["bytes_sent"][-1] == run["bytes_sent"]
    assert found["runs"]["onebit-adam"]["frozen_at"] == 2
    assert found["findings"]["onebit-adam"]["fewer_bytes_frozen"] > 20
    assert "1-bit Adam  6/6" in ended.stderr
    assert "1-bit Adam: validation loss" in ended.stdout


def test_a_pre_ln_bert_trains_and_drops_layers_where_the_configuration_says(tmp_path, corpus, capsys) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"progressive_layer_drop": {"enabled": True, "theta": 0.5, "gamma": 0.5}}))
    assert on_one_rank(tmp_path, corpus, "--pre-ln", "--optimizer", "adamw", "--config", str(config)) == 0
    found = written(tmp_path / "results", "pretrain_bert")
    assert found["settings"]["pre_ln"] is True
    losses = found["runs"]["adamw"]["curve"]["losses"]
    assert losses[-1] < losses[0]
    assert on_one_rank(tmp_path, corpus, "--optimizer", "adamw", "--config", str(config)) == BAD_INPUT
    assert "give --pre-ln" in capsys.readouterr().err


def test_a_resumed_run_repeats_the_uninterrupted_one(tmp_path, corpus, capsys) -> None:
    assert on_one_rank(tmp_path, corpus) == 0
    whole = written(tmp_path / "results", "pretrain_bert")["runs"]
    for run in (tmp_path / "runs" / "pretrain_bert").glob("*/"):
        shutil.rmtree(run / f"step-{STEPS:08}")
    assert on_one_rank(tmp_path, corpus, "--resume") == 0
    assert f"continuing after step {STOP}" in capsys.readouterr().err
    for optimizer, run in whole.items():
        repeated = written(tmp_path / "results", "pretrain_bert")["runs"][optimizer]
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


def settings(folder: Path, file: Any = None, given: str = "") -> PretrainSettings:
    """What the command line `given` and a configuration file make."""
    arguments = [*given.split(), "--output", str(folder), "--checkpoints", str(folder)]
    if file is not None:
        path = folder / "config.json"
        path.write_text(file if isinstance(file, str) else json.dumps(file))
        arguments += ["--config", str(path)]
    return parse(arguments)


def test_without_a_file_options_make_the_configuration(tmp_path: Path) -> None:
    found = settings(tmp_path, given="--zero 2 --lr 0.5 --batch-size 3 --steps 50 --seed 4")
    plan = found.plan
    assert (plan.steps, plan.warmup_steps, plan.learning_rate, plan.freeze_step, plan.seed) == (50, 5, 0.5, 10, 4)
    assert found.engine.config("onebit-adam") == {
        "train_micro_batch_size_per_gpu": 3,
        "optimizer": {"type": "OneBitAdam", "params": {"lr": 0.5, "weight_decay": 0.01, "freeze_step": 10}},
        "zero_optimization": {"stage": 2},
        "seed": 4,
    }
    assert "freeze_step" not in found.engine.config("adamw")["optimizer"]["params"]


def test_the_file_decides_what_options_leave_open(tmp_path: Path) -> None:
    file = {
        "train_batch_size": 24,
        "optimizer": {"type": "onebitadam", "params": {"lr": 0.25, "freeze_step": 5, "weight_decay": 0.5}},
        "zero_optimization": {"stage": 2, "overlap_comm": True},
        "bf16": {"enabled": True},
        "seed": 9,
    }
    found = settings(tmp_path, file)
    assert found.engine.optimizers == ("onebit-adam",)
    plan = found.plan
    assert (plan.learning_rate, plan.freeze_step, plan.weight_decay, plan.seed, found.zero) == (0.25, 5, 0.5, 9, 2)
    loaded = load(found.engine.config("onebit-adam"), 3)
    assert (loaded.train_batch_size, loaded.train_micro_batch_size_per_gpu) == (24, 8)
    assert loaded.bf16.enabled
    assert found.describe(24)["config"] == file


def test_the_example_can_be_used(tmp_path: Path) -> None:
    example = Path(__file__).parents[2] / "experiments" / "configs" / "bert_onebit_zero1.json"
    found = settings(tmp_path, example.read_text())
    assert found.engine.optimizers == ("onebit-adam",)
    assert load(found.engine.config("onebit-adam"), 2).zero_optimization.overlap_comm


@pytest.mark.parametrize(
    ("file", "given", "complaint"),
    [
        ({"zero_optimization": {"stage": 2}}, "--zero 1", '--zero 1 .*"zero_optimization.stage" 2'),
        ({"optimizer": {"type": "AdamW", "params": {"lr": 1}}}, "--lr 2", "--lr 2"),
        ({"optimizer": {"type": "AdamW"}}, "--optimizer onebit-adam", "--optimizer onebit-adam .*disagree"),
        ({"optimizer": {"type": "SGD"}}, "", '"SGD"'),
        (
            {"optimizer": {"type": "ZeroOneAdam", "params": {"var_freeze_step": 9}}},
            "--freeze-step 7",
            '--freeze-step 7 .*"optimizer.params.var_freeze_step" 9',
        ),
        ({"train_batch_size": 8}, "--batch-size 4", '--batch-size 4 .*"train_batch_size" 8'),
        ({"seed": 1}, "--seed 2", "--seed 2"),
        ({"scheduler": {"type": "WarmupLR"}}, "--warmup-steps 3", "--warmup-steps 3 .*scheduler"),
        ({"zero_optimisation": {"stage": 2}}, "", "zero_optimization"),
        ({"optimizer": {"type": "AdamW", "params": {"lr": "fast"}}}, "", "fast"),
        ("{", "", "is not JSON"),
        ([1], "", "must hold a JSON object"),
    ],
)
def test_contradictions_and_bad_files_are_refused(tmp_path: Path, file: Any, given: str, complaint: str) -> None:
    with pytest.raises(InputError, match=complaint):
        settings(tmp_path, file, given)
