"""Ranks of one host meet over loopback alone, on a port that only this user is told; over several as they are told."""

from __future__ import annotations

import hashlib
import os
import socket
import stat
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from torch.distributed import Store, TCPStore

from thinwire.comm.launchers import Launch, meet

SRUN = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "node1"}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path / f"thinwire-{os.getuid()}"


def on_one_host(environ: Mapping[str, str], size: int = 3, launcher: str = "mpirun") -> list[Store]:
    """The store of each rank, met in threads."""
    launches = [Launch(launcher, "", rank, size, rank, size) for rank in range(size)]  # type: ignore[arg-type]
    with ThreadPoolExecutor(size) as ranks:
        stores = list(ranks.map(lambda launch: meet(launch, size, 60.0, environ), launches))
    stores[0].set("key", "of rank 0")
    assert all(store.get("key") == b"of rank 0" for store in stores)
    return stores


def listening(port: int) -> set[str]:
    """The addresses that this host listens on at a port, in the kernel's hexadecimal."""
    table = [line.split() for name in ("tcp", "tcp6") for line in Path("/proc/net", name).read_text().splitlines()[1:]]
    return {row[1].partition(":")[0] for row in table if row[3] == "0A" and int(row[1].partition(":")[2], 16) == port}


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="asks Linux who listens")
@pytest.mark.parametrize("environ", ["nothing", "pmix", "port", "address and port"])
@pytest.mark.parametrize("launcher", ["mpirun", "srun"])
def test_one_host_listens_on_loopback_alone(environ: str, launcher: str, folder: Path) -> None:
    variables = {
        "nothing": {},
        "pmix": {"PMIX_NAMESPACE": "prterun-host-12@1"},
        "port": {"MASTER_PORT": free_port()},
        "address and port": {"MASTER_ADDR": "localhost", "MASTER_PORT": free_port()},
    }[environ]
    stores = on_one_host(SRUN | variables, launcher=launcher)
    assert isinstance(stores[0], TCPStore)
    assert listening(stores[0].port) == {"0100007F"}
    if folder.exists():
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert not list(folder.iterdir()), "nothing is left to find"


def test_two_jobs_do_not_share_a_port() -> None:
    jobs = [on_one_host({"PMIX_NAMESPACE": name}) for name in ("one", "two")]
    first, second = (stores[0].port for stores in jobs if isinstance(stores[0], TCPStore))
    assert first != second


def test_what_a_dead_job_left_is_not_believed(folder: Path) -> None:
    on_one_host({"PMIX_NAMESPACE": "again"})
    left = folder / hashlib.sha256(b"pmix again").hexdigest()[:32]
    left.write_text(f"1 {2**22 + 1}")  # no process has such a number
    on_one_host({"PMIX_NAMESPACE": "again"})


def test_one_rank_meets_nobody(folder: Path) -> None:
    assert not isinstance(meet(Launch("srun", "", 0, 1, 0, 1), 1, 60.0, SRUN), TCPStore)
    assert not folder.exists()


def test_a_folder_of_somebody_elses_is_refused(folder: Path) -> None:
    folder.mkdir(mode=0o755)
    with pytest.raises(ValueError, match=r"must be a folder that this user alone can use.*MASTER_ADDR"):
        meet(Launch("mpirun", "", 1, 2, 1, 2), 2, 60.0, {})


def test_rank_0_that_does_not_come_is_told() -> None:
    with pytest.raises(RuntimeError, match=r"rank 0 did not say in .* where to meet: did it start.*MASTER_PORT"):
        meet(Launch("mpirun", "", 1, 2, 1, 2), 2, 0.01, {})
    with pytest.raises(RuntimeError, match="0 of 1 other ranks came within"):
        meet(Launch("mpirun", "", 0, 2, 0, 2), 2, 0.01, {})


def test_several_hosts_have_to_be_told() -> None:
    with pytest.raises(ValueError, match="set MASTER_ADDR to rank 0's host"):
        meet(Launch("mpirun", "", 0, 4, 0, 2), 4, 60.0, {})
