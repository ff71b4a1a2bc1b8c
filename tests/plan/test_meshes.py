"""Meshes of stages, replicas and tensor parallelism: what a search finds, what a mesh costs, and what is refused."""

import json
from dataclasses import replace

import pytest

from experiments.benchmarks.plan_meshes import PUBLISHED
from tests.plan.strategies import ethernet
from tests.refusing import refused
from thinwire.command_line import main
from thinwire.plan import Link, PlanError, named_model, plain_model
from thinwire.plan.meshes import Mesh, MeshJob, bubble_share, predict_mesh, search_meshes
from thinwire.plan.workload import named_device

A100 = named_device("a100")
GPT = named_model("gpt2-xl")


def job(nodes: int = 4, ranks: int = 1, gbps: float = 1.0, batch: int = 64) -> MeshJob:
    return MeshJob(GPT, ethernet(nodes, ranks, gbps), A100, batch, 1024)


def test_a_step_is_what_a_schedule_takes_slot_by_slot() -> None:
    """On links that cost nothing: m + p - 1 slots of a forward and a backward, of which p - 1 are idle."""
    free = Link.of(1e18, 0.0, 0.0)
    whole = job()
    whole = replace(whole, cluster=replace(whole.cluster, between=free))
    found = predict_mesh(whole, Mesh(4, 1, 1))
    assert found.micro_batches == 64
    slots = found.seconds["compute"] / 64 * (64 + 3)
    assert found.step_seconds - found.seconds["replicas"] == pytest.approx(slots, rel=1e-6)
    assert found.bubble == bubble_share(4, 64) == 3 / 67


def test_stages_that_run_ahead_hide_what_travels_and_hold_more() -> None:
    # At 1 Gb/s a hop takes nine tenths of what a stage computes of a micro-batch.
    plain, eager = (predict_mesh(job(), Mesh(4, 1, 1, recompute=True, eager=one)) for one in (False, True))
    hop = eager.seconds["stages"] / 6  # before the first stage gets, and once the last one has given
    assert plain.seconds["stages"] == pytest.approx(6 * hop + 64 * 2 * hop * 3 / 4)
    assert plain.seconds["compute"] == eager.seconds["compute"] == pytest.approx(64 * hop / 0.9, rel=0.1)
    assert eager.memory["activations"] == pytest.approx(plain.memory["activations"] * 10 / 4)
    few, all_of_few = (predict_mesh(job(batch=8), Mesh(4, 1, 1, eager=one)).memory for one in (False, True))
    assert all_of_few["activations"] == pytest.approx(2 * few["activations"])


@pytest.mark.parametrize("recompute", [False, True])
def test_tensor_parallelism_shares_layers_and_not_what_is_whole(recompute: bool) -> None:
    large = replace(job(2, 4), model=named_model("gpt2-large"))
    one = predict_mesh(large, Mesh(2, 4, 1, recompute=recompute))
    cut = predict_mesh(large, Mesh(2, 1, 4, recompute=recompute))
    embedding = large.model.last_elements * 2
    assert cut.memory["weights"] - embedding == pytest.approx((one.memory["weights"] - embedding) / 4, abs=2)
    # Of a micro-batch's 34 s·b·h and scores, 10 are not shared (Korthikanti et al. 2022, equation 2).
    places, scores = 1024 * 1280 * 18, 5 * 20 * 1024 / 1280
    kept = [2.0, 2.0] if recompute else [34 + scores, 10 + (24 + scores) / 4]
    assert one.memory["activations"] == pytest.approx(2 * places * kept[0])
    assert cut.memory["activations"] == pytest.approx(2 * places * kept[1])


def test_packets_between_stages_pay_where_the_wire_is_thin() -> None:
    thin = job(gbps=0.1)
    none, int8, int4 = (predict_mesh(thin, Mesh(4, 1, 1, wire=wire)).seconds for wire in ("none", "int8", "int4"))
    assert none["stages"] / int8["stages"] == pytest.approx(2, rel=0.05)
    directions = 16 * 12 * (1 / 1280 + 1 / 1024)  # bits an element
    assert none["stages"] / int4["stages"] == pytest.approx(16 / (4.5 + directions), rel=0.02)
    assert {one["compute"] for one in (int8, int4)} == {none["compute"]}
    assert search_meshes(thin, 16e9)[0].mesh.wire == "int8"
    assert search_meshes(thin, 16e9, speed_only=True)[0].mesh.wire == "int4"
    assert {one.mesh.wire for one in search_meshes(job(gbps=400), 16e9)} == {"none"}


def test_a_search_of_a_trillion_parameters_on_ten_thousand_ranks() -> None:
    largest = replace(job(1250, 8, 1600, 10_000), model=named_model("gpt-1t"), length=2048)
    found = search_meshes(largest, 80e9)
    assert [one.step_seconds for one in found] == sorted(one.step_seconds for one in found)
    for one in found:
        mesh = one.mesh
        assert mesh.pp * mesh.dp * mesh.tp == 10_000
        assert mesh.tp in (1, 2, 4, 8)
        assert one.memory_bytes <= 80e9
        assert one == predict_mesh(largest, mesh)


def test_refusals() -> None:
    two = job(2, 4)
    refused(PlanError, "tp 8 would lie on several nodes, of 4 ranks each", predict_mesh, two, Mesh(1, 1, 8))
    refused(PlanError, "is 16 ranks, and the cluster has 8", search_meshes, two, shape=(2, 4, 2))
    refused(PlanError, "25 attention heads cannot be shared", predict_mesh, two, Mesh(1, 4, 2))
    refused(PlanError, "48 layers, too few for 64 stages", predict_mesh, job(64), Mesh(64, 1, 1))
    refused(PlanError, "no whole number of micro-batches", predict_mesh, job(batch=63), Mesh(1, 4, 1))
    refused(PlanError, "layers of a model are not known", MeshJob, plain_model(10**12), two.cluster, A100, 8, 8)
    refused(PlanError, "nothing fits into 100 MB a rank: pp 1 x dp 4 x tp 1 needs least", search_meshes, job(), 1e8)


def test_the_command_says_what_it_found(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["plan", "--model", "gpt2-xl", "--nodes", "4", "--link", "1Gb/s", "--batch", "64", "--mesh"]
    assert main([*asked, "--memory", "16GB"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].startswith("Take pp 4 x dp 1 x tp 1: ")
    assert "Eager1F1B, bubble 4.5%, activations in int8" in printed[2]
    assert main([*asked, "--memory", "16GB", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["meshes"][0]["pp"] == 4
    assert main([*asked, "2x2x1"]) == 0
    assert capsys.readouterr().out.startswith("Take pp 2 x dp 2 x tp 1: ")
    for wrong, message in (("2x2", "--mesh must be as 8x16x4"), ("2x2x2", "is 8 ranks")):
        assert main([*asked, wrong]) != 0
        assert message in capsys.readouterr().err
    for option, what in (("--micro-batch", "the micro-batch"), ("--sequence", "a sequence's length")):
        assert main([*asked, "2x2x1", option, "0"]) != 0
        assert f"{what} must be a whole number, at least 1, got 0" in capsys.readouterr().err
    assert main([*asked]) != 0
    assert "give --memory" in capsys.readouterr().err
    assert main([*asked, "--forward", "1s"]) != 0
    assert "--forward is of one rank" in capsys.readouterr().err


def test_published_runs_have_the_size_that_they_are_said_to_have() -> None:
    for run in PUBLISHED:
        assert run.model.parameters / 1e9 == pytest.approx(run.billions, rel=0.03), run
