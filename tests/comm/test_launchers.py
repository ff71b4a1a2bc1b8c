"""What launchers tell ranks; where ranks meet: those of one host over loopback alone, on a port that only this user is
told, over several as they are told."""

import hashlib
import os
import stat
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from torch.distributed import Store, TCPStore

from tests.launching import free_port
from tests.refusing import refused
from thinwire.comm import Launch, detect
from thinwire.comm.launchers import check_alone, meet, rendezvous

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "node1"}
OPEN_MPI = {"RANK": "3", "SIZE": "8", "LOCAL_RANK": "1", "LOCAL_SIZE": "2"}
OPEN_MPI = {f"OMPI_COMM_WORLD_{name}": value for name, value in OPEN_MPI.items()}
OPEN_MPI |= {"PMIX_RANK": "3", "PMIX_NAMESPACE": "prterun-1@1"}
HYDRA = {"PMI_RANK": "3", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
SBATCH = {"SLURM_JOB_ID": "77", "SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_JOB_NODELIST": "node[1-4]"}
SRUN = SBATCH | {
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_ID": "2",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_TASKS_PER_NODE": "2(x4)",
    "SLURM_STEP_NODELIST": "node[1-4]",
}
# mpirun starts its daemons with srun: their step's variables reach the ranks as well.
DAEMON_STEP = SRUN | {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "4"}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, Launch("single", "", 0, 1, 0, 1)),
        (TORCHRUN, Launch("torchrun", "", 3, 8, 1, 2)),
        (TORCHRUN | SRUN, Launch("torchrun", "", 3, 8, 1, 2)),
        ({"RANK": "3", "WORLD_SIZE": "8"}, Launch("single", "", 0, 1, 0, 1)),
        (OPEN_MPI, Launch("mpirun", "Open MPI", 3, 8, 1, 2)),
        (OPEN_MPI | DAEMON_STEP, Launch("mpirun", "Open MPI", 3, 8, 1, 2)),
        (OPEN_MPI | SBATCH, Launch("mpirun", "Open MPI", 3, 8, 1, 2)),
        (HYDRA, Launch("mpirun", "MPICH or Intel MPI", 3, 8, 1, 2)),
        (HYDRA | DAEMON_STEP, Launch("mpirun", "MPICH or Intel MPI", 3, 8, 1, 2)),
        ({"PMI_RANK": "0", "PMI_SIZE": "2"}, Launch("mpirun", "MPICH or Intel MPI", 0, 2, None, None)),
        (
            {name.replace("OMPI_", "MV2_"): value for name, value in OPEN_MPI.items()},
            Launch("mpirun", "MVAPICH2", 3, 8, 1, 2),
        ),
        (
            {"PALS_RANKID": "3", "PALS_LOCAL_RANKID": "1", "PMI_SIZE": "8", "PMI_LOCAL_SIZE": "2"},
            Launch("mpirun", "PALS", 3, 8, 1, 2),
        ),
        ({"PMIX_RANK": "3", "PMIX_NAMESPACE": "x"}, Launch("mpirun", "PMIx", 3, None, None, None)),
        (SRUN, Launch("srun", "", 3, 8, 1, 2)),
        (SRUN | {"PMIX_RANK": "3", "PMIX_NAMESPACE": "slurm.77.2"}, Launch("srun", "", 3, 8, 1, 2)),
        (SRUN | {"PMI_RANK": "3", "PMI_SIZE": "8"}, Launch("srun", "", 3, 8, 1, 2)),
        (SBATCH, Launch("single", "", 0, 1, 0, 1)),
        ({"SLURM_JOB_ID": "77", "SLURM_NTASKS": "8"}, Launch("single", "", 0, 1, 0, 1)),
    ],
)
def test_launchers(environ, expected):
    assert detect(environ) == expected


@pytest.mark.parametrize(
    ("tasks", "node", "local_size"),
    [("4(x2),3", "2", 3), ("4(x2),3", "1", 4), ("5", "0", 5), ("5", "7", None), ("?", "0", None)],
)
def test_tasks_per_node(tasks, node, local_size):
    environ = SRUN | {"SLURM_STEP_TASKS_PER_NODE": tasks, "SLURM_NODEID": node}
    assert detect(environ).local_size == local_size


@pytest.mark.parametrize("value", ["x", "", "8", "-1"])
def test_ranks_that_make_no_sense(value):
    refused(ValueError, "RANK", detect, TORCHRUN | {"RANK": value})


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("node1", "node1"),
        ("node1,node2", "node1"),
        ("node[003-005,9]", "node003"),
        ("node[9,003-005],gpu1", "node9"),
        ("rack2-node[1-2].cluster.local,x", "rack2-node1.cluster.local"),
        ("r[1-2]n[07,09]", "r1n07"),
    ],
)
def test_srun_meets_on_the_first_host(hosts, first):
    assert rendezvous(SRUN | {"SLURM_STEP_NODELIST": hosts})[0] == first


def test_srun_ports_differ_between_steps_and_jobs():
    ports = {
        rendezvous(SRUN | {"SLURM_JOB_ID": job, "SLURM_STEP_ID": step})[1]
        for job in ("77", "78")
        for step in ("0", "1")
    }
    assert len(ports) == 4
    assert all(1024 < port < 65536 for port in ports)


def test_what_the_user_set_comes_first():
    assert rendezvous(SRUN | {"MASTER_ADDR": "other", "MASTER_PORT": "1234"}) == ("other", 1234)


# Meeting

STEP = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "node1"}


@pytest.fixture
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


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="asks Linux who listens")
@pytest.mark.parametrize("environ", ["nothing", "pmix", "port", "address and port"])
@pytest.mark.parametrize("launcher", ["mpirun", "srun"])
def test_one_host_listens_on_loopback_alone(environ: str, launcher: str, folder: Path) -> None:
    variables = {
        "nothing": {},
        "pmix": {"PMIX_NAMESPACE": "prterun-host-12@1"},
        "port": {"MASTER_PORT": str(free_port())},
        "address and port": {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())},
    }[environ]
    stores = on_one_host(STEP | variables, launcher=launcher)
    assert isinstance(stores[0], TCPStore)
    assert listening(stores[0].port) == {"0100007F"}
    if folder.exists():
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert not list(folder.iterdir()), "nothing is left to find"


@pytest.mark.usefixtures("folder")
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
    assert not isinstance(meet(Launch("srun", "", 0, 1, 0, 1), 1, 60.0, STEP), TCPStore)
    assert not folder.exists()


def met(rank: int, size: int = 2, local_size: int = 2, seconds: float = 0.01) -> None:
    meet(Launch("mpirun", "", rank, size, rank, local_size), size, seconds, {})


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("meeting", "error", "message"),
    [
        (lambda: met(1), RuntimeError, "rank 0 did not say in .* where to meet: did it start.*MASTER_PORT"),
        (lambda: met(0), RuntimeError, "0 of 1 other ranks came within"),
        (lambda: met(0, size=4), ValueError, "set MASTER_ADDR to rank 0's host"),
        (lambda: rendezvous({"SLURM_JOB_ID": "1"}), ValueError, "MASTER_ADDR"),
        (lambda: rendezvous({"SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": ",["}), ValueError, "host list"),
    ],
)
def test_who_does_not_meet(meeting, error, message) -> None:
    refused(error, message, meeting)


def test_a_folder_of_somebody_elses_is_refused(folder: Path) -> None:
    folder.mkdir(mode=0o755)
    refused(ValueError, r"must be a folder that this user alone can use.*MASTER_ADDR", met, 1)


def test_a_process_that_is_told_of_others_does_not_train_alone():
    check_alone({"WORLD_SIZE": "1"})
    others = {"RANK": "3", "WORLD_SIZE": "8"}
    refused(ValueError, "WORLD_SIZE=8 says.*and MASTER_ADDR is not set", check_alone, others)
