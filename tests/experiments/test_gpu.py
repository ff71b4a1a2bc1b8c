"""Stages stand alone: what one lacks, or does wrong, or takes too long for, keeps no other from running."""

import json
from pathlib import Path

import pytest
import torch

from experiments.gpu import __main__ as command
from experiments.gpu import training
from experiments.gpu.stages import STAGES, Stage, run

REPOSITORY = Path(__file__).parents[2]


def test_every_test_of_the_gpu_is_in_a_stage() -> None:
    files = {path.name for path in (REPOSITORY / "tests" / "gpu").glob("test_*.py")}
    assert files == {Path(part).name for stage in STAGES for part in stage.arguments if part.startswith("tests/")}


@pytest.mark.parametrize(
    ("stage", "status"),
    [
        (Stage("a", ("-c", "print('fine')")), "passed"),
        (Stage("b", ("-c", "raise SystemExit(3)")), "failed"),
        (Stage("c", ("-c", "import time; time.sleep(60)")), "out of time"),
        (Stage("d", ("-c", "print('fine')"), needs=("no_such_module",)), "skipped"),
        (Stage("e", ("-c", "print('fine')"), gpus=2), "skipped"),
    ],
    ids=lambda one: one if isinstance(one, str) else "",
)
def test_what_becomes_of_a_stage(stage: Stage, status: str, tmp_path: Path) -> None:
    record = run(stage, tmp_path, gpus=1, seconds=0.5 if status == "out of time" else 60)
    assert record["status"] == status, record
    if status == "passed":
        assert record["output"] == ["fine"]
    if status == "skipped":
        assert record["lacks"] == (["no_such_module"] if stage.needs else ["2 GPUs, there are 1"])


def test_a_failing_stage_is_recorded_and_the_next_one_runs(tmp_path, monkeypatch, capsys) -> None:
    stages = [Stage("bad", ("-c", "raise SystemExit(3)")), Stage("good", ("-c", "pass"))]
    monkeypatch.setattr(command, "chosen", lambda names: stages)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda number: "a GPU")
    assert command.main(["--output", str(tmp_path)]) == 1
    assert [json.loads((tmp_path / f"stage_{one.name}.json").read_text())["status"] for one in stages] == [
        "failed",
        "passed",
    ]
    assert command.main(["nonsense"]) == 2
    assert "there is no stage 'nonsense'" in capsys.readouterr().err


@pytest.mark.programs
def test_training_is_tried_out_without_a_gpu(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(training, "_VOCABULARY", 100)
    monkeypatch.setattr(training, "_LENGTH", 16)
    output = tmp_path / "out.json"
    small = ["--model", "tiny", "--batch-size", "1", "--steps", "1", "--device", "cpu"]
    assert training.main([*small, "--output", str(output)]) == 0
    systems = json.loads(output.read_text())["systems"]
    assert set(systems) == set(training._systems(1, "cpu"))
    assert all(one["tokens_a_second"] > 0 and one["loss"] > 0 for one in systems.values())
