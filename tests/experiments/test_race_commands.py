"""The race over Ethernet end to end on two emulated hosts; a race that is added to, or timed at another rate."""

import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from experiments.common import machine
from experiments.ethernet import __main__ as command
from experiments.ethernet import losses
from experiments.ethernet.cluster.clusters import EmulatedCluster
from tests.experiments.helpers import race_run
from tests.experiments.test_cluster import needs_cluster


@needs_cluster
@pytest.mark.launch
@pytest.mark.chaos
def test_steps_are_raced_and_bytes_counted(tmp_path: Path) -> None:
    racing = ["--contenders", "ddp-fp32", "ddp-bf16", "onebit-adam"]
    links = ["--hosts", "2", "--rates", "200", "2000", "--waiting", "0.01"]
    size = ["--model", "tiny", "--batch-size", "1", "--seconds", "1", "--probe-seconds", "1"]
    assert command.main(["--races", "steps", *racing, *links, *size, "--output", str(tmp_path)]) == 0
    results = json.loads((tmp_path / "ethernet.json").read_text())
    assert [entry["megabits"] for entry in results["rates"]] == [200, 2000]
    assert 0 < results["fairness"]["fraction_of_line_rate"] < 1.02
    slow = results["rates"][0]["contenders"]
    elements = 946_304
    assert slow["ddp-fp32"]["counted_bytes"] == 4 * elements
    assert slow["ddp-bf16"]["counted_bytes"] == 2 * elements
    assert slow["onebit-adam"]["counted_bytes"] < 4 * elements / 25
    for record in slow.values():
        # Headers and acknowledgements, and what agreeing on the next turn takes.
        assert record["counted_bytes"] < record["interface_bytes"] < 1.1 * record["counted_bytes"] + 20_000
    # What was sent has to fit through the link.
    assert slow["ddp-fp32"]["seconds"] > 8 * 4 * elements / 200e6
    assert (tmp_path / "ethernet.png").stat().st_size > 10_000


RETIMING = "--retime 100 --contenders ddp-bf16"
ADDING = "--add --loss-rate 20 --contenders diloco-30-int4"
SETTINGS = ["--races", "losses", "--batch-size", "32", "--steps", "20"]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[list[str]]:
    """The jobs that would be started, on a cluster that is none, beside a recorded race in `tmp_path`."""
    jobs: list[list[str]] = []

    def job(cluster: object, module: str, arguments: list[object], ranks_a_host: int, seconds: float) -> dict[str, Any]:
        words = [str(one) for one in arguments]
        jobs.append([module, *words])
        names = words[words.index("--contenders") + 1 : words.index("--tokens")]
        if module.endswith("kind_times"):
            return {"ranks": 4, "kinds": {name: race_run(0.5, [0.0] * 4)["kinds"] for name in names}}
        return {"ranks": 4, "runs": {name: race_run(0.25, [6.0, 5.0, 4.0]) for name in names}}

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
        "runs": {"ddp-fp32": race_run(2.0, [5.0, 4.0]), "ddp-bf16": race_run(1.0, [5.0, 4.0])},
    }
    (tmp_path / "ethernet_losses.json").write_text(json.dumps(content))
    return jobs


def main(output: Path, *arguments: str) -> dict[str, Any]:
    assert command.main([*SETTINGS, *arguments, "--output", str(output)]) == 0
    content: dict[str, Any] = json.loads((output / "ethernet_losses.json").read_text())
    return content


def test_a_race_is_timed_at_another_rate_and_added_to(started: list[list[str]], tmp_path: Path) -> None:
    content = main(tmp_path, *RETIMING.split())
    assert [job[0].rpartition(".")[2] for job in started] == ["kind_times"]
    assert started[0][-2:] == ["--rate", "100"]
    assert content["retimed"]["100"]["seconds_to_the_loss"] == {"ddp-bf16": pytest.approx(0.5 * 19.6)}
    assert content["runs"]["ddp-bf16"] == race_run(1.0, [5.0, 4.0])

    content = main(tmp_path, *ADDING.split(), "--added-steps", "30")
    assert started[1][started[1].index("--steps") + 1] == "30"
    assert content["steps"] == 20
    assert content["seconds_to_the_loss"]["diloco-30-int4"] == pytest.approx(0.25 * 29.6)
    assert list(content["retimed"]["100"]["seconds_to_the_loss"]) == ["ddp-bf16"]

    content = main(tmp_path, "--retime", "100", "1000", "--contenders", "ddp-bf16", "diloco-30-int4")
    assert [job[-1] for job in started[2:]] == ["100", "1000"]
    for rate in ("100", "1000"):
        assert content["retimed"][rate]["seconds_to_the_loss"]["diloco-30-int4"] == pytest.approx(0.5 * 29.6)
    # Its steps take as long whatever it learned: with other losses it arrives elsewhere.
    content = main(tmp_path, *ADDING.split())
    assert content["retimed"]["1000"]["seconds_to_the_loss"]["diloco-30-int4"] is not None


REFUSED: list[tuple[str, Callable[[dict[str, Any]], object], str]] = [
    (RETIMING, lambda one: one.update(retimed={"100": {"machine": "another", "tcp": None}}), "with another machine"),
    (RETIMING, lambda one: one.update(retimed={"100": {**one, "tcp": "another"}}), "with another tcp"),
    (
        "--retime 9 --contenders ddp-bf16",
        lambda one: one["runs"]["ddp-bf16"]["bytes_sent"].insert(0, 1),
        "sent by step",
    ),
    (ADDING, lambda one: one.update(megabits=30), "holds another race"),
    (ADDING, lambda one: one.update(learning_rate=5.0), "learning_rate 5.0 and not 0.001"),
]


@pytest.mark.parametrize(("arguments", "change", "complaint"), REFUSED, ids=[one[2] for one in REFUSED])
def test_what_does_not_go_together_is_refused(arguments, change, complaint, started, tmp_path, capsys) -> None:
    path = tmp_path / "ethernet_losses.json"
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    assert command.main([*SETTINGS, *arguments.split(), "--output", str(tmp_path)]) == 2
    assert complaint in capsys.readouterr().err
    assert not started or arguments != ADDING
