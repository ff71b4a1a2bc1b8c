"""`thinwire plan` and `thinwire probe`: what they print, and what they refuse."""

import json
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.plan.strategies import GIGABIT, bert, ethernet
from tests.plan.test_probe import calibration
from thinwire.command_line import main
from thinwire.optim import registry
from thinwire.plan import (
    Cluster,
    Link,
    Method,
    Processor,
    Schedule,
    Workload,
    load_calibration,
    methods_for,
    named_model,
    plan,
    predict,
    request,
    save_calibration,
)
from thinwire.plan.calibration import DiskRates
from thinwire.plan.picture import finding

COMPUTE = ("--forward", "100ms", "--backward", "200ms")
NODES = ("--nodes", "4", "--ranks-per-node", "3")
LINK, INSIDE, MEMORY = ("--link", "1Gb/s"), ("--inside", "80Gb/s"), ("--memory-bandwidth", "30GB/s")
CLUSTER = (*NODES, *LINK, *INSIDE, *MEMORY)
WORKLOAD = Workload(named_model("bert-base"), 0.1, 0.2)
SAME_CLUSTER = Cluster(
    4, 3, Link.of(GIGABIT, 50e-6, 5e-6), Link.of(80 * GIGABIT, 10e-6, 1e-6), Processor.of_memory(30e9)
)
ONE_LINE = ("--model", "bert-large", "--nodes", "16", "--link", "1Gb/s")

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "planning.md"
EXAMPLES = re.findall(r"```console\n\$ thinwire (.*)\n([\s\S]*?)```", GUIDE.read_text())

RUN = """
import sys
from thinwire.command_line import main
from thinwire.optim import registry
assert main(sys.argv[1:]) == 0
heavy = {"torch", "numpy", "pydantic", "numba", "transformers", "matplotlib"} & set(sys.modules)
assert not heavy, heavy
"""


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
    base = (*CLUSTER, "--model", "bert-base", "--warmup-wire", "fp32")
    described = planned(capsys, *base, "--steps", 5000, "--warmup", 0.2)
    expected = predict(WORKLOAD, SAME_CLUSTER, Method("onebit-adam", hierarchical=True), Schedule(5000, 0.2))
    found = of(described, "onebit-adam by node")
    assert found["average"]["step"] == expected.step_seconds
    assert found["phases"]["frozen"]["bytes_sent"] == expected.phases["frozen"].bytes_sent
    assert found["phases"]["frozen"]["share"] == pytest.approx(0.8)
    assert sum(found["memory"].values()) == found["memory_bytes"] > expected.memory_bytes
    assert found["memory_bytes"] - found["memory"]["activations"] == expected.memory_bytes
    assert found["fits"] is True
    assert found["measured_loss"]["beside"] == "AdamW"
    assert of(described, "onebit-adam ZeRO-1")["break_even_bytes_per_second"] > GIGABIT
    assert described["recommended"] == "onebit-muon by node"
    assert (described["forward_seconds"], described["assumed"]) == (0.1, [])


def test_a_model_and_a_link_are_enough() -> None:
    """In at most 12 lines, and without what takes seconds to import."""
    done = subprocess.run([sys.executable, "-c", RUN, "plan", *ONE_LINE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) <= 12
    assert lines[0].startswith("Take OneBitMuon: ")
    assert "x as fast as DDP with its bf16 hook and " in lines[0]
    assert '  write    thinwire.OneBitMuon(model.named_parameters(), lr=lr, codec="sign1")' in lines
    assert "  loss     -2.7% beside AdamW (a small GPT on text, 3 seeds)" in lines
    assert lines[-1] == "Assumed: 8 sequences of 512 tokens a rank, a100 at 40% of its peak"


def test_the_answer_is_short_whatever_is_asked(capsys) -> None:
    for more in ("--nodes 1 --ranks-per-node 8", "--memory 1GB", "--methods powersgd", "--speed-only"):
        for link in ("1Mb/s", "1Gb/s", "1Tb/s"):
            code, printed, _ = run(capsys, "plan", "--model", "gpt2", "--link", link, *more.split())
            assert (code, len(printed.splitlines()) <= 12) == (0, True)


ON_BERT = ("--model", "bert-base", *LINK)
FAST = ("--model", "bert-base", "--link", "100Gb/s", "--device", "t4")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        # A fast network is left to DDP.
        (FAST, "Take DDP with its bf16 hook: "),
        (FAST, "hook(None, default_hooks.bf16_compress_hook)"),
        (FAST, "OneBitAdam is at least 1.1x as fast as DDP"),
        (
            (*COMPUTE, *CLUSTER, "--parameters", "340e9", "--memory", "1GB"),
            "Nothing fits into 1 GB a rank: AdamW on shards at ZeRO stage 3 needs least, 453 GB",
        ),
        (
            (*ONE_LINE, "--dtype", "bf16", "--memory", "700MB", "--recompute", "--host-memory", "64GB"),
            'config={..., "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": ',
        ),
        # Only what costs loss was asked for.
        (
            (*ONE_LINE, "--methods", "powersgd"),
            "None of these is known to keep the loss; the fastest is PowerSGD of rank 1",
        ),
        ((*ONE_LINE, "--methods", "powersgd", "--speed-only"), "Take PowerSGD of rank 1: "),
        ((*ONE_LINE, "--methods", "powersgd", "--speed-only"), "loss     speed only: "),
        ((*COMPUTE, *CLUSTER, "--parameters", "1T"), "For a model, 1T parameters in fp32"),
        ((*COMPUTE, *ON_BERT), "Assumed: 4 nodes; compression at the speed of an a100's memory"),
    ],
)
def test_what_is_said(capsys, arguments, said: str) -> None:
    code, printed, _ = run(capsys, "plan", *arguments)
    assert code == 0
    assert said in printed


@pytest.mark.parametrize(("command", "shown"), EXAMPLES)
def test_the_guide_s_examples_print_what_it_shows(command: str, shown: str, capsys) -> None:
    assert len(EXAMPLES) >= 2
    assert main(shlex.split(command)) == 0
    assert capsys.readouterr().out == shown


def test_verbose_names_every_method(capsys) -> None:
    code, printed, _ = run(capsys, "plan", *COMPUTE, *CLUSTER, "--model", "bert-base", "--memory", "2GB", "--verbose")
    assert code == 0
    for row in ("ddp-fp32", "powersgd rank 4", "sharded-adam ZeRO-3", "onebit-adam ZeRO-2", "zero-one-adam by node"):
        assert f"\n{row} " in printed
    for name in registry.NAMES:
        algorithm = name.lower().replace("onebit", "onebit-").replace("zeroone", "zero-one-")
        for stage in registry.entry(name).stages:
            assert f"\n{algorithm}{f' ZeRO-{stage}' if stage else ''} " in printed
    assert "onebit-adam ZeRO-1 beats ddp-bf16 below " in printed
    assert "!" in printed  # DDP holds 20 bytes a parameter: more than 2 GB


CHANGES = {
    "onebit-adam": "--dtype bf16, --accumulation 2, --update 500ms, --latency 500us, --message 500us, "
    "--inside-latency 5ms, --inside-message 50ms, --overlap 30%, --memory 1GB, --cores-per-node 2, --methods ddp-fp32, "
    "--warmup 0.5, --warmup-wire fp32, --bucket 3MiB, --sequence 128, --micro-batch 3",
    "powersgd": "--powersgd-ranks 2",
    "zero-one-adam": "--steps 50, --var-freeze-step 3, --var-update-scaler 3, --local-step-scaler 3, "
    "--local-step-clipper 3",
    "diloco": "--every 17, --fragments 3, --outer-overlap 0, --outer-codec sign1, --inner Muon, --share exp_avg=2",
    "onebit-muon": "--muon-codec int8",
}


@pytest.mark.parametrize("method", CHANGES)
def test_every_option_of_a_run_has_an_effect(capsys, method: str) -> None:
    """None is accepted and ignored: each changes some prediction."""
    base = (*CLUSTER, "--model", "bert-base", "--methods", method)
    before = planned(capsys, *base)["predictions"]
    for change in CHANGES[method].split(", "):
        assert planned(capsys, *base, *change.split())["predictions"] != before, change


def test_local_updates_say_what_was_published_of_their_loss_and_whether_a_fragment_hides(capsys) -> None:
    line = ("plan", "--model", "bert-base", "--link", "10Gb/s", "--methods", "diloco", "ddp-bf16")
    _, printed, _ = run(capsys, *line)
    assert printed.startswith("Take DDP with its bf16 hook: ")
    assert "Faster, not recommended: DiLoCo" in printed
    assert "(loss +1.3%, published)" in printed
    _, printed, _ = run(capsys, *line, "--speed-only")
    assert "thinwire.DiLoCo(model.named_parameters(), torch.optim.AdamW, lr=lr, every=30)" in printed
    assert "loss     +1.3% beside data parallel, published with AdamW inside (arXiv 2503.09799)" in printed
    _, printed, _ = run(capsys, *line, "--speed-only", "--outer-codec", "int8")
    assert re.search(
        r"outer    .* a node leave at once, .*: training stalls .* an overlap of \d+ would hide it", printed
    )
    _, printed, _ = run(capsys, *line, "--speed-only", "--outer-overlap", "29", "--fragments", "1")
    assert "hidden behind 29 steps" in printed
    _, printed, _ = run(capsys, *line, "--speed-only", "--inner", "Muon")
    assert "thinwire.DiLoCo(model.named_parameters(), thinwire.optim.Muon, lr=lr, every=30)" in printed
    assert "published with AdamW inside (arXiv 2503.09799)" in printed
    for share, lack in (("exp_avg", "with no number"), ("exp_avg=0", "share of exp_avg"), ("sum=1", "it has exp_avg,")):
        code, _, errors = run(capsys, *line, "--share", share)
        assert (code, lack in errors) == (2, True)
    small = ("plan", "--parameters", "4M", "--link", "100Mb/s", "--methods", "diloco", "ddp-bf16", "--nodes", "16")
    _, printed, _ = run(capsys, *small)
    assert "loss +3.9% or worse, published" in printed
    _, printed, _ = run(capsys, *small, "--speed-only")
    assert (
        "(arXiv 2503.09799; for 35M parameters; below that it is worse; for 8 workers; with more it is worse)"
        in printed
    )
    assert run(capsys, *small, "--every", "1")[0] == 2  # no room for an overlap


def test_what_is_estimated(capsys) -> None:
    """Operations over a device's speed; more tokens and slower devices take longer."""

    def forward(*more: object) -> float:
        code, printed, _ = run(capsys, "plan", "--model", "bert-base", *LINK, *more, "--methods", "ddp-fp32", "--json")
        assert code == 0
        described = json.loads(printed)
        assert described["backward_seconds"] == 2 * described["forward_seconds"]
        return described["forward_seconds"]

    flops = 2 * 109_514_298 + 4 * 12 * 768 * 512
    assert forward() == pytest.approx(flops * 8 * 512 / (0.4 * 312e12))
    assert forward("--micro-batch", 16) == pytest.approx(2 * forward())
    assert forward("--sequence", 128) < forward() / 4
    assert forward("--device", "RTX 3090") == pytest.approx(312 / 71 * forward())
    plain = ("--parameters", "100M", "--hidden", 768)
    code, printed, _ = run(capsys, "plan", *plain, *LINK, "--json")
    assert (code, json.loads(printed)["forward_seconds"]) == (0, pytest.approx(2e8 * 8 * 512 / (0.4 * 312e12)))
    assert "activations" not in json.loads(printed)["predictions"][0]["memory"]
    code, printed, _ = run(capsys, "plan", *plain, "--layers", 12, "--heads", 12, *LINK, "--json")
    assert json.loads(printed)["predictions"][0]["memory"]["activations"] > 0
    assert json.loads(printed)["forward_seconds"] > 2e8 * 8 * 512 / (0.4 * 312e12)


def test_nothing_is_assumed_of_what_was_given(capsys) -> None:
    assert "Assumed" not in run(capsys, "plan", *COMPUTE, *ON_BERT, "--nodes", 4, "--device", "t4")[1]


def test_a_measured_script_s_dtype_is_taken(capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request, "measure_script", lambda *_: replace(WORKLOAD, dtype="bf16"))
    for more, dtype in (((), "bf16"), (("--dtype", "fp32"), "fp32")):
        code, printed, _ = run(capsys, "plan", "--measure", __file__, *LINK, *more, "--json")
        assert (code, json.loads(printed)["dtype"]) == (0, dtype)


def test_shared_cores(capsys) -> None:
    """Ranks that share a core take turns: what each computes takes as many times as long."""
    alone = planned(capsys, *CLUSTER, "--model", "bert-base")
    enough = planned(capsys, *CLUSTER, "--model", "bert-base", "--cores-per-node", 3)
    shared = planned(capsys, *CLUSTER, "--model", "bert-base", "--cores-per-node", 1.5)
    assert enough == alone
    for name in ("ddp-bf16", "onebit-adam", "sharded-adam ZeRO-3"):
        assert of(shared, name)["average"]["compute"] == pytest.approx(2 * of(alone, name)["average"]["compute"])
        assert of(shared, name)["average"]["encode"] == pytest.approx(2 * of(alone, name)["average"]["encode"])
        # In every collective they wait for those that have no core just then, and send no more.
        assert of(shared, name)["average"]["wire"] > of(alone, name)["average"]["wire"] + 5e-3
        assert of(shared, name)["average"]["bytes_sent"] == of(alone, name)["average"]["bytes_sent"]


def test_a_calibration_stands_for_the_cluster(capsys, tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    save_calibration(calibration(), path)
    described = planned(capsys, "--model", "bert-base", "--calibration", path)
    assert (described["nodes"], described["ranks_per_node"]) == (4, 1)
    measured = calibration().link("between")
    cluster = Cluster(4, 1, measured, measured, calibration().processor)
    assert of(described, "ddp-bf16")["average"]["step"] == predict(WORKLOAD, cluster, Method("ddp-bf16")).step_seconds
    faster = planned(capsys, "--model", "bert-base", "--calibration", path, "--link", "80Gb/s")
    assert of(faster, "ddp-bf16")["average"]["wire"] < of(described, "ddp-bf16")["average"]["wire"] / 5
    no_overlap = planned(capsys, "--model", "bert-base", "--calibration", path, "--overlap", 0)
    assert of(no_overlap, "ddp-bf16")["average"]["exposed"] > of(described, "ddp-bf16")["average"]["exposed"]
    # It was measured by one rank a core, and that many it was told of.
    crowded = planned(capsys, "--model", "bert-base", "--calibration", path, "--cores-per-node", 0.5)
    assert of(crowded, "ddp-bf16")["average"]["compute"] == pytest.approx(
        2 * 0.3 + of(described, "ddp-bf16")["average"]["compute"] - 0.3
    )


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ((*CLUSTER,), "give one of --model and --parameters"),
        ((*CLUSTER, "--model", "bert-base", "--parameters", "5"), "give one of --model and --parameters"),
        ((*CLUSTER, "--parameters", "1.5"), "--parameters must be a whole number above 0, as in 340M"),
        ((*CLUSTER, "--model", "no-such-model"), "model 'no-such-model' is not known here"),
        ((*CLUSTER, "--model", "bert-base", "--layers", "3"), "go with --parameters: a --model has its own"),
        ((*CLUSTER, "--parameters", "5M", "--layers", "3"), "activations need all of"),
        ((*CLUSTER, "--model", "bert-base", "--warmup", "2"), "--warmup must be a part from 0 to 1"),
        ((*CLUSTER, "--model", "bert-base", "--device", "abacus"), "--device 'abacus' is not one of t4, v100"),
        ((*CLUSTER, "--model", "bert-base", "--cores-per-node", "0"), "cores_per_node must be a number above 0"),
        ((*CLUSTER, "--model", "bert-base", "--nodes", "0"), "--nodes must be a whole number, at least 1, got 0"),
        ((*CLUSTER, "--model", "bert-base", "--ranks-per-node", "-1"), "--ranks-per-node must be a whole number"),
        ((*CLUSTER, "--model", "bert-base", "--micro-batch", "0"), "the micro-batch must be a whole number"),
        ((*CLUSTER, "--model", "bert-base", "--steps", "0"), "steps must be a whole number, at least 1, got 0"),
        ((*CLUSTER, "--model", "bert-base", "--json", "--verbose"), "give one of them"),
        ((*CLUSTER, "--model", "bert-base", "--plot", "/no/a.png"), "the picture /no/a.png cannot be written"),
        ((*CLUSTER, "--model", "bert-base", "--plot", "a.xyz"), "the picture a.xyz cannot be written"),
        ((*NODES, *INSIDE, "--model", "bert-base"), "the rate of a node's link is not known: give --link 1Gb/s"),
        (("--model", "bert-base", "--link", "1"), "--link must be a rate, as in 1Gb/s, 10GbE"),
        (("--calibration", "/nowhere", "--model", "bert-base"), "the calibration /nowhere cannot be read"),
        ((*CLUSTER, "--model", "bert-base", "--disk", "1TB"), "give both --disk and --disk-rate, or --disk and"),
        ((*CLUSTER, "--model", "bert-base", "--host-rate", "1GB/s"), "give --host-memory or --disk"),
        ((*CLUSTER, "--model", "bert-base", "--host-memory", "0GB"), "--host-memory must be"),
        ((*CLUSTER, "--measure", "/nowhere"), "--measure finds out itself: leave out --forward, --backward"),
    ],
)
def test_what_cannot_be_planned(capsys, arguments, told) -> None:
    code, printed, error = run(capsys, "plan", *COMPUTE, *arguments)
    assert (code, printed) == (2, "")
    assert error.startswith("thinwire: ")
    assert told in error


def test_a_disk_is_as_fast_as_it_was_measured_or_said_to_be(capsys, tmp_path: Path) -> None:
    path, printed = tmp_path / "calibration.json", []
    save_calibration(calibration().model_copy(update={"disk": DiskRates(read=9e9, write=9e9, both=2e9)}), path)
    asked = ("plan", *COMPUTE, "--model", "bert-base", "--calibration", path, "--disk", "1TB", "--json")
    for more in ((), ("--disk-rate", "2GB/s"), ("--disk-rate", "4GB/s")):
        code, text, _ = run(capsys, *asked, *more)
        assert code == 0
        printed.append(text)
    assert printed[0] == printed[1] != printed[2]


def test_what_goes_together(capsys, tmp_path: Path) -> None:
    """Forward and backward; latencies are measured or given."""
    code, _, error = run(capsys, "plan", *ONE_LINE, "--forward", "3ms")
    assert (code, "give both --forward and --backward" in error) == (2, True)
    path = tmp_path / "calibration.json"
    save_calibration(calibration(), path)
    code, _, error = run(capsys, "plan", *COMPUTE, "--model", "bert-base", "--calibration", path, "--latency", "3us")
    assert (code, "has the latencies of --link already" in error) == (2, True)


def test_the_picture(capsys, tmp_path: Path) -> None:
    code, printed, _ = run(capsys, "plan", *ONE_LINE, "--plot", tmp_path / "plan.png")
    assert (code, printed.startswith("Take OneBitMuon")) == (0, True)
    assert (tmp_path / "plan.png").read_bytes()[:4] == b"\x89PNG"
    cluster = ethernet(16)
    title = finding(plan(bert("large"), cluster, methods_for(cluster)))
    assert title.startswith("bert-large on 16 nodes: at 1 Gb/s OneBitMuon is ")
    assert "x as fast as DDP in bf16, and worth it below " in title


def test_a_probe_that_could_not_be_kept_does_not_start(capsys, tmp_path: Path) -> None:
    code, _, error = run(capsys, "probe", tmp_path / "no" / "calibration.json")
    assert code == 2
    assert f"the folder of {tmp_path / 'no' / 'calibration.json'} does not exist" in error


@pytest.mark.launch
def test_probe_under_torchrun_makes_what_plan_reads(jobs, capsys, tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    done = jobs.torchrun(2, "-m", "thinwire", "probe", str(path), "--seconds", "0.2")
    assert done.returncode == 0, done.stderr
    assert "inside nodes, all_reduce: " in done.stdout
    found = load_calibration(path)
    assert (found.backend, found.nodes, found.ranks_per_node) == ("gloo", 1, 2)
    assert planned(capsys, "--model", "bert-tiny", "--calibration", path)["recommended"]
