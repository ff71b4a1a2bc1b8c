"""A study searches with one seed and reports with all; its figures follow from the runs, and it says what it lacks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from experiments.common.errors import InputError
from experiments.common.results import write_json
from experiments.frontier import learning
from experiments.frontier.__main__ import parse
from experiments.frontier.contenders import Contender
from experiments.frontier.store import Run, RunStore
from experiments.frontier.studies import STUDIES, Question, options_of, variant_name
from experiments.frontier.studying import Baseline, answer, baselines, study_summary, variant_standings
from experiments.frontier.subjects import SUBJECTS, Subject
from tests.experiments.training.outcomes import outcome

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


def test_a_single_rate_is_not_searched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = _answer(_question(rates=(0.004,), seeds=1), tmp_path / "a.json", monkeypatch)
    assert [(run.contender, run.rate) for run in runs] == [(name, 0.004) for name in _LOSSES]


def test_studies_name_their_variants_apart_and_ask_known_tasks() -> None:
    for questions in STUDIES.values():
        named: dict[tuple[str, int, str], Contender] = {}
        for question in questions:
            assert question.subject in SUBJECTS
            for name, one in question.variants.items():
                assert name == variant_name(one.optimizer, question.steps, one.options)
                numbers = {option: value for option, value in one.options.items() if option != "codec"}
                length = {} if question.steps is None else {"steps": question.steps}
                assert options_of(name) == numbers | length
                assert named.setdefault((question.subject, question.workers, name), one) == one


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
