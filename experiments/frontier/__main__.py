"""Loss against bytes and against seconds on slow links: every optimizer at its own best rate, on ranks in threads.

`python -m experiments.frontier`. Each finished run is in the results at once: a run that is stopped goes on from there.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from experiments.common.command_line import Parser, positive
from experiments.common.errors import InputError, refuse
from experiments.common.launching import INTERRUPTED, refuse_launchers
from experiments.common.results import OUTPUT, check_writable
from experiments.frontier.contenders import CONTENDERS
from experiments.frontier.findings import summary
from experiments.frontier.learning import learn
from experiments.frontier.plots import draw
from experiments.frontier.store import RunStore
from experiments.frontier.studies import STUDIES
from experiments.frontier.studying import answer, baselines, study_summary
from experiments.frontier.subjects import RECIPES, SUBJECTS, Subject

__all__ = ["main", "parse"]

_NAME = "frontier"
_QUICK_STEPS = 2
_VALIDATION_WINDOWS, _QUICK_WINDOWS = 128, 8


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    try:
        refuse_launchers()
        options = parse(sys.argv[1:] if arguments is None else arguments)
        for name in options.task:
            if options.study is None:
                _compare(name, options)
            else:
                _study(name, options)
    except InputError as error:
        return refuse("experiments.frontier", error)
    except KeyboardInterrupt:
        return INTERRUPTED
    return 0


def _compare(name: str, options: argparse.Namespace) -> None:
    """All runs of a task that its file does not hold yet, its JSON and its picture."""
    whole = SUBJECTS[name].shortened(_QUICK_STEPS) if options.quick else SUBJECTS[name]
    windows = _QUICK_WINDOWS if options.quick else _VALIDATION_WINDOWS
    seeds = 1 if options.quick else options.seeds
    task = whole.load_task(options.corpus, windows)
    path = options.output / f"{_NAME}_{name}.json"
    store = RunStore(
        path,
        _settings(whole, windows, options),
        lambda runs: summary(runs, whole.steps, whole.contenders, whole.workers, seeds),
    )
    with _one_thread():
        for workers in options.workers or whole.workers:
            for contender in whole.contenders:
                if options.contenders is None or contender in options.contenders:
                    learn(whole, task, workers, (contender, CONTENDERS[contender]), seeds, store, _say)
    store.write()
    draw(store.content, path.with_suffix(".png"))
    print("\n".join(store.content["findings"]))
    print(f"Written: {path.with_suffix('')}.json and .png", flush=True)


def _study(name: str, options: argparse.Namespace) -> None:
    """What a study asks of a task, as far as its file does not hold it yet."""
    questions = [question for question in STUDIES[options.study] if question.subject == name]
    if not questions:
        return
    subject = SUBJECTS[name]
    task = subject.load_task(options.corpus, _VALIDATION_WINDOWS)
    baseline = baselines(options.output / f"{_NAME}_{name}.json", questions, subject.steps)
    path = options.output / f"{_NAME}_{options.study}_{name}.json"
    settings = _settings(subject, _VALIDATION_WINDOWS, options)
    store = RunStore(path, settings, lambda runs: study_summary(runs, baseline))
    with _one_thread():
        for question in questions:
            answer(question, subject, task, options.seeds, store, _say)
    store.write()
    print(f"Written: {path}", flush=True)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Workers run beside one another; of more threads each, a small model only waits."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _say(line: str) -> None:
    print(line, flush=True)


def _settings(subject: Subject, windows: int, options: argparse.Namespace) -> dict[str, Any]:
    """What a run depends on besides its own name, as JSON has it."""
    settings = {
        "description": subject.description,
        "unit": subject.unit,
        "steps": subject.steps,
        "validations": subject.validations,
        "rates_tried_first": subject.rates,
        "corpus": subject.corpus(options.corpus),
        "validation_windows": None if subject.text is None else windows,
        "model": None if subject.text is None else asdict(subject.text[0]),
        "options": {name: asdict(recipe) for name, recipe in RECIPES.items()},
    }
    plain: dict[str, Any] = json.loads(json.dumps(settings))
    return plain


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Reads and checks the command line; raises `InputError` for what cannot be used."""
    parser = Parser(
        "experiments.frontier",
        "Trains every optimizer at its best rate: loss by bytes and by seconds.",
        "hours on one core, and goes on where it was stopped",
    )
    parser.add_argument("--task", nargs="+", choices=tuple(SUBJECTS), default=tuple(SUBJECTS), help="what to learn")
    parser.add_argument("--study", choices=tuple(STUDIES), help="ask this instead, and run nothing else")
    parser.add_argument("--contenders", nargs="+", choices=tuple(CONTENDERS), help="to train now; else all of a task's")
    parser.add_argument("--workers", nargs="+", type=positive, metavar="N", help="to train now; else a task's own")
    parser.add_argument("--seeds", type=positive, default=3, metavar="N", help="runs of each at its best rate")
    parser.add_argument("--corpus", nargs="+", type=Path, metavar="FILE", help="UTF-8 text; else the standard library")
    parser.add_argument("--quick", action="store_true", help=f"{_QUICK_STEPS} steps, one seed: whether all of it runs")
    parser.add_argument("--output", type=Path, default=OUTPUT, metavar="DIR", help="for the pictures and the JSON")
    options = parser.parse_args(arguments)
    if options.quick and options.output == OUTPUT:
        raise InputError("--quick is no measurement: give another folder with --output")
    for name in options.contenders or ():
        if not any(name in SUBJECTS[task].contenders for task in options.task):
            raise InputError(f"--contenders {name} learns none of --task {' '.join(options.task)}")
    if options.study is not None:
        _refuse_beside_study(options)
    check_writable(options.output, "--output")
    return options


def _refuse_beside_study(options: argparse.Namespace) -> None:
    """A study has its own contenders, workers and lengths."""
    for name, given in (
        ("--contenders", options.contenders),
        ("--workers", options.workers),
        ("--quick", options.quick),
    ):
        if given:
            raise InputError(f"{name} is of the comparison, and --study {options.study} has its own: leave it out")
    tasks = {question.subject for question in STUDIES[options.study]}
    if not tasks & set(options.task):
        wanted, given = " or ".join(sorted(tasks)), " ".join(options.task)
        raise InputError(f"--study {options.study} asks nothing of --task {given}: give {wanted}")


if __name__ == "__main__":
    sys.exit(main())
