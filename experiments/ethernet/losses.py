"""The race to a loss, from outside: runs it at one rate, adds to it, or gives it the seconds of other rates."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from experiments.common import machine
from experiments.common.errors import InputError
from experiments.common.results import read_json, write_json
from experiments.ethernet.cluster.clusters import Cluster, EmulatedCluster
from experiments.ethernet.jobs import job, links, setting
from experiments.ethernet.race import kinds, loss_report
from experiments.ethernet.race.contenders import CONTENDERS, FAIR_BASELINE
from experiments.tasks.corpus import load
from experiments.tasks.tokens import share_tokens
from thinwire.comm import threads

__all__ = ["at_another_rate", "race", "retime"]

_NAME = "ethernet_losses"
_OF_MACHINE = ("machine", "tcp")
_VOCABULARY, _LENGTH, _VALIDATION_SEQUENCES = 4096, 32, 512

Runs = Mapping[str, Mapping[str, Any]]
"""By contender, as results hold them."""


def race(options: argparse.Namespace, cluster: Cluster, emulated: EmulatedCluster | None, rate: float | None) -> None:
    """Whole trainings on text, at one rate; with `--add`, beside those that were run before.

    What was learned by a step is the same everywhere: beside trainings of another machine, links have no limit, and
    then everybody's steps are timed at the rate here.
    """
    if emulated is not None and rate is None:
        raise InputError("--races losses alone knows no rate: give --loss-rate, or race steps as well")
    here = _conditions(cluster, None if emulated is None else rate)
    settings = {**here, **_trainings(options)}
    of_trainings = {name: value for name, value in settings.items() if name not in _OF_MACHINE}
    before = _recorded("--add", of_trainings, options.output) if options.add else {}
    settings |= {name: before[name] for name in _OF_MACHINE if name in before}
    moved = any(settings[name] != here[name] for name in _OF_MACHINE)
    if moved and emulated is None:
        raise InputError("--add: another machine ran the recorded race, and there are no links to time it again")
    racing = [name for name in options.contenders if CONTENDERS[name].trains]
    with _shared_arguments(racing, options, cluster, emulated) as arguments:
        arguments += ["--steps", options.added_steps or options.steps, "--freeze-step", options.freeze_step]
        arguments += ["--timed-every", options.timed_every, *([] if moved else _at(emulated, rate))]
        raw = job(cluster, "experiments.ethernet.race.loss_times", arguments, options.ranks_a_host, options.limit)
    runs = {**before.get("runs", {}), **raw["runs"]}
    runs = {name: runs[name] for name in CONTENDERS if name in runs}
    content = {
        **settings,
        "ranks": raw["ranks"],
        "steps": options.steps,
        "retimed": {key: at_another_rate(runs, one) for key, one in before.get("retimed", {}).items()},
        "runs": runs,
    }
    if moved and emulated is not None and rate is not None:
        _write(content, options.output)  # trainings take hours, and timing may fail
        content = _time_again(content, emulated, rate, options)
    shown = loss_report.timed_last(content)
    goal = loss_report.goal_of(runs)
    findings = [loss_report.sentence(shown["runs"], goal)]
    content |= {"findings": findings, "seconds_to_the_loss": loss_report.arrivals(shown["runs"], goal)}
    _write(content, options.output)
    loss_report.print_table(shown["runs"], goal)
    print("\n" + findings[0])
    loss_report.draw(content, options.output / f"{_NAME}.png")
    print(f"Written: {options.output / _NAME}.json and .png", flush=True)


def retime(options: argparse.Namespace, emulated: EmulatedCluster | None) -> None:
    """The recorded race at other rates: the losses are those of its trainings, and only the steps are timed again."""
    if emulated is None:
        raise InputError("--retime: there are no links to shape")
    content = _recorded("--retime", _trainings(options), options.output)
    _check_recorded(options.contenders, content["runs"])
    content.setdefault("retimed", {})
    for rate in options.retime:
        content = _retimed(content, options.contenders, emulated, rate, options)
        _write(content, options.output)
        _print_retimed(content, rate)


def _time_again(
    content: dict[str, Any], emulated: EmulatedCluster, rate: float, options: argparse.Namespace
) -> dict[str, Any]:
    """`content` with the steps of all its contenders timed here at its own rate, if they were not yet or race anew."""
    timed = content["retimed"].get(str(rate), {}).get("kinds", {})
    names = [name for name in content["runs"] if name not in timed or name in options.contenders]
    _check_recorded(names, content["runs"])
    return _retimed(content, names, emulated, rate, options)


def _retimed(
    content: dict[str, Any],
    names: Sequence[str],
    emulated: EmulatedCluster,
    rate: float,
    options: argparse.Namespace,
) -> dict[str, Any]:
    """`content` with the steps of `names` timed at a rate."""
    measured = _timed_before(content["retimed"].get(str(rate)), _conditions(emulated, rate))
    if FAIR_BASELINE not in {*measured["kinds"], *names}:
        raise InputError(f"--retime compares with {FAIR_BASELINE}: name it among --contenders at a new rate")
    with _shared_arguments(names, options, emulated, emulated) as arguments:
        arguments += ["--steps", options.timed_steps, *_at(emulated, rate)]
        raw = job(emulated, "experiments.ethernet.race.kind_times", arguments, options.ranks_a_host, options.limit)
    measured["kinds"] |= raw["kinds"]
    retimed = {**content["retimed"], str(rate): at_another_rate(content["runs"], measured)}
    return {**content, "retimed": retimed}


def at_another_rate(runs: Runs, measured: Mapping[str, Any]) -> dict[str, Any]:
    """What a race is at the rate at which its `measured["kinds"]` of steps were timed: their contenders' seconds."""
    timed = measured["kinds"]
    found = {name: kinds.retime(runs[name], timed[name]) for name in CONTENDERS if name in timed}
    goal = loss_report.goal_of(runs)
    return {
        **{name: measured[name] for name in _OF_MACHINE},
        "findings": [loss_report.sentence(found, goal)],
        "seconds_to_the_loss": loss_report.arrivals(found, goal),
        "runs": {name: {key: one[key] for key in ("seconds", "seconds_a_step")} for name, one in found.items()},
        "kinds": timed,
    }


def _check_recorded(contenders: Sequence[str], runs: Runs) -> None:
    """Refuses whose recorded run is missing, or cannot be taken apart into kinds of steps."""
    absent = [name for name in contenders if name not in runs]
    if absent:
        raise InputError(f"--retime: {', '.join(absent)} did not run in the recorded race: race them with --add first")
    for name in contenders:
        try:
            kinds.counts_along(runs[name])
        except ValueError as error:
            raise InputError(f"--retime: {name}: {error}") from error


def _timed_before(entry: Mapping[str, Any] | None, here: Mapping[str, Any]) -> dict[str, Any]:
    """What was timed at this rate before, over links as they are `here`."""
    if entry is None:
        return {**here, "kinds": {}}
    for name in _OF_MACHINE:
        if entry.get(name) != here[name]:
            raise InputError(
                f"--retime: steps at {here['megabits']} Mb/s were timed with another {name}: {entry.get(name)} and not "
                f"{here[name]}. Take that entry out of {_NAME}.json to time all of them here"
            )
    return {**here, "kinds": dict(entry["kinds"])}


def _print_retimed(content: Mapping[str, Any], rate: float) -> None:
    entry = content["retimed"][str(rate)]
    goal = loss_report.goal_of(content["runs"])
    found = {name: {**content["runs"][name], **one} for name, one in entry["runs"].items()}
    print(f"\nThe same trainings over links of {rate} Mb/s", end="")
    loss_report.print_table(found, goal)
    print("\n" + entry["findings"][0])


def _conditions(cluster: Cluster, rate: float | None) -> dict[str, Any]:
    """What seconds depend on: the machine, its links, and who shares them out."""
    return {"machine": machine.describe(), "tcp": cluster.congestion_control, "megabits": rate}


def _trainings(options: argparse.Namespace) -> dict[str, Any]:
    """What tells one race's trainings from another's."""
    text = f"BERT-{options.loss_model} on Python's standard library, {options.steps} steps"
    return {
        "subject": f"{text}, {setting(options)}",
        "learning_rate": options.learning_rate,
        "freeze_step": options.freeze_step,
    }


def _recorded(option: str, settings: Mapping[str, Any], output: Path) -> dict[str, Any]:
    """A race that was run before under the same settings.

    Raises:
        InputError: there is none, or it was another race.
    """
    path = output / f"{_NAME}.json"
    if not path.exists():
        raise InputError(f"{option}: there is no {path} to add to: race without {option} first")
    found = read_json(path)
    differing = [name for name, value in settings.items() if found.get(name) != value]
    if differing:
        both = "; ".join(f"{name} {found.get(name)!r} and not {settings[name]!r}" for name in differing)
        raise InputError(f"{option}: {path} holds another race: {both}")
    return found


@contextmanager
def _shared_arguments(
    racing: Sequence[str], options: argparse.Namespace, cluster: Cluster, emulated: EmulatedCluster | None
) -> Iterator[list[object]]:
    """What every job that trains is told, and the corpus, once for all ranks, as a shared file system would hold it."""
    alone = threads.single(timeout=60.0)
    tokens = share_tokens(alone, load, _VOCABULARY, _LENGTH, _VALIDATION_SEQUENCES)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tokens.npz"
        np.savez(path, vocabulary=tokens.vocabulary, training=tokens.training, validation=tokens.validation)
        arguments: list[object] = ["--model", options.loss_model, "--batch-size", options.batch_size]
        arguments += ["--contenders", *racing, "--tokens", path, "--learning-rate", options.learning_rate]
        yield [*arguments, *links(emulated, cluster)]


def _at(emulated: EmulatedCluster | None, rate: float | None) -> list[object]:
    return [] if emulated is None else ["--rate", rate]


def _write(content: dict[str, Any], output: Path) -> None:
    write_json(output / f"{_NAME}.json", content)
