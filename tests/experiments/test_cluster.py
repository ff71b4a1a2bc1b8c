"""Clusters are made, shaped, used by mpirun, and removed again; their commands and jobs end with what went wrong."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from experiments.ethernet.cluster import namespaces, remote_agent
from experiments.ethernet.cluster.clusters import EmulatedCluster, LoopbackCluster
from experiments.ethernet.cluster.commands import missing, run
from experiments.ethernet.cluster.mpirun import clean_environment, run_limited
from tests.launching import need_mpi

_LACK = missing()

needs_cluster = pytest.mark.skipif(_LACK is not None, reason=f"no emulated cluster: {_LACK}")


REPOSITORY = Path(__file__).parents[2]
MAKE_AND_WAIT = """
import time
from experiments.ethernet.cluster.clusters import EmulatedCluster
with EmulatedCluster(2).running() as cluster:
    print(cluster.name, flush=True)
    time.sleep(600)
"""

SUM_OF_RANKS = """
import os, socket, torch, torch.distributed as dist
from thinwire import comm
world = comm.init(backend="gloo", quiet=True) if "GLOO_SOCKET_IFNAME" in os.environ else comm.init(quiet=True)
total = torch.tensor([world.rank])
world.all_reduce(total)
print(f"sum {int(total)} on {socket.gethostname()}", flush=True)
"""


def existing() -> str:
    return run("ip", "netns", "list")


@contextmanager
def making(number: int = signal.SIGTERM) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A process that has made a cluster and waits, and the cluster's name."""
    with subprocess.Popen(
        [sys.executable, "-c", MAKE_AND_WAIT],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        text=True,
        # What a shell runs in the background ignores Ctrl-C, and so would its children.
        preexec_fn=lambda: signal.signal(number, signal.SIG_DFL),
    ) as maker:
        yield maker, maker.stdout.readline().strip()


@needs_cluster
@pytest.mark.launch
@pytest.mark.chaos
def test_mpirun_reaches_every_host_and_nothing_is_left(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(SUM_OF_RANKS)
    with EmulatedCluster(3).running() as cluster:
        cluster.shape(1000)
        finished = cluster.run([str(program)], seconds=100)
        assert finished.code == 0, finished.output
        assert sorted(line for line in finished.output.splitlines() if line.startswith("sum")) == [
            f"sum 3 on host{host}" for host in range(3)
        ]
        assert cluster.name in existing()
    assert cluster.name not in existing()


@needs_cluster
def test_links_are_shaped_at_both_ends_and_released() -> None:
    with EmulatedCluster(1).running() as cluster:
        assert cluster.congestion_control in {"cubic", "reno"}, "as Linux does by default, whatever the machine does"
        link = cluster.links[0]
        ends = [(link.host, "eth0"), (link.switch, link.port)]
        for megabits, shown in ((50, "rate 50Mbit"), (2500, "rate 2500Mbit")):
            cluster.shape(megabits)
            assert all(shown in run("tc", "-n", name, "qdisc", "show", "dev", device) for name, device in ends)
        cluster.shape(None)
        cluster.shape(None)
        assert not any("tbf" in run("tc", "-n", name, "qdisc", "show", "dev", device) for name, device in ends)
        link.set_up(False)
        assert "state DOWN" in run("ip", "-n", link.switch, "link", "show", link.port)
        link.set_up(True)


@needs_cluster
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signals_remove_the_cluster(number: signal.Signals) -> None:
    with making(number) as (maker, name):
        assert f"{name}-host1" in existing()
        maker.send_signal(number)
        maker.wait(60)
    assert name not in existing()


@needs_cluster
def test_what_a_killed_maker_left_is_removed_by_the_next() -> None:
    with making() as (maker, name):
        assert f"{name}-switch" not in namespaces.remove_stale_namespaces()
        maker.kill()
    assert f"{name}-switch" in existing()
    assert f"{name}-switch" in namespaces.remove_stale_namespaces()
    assert name not in existing()


@pytest.mark.programs
def test_loopback_stands_in_without_root(tmp_path: Path) -> None:
    need_mpi()
    program = tmp_path / "program.py"
    program.write_text(SUM_OF_RANKS)
    finished = LoopbackCluster(2).run([str(program)], seconds=100)
    assert finished.code == 0, finished.output
    assert finished.output.count("sum 1 on") == 2


def test_output_and_exit_code_are_kept_and_a_job_that_hangs_is_killed_with_its_children(tmp_path: Path) -> None:
    finished = run_limited(["sh", "-c", "pwd; echo oops >&2; exit 3"], os.environ, 30.0, tmp_path)
    assert (finished.code, finished.output) == (3, f"{tmp_path}\noops\n")
    started = time.monotonic()
    finished = run_limited(["sh", "-c", "echo begun; sleep 600 & wait"], os.environ, 0.5, tmp_path)
    assert (finished.code, finished.output) == (None, "begun\n")
    assert time.monotonic() - started < 60


def test_a_launcher_around_this_process_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "OMPI_COMM_WORLD_RANK", "MASTER_ADDR", "PMIX_RANK"):
        monkeypatch.setenv(name, "7")
    environment = clean_environment({"MASTER_ADDR": "10.77.0.1"})
    assert environment["MASTER_ADDR"] == "10.77.0.1"
    assert environment["OMP_NUM_THREADS"] == "1"
    assert not {"RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK"} & environment.keys()


def test_a_host_that_does_not_answer_is_named_with_sshs_exit_code() -> None:
    # TCP connects to no broadcast address: that fails at once, on any machine.
    command = [sys.executable, str(remote_agent.__file__), "cluster", "255.255.255.255", "true"]
    finished = subprocess.run(command, capture_output=True, text=True)
    assert finished.returncode == 255
    assert "connect to host 255.255.255.255" in finished.stderr
