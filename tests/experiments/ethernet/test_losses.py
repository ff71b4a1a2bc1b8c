"""A race that is added to, or timed at another rate."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from experiments.common import machine
from experiments.ethernet import __main__ as command
from experiments.ethernet import losses
from experiments.ethernet.cluster.clusters import EmulatedCluster

SETTINGS = ["--races", "losses", "--batch-size", "32", "--steps", "20"]


def run(seconds_a_step: float, losses_at: list[float]) -> dict[str, Any]:
    steps = [10 * number for number in range(1, len(losses_at) + 1)]
    timed = {"stage": "exact", "bytes_sent": 100, "steps": steps[-1], "timed_seconds": [seconds_a_step]}
    return {
        "steps": steps,
        "losses": losses_at,
        "seconds": [seconds_a_step * step for step in steps],
        "bytes_sent": [100 * step for step in steps],
        "seconds_a_step": {"exact": seconds_a_step},
        "kinds": [timed],
        "frozen_at": None,
    }


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[list[str]]:
    """The jobs that would be started, on a cluster that is none, beside a recorded race in `tmp_path`."""
    jobs: list[list[str]] = []

    def job(cluster: object, module: str, arguments: list[object], ranks_a_host: int, seconds: float) -> dict[str, Any]:
        words = [str(one) for one in arguments]
        jobs.append([module, *words])
        names = words[words.index("--contenders") + 1 : words.index("--tokens")]
        if module.endswith("kind_times"):
            return {"ranks": 4, "kinds": {name: run(0.5, [0.0] * 4)["kinds"] for name in names}}
        return {"ranks": 4, "runs": {name: run(0.25, [6.0, 5.0, 4.0]) for name in names}}

    monkeypatch.setattr(losses, "job", job)
    monkeypatch.setattr(
        losses, "_shared_arguments", lambda racing, *_: nullcontext(["--contenders", *racing, "--tokens"])
    )
    monkeypatch.setattr(command, "missing", lambda: None)
    monkeypatch.setattr(EmulatedCluster, "running", lambda self: nullcontext(self))
    content = {
        "machine": machine.describe(),
        "tcp": None,
        "subject": "BERT-tiny on Python's standard library, 20 steps, 32 sequences a rank, 4 hosts of one rank, Gloo",
        "megabits": 20,
        "learning_rate": 1e-3,
        "freeze_step": "auto",
        "runs": {"ddp-fp32": run(2.0, [5.0, 4.0]), "ddp-bf16": run(1.0, [5.0, 4.0])},
    }
    (tmp_path / "ethernet_losses.json").write_text(json.dumps(content))
    return jobs


def main(output: Path, *arguments: str) -> dict[str, Any]:
    assert command.main([*SETTINGS, *arguments, "--output", str(output)]) == 0
    content: dict[str, Any] = json.loads((output / "ethernet_losses.json").read_text())
    return content


def test_a_race_is_timed_at_another_rate_and_added_to(started: list[list[str]], tmp_path: Path) -> None:
    content = main(tmp_path, "--retime", "100", "--contenders", "ddp-bf16")
    assert [job[0].rpartition(".")[2] for job in started] == ["kind_times"]
    assert started[0][-2:] == ["--rate", "100"]
    assert content["retimed"]["100"]["seconds_to_the_loss"] == {"ddp-bf16": pytest.approx(0.5 * 19.6)}
    assert content["runs"]["ddp-bf16"] == run(1.0, [5.0, 4.0])

    adding = ["--add", "--loss-rate", "20", "--contenders", "diloco-30-int4", "--added-steps", "30"]
    content = main(tmp_path, *adding)
    assert started[1][started[1].index("--steps") + 1] == "30"
    assert content["steps"] == 20
    assert content["seconds_to_the_loss"]["diloco-30-int4"] == pytest.approx(0.25 * 29.6)
    assert list(content["retimed"]["100"]["seconds_to_the_loss"]) == ["ddp-bf16"]

    content = main(tmp_path, "--retime", "100", "1000", "--contenders", "ddp-bf16", "diloco-30-int4")
    assert [job[-1] for job in started[2:]] == ["100", "1000"]
    for rate in ("100", "1000"):
        assert content["retimed"][rate]["seconds_to_the_loss"]["diloco-30-int4"] == pytest.approx(0.5 * 29.6)
    # Its steps take as long whatever it learned: with other losses it arrives elsewhere.
    content = main(tmp_path, *adding[:-2])
    assert content["retimed"]["1000"]["seconds_to_the_loss"]["diloco-30-int4"] is not None


@pytest.mark.parametrize("what", ["machine", "tcp"])
def test_steps_over_other_links_are_not_mixed(
    what: str, started: list[list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    again = ["--retime", "100", "--contenders", "ddp-bf16"]
    content = main(tmp_path, *again)
    content["retimed"]["100"][what] = "another"
    (tmp_path / "ethernet_losses.json").write_text(json.dumps(content))
    assert command.main([*SETTINGS, *again, "--output", str(tmp_path)]) == 2
    assert f"with another {what}" in capsys.readouterr().err


@pytest.mark.parametrize("what", ["machine", "tcp"])
def test_nothing_is_added_over_other_links(
    what: str, started: list[list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "ethernet_losses.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {what: "another"}))
    adding = ["--add", "--loss-rate", "20", "--contenders", "diloco-30-int4"]
    assert command.main([*SETTINGS, *adding, "--output", str(tmp_path)]) == 2
    assert "holds another race" in capsys.readouterr().err
    assert not started


def test_a_run_that_does_not_add_up_is_refused(
    started: list[list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "ethernet_losses.json"
    content = json.loads(path.read_text())
    content["runs"]["ddp-bf16"]["bytes_sent"][0] += 1
    path.write_text(json.dumps(content))
    assert command.main([*SETTINGS, "--retime", "9", "--contenders", "ddp-bf16", "--output", str(tmp_path)]) == 2
    assert "ddp-bf16: the 1001 bytes sent by step 10" in capsys.readouterr().err
