"""Stage 3 trains what stage 0 trains, on real processes, and shares its checkpoints with every stage."""

from __future__ import annotations

import json

import pytest

from tests.engine.stage3_program import same_data
from tests.engine.tiny import make_engine, settings
from thinwire.comm import threads

PROGRAM = ("-m", "tests.engine.stage3_program")


@pytest.mark.launch
def test_on_gloo(jobs, tmp_path) -> None:
    done = jobs.torchrun(3, *PROGRAM, str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all held on gloo with 3 ranks" in done.stdout
    expected = json.loads((tmp_path / "expected.json").read_text())

    def resume(comm, name, changes):
        engine = make_engine(comm, settings(1, **changes), seed=1)
        assert engine.load_checkpoint(tmp_path / name)[1] == {"name": name}
        return [same_data(engine, step) for step in range(3, 6)]

    for name, changes, tolerance in (("fp32", {}, 1e-5), ("bf16", {"bf16": {"enabled": True}}, 0.02)):
        for losses in threads.run(lambda comm, one=(name, changes): resume(comm, *one), 4):
            assert losses == pytest.approx(expected[name], rel=tolerance)


@pytest.mark.launch
def test_on_mpi(jobs, tmp_path) -> None:
    done = jobs.mpirun(2, *PROGRAM, str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all held on mpi with 2 ranks" in done.stdout


@pytest.mark.launch
def test_in_a_process_of_its_own(jobs, tmp_path) -> None:
    done = jobs.alone(*PROGRAM, str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all held on single with 1 ranks" in done.stdout
