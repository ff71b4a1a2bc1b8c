"""What threads run, shorter, on real processes: 3 over Gloo by torchrun, 2 over Open MPI by mpirun."""

import pytest

pytestmark = pytest.mark.launch
PROGRAM = ("-m", "tests.compress.bodies")


@pytest.mark.programs
def test_on_gloo_and_beside_ddp(jobs) -> None:
    done = jobs.torchrun(3, *PROGRAM, "ddp")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all held on gloo with 3 ranks" in done.stdout


def test_on_mpi(jobs) -> None:
    done = jobs.mpirun(2, *PROGRAM)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all held on mpi with 2 ranks" in done.stdout
