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


PARTS = ("losses_are_those_of_stage_0", "layers_are_sharded_apart", "what_is_not_finite", "checkpoints")


@pytest.mark.launch
@pytest.mark.parametrize(("backend", "size"), [("mpi", 2), ("single", 1)])
def test_on_other_backends(jobs, tmp_path, backend, size) -> None:
    arguments = (*PROGRAM, str(tmp_path), *PARTS)
    done = jobs.mpirun(size, *arguments) if backend == "mpi" else jobs.alone(*arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"all held on {backend} with {size} ranks" in done.stdout
