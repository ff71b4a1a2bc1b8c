"""What a real network does to a job: it ends with an error that names what is wrong, or goes on with the same losses.

Never a hang past the timeout, never a wrong sum.
"""

import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import nn

import thinwire
from experiments.ethernet.cluster.clusters import EmulatedCluster
from experiments.ethernet.cluster.mpirun import Finished
from tests.experiments.test_cluster import needs_cluster
from thinwire import comm
from thinwire.comm import Communicator, threads

pytestmark = [needs_cluster, pytest.mark.launch, pytest.mark.chaos]

THIS = "tests.experiments.test_cluster_faults"
HOSTS = 3
PATIENT, IMPATIENT = 60.0, 8.0
"""Timeouts of collectives, in seconds."""
LIMIT = 120.0
"""Longest that any job here may take: no fault may hang it."""


STEPS = 40
FREEZE_STEP = 5
FAULT_AT = 12
"""The step before which the program says that it is time for a fault: frozen, and under way."""


def train(world: Communicator, widths: tuple[int, ...], folder: Path | None, pause: float) -> list[float]:
    """Losses of this rank, step by step."""
    torch.set_num_threads(1)
    width = widths[world.rank % len(widths)]
    model = nn.Sequential(nn.Linear(31, width), nn.Tanh(), nn.Linear(width, 7))
    random = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=random) / 5)
    optimizer = thinwire.OneBitAdam(model.parameters(), lr=1e-2, freeze_step=FREEZE_STEP, comm=world)
    losses = []
    for step in range(STEPS):
        if folder is not None and world.rank == 0 and step == FAULT_AT:
            (folder / "now").touch()
        time.sleep(pause)
        inputs = torch.randn(16, 31, generator=torch.Generator().manual_seed(100 * step + world.rank))
        loss = (model(inputs) - inputs[:, :7]).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main(folder: str, timeout: str, *widths: str) -> None:
    """A few steps of 1-bit Adam on each rank, its losses on the output of rank 0."""
    world = comm.init(backend="gloo", timeout=float(timeout), quiet=True)
    losses = train(world, tuple(map(int, widths)), Path(folder), pause=0.05)
    if world.rank == 0:
        print("losses", *(loss.hex() for loss in losses), flush=True)
    world.close()


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
    return threads.run(lambda world: train(world, (33,), None, pause=0.0), HOSTS)[0]


def run_with_fault(
    cluster: EmulatedCluster, folder: Path, timeout: float, fault: Callable[[], None], *widths: int
) -> Finished:
    """Trains, and calls `fault` while it does."""
    program = ["-m", THIS, str(folder), str(timeout), *map(str, widths or (33,))]
    with ThreadPoolExecutor(1) as pool:
        job = pool.submit(cluster.run, program, seconds=LIMIT)
        while not (folder / "now").exists() and not job.done():
            time.sleep(0.02)
        fault()
        return job.result()


def go_down_for_5_seconds(cluster: EmulatedCluster) -> None:
    cluster.links[1].set_up(False)
    time.sleep(5)
    cluster.links[1].set_up(True)


@pytest.mark.parametrize(
    "fault", [go_down_for_5_seconds, lambda cluster: cluster.links[2].shape(100)], ids=["down", "a tenth of its rate"]
)
def test_a_disturbed_link_changes_nothing(cluster, tmp_path, sound_losses, fault) -> None:
    finished = run_with_fault(cluster, tmp_path, PATIENT, lambda: fault(cluster))
    assert finished.code == 0, finished.output
    line = next(line for line in finished.output.splitlines() if line.startswith("losses"))
    assert [float.fromhex(loss) for loss in line.split()[1:]] == sound_losses


@pytest.mark.parametrize(
    ("cut_off", "widths", "named"), [(True, (33,), ""), (False, (33, 34, 33), "ValueError")], ids=["cut off", "models"]
)
def test_a_host_cut_off_for_good_and_one_of_another_model_are_named(cluster, tmp_path, cut_off, widths, named) -> None:
    fault = (lambda: cluster.links[1].set_up(False)) if cut_off else (lambda: None)
    finished = run_with_fault(cluster, tmp_path, IMPATIENT, fault, *widths)
    assert finished.code not in (0, None), finished.output
    assert "rank 1" in finished.output
    assert named in finished.output


def test_a_host_that_cannot_be_reached_is_named(cluster: EmulatedCluster) -> None:
    finished = cluster.run(["-m", "this"], seconds=LIMIT, also_hosts=["10.77.0.99"])
    assert finished.code not in (0, None), finished.output
    assert "connect to host 10.77.0.99" in finished.output
    assert "Zen of Python" not in finished.output


if __name__ == "__main__":
    main(*sys.argv[1:])
