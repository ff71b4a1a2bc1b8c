"""Clusters are made, shaped, used by mpirun, and removed again whatever ends their maker."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from experiments.ethernet.cluster import namespaces
from experiments.ethernet.cluster.clusters import EmulatedCluster, LoopbackCluster
from experiments.ethernet.cluster.commands import run
from tests.experiments.ethernet.cluster.needs import needs_cluster
from tests.launching import need_mpi

REPOSITORY = Path(__file__).parents[4]
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


@pytest.mark.parametrize("hosts", [0, 251])
def test_no_addresses_for_so_many_hosts(hosts: int) -> None:
    with pytest.raises(ValueError, match="1 to 250"):
        EmulatedCluster(hosts)


def test_names_tell_clusters_of_one_process_apart() -> None:
    assert len({namespaces.new_cluster_name() for _ in range(10)}) == 10


@needs_cluster
def test_hosts_slow_down_as_linux_does_by_default_whatever_the_machine_does() -> None:
    with EmulatedCluster(1).running() as cluster:
        assert cluster.congestion_control in {"cubic", "reno"}


@needs_cluster
@pytest.mark.launch
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
def test_an_exception_removes_the_cluster() -> None:
    with pytest.raises(KeyError), EmulatedCluster(1).running() as cluster:
        raise KeyError
    assert cluster.name not in existing()


@needs_cluster
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signals_remove_the_cluster(number: signal.Signals) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", MAKE_AND_WAIT],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        text=True,
        # What a shell runs in the background ignores Ctrl-C, and so would its children.
        preexec_fn=lambda: signal.signal(number, signal.SIG_DFL),
    ) as maker:
        assert maker.stdout is not None
        name = maker.stdout.readline().strip()
        assert f"{name}-host1" in existing()
        maker.send_signal(number)
        maker.wait(60)
    assert name not in existing()


@needs_cluster
def test_what_a_killed_maker_left_is_removed_by_the_next() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", MAKE_AND_WAIT], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True
    ) as maker:
        assert maker.stdout is not None
        name = maker.stdout.readline().strip()
        assert f"{name}-switch" not in namespaces.remove_stale_namespaces()
        maker.kill()
    assert f"{name}-switch" in existing()
    assert f"{name}-switch" in namespaces.remove_stale_namespaces()
    assert name not in existing()


@pytest.mark.launch
def test_loopback_stands_in_without_root(tmp_path: Path) -> None:
    need_mpi()
    program = tmp_path / "program.py"
    program.write_text(SUM_OF_RANKS)
    finished = LoopbackCluster(2).run([str(program)], seconds=100)
    assert finished.code == 0, finished.output
    assert finished.output.count("sum 1 on") == 2
