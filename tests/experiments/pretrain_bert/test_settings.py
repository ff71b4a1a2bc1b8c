"""The command line of the main job: defaults that fit, and complaints that name the option."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from experiments.common.errors import InputError
from experiments.pretrain_bert.engine_settings import load
from experiments.pretrain_bert.settings import PretrainSettings, parse


@pytest.fixture
def folders(tmp_path: Path) -> list[str]:
    return ["--output", str(tmp_path / "results"), "--checkpoints", str(tmp_path / "runs")]


def test_defaults_train_both_optimizers_and_freeze_after_a_fifth(folders: list[str]) -> None:
    settings = parse(folders)
    assert settings.engine.optimizers == ("adamw", "onebit-adam")
    assert settings.zero == 1
    assert settings.plan.freeze_step == settings.plan.steps // 5
    assert settings.ranks is None
    assert settings.corpus is None


def test_options_reach_the_plan(folders: list[str]) -> None:
    given = "--optimizer onebit-adam --steps 50 --lr 0.5 --freeze-step 7 --seed 3 --batch-size 2 --sequence-length 9"
    settings = parse([*given.split(), *folders])
    plan = settings.plan
    assert (plan.steps, plan.warmup_steps, plan.learning_rate, plan.freeze_step, plan.seed) == (50, 5, 0.5, 7, 3)
    assert settings.engine.optimizers == ("onebit-adam",)
    assert load(settings.engine.config("onebit-adam"), 4).train_batch_size == 8


@pytest.mark.parametrize("option", ["--output", "--checkpoints"])
def test_unwritable_folders_are_named(option: str, folders: list[str], tmp_path: Path) -> None:
    occupied = tmp_path / "file"
    occupied.write_text("in the way")
    for folder in (occupied, occupied / "below"):
        with pytest.raises(InputError, match=f"{option} .*cannot be written"):
            parse([*folders, option, str(folder)])


EXAMPLE = Path(__file__).parents[3] / "experiments" / "configs" / "bert_onebit_zero1.json"


def settings(folder: Path, file: Any = None, given: str = "") -> PretrainSettings:
    """What the command line `given` and a configuration file make."""
    arguments = [*given.split(), "--output", str(folder), "--checkpoints", str(folder)]
    if file is not None:
        path = folder / "config.json"
        path.write_text(file if isinstance(file, str) else json.dumps(file))
        arguments += ["--config", str(path)]
    return parse(arguments)


def test_without_a_file_options_make_the_configuration(tmp_path: Path) -> None:
    found = settings(tmp_path, given="--zero 2 --lr 0.5 --batch-size 3 --steps 50 --seed 4").engine
    assert found.config("onebit-adam") == {
        "train_micro_batch_size_per_gpu": 3,
        "optimizer": {"type": "OneBitAdam", "params": {"lr": 0.5, "weight_decay": 0.01, "freeze_step": 10}},
        "zero_optimization": {"stage": 2},
        "seed": 4,
    }
    assert "freeze_step" not in found.config("adamw")["optimizer"]["params"]


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


def test_auto_leaves_it_to_the_options(tmp_path: Path) -> None:
    file = {"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}, "train_micro_batch_size_per_gpu": "auto"}
    found = settings(tmp_path, file, "--lr 0.5 --batch-size 7")
    assert found.plan.learning_rate == 0.5
    assert load(found.engine.config("adamw"), 2).train_batch_size == 14


def test_a_scheduler_in_the_file_takes_the_rates_over(tmp_path: Path) -> None:
    scheduler = {"type": "WarmupLR", "params": {"warmup_num_steps": 3}}
    found = settings(tmp_path, {"scheduler": scheduler})
    assert found.engine.scheduled
    assert found.describe(2)["warmup_steps"] is None


def test_the_example_can_be_used(tmp_path: Path) -> None:
    found = settings(tmp_path, EXAMPLE.read_text())
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


def test_batch_sizes_that_do_not_multiply_out_are_refused(tmp_path: Path) -> None:
    found = settings(tmp_path, {"train_batch_size": 7})
    with pytest.raises(InputError, match="train_batch_size 7"):
        load(found.engine.config("adamw"), 2)
