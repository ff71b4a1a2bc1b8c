"""What is said of contenders and variants follows from the numbers; a study says what it lacks."""

from math import nan
from pathlib import Path
from typing import Any

import pytest

from experiments.common.errors import InputError
from experiments.common.results import read_json, write_json
from experiments.frontier import learning
from experiments.frontier.__main__ import main, parse
from experiments.frontier.contenders import CONTENDERS, Contender
from experiments.frontier.findings import missing, seconds_at, sentences, standings, title
from experiments.frontier.store import Run, RunStore
from experiments.frontier.studies import Question
from experiments.frontier.studying import Baseline, answer, baselines, study_summary, variant_standings
from experiments.frontier.subjects import SUBJECTS, Subject
from experiments.training.optimizers import OPTIMIZERS, SHARDED
from tests.experiments.helpers import outcome, write_text, written


def run(contender: str, rate: float, loss: float, sent: int, seed: int = 0, cpu: float = 0.01) -> Run:
    return Run(2, contender, rate, cpu, outcome(loss, sent, seed=seed))


RUNS = [
    run("adamw", 0.001, 2.2, 3200),
    run("adamw", 0.002, 2.0, 3200),
    run("adamw", 0.002, 2.1, 3200, seed=1),
    run("adamw", 0.004, nan, 3200),
    run("diloco-30-none", 0.002, 2.06, 100, cpu=0.02),
    run("diloco-30-none", 0.002, 2.06, 100, seed=1, cpu=0.02),
    run("diloco-30-int4", 0.002, 2.30, 25),
    run("diloco-30-int4", 0.002, 2.30, 25, seed=1),
    run("onebit-lion", 0.001, nan, 50),
]


def test_contenders_stand_at_their_best_rates() -> None:
    found = standings(RUNS, 2, steps=10)
    adamw, plain, coarse = found["adamw"], found["diloco-30-none"], found["diloco-30-int4"]
    assert (adamw.rate, adamw.seeds, adamw.inside_the_sweep) == (0.002, 2, True)
    assert adamw.loss == pytest.approx(2.05)
    assert adamw.deviation == pytest.approx(0.1 / 2**0.5)
    assert adamw.fewer_bytes is None
    assert (plain.fewer_bytes, plain.inside_the_sweep) == (32, False)
    assert plain.percent_above == {"adamw": pytest.approx(100 * (2.06 / 2.05 - 1))}
    assert coarse.percent_above == {
        "adamw": pytest.approx(100 * (2.30 / 2.05 - 1)),
        "diloco-30-none": pytest.approx(100 * (2.30 / 2.06 - 1)),
    }
    assert plain.seconds["20 Mb/s"] == pytest.approx(10 * 0.02 + 8 * 100 / 20e6) == seconds_at(20e6, 0.2, 100)
    assert title(found, 2) == (
        "DiLoCo, 30 steps, fp32: 32x fewer bytes than AdamW, within the seeds' scatter of its loss; "
        "DiLoCo, 30 steps, int4: 128x, 12.2% above (2 workers)"
    )
    lines = sentences(found, 2)
    assert lines[0] == "2 workers: 1-bit Lion diverged at every rate"
    assert "12.20% beside AdamW, +11.65% beside DiLoCo, 30 steps, fp32; 128x fewer bytes" in lines[2]
    assert missing({2: found}, ["adamw", "diloco-30-int4", "onebit-lion", "lamb"], [2], 2) == [
        "1-bit Lion, 2 workers: 1 of 2 seeds",
        "LAMB, 2 workers: 0 of 2 seeds",
    ]


_LOSSES = {"kept": 2.2, "worse": 2.3, "best": 2.0}
"""By variant, at the rate 0.002; elsewhere all are higher."""
_BASELINE = {2: Baseline(2.0, {})}


def _question(**options: Any) -> Question:
    variants = {name: Contender("diloco", "", "#000000", "o") for name in _LOSSES}
    return Question("text", 2, options.pop("rates", (0.001, 0.002)), variants, **options)


def _answer(question: Question, path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Run]:
    """The runs that it makes, in their order."""
    runs: list[Run] = []

    def train(
        subject: Subject, task: object, workers: int, contender: tuple[str, Contender], rate: float, seed: int
    ) -> Run:
        loss = _LOSSES[contender[0]] + 100 * abs(rate - 0.002) + 0.01 * seed
        runs.append(Run(workers, contender[0], rate, 0.01, outcome(loss, subject.steps, seed=seed)))
        return runs[-1]

    monkeypatch.setattr(learning, "train", train)
    task: Any = None
    store = RunStore(path, {}, lambda runs: study_summary(runs, _BASELINE))
    answer(question, SUBJECTS["text"], task, 3, store, lambda line: None)
    return runs


def test_the_first_and_the_best_run_with_all_seeds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = _answer(_question(steps=7), tmp_path / "a.json", monkeypatch)
    found = variant_standings(runs, _BASELINE)["2"]
    assert {name: one.seeds for name, one in found.items()} == {"kept": 3, "worse": 1, "best": 3}
    assert all((one.rate, one.rates_tried) == (0.002, [0.001, 0.002]) for one in found.values())
    kept = found["kept"]
    assert (kept.first_loss, kept.loss, kept.percent_above) == pytest.approx((2.2, 2.21, 10.5))
    assert kept.seconds["20 Mb/s"] == pytest.approx(0.01 * 100 + 8 * 7 / 20e6)
    assert kept.deviation == pytest.approx(0.01)
    assert {run.outcome.bytes_sent for run in runs} == {7}
    assert not _answer(_question(steps=7), tmp_path / "a.json", monkeypatch)
    more = _answer(_question(steps=7, seeds=2), tmp_path / "b.json", monkeypatch)
    assert {run.contender for run in more if run.outcome.seed == 1} == {"kept", "best"}
    assert {run.outcome.seed for run in more} == {0, 1}


def test_what_a_study_lacks_is_said(tmp_path: Path) -> None:
    path = tmp_path / "frontier_text.json"
    with pytest.raises(InputError, match=r"no adamw with 2 workers.*--workers 2 --contenders adamw"):
        baselines(path, [_question()], steps=10)
    adamw = {"loss": 2.5, "bytes_sent": 5e6, "step_cpu_seconds": 0.1}
    write_json(path, {"standings": {"2": {"adamw": adamw}}})
    found = baselines(path, [_question()], steps=10)[2]
    assert found.loss == 2.5
    assert found.seconds_in_bf16["20 Mb/s"] == pytest.approx(10 * 0.1 + 8 * 2.5e6 / 20e6)
    for command in (["--workers", "2"], ["--quick", "--output", str(tmp_path)], ["--contenders", "adamw"]):
        with pytest.raises(InputError, match=f"{command[0]} is of the comparison, and --study outer has its own"):
            parse(["--study", "outer", *command])
    with pytest.raises(InputError, match="asks nothing of --task digits: give text"):
        parse(["--study", "zero-one", "--task", "digits"])


def test_every_optimizer_of_the_experiments_is_compared() -> None:
    assert {one.optimizer for one in CONTENDERS.values()} == OPTIMIZERS.keys() | SHARDED.keys()
    assert len({(one.colour, one.marker) for one in CONTENDERS.values()}) == len(CONTENDERS)
    assert {one.beside for one in CONTENDERS.values()} - {None} <= CONTENDERS.keys()


def test_a_stopped_study_goes_on_where_it_was(tmp_path, monkeypatch, capsys) -> None:
    corpus = write_text(tmp_path / "shopping.txt", 400)
    command = ["--quick", "--task", "text", "--contenders", "adamw", "diloco-10-none", "--output", str(tmp_path)]
    command += ["--corpus", str(corpus)]
    results = tmp_path / "frontier_text.json"
    trained: list[str] = []

    def stop_after_4(*arguments: object) -> Run:
        if len(trained) == 4:
            raise KeyboardInterrupt
        trained.append("run")
        return train(*arguments)  # type: ignore[arg-type]

    train = learning.train
    monkeypatch.setattr(learning, "train", stop_after_4)
    assert main(command) == 130
    before = read_json(results)["runs"]
    assert len(before) == 4
    monkeypatch.setattr(learning, "train", train)
    assert main(command) == 0
    found = written(tmp_path, "frontier_text")
    assert {name: found["runs"][name] for name in before} == before
    assert list(found["standings"]["2"]) == ["adamw", "diloco-10-none"]
    adamw, diloco = found["standings"]["2"].values()
    assert diloco["seeds"] == 1
    assert (
        diloco["fewer_bytes"] == pytest.approx(adamw["bytes_sent"] / diloco["bytes_sent"]) == pytest.approx(2, rel=0.01)
    )
    assert found["findings"][0] in capsys.readouterr().out
    assert any(line.startswith("1-bit Adam, 2 workers: 0 of 1 seeds") for line in found["not_run"])
    # Runs of other settings are not mixed.
    found["settings"]["steps"] += 1
    write_json(results, found)
    assert main(command) == 2
    assert "runs of other settings" in capsys.readouterr().err
