"""The command line of the main job: defaults that fit, and complaints that name the option."""

from __future__ import annotations

from pathlib import Path

import pytest

from experiments.common.errors import InputError
from experiments.pretrain_bert.engine_settings import load
from experiments.pretrain_bert.settings import parse
from experiments.tasks.sizes import SIZES


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


@pytest.mark.parametrize("size", SIZES)
def test_every_size_is_offered(size: str, folders: list[str]) -> None:
    assert parse(["--model", size, *folders]).model == size


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ("--model huge", "--model.*huge.*tiny"),
        ("--optimizer sgd", "--optimizer.*sgd"),
        ("--steps 0", "--steps.*at least 1"),
        ("--steps many", "--steps.*'many'"),
        ("--batch-size -3", "--batch-size"),
        ("--lr nan", "--lr.*above 0"),
        ("--lr -1", "--lr"),
        ("--freeze-step 0", "--freeze-step"),
        ("--freeze-step soon", "--freeze-step.*'soon'"),
        ("--ranks 0", "--ranks"),
        ("--dropout 1", "--dropout"),
        ("--weight-decay -1", "--weight-decay"),
        ("--steps 5 --warmup-steps 5", "--warmup-steps 5 must be less"),
        ("--sequence-length 3", "--sequence-length 3"),
        ("--seed -1", "--seed"),
        ("--zero 4", "--zero"),
        ("--config absent.json", "absent.json cannot be read"),
        ("--zero 3 --optimizer onebit-adam", "stage 3 .*momentum"),
        ("--corpus", "--corpus"),
        ("--unheard-of", "--unheard-of"),
    ],
)
def test_bad_options_are_named(given: str, complaint: str, folders: list[str]) -> None:
    with pytest.raises(InputError, match=complaint):
        parse([*given.split(), *folders])


@pytest.mark.parametrize("option", ["--output", "--checkpoints"])
def test_unwritable_folders_are_named(option: str, folders: list[str], tmp_path: Path) -> None:
    occupied = tmp_path / "file"
    occupied.write_text("in the way")
    for folder in (occupied, occupied / "below"):
        with pytest.raises(InputError, match=f"{option} .*cannot be written"):
            parse([*folders, option, str(folder)])


def test_unusable_corpora_are_refused(folders: list[str], tmp_path: Path) -> None:
    with pytest.raises(InputError, match="absent"):
        parse([*folders, "--corpus", str(tmp_path / "absent")])
