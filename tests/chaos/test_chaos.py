"""A short slice of every harness; `make chaos` does the whole."""

import pytest

from tests.chaos import HARNESSES, configs, elastic, forks, heal, kills, launched, meshes, run
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
