"""Stage 3 trains what stage 0 trains, on real processes, and shares its checkpoints with every stage."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engine.stage3_program import same_data
from tests.engine.tiny import make_engine, settings
from thinwire.comm import threads

PROGRAM = ["-m", "tests.engine.stage3_program"]


def run(command: list[str], **extra: str) -> str:
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | extra
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.launch
def test_on_gloo(tmp_path) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3"]
    assert "all held on gloo with 3 ranks" in run([*launcher, *PROGRAM, str(tmp_path)])
    expected = json.loads((tmp_path / "expected.json").read_text())

    def resume(comm, name, changes):
        engine = make_engine(comm, settings(1, **changes), seed=1)
        assert engine.load_checkpoint(tmp_path / name)[1] == {"name": name}
        return [same_data(engine, step) for step in range(3, 6)]

    for name, changes, tolerance in (("fp32", {}, 1e-5), ("bf16", {"bf16": {"enabled": True}}, 0.02)):
        for losses in threads.run(lambda comm, one=(name, changes): resume(comm, *one), 4):
            assert losses == pytest.approx(expected[name], rel=tolerance)


@pytest.mark.launch
def test_on_mpi(tmp_path) -> None:
    pytest.importorskip("mpi4py")
    mpirun = shutil.which("mpirun", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if mpirun is None:
        pytest.skip("no mpirun")
    output = run(
        [mpirun, "-n", "2", "--map-by", ":OVERSUBSCRIBE", sys.executable, *PROGRAM, str(tmp_path)],
        OMPI_ALLOW_RUN_AS_ROOT="1",
        OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1",
    )
    assert "all held on mpi with 2 ranks" in output


@pytest.mark.launch
def test_in_a_process_of_its_own(tmp_path) -> None:
    assert "all held on single with 1 ranks" in run([sys.executable, *PROGRAM, str(tmp_path)])
