"""`thinwire checkpoint`: what it prints and how it exits."""

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.engine.checkpoint.jobs import Values, same, save
from thinwire.command_line import main
from thinwire.engine.checkpoint.manifest import _sealed


@pytest.fixture
def values(tmp_path: Path) -> Values:
    """What is in step-2; step-1 is older."""
    newer = Values(2, 2)
    save(tmp_path / "in", ("step-1", Values(1, 3)), ("step-2", newer))
    return newer


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    """The exit code and what was printed."""
    try:
        code = main(["checkpoint", *map(str, arguments)])
    except SystemExit as ended:
        code = int(ended.code or 0)
    printed = capsys.readouterr()
    return code, printed.out, printed.err


def test_verify_says_what_is_whole(tmp_path: Path, values: Values, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "verify", tmp_path / "in") == (0, "step-2: whole\nstep-1: whole\n", "")
    assert run(capsys, "verify", tmp_path / "in", "--tag", "step-1") == (0, "step-1: whole\n", "")


def test_verify_names_damaged_files(tmp_path: Path, values: Values, capsys: pytest.CaptureFixture[str]) -> None:
    os.truncate(tmp_path / "in" / "step-1" / "rank-00002.safetensors", 9)
    (tmp_path / "in" / "step-1" / "rank-00000.safetensors").unlink()
    code, printed, _ = run(capsys, "verify", tmp_path / "in")
    assert code == 1
    assert printed.splitlines()[0] == "step-2: whole"
    assert "step-1: rank-00000.safetensors is missing" in printed
    assert "step-1: rank-00002.safetensors has 9 bytes" in printed
    assert run(capsys, "verify", tmp_path / "in", "--tag", "step-2")[0] == 0
    assert run(capsys, "verify", tmp_path / "in", "--tag", "step-1")[0] == 1


def test_inspect(tmp_path: Path, values: Values, capsys: pytest.CaptureFixture[str]) -> None:
    code, printed, _ = run(capsys, "inspect", tmp_path / "in", "--json")
    assert code == 0
    described = json.loads(printed)
    numel = sum(values.model.numel(name) for name in values.shapes)
    assert (described["tag"], described["step"], described["world_size"]) == ("step-2", 2, 2)
    assert described["parameters"] == {"tensors": 5, "elements": numel, "dtypes": ["bfloat16"]}
    assert described["bytes_of_kind"] == {
        "exp_avg": 4 * numel,
        "master": 4 * numel,
        "weight": 2 * numel,
        "scalar.step": 8 * len(values.shapes),
    }
    assert described["files"].keys() == {"rank-00000.safetensors", "rank-00001.safetensors"}
    code, printed, _ = run(capsys, "inspect", tmp_path / "in", "--tag", "step-1")
    assert code == 0
    lines = {line.split("  ")[0]: line.split("  ")[-1].strip() for line in printed.splitlines()}
    assert lines["tag"] == "step-1"
    assert lines["step"] == "1"
    assert lines["world size"] == "3"
    assert lines["kind weight"] == f"{2 * numel:,} bytes"
    (tmp_path / "in" / "step-1" / "manifest.json").write_text("{}")
    assert run(capsys, "inspect", tmp_path / "in", "--tag", "step-1")[0] == 1


def test_export(tmp_path: Path, values: Values, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "some.json"
    config.write_text('{"model_type": "bert"}')
    code, printed, _ = run(
        capsys, "export", tmp_path / "in", tmp_path / "out", "--dtype", "fp16", "--config", config, "--tag", "step-2"
    )
    assert code == 0
    assert "step-2" in printed
    exported = load_file(tmp_path / "out" / "model.safetensors")
    wanted = values.flat["master", "embedding"].to(torch.float16).view(values.shapes["embedding"])
    assert same(exported["embedding"], wanted)
    assert (tmp_path / "out" / "config.json").read_text() == config.read_text()


def test_export_falls_back_and_says_so(tmp_path: Path, values: Values, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "in" / "step-2" / "manifest.json").unlink()
    code, printed, complaint = run(capsys, "export", tmp_path / "in", tmp_path / "out")
    assert code == 0
    assert "step-1" in printed
    assert "manifest.json is missing" in complaint
    code, _, complaint = run(capsys, "export", tmp_path / "in", tmp_path / "out", "--tag", "step-2")
    assert code == 1
    assert "manifest.json is missing" in complaint


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        *(("tied", value, "shared.tied") for value in (None, [], "a", 3, {"a": 1}, {"a": None}, {"a": "gone"})),
        ("tied", {"alias": "alias"}, "shared.tied"),
        *(("frozen", value, "shared.frozen") for value in (None, "a", {}, [1], [[]])),
        *(("progress", value, "shared.progress") for value in (None, [], "a")),
    ],
)
def test_sealed_values_of_other_types_are_one_error_to_all(tmp_path, values, capsys, name, value, message) -> None:
    path = tmp_path / "in" / "step-2" / "manifest.json"
    body = json.loads(path.read_bytes())
    del body["sha256"]
    body["shared"][name] = value
    path.write_bytes(_sealed(body))
    one, fp32 = ("--tag", "step-2"), ("--format", "deepspeed-fp32")
    for command in (
        ("verify", tmp_path / "in", *one),
        ("export", tmp_path / "in", *one, tmp_path / "out", "--tied"),
        ("export", tmp_path / "in", *one, tmp_path / "out", *fp32),
        ("export", tmp_path / "in", *one, tmp_path / "out", *fp32, "--exclude-frozen-parameters"),
    ):
        code, printed, complaint = run(capsys, *command)
        assert code == 1
        assert message in printed + complaint
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("verify",), "required: DIR"),
        (("verify", "{}/nothing"), "there is no checkpoint in"),
        (("verify", "{}/in", "--tag", "step-9"), "there is no checkpoint 'step-9', only step-2, step-1"),
        (("verify", "{}/in/step-1"), "/in --tag step-1"),
        (("inspect", "{}/pickles"), "weights.pt is a pickle"),
        (("verify", "{}/pickles", "--tag", "weights.pt"), "weights.pt is no checkpoint but a pickle"),
        (("export", "{}/in"), "required: OUTPUT"),
        (("export", "{}/in", "{}/out", "--dtype", "int8"), "invalid choice"),
        (("export", "{}/in", "{}/out", "--config", "{}/nothing"), "is not a file"),
        ((), "required"),
        (("repair", "{}/in"), "repair"),
    ],
)
def test_bad_usage(tmp_path, values, capsys, arguments, complaint) -> None:
    (tmp_path / "pickles").mkdir()
    torch.save({}, tmp_path / "pickles" / "weights.pt")
    code, printed, said = run(capsys, *(argument.format(tmp_path) for argument in arguments))
    assert code == 2
    assert printed == ""
    assert complaint in said
    assert not (tmp_path / "out").exists()


@pytest.mark.launch
def test_as_a_program(jobs, tmp_path: Path, values: Values) -> None:
    """What it prints and its exit code leave the process; one that is not 0 does not come by itself."""
    (tmp_path / "in" / "step-2" / "rank-00001.safetensors").write_bytes(b"")
    ended = jobs.alone("-m", "thinwire.command_line", "checkpoint", "verify", str(tmp_path / "in"))
    assert ended.returncode == 1, ended.stderr
    assert ended.stdout.startswith("step-2: rank-00001.safetensors ")
    assert ended.stdout.endswith("\nstep-1: whole\n")
