"""`init`: which backend, what is told, what is refused, and what optional packages and other versions change."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.comm.job import JOB
from tests.launching import LAUNCHER_VARIABLES, environment, need_mpi, on_threads
from tests.refusing import refused
from thinwire.comm import Communicator, Launch, TorchCommunicator, init, launch, threads
from thinwire.comm.launch import choose_backend, count_hosts

JOINED = Launch("torchrun", "", 3, 8, 1, 2)


@pytest.fixture(autouse=True)
def _nothing_said_yet() -> None:
    launch._say_once.cache_clear()


@pytest.fixture
def _no_launcher(monkeypatch):
    for name in list(os.environ):
        if name.startswith(LAUNCHER_VARIABLES):
            monkeypatch.delenv(name)


@pytest.mark.usefixtures("_no_launcher")
def test_a_process_on_its_own(capfd):
    comm = init()
    assert (comm.rank, comm.size, comm.backend, comm.timeout) == (0, 1, "single", 300.0)
    assert comm.traffic.calls == 0
    assert capfd.readouterr().err == (
        "thinwire: 1 rank on 1 host, backend single, no launcher found; torchrun, mpirun or srun start more\n"
    )
    init(quiet=True)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda: init(backend="threads"), "unknown backend 'threads', expected one of gloo, nccl, mpi"),
        (lambda: init(timeout=0), "timeout"),
        (lambda: init(backend="mpi"), "backend 'mpi' under torchrun"),
        (lambda: threads.run(lambda comm: init(backend="gloo"), 1), r"inside threads\.run"),
        (lambda: choose_backend(JOINED, "nccl", 1, {}), "2 ranks on this host see 1"),
    ],
)
def test_refusals(monkeypatch, ask, message):
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}.items():
        monkeypatch.setenv(name, value)
    refused(ValueError, message, ask)


@pytest.mark.parametrize(
    ("backend", "gpus", "environ", "chosen"),
    [
        (None, 0, {}, "gloo"),
        (None, 1, {}, "gloo"),
        (None, 2, {}, "cpu:gloo,cuda:nccl"),
        (None, 1, {"SLURM_GPUS_PER_TASK": "1"}, "cpu:gloo,cuda:nccl"),
        ("gloo", 2, {}, "gloo"),
        ("nccl", 2, {}, "nccl"),
    ],
)
def test_backend_goes_by_the_gpus(backend, gpus, environ, chosen):
    assert choose_backend(JOINED, backend, gpus, environ) == chosen


def python(code: str, **extra: str) -> str:
    """What a program prints."""
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env=environment(**extra), check=True, stdout=subprocess.PIPE, text=True).stdout


def test_import_leaves_optional_packages_alone():
    code = (
        "import sys, thinwire.comm\n"
        "assert not {'mpi4py', 'numba', 'cupy'} & sys.modules.keys()\n"
        "assert all(hasattr(thinwire.comm, name) for name in set(thinwire.comm.__all__) - {'MPICommunicator'})"
    )
    python(code)


def ended(comm: Communicator) -> None:
    comm.close()
    dist.destroy_process_group()


@pytest.mark.usefixtures("_no_launcher")
def test_a_process_on_its_own_with_a_process_group(capfd):
    comm = init(backend="gloo", timeout=7.0)
    found = [init(), Communicator.of(dist.group.WORLD), init(timeout=8.0), init(), threads.single(30.0)]
    assert isinstance(found[0], TorchCommunicator)
    assert [one.timeout for one in (comm, *found)] == [7.0, 7.0, 7.0, 8.0, 8.0, 30.0]
    assert all((one.backend, one.size) == ("gloo", 1) for one in (comm, *found[:-1]))
    ended(comm)
    assert capfd.readouterr().err.count("backend gloo") == 1


@pytest.mark.usefixtures("_no_launcher")
def test_srun_variables_are_enough(monkeypatch, capfd):
    slurm = {"PROCID": "0", "STEP_NUM_TASKS": "1", "LOCALID": "0", "STEP_NODELIST": "localhost"}
    for name, value in {**{f"SLURM_{key}": value for key, value in slurm.items()}, "MASTER_PORT": "0"}.items():
        monkeypatch.setenv(name, value)
    comm = init()
    comm.barrier()
    ended(comm)
    assert "1 rank on 1 host, backend gloo, started by srun" in capfd.readouterr().err


@pytest.mark.launch
def test_gloo_under_mpirun(jobs):
    done = jobs.mpirun(2, *JOB, "join", "gloo")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "gloo gloo 2\n" * 2
    assert "thinwire: 2 ranks on 1 host, backend gloo, started by mpirun (Open MPI)\n" in done.stderr


@pytest.mark.launch
def test_mpi4py_over_another_mpi_is_recognised(jobs):
    need_mpi()
    done = jobs.alone(*JOB, "join", "", PMI_RANK="0", PMI_SIZE="2", MPI_LOCALRANKID="0")
    assert done.returncode != 0
    assert "mpirun started 2 ranks but mpi4py sees 1" in done.stderr


def python_without_an_mpi_library(folder: Path, code: str, **extra: str) -> str:
    """Run ``code`` where mpi4py is installed and finds no MPI, which it says as the real one does."""
    (folder / "mpi4py").mkdir()
    (folder / "mpi4py" / "__init__.py").write_text("")
    (folder / "mpi4py" / "MPI.py").write_text("raise RuntimeError('cannot load MPI library')\n")
    return python(code, PYTHONPATH=f"{folder}{os.pathsep}{environment()['PYTHONPATH']}", **extra)


def test_mpi4py_without_an_mpi_library_is_an_error_where_mpi_is_asked_for(tmp_path):
    code = (
        "from thinwire import comm\n"
        "for ask in (lambda: comm.init('mpi'), lambda: comm.MPICommunicator):\n"
        "    try: ask()\n"
        "    except ImportError as error: print(error)\n"
        "print(comm.init(quiet=True).backend)"
    )
    *errors, backend = python_without_an_mpi_library(tmp_path, code).splitlines()
    assert len(errors) == 2
    assert all("cannot be used: cannot load MPI library. Install mpi4py and an MPI library" in one for one in errors)
    assert backend == "single"


def test_mpirun_without_an_mpi_library_for_mpi4py_takes_gloo(tmp_path):
    started = {"RANK": "0", "SIZE": "1", "LOCAL_RANK": "0", "LOCAL_SIZE": "1"}
    code = "from thinwire import comm\nprint(comm.init(quiet=True).backend)"
    variables = {f"OMPI_COMM_WORLD_{name}": value for name, value in started.items()}
    assert python_without_an_mpi_library(tmp_path, code, **variables) == "gloo\n"


def test_nothing_of_a_process_group_outlives_python():
    """What torch imports for an optimizer would keep the group; its threads can abort a process that has finished."""
    code = (
        "import atexit, os\n"
        "atexit.register(lambda: print(len(os.listdir('/proc/self/task')), flush=True))\n"
        "from thinwire import comm\n"
        "comm.init(backend='gloo')\n"
        "print(len(os.listdir('/proc/self/task')))\n"
        "import torch._dynamo\n"
    )
    during, at_exit = map(int, python(code).split())
    assert during > at_exit == 1


@on_threads(3)
def test_another_thinwire_is_an_error_on_every_rank(comm: Communicator):
    with pytest.raises(RuntimeError, match=r"rank 2 on .* runs thinwire 1\.1, rank 0 on .* 1\.0: install"):
        count_hosts(comm, thinwire="1.1" if comm.rank == 2 else "1.0", torch="2")


@pytest.mark.filterwarnings("error")
def test_one_host():
    assert threads.run(lambda comm: count_hosts(comm, thinwire="1", torch="2"), 3) == [1, 1, 1]


def test_another_torch_is_a_warning():
    with pytest.warns(RuntimeWarning, match=r"rank 1 on .* runs torch 2\.2, rank 0 on .* 2\.1") as caught:
        threads.run(lambda comm: count_hosts(comm, thinwire="1", torch=f"2.{comm.rank + 1}"), 2)
    assert len(caught) == 1
