"""`thinwire plan` and `thinwire probe`: what they print, and what they refuse."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.plan.strategies import GIGABIT
from tests.plan.test_calibration import calibration
from thinwire.command_line import main
from thinwire.plan import (
    Cluster,
    Link,
    Method,
    Processor,
    Schedule,
    Workload,
    load_calibration,
    named_model,
    predict,
    save_calibration,
)

COMPUTE = ("--forward-ms", "100", "--backward-ms", "200")
NODES = ("--nodes", "4", "--ranks-per-node", "3")
LINK, INSIDE, MEMORY = ("--link-gbps", "1"), ("--inside-gbps", "80"), ("--memory-bandwidth", "30")
CLUSTER = (*NODES, *LINK, *INSIDE, *MEMORY)
WORKLOAD = Workload(named_model("bert-base"), 0.1, 0.2)
SAME_CLUSTER = Cluster(
    4, 3, Link.of(GIGABIT, 50e-6, 5e-6), Link.of(80 * GIGABIT, 10e-6, 1e-6), Processor.of_memory(30e9)
)


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    """The exit code and what was printed."""
    code = main([*map(str, arguments)])
    printed = capsys.readouterr()
    return code, printed.out, printed.err


def planned(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict:
    code, printed, told = run(capsys, "plan", *COMPUTE, *arguments, "--json")
    assert (code, told) == (0, "")
    return json.loads(printed)


def of(described: dict, name: str) -> dict:
    return next(one for one in described["predictions"] if one["method"] == name)


def test_json_holds_what_predict_says(capsys) -> None:
    described = planned(capsys, *CLUSTER, "--model", "bert-base", "--steps", 5000, "--warmup", 0.2)
    expected = predict(WORKLOAD, SAME_CLUSTER, Method("onebit-adam", hierarchical=True), Schedule(5000, 0.2))
    found = of(described, "onebit-adam by node")
    assert found["average"]["step"] == expected.step_seconds
    assert found["phases"]["frozen"]["bytes_sent"] == expected.phases["frozen"].bytes_sent
    assert found["phases"]["frozen"]["share"] == pytest.approx(0.8)
    assert found["memory_bytes"] == expected.memory_bytes == sum(found["memory"].values())
    assert found["fits"] is True
    assert of(described, "onebit-adam ZeRO-1")["break_even_bytes_per_second"] > GIGABIT
    assert described["recommended"] == min(described["predictions"], key=lambda one: one["average"]["step"])["method"]


def test_the_table_names_every_method_and_recommends_one(capsys) -> None:
    code, printed, _ = run(capsys, "plan", *COMPUTE, *CLUSTER, "--model", "bert-base", "--memory-gb", 2)
    assert code == 0
    for row in ("ddp-fp32", "powersgd rank 4", "sharded-adam ZeRO-3", "onebit-adam ZeRO-2", "zero-one-adam by node"):
        assert f"\n{row} " in printed
    assert "Recommended: " in printed
    assert "onebit-adam ZeRO-1 beats ddp-bf16 below " in printed
    assert "!" in printed  # DDP holds 20 bytes a parameter: more than 2 GB


def test_nothing_fits(capsys) -> None:
    code, printed, _ = run(capsys, "plan", *COMPUTE, *CLUSTER, "--parameters", "340e9", "--memory-gb", "1")
    assert code == 0
    assert "Nothing fits into 1.00 GB a rank: sharded-adam ZeRO-3 needs least, 453.33 GB" in printed


def test_every_option_of_a_run_has_an_effect(capsys) -> None:
    """None is accepted and ignored: each changes some prediction."""
    base = (*CLUSTER, "--model", "bert-base")
    before = planned(capsys, *base)["predictions"]
    for change in (
        ("--dtype", "bf16"),
        ("--accumulation", "2"),
        ("--update-ms", "500"),
        ("--latency-us", "500"),
        ("--message-us", "500"),
        ("--inside-latency-us", "5000"),
        ("--inside-message-us", "50000"),
        ("--overlap", "0.3"),
        ("--memory-gb", "1"),
        ("--methods", "ddp-fp32"),
        ("--powersgd-ranks", "2"),
        ("--steps", "50"),
        ("--warmup", "0.5"),
        ("--warmup-wire", "bf16"),
        ("--var-freeze-step", "3"),
        ("--var-update-scaler", "3"),
        ("--local-step-scaler", "3"),
        ("--local-step-clipper", "3"),
        ("--bucket-mib", "3"),
        ("--layers", "12", "--hidden", "768", "--heads", "12", "--sequence", "128", "--micro-batch", "4"),
    ):
        assert planned(capsys, *base, *change)["predictions"] != before, change


def test_a_calibration_stands_for_the_cluster(capsys, tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    save_calibration(calibration(), path)
    described = planned(capsys, "--model", "bert-base", "--calibration", path)
    assert (described["nodes"], described["ranks_per_node"]) == (4, 1)
    measured = calibration().link("between")
    assert measured is not None
    cluster = Cluster(4, 1, measured, measured, calibration().make_processor())
    assert of(described, "ddp-bf16")["average"]["step"] == predict(WORKLOAD, cluster, Method("ddp-bf16")).step_seconds
    faster = planned(capsys, "--model", "bert-base", "--calibration", path, "--link-gbps", 80)
    assert of(faster, "ddp-bf16")["average"]["wire"] < of(described, "ddp-bf16")["average"]["wire"] / 5
    no_overlap = planned(capsys, "--model", "bert-base", "--calibration", path, "--overlap", 0)
    assert of(no_overlap, "ddp-bf16")["average"]["exposed"] > of(described, "ddp-bf16")["average"]["exposed"]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ((*CLUSTER,), "give either --model or --parameters"),
        ((*CLUSTER, "--model", "bert-base", "--parameters", "5"), "give either --model or --parameters"),
        ((*CLUSTER, "--parameters", "1.5"), "--parameters must be a whole number, got 1.5"),
        ((*CLUSTER, "--parameters", "inf"), "--parameters must be a whole number, got inf"),
        ((*CLUSTER, "--model", "bert-base", "--layers", "3"), "activations need all of"),
        ((*CLUSTER, "--model", "bert-base", "--warmup", "2"), "warmup is the part of the steps"),
        ((*CLUSTER, "--model", "bert-base", "--overlap", "-1"), "overlap must be from 0 to 1"),
        ((*LINK, *INSIDE, *MEMORY, "--model", "bert-base"), "give --nodes and --ranks-per-node"),
        ((*NODES, *INSIDE, *MEMORY, "--model", "bert-base"), "the rate of the link is not known, --link-gbps"),
        ((*NODES, *LINK, *MEMORY, "--model", "bert-base"), "the rate of the inside is not known, --inside-gbps"),
        ((*NODES, *LINK, *INSIDE, "--model", "bert-base"), "how fast a rank compresses is not known"),
        (("--calibration", "/nowhere", "--model", "bert-base"), "the calibration /nowhere cannot be read"),
    ],
)
def test_what_cannot_be_planned(capsys, arguments, told) -> None:
    code, printed, error = run(capsys, "plan", *COMPUTE, *arguments)
    assert (code, printed) == (2, "")
    assert error.startswith("thinwire: ")
    assert told in error


def test_latencies_are_measured_or_given(capsys, tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    save_calibration(calibration(), path)
    code, _, error = run(capsys, "plan", *COMPUTE, "--model", "bert-base", "--calibration", path, "--latency-us", 3)
    assert code == 2
    assert "has the latencies of the link already" in error


def test_a_probe_that_could_not_be_kept_does_not_start(capsys, tmp_path: Path) -> None:
    code, _, error = run(capsys, "probe", tmp_path / "no" / "calibration.json")
    assert code == 2
    assert f"the folder of {tmp_path / 'no' / 'calibration.json'} does not exist" in error


@pytest.mark.launch
def test_probe_under_torchrun_makes_what_plan_reads(jobs, capsys, tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    done = jobs.torchrun(2, "-m", "thinwire", "probe", str(path), "--seconds", "1")
    assert done.returncode == 0, done.stderr
    assert "inside nodes, all_reduce: " in done.stdout
    found = load_calibration(path)
    assert (found.backend, found.nodes, found.ranks_per_node) == ("gloo", 1, 2)
    assert planned(capsys, "--model", "bert-tiny", "--calibration", path)["recommended"]
