from __future__ import annotations

import pytest

from thinwire.comm import Launch, detect
from thinwire.comm.launchers import rendezvous

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "node1",
    "MASTER_PORT": "29500",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_RANK": "3",
    "PMIX_NAMESPACE": "prterun-1@1",
}
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
    with pytest.raises(ValueError, match="RANK"):
        detect(TORCHRUN | {"RANK": value})


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


def test_srun_without_a_host_list():
    with pytest.raises(ValueError, match="MASTER_ADDR"):
        rendezvous({"SLURM_JOB_ID": "1"})
    with pytest.raises(ValueError, match="host list"):
        rendezvous({"SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": ",["})
