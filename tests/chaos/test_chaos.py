"""A short slice of every harness; `make chaos` does the whole."""

import random
import re
from collections.abc import Callable
from dataclasses import asdict, replace

import pytest

from tests.chaos import HARNESSES, accounts, configs, elastic, forks, heal, kills, launched, meshes, run
from tests.chaos.harness import Outcome
from tests.launching import Jobs


def check(outcome: Outcome, tried: int) -> None:
    assert outcome.tried >= tried
    assert outcome.bad == 0, "\n".join(outcome.examples)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("name", [name for name, one in HARNESSES.items() if one.slice])
def test_a_slice(name: str) -> None:
    count = HARNESSES[name].slice
    check(run(name, count, seed=7), count)


def test_the_seed_decides() -> None:
    assert configs.run(20, 3) == configs.run(20, 3)


def account() -> list[accounts.Entry]:
    """Of three workers that take six outer steps of one fragment, of which the third then dies; two take three more."""
    source, told = random.Random(1), []
    residual, owed, velocity = [0.0] * 3, [0.0] * 3, [0.0] * 3
    for number in range(9):
        size = 3 if number < 6 else 2
        velocity = [sum(velocity) / size] * size  # handed on
        before, gradients = (residual, owed, velocity), [source.gauss(0, 1) for _ in range(size)]
        residual, owed = ([source.gauss(0, 0.1) for _ in range(size)] for _ in range(2))
        average = sum(d + e - after for d, e, after in zip(gradients, before[0], residual, strict=False)) / size
        velocity = [0.9 * one + average / size for one in velocity]
        update = 0.6 * (average + 0.9 * sum(velocity)) + sum(before[1][:size]) - sum(owed)
        for who in range(size):
            kept = [[[part[who]] for part in parts] for parts in (before, (residual, owed, velocity))]
            (e, s, v), (e1, s1, v1) = kept
            same = [who, number, 0, size == 2, size, 0.6, 0.9]
            told.append(accounts.Entry(*same, [gradients[who]], [e, v, s], [e1, v1, s1], [update], [1.0, 1.0, 0.001]))
    return told


@pytest.mark.parametrize(
    ("spoil", "fault"),
    [
        (lambda told: None, None),
        (lambda told: told[7].gradient.__setitem__(0, 0.0), "step 2 of fragment 0, by 3: its momentum is off"),
        (lambda told: told[4].after[2].__setitem__(0, 9.0), "step 1 of fragment 0, by 3: its update is off"),
        (lambda told: told[18].before[0].__setitem__(0, 0.0), "worker 0 begins outer step 6 with other residuals"),
        (lambda told: [one.before[1].__setitem__(0, 0.0) for one in told[18:20]], "step 6 begins with a momentum of"),
        (lambda told: told[10].update.__setitem__(0, 9.0), r"step 3 is not the same on workers \[0, 1, 2\]"),
        (lambda told: told.append(replace(told[18], who=5)), "step 6 was taken by 3 workers, and 2 took part"),
        (lambda told: told.pop(12), "worker 0 takes outer step 5 after 3"),
    ],
)
def test_an_account_shows_what_was_lost_or_counted_twice(
    spoil: Callable[[list[accounts.Entry]], object], fault: str | None
) -> None:
    told = account()
    spoil(told)
    found = accounts.faults([asdict(one) for one in told])
    assert any(re.search(fault, one) for one in found) if fault else not found


@pytest.mark.programs
def test_surviving_nodes_end_together_and_a_node_joins(jobs: Jobs) -> None:
    """Nodes of two ranks, of which one rank dies."""
    check(elastic.run(1, seed=5, python=jobs.python), 1)


@pytest.mark.programs
def test_synchronous_workers_go_on_without_one_and_with_another(jobs: Jobs) -> None:
    """The first of four dies once it has all of a frozen step, after one has joined."""
    check(heal.run(1, seed=36, python=jobs.python), 1)


@pytest.mark.programs
def test_ranks_of_a_mesh_of_which_one_is_stopped(jobs: Jobs) -> None:
    assert meshes.faults(meshes.Trial("pp dp", "stopped", 3, 9), jobs.python) == []


@pytest.mark.launch
def test_workers_end_together_beside_one_that_sends_garbage(jobs: Jobs) -> None:
    check(elastic.garbage(1, seed=2, python=jobs.python), 1)


@pytest.mark.launch
def test_forks_of_a_rank_end_and_the_rank_goes_on(jobs: Jobs) -> None:
    assert forks.of_form("onebit-1", 6, 1, jobs.python) == []


@pytest.mark.programs
@pytest.mark.parametrize("form", [kills.Form("OneBitAdam", 1), kills.Form("OneBitAdam", 1, by_node=True)], ids=str)
def test_what_was_killed_goes_on_bit_for_bit(form: kills.Form, jobs: Jobs) -> None:
    check(kills.run(2, seed=1, forms=[form], python=jobs.python), 2)


@pytest.mark.launch
@pytest.mark.parametrize(
    "trial",
    [
        launched.Trial("gloo", "adamw-3", "another rate", 1, 2),
        launched.Trial("mpi", "onebit-1", "another thinwire", 2, 1),
    ],
    ids=lambda trial: trial.backend,
)
def test_real_ranks_of_which_one_differs(trial: launched.Trial, jobs: Jobs) -> None:
    if trial.backend not in launched.backends():
        pytest.skip("no mpirun")
    assert launched.faults(trial, jobs.python) == []
