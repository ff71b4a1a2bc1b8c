"""Studies in small: a whole run on one rank or on threads writes numbers and a picture; and their figures."""

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from math import nan
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import experiments.bert_recipe.__main__ as bert_recipe
import experiments.convergence.__main__ as convergence
import experiments.lion.__main__ as lion
import experiments.long_documents.__main__ as long_documents
import experiments.long_sequences.__main__ as long_sequences
import experiments.text_classification.__main__ as text_classification
from experiments.lion.findings import find, sentences, titles
from experiments.long_sequences import bert_memory, memory, timing
from experiments.long_sequences.bert_memory import grow
from experiments.long_sequences.findings import times_faster
from experiments.long_sequences.systems import (
    BLOCK,
    DENSE,
    GATHERED,
    LAYOUTS,
    MATERIALISED,
    SYSTEMS,
    input_bytes,
    inputs,
)
from experiments.long_sequences.timing import Times
from experiments.tasks.attention_peers import materialised_attention
from experiments.tasks.next_character import CharacterModelSize
from experiments.text_classification import findings as of_classes
from experiments.text_classification.learning import Outcome
from experiments.training import sweep
from experiments.training.optimizers import PARENTS
from tests.experiments.helpers import outcome, write_text, written
from thinwire.comm import threads
from thinwire.sparse_attn import reference_attention


def converge(folder: Path, *arguments: str) -> None:
    options = convergence.parse(["--task", "digits", "--output", str(folder), *arguments])
    threads.run(lambda comm: convergence.study(comm, options), 2)


def test_convergence_writes_every_curve_and_findings_of_all_seeds(tmp_path: Path) -> None:
    ours = ["onebit-adam", "zero-one-adam"]
    converge(tmp_path, "--seeds", "2", "--steps", "9", "--optimizer", *ours)
    digits = written(tmp_path, "convergence")["tasks"]["digits"]
    assert digits["runs"].keys() == {*ours, *(PARENTS[name] for name in ours)}
    for runs in digits["runs"].values():
        assert [run["seed"] for run in runs] == [0, 1]
        assert all(run["curve"]["losses"][-1] < run["curve"]["losses"][0] for run in runs)
    assert digits["runs"]["onebit-adam"][0]["frozen_at"] == 3, "stages are in proportion to the steps"
    losses = [run["final_loss"] for run in digits["runs"]["adamw"]]
    assert losses[0] != losses[1]
    assert digits["findings"]["onebit-adam"]["exact_loss"] == pytest.approx(sum(losses) / 2)


def test_the_recipe_trains_both_phases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    short = tuple(replace(one, length=one.length // 8, micro_batch=one.micro_batch // 2) for one in bert_recipe.PHASES)
    monkeypatch.setattr(bert_recipe, "PHASES", short)
    corpus = write_text(tmp_path / "shopping.txt", 1500)
    sizes = ["--steps", "2", "--batch-size", "32", "--vocab-size", "80", "--without-large"]
    settings = bert_recipe.parse([*sizes, "--corpus", str(corpus), "--output", str(tmp_path)])
    threads.run(lambda comm: bert_recipe.pretrain(comm, settings), 2)
    run = written(tmp_path, "bert_recipe")["runs"]["onebit-lamb"]
    assert run["curve"]["steps"] == [1, 2, 3, 4], "the second phase goes on where the first ended"
    assert run["curve"]["losses"][-1] < run["curve"]["losses"][0]
    assert run["curve"]["bytes_sent"] == sorted(run["curve"]["bytes_sent"])


def test_tuning_compares_learning_rates(tmp_path: Path) -> None:
    converge(tmp_path, "--tune", "--steps", "3")
    tuned = json.loads((tmp_path / "convergence_tuning.json").read_text())
    assert all(len(tuned["final_loss_by_learning_rate"][optimizer]["digits"]) > 2 for optimizer in ("adamw", "lamb"))
    assert not (tmp_path / "convergence.png").exists()


def test_lion_writes_numbers_and_picture(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(sweep, "_MOST_BEYOND", 0)
    monkeypatch.setattr(lion, "_SIZE", CharacterModelSize(layers=2, width=48, heads=3, length=12))
    corpus = write_text(tmp_path / "shopping.txt", 500)
    methods = ["--methods", "adamw", "lion", "onebit-adam"]
    short = ["--steps", "3", "--seeds", "2", "--validation-windows", "8"]
    options = lion.parse(["--corpus", str(corpus), *methods, *short, "--output", str(tmp_path)])
    threads.run(lambda comm: lion.study(comm, options), 2)
    found = written(tmp_path, "lion")
    assert list(found["methods"]) == ["adamw", "lion", "onebit-adam"]
    for one in found["methods"].values():
        assert [run["seed"] for run in one["runs"]] == [0, 1]
        losses = one["final_loss_by_learning_rate"]
        assert min(losses.values()) == losses[f"{one['learning_rate']:g}"] == one["runs"][0]["final_loss"]
        assert one["final_loss"] == pytest.approx(sum(run["final_loss"] for run in one["runs"]) / 2)
    sent = {name: one["bytes_sent"] for name, one in found["methods"].items()}
    assert sent["lion"] == sent["adamw"] > 2 * sent["onebit-adam"]
    assert found["findings"][0] in capsys.readouterr().out


def test_methods_are_compared_at_their_best_rates() -> None:
    swept = {
        "adamw": {0.001: 2.2, 0.01: 2.0, 0.1: 2.4},
        "lion": {0.001: 2.1, 0.01: 2.3},
        "onebit-adam": {0.001: 2.3, 0.01: 2.1, 0.1: nan},
    }
    outcomes = {
        name: [outcome(loss, 3200, seed=seed) for seed in (0, 1)] for name, loss in [("adamw", 2.0), ("lion", 2.1)]
    }
    outcomes["onebit-adam"] = [outcome(loss, 100, frozen_at=20, seed=seed) for seed, loss in enumerate((2.08, 2.12))]
    found = find(swept, outcomes)
    assert {name: one.learning_rate for name, one in found.items()} == {
        "adamw": 0.01,
        "lion": 0.001,
        "onebit-adam": 0.01,
    }
    assert found["onebit-adam"].final_loss == pytest.approx(2.1)
    assert found["onebit-adam"].deviation == pytest.approx(0.04 / 2**0.5)
    assert found["onebit-adam"].difference_percent == {"adamw": pytest.approx(5.0)}
    assert found["onebit-adam"].fewer_bytes == 32
    assert found["adamw"].difference_percent == {}
    assert [one.inside_the_sweep for one in found.values()] == [True, False, True]
    assert sentences(found) == ["1-bit Adam, each at its best rate: loss +5.0% beside AdamW; 32.0x fewer bytes"]
    assert titles(found) == ["1-bit Adam sends 32x fewer bytes and ends 5.0% above AdamW's loss"]


def test_text_classification_writes_numbers_and_picture(tmp_path, capsys, monkeypatch) -> None:
    shopping, counting = write_text(tmp_path / "shopping.txt", 40), tmp_path / "counting.txt"
    counting.write_text("".join(f"{number} and {number + 1} are {2 * number + 1}\n" for number in range(60)))
    monkeypatch.setattr(sweep, "_MOST_BEYOND", 0)
    short = "--rates 1e-3 2e-3 --steps 5 --freeze-step 2 --seeds 2 --model tiny"
    options = text_classification.parse(
        f"--corpus {shopping} {counting} {short} --batch-size 4 --length 5 --vocab-size 200 --output {tmp_path}".split()
    )
    text_classification.study(threads.single(60.0), options)
    found = written(tmp_path, "text_classification")
    assert found["settings"]["classes"] == ["shopping", "counting"]
    assert found["resumes_bit_for_bit"] == {"onebit-adam": True}
    assert list(found["methods"]) == ["adamw", "onebit-adam"]
    for one in found["methods"].values():
        assert [run["seed"] for run in one["runs"]] == [0, 1]
        errors = one["validation_error_by_learning_rate"]
        assert min(errors.values()) == errors[f"{one['learning_rate']:g}"] == 100 - one["runs"][0]["validation"]
        assert one["test"] == pytest.approx(sum(run["test"] for run in one["runs"]) / 2)
    assert found["findings"][0] in capsys.readouterr().out


def test_figures_of_text_classification() -> None:
    interfaces = {"adamw": [100.0] * 6, "onebit-adam": [100.0, 100.0, 50.0, 4.0, 4.0, 4.0]}
    tests = {"adamw": (90.0, 92.0), "onebit-adam": (90.4, 92.0)}
    runs = {
        name: [
            Outcome(name, 1e-3, seed, validation=test, test=test, interface=interface)
            for seed, test in enumerate(tests[name])
        ]
        for name, interface in interfaces.items()
    }
    swept = {"adamw": {5e-4: 11.0, 1e-3: 10.0, 2e-3: 12.0}, "onebit-adam": {1e-3: 9.0, 2e-3: 9.5}}
    adamw, onebit = of_classes.find(swept, runs, freeze_step=2).values()
    assert (adamw.test, adamw.points, adamw.fewer_bytes_frozen) == (91.0, 0.0, 1.0)
    assert (onebit.test, onebit.points) == pytest.approx((91.2, 0.2))
    assert onebit.points_deviation == pytest.approx(0.2 * 2**0.5)
    assert (onebit.frozen_bytes, onebit.fewer_bytes_frozen) == (4.0, 25.0)
    assert onebit.fewer_bytes == pytest.approx(600 / 262)
    assert (adamw.inside_the_sweep, onebit.inside_the_sweep) == (True, False)


def test_times_faster_pairs_rounds() -> None:
    times = Times(seconds={"training": {64: {DENSE: [2.0, 40.0, 6.0], "BigBird": [1.0, 10.0, 2.0]}}})
    assert times_faster(times, "training", 64, "BigBird", DENSE) == 3
    assert times_faster(times, "training", 64, "Fixed", DENSE) is None


@pytest.mark.parametrize("name", [DENSE, *LAYOUTS])
def test_systems_compute_attention_on_their_own_inputs(name: str) -> None:
    length = 4 * BLOCK
    q, k, v = inputs(length, gradients=False)
    found = SYSTEMS[name].build(length)(q, k, v)
    expected = materialised_attention(q, k, v) if name == DENSE else reference_attention(q, k, v, LAYOUTS[name])
    torch.testing.assert_close(found, expected)
    assert input_bytes(length) == sum(x.nbytes for x in (q, k, v))


@pytest.mark.parametrize(("coefficients", "degree"), [((1800.0, 6e5, 2e9), 2), ((7e5, 2e9), 1)])
def test_growth_finds_the_longest_sequence(coefficients: tuple[float, ...], degree: int) -> None:
    def needs(length: int) -> int:
        return round(np.polyval(coefficients, length))

    growth = grow({length: needs(length) for length in (512, 1024, 2048, 4096)[: degree + 2]}, degree)
    np.testing.assert_allclose(growth.coefficients, coefficients, rtol=1e-4)
    assert growth.held_out_error == pytest.approx(0, abs=1e-6)
    longest = growth.longest(24e9)
    assert longest % BLOCK == 0
    assert needs(longest) <= 24e9 < needs(longest + BLOCK)
    assert growth.longest(1e9) == 0


@pytest.mark.skipif(sys.platform != "linux", reason="peak memory is read from /proc")
@pytest.mark.programs
def test_long_sequences_write_numbers_and_picture(tmp_path, monkeypatch, capsys) -> None:
    """In this process, which has held more before: what its peaks would say of BERT is made up."""

    def measure_here(work: Callable[..., Any], *arguments: Any, imported_before: object) -> Any:
        if work.__module__ == memory.__name__:
            return work(*arguments)
        attention, length = arguments[1:3]
        _ = length > 512 or work(*arguments)
        return 10**9 + (2000 * length**2 if attention == "dense" else 10**5 * length)

    monkeypatch.setattr(timing, "_MOST_ROUNDS", timing.FEWEST_ROUNDS)
    monkeypatch.setattr(bert_memory, "_VOCABULARY", 400)
    for module in (memory, bert_memory):
        monkeypatch.setattr(module, "measure_alone", measure_here)
    sizes = "--lengths 256 512 --memory-lengths 256 --dense-limit 256 --materialised-limit 256"
    bert = "--model tiny --bert-length 512 --gigabytes 2 --rounds 1 --threads 1"
    systems = [DENSE, MATERIALISED, "BigBird", GATHERED]  # the peer that compiles has no test of its own
    options = [*sizes.split(), *bert.split(), "--systems", *systems, "--output", str(tmp_path)]
    assert long_sequences.main(options) == 0
    found = written(tmp_path, "long_sequences")
    assert found["skipped_from_length"] == {DENSE: 512, MATERIALISED: 512}
    for mode in ("forward", "training"):
        assert set(found["time"][mode]["256"]) == set(systems)
        assert set(found["time"][mode]["512"]) == {"BigBird", GATHERED}
    assert found["bigbird"]["training_times_faster_than_dense"]["512"] is None
    assert found["bigbird"]["training_times_faster_than_gather"]["512"] > 0
    assert set(found["memory"]["extra_peak_bytes"]["256"]) == set(systems)
    for rows in found["longest_sequence"]["tokens"].values():
        assert rows["2 GB"]["sparse"] > rows["2 GB"]["dense"] > 0
    assert found["findings"][0] in capsys.readouterr().out


@pytest.mark.programs
def test_long_documents_write_numbers_and_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    corpus = write_text(tmp_path / "shopping.txt", 6000)
    sizes = ["--model", "tiny", "--vocab-size", "120", "--document-length", "256", "--window", "64"]
    times = ["--start-steps", "2", "--minutes", "0.02", "--turns", "2", "--validation-documents", "2"]
    assert long_documents.main(["--corpus", str(corpus), *sizes, *times, "--output", str(tmp_path)]) == 0
    found = written(tmp_path, "long_documents")
    fewest = min(run["curve"]["steps"][-1] for run in found["runs"].values())
    assert found["equal_steps"]["steps"] == fewest
    for name, run in found["runs"].items():
        assert run["tokens_seen"] == run["documents_seen"] * (64 if name == "truncated" else 256)
        assert found["equal_time"]["losses"][name] == run["curve"]["losses"][-1]
    assert found["findings"][1] in capsys.readouterr().out
