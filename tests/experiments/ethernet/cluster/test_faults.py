"""What a real network does to a job: it ends with an error that names what is wrong, or goes on with the same losses.

Never a hang past the timeout, never a wrong sum.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from experiments.ethernet.cluster.clusters import EmulatedCluster
from experiments.ethernet.cluster.mpirun import Finished
from tests.experiments.ethernet.cluster import faulty_program
from tests.experiments.ethernet.cluster.needs import needs_cluster
from thinwire.comm import threads

pytestmark = [needs_cluster, pytest.mark.launch, pytest.mark.chaos]

HOSTS = 3
PATIENT, IMPATIENT = 60.0, 8.0
"""Timeouts of collectives, in seconds."""
LIMIT = 120.0
"""Longest that any job here may take: no fault may hang it."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[EmulatedCluster]:
    with EmulatedCluster(HOSTS).running() as running:
        yield running


@pytest.fixture(autouse=True)
def _sound_links(cluster: EmulatedCluster) -> None:
    cluster.shape(1000)
    for link in cluster.links:
        link.set_up(True)


@pytest.fixture(scope="module")
def sound_losses() -> list[float]:
    """Of rank 0, where nothing goes wrong: the same on threads."""
    return threads.run(lambda world: faulty_program.train(world, (33,), None, pause=0.0), HOSTS)[0]


def run_with_fault(
    cluster: EmulatedCluster, folder: Path, timeout: float, fault: Callable[[], None], *widths: int
) -> Finished:
    """Trains, and calls `fault` while it does."""
    program = ["-m", faulty_program.__name__, str(folder), str(timeout), *map(str, widths or (33,))]
    with ThreadPoolExecutor(1) as pool:
        job = pool.submit(cluster.run, program, seconds=LIMIT)
        while not (folder / "now").exists() and not job.done():
            time.sleep(0.02)
        fault()
        return job.result()


def losses(finished: Finished) -> list[float]:
    assert finished.code == 0, finished.output
    line = next(line for line in finished.output.splitlines() if line.startswith("losses"))
    return [float.fromhex(loss) for loss in line.split()[1:]]


def test_a_link_down_for_five_seconds_changes_nothing(
    cluster: EmulatedCluster, tmp_path: Path, sound_losses: list[float]
) -> None:
    def fault() -> None:
        cluster.links[1].set_up(False)
        time.sleep(5)
        cluster.links[1].set_up(True)

    assert losses(run_with_fault(cluster, tmp_path, PATIENT, fault)) == sound_losses


def test_a_link_at_a_tenth_of_its_rate_changes_nothing(
    cluster: EmulatedCluster, tmp_path: Path, sound_losses: list[float]
) -> None:
    finished = run_with_fault(cluster, tmp_path, PATIENT, lambda: cluster.links[2].shape(100))
    assert losses(finished) == sound_losses


def test_a_host_cut_off_for_good_is_named(cluster: EmulatedCluster, tmp_path: Path) -> None:
    finished = run_with_fault(cluster, tmp_path, IMPATIENT, lambda: cluster.links[1].set_up(False))
    assert finished.code not in (0, None), finished.output
    assert "rank 1" in finished.output


def test_ranks_with_different_models_are_named(cluster: EmulatedCluster, tmp_path: Path) -> None:
    finished = run_with_fault(cluster, tmp_path, IMPATIENT, lambda: None, 33, 34, 33)
    assert finished.code not in (0, None), finished.output
    assert "ValueError" in finished.output
    assert "rank 1" in finished.output


def test_a_host_that_cannot_be_reached_is_named(cluster: EmulatedCluster) -> None:
    finished = cluster.run(["-m", "this"], seconds=LIMIT, also_hosts=["10.77.0.99"])
    assert finished.code not in (0, None), finished.output
    assert "connect to host 10.77.0.99" in finished.output
    assert "Zen of Python" not in finished.output
