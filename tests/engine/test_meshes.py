"""Checkpoints of ranks that hold parts of a model load on any others, in real processes: see `meshes_job`."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.engine.meshes_job import BEFORE, MESHES, PROGRAM, build, losses
from tests.launching import Jobs
from tests.parallel.training import gpt2
from tests.refusing import refused
from thinwire.__main__ import main
from thinwire.engine import CheckpointError
from thinwire.engine.checkpoint.manifest import _sealed
from thinwire.engine.checkpoint.regions import Cut


@pytest.mark.programs
def test_what_one_mesh_saves_goes_on_on_any_other(jobs: Jobs, tmp_path: Path) -> None:
    alone = build("AdamW", 1, 1, 1)
    expected = losses(alone, 0, BEFORE)
    assert alone.save_checkpoint(str(tmp_path), "alone")
    expected += losses(alone, BEFORE, len(MESHES) + 1)
    (tmp_path / "losses.json").write_text(json.dumps(expected))
    done = jobs.torchrun(4, *PROGRAM, str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    for name, mesh, tolerance in (("AdamW", "pp2xdp2", 1e-5), ("AdamW", "tp4", 1e-5), ("OneBitAdam", "dp2xtp2", 0.01)):
        engine = build(name, 1, 1, 1)
        engine.load_checkpoint(str(tmp_path), f"{name}-{mesh}")
        steps = engine.global_steps
        assert losses(engine, steps, 1) == pytest.approx([expected[steps]], rel=tolerance)
    assert (
        main(["checkpoint", "export", str(tmp_path), str(tmp_path / "exported"), "--tag", "AdamW-tp4", "--tied"]) == 0
    )
    written = load_file(tmp_path / "exported" / "model.safetensors")
    engine = build("AdamW", 1, 1, 1)
    engine.load_checkpoint(str(tmp_path), "AdamW-tp4")
    assert {*written} == {*gpt2().state_dict()}
    for key, value in engine.module.state_dict().items():
        assert torch.equal(written[key], value), key
    refuse_damaged(tmp_path, "OneBitAdam-dp2xtp2")


def refuse_damaged(folder: Path, tag: str) -> None:
    """What ranks' values say of parts, under a good seal."""
    path = folder / tag / "manifest.json"
    content, engine = path.read_bytes(), build("OneBitAdam", 1, 1, 1)
    for told, damage in (
        ("part of rank 1: part: Input should be a valid dict", lambda part: 3),
        ("part of rank 1: part.names.0: Input should be a valid string", lambda part: part | {"names": [3]}),
        ("part of rank 1: part.optimizer: Field required", lambda part: {"names": part["names"]}),
        ("ranks' freeze groups are not those of one", lambda part: part | {"optimizer": {"freeze_groups": 3}}),
        ("ranks' freeze groups are not those of one", lambda part: part | {"optimizer": {"freeze_groups": [{}]}}),
    ):
        body = json.loads(content)
        body.pop("sha256", None)
        values = body["files"][1]["values"]
        values["part"] = damage(values["part"])
        path.write_bytes(_sealed(body))
        refused(CheckpointError, told, engine.load_checkpoint, str(folder), tag)


@pytest.mark.programs
def test_a_lost_rank_is_named_and_the_last_checkpoint_loads(jobs: Jobs, tmp_path: Path) -> None:
    for survivor in jobs.orphans(4, *PROGRAM, str(tmp_path), "pp2xtp2", victim=3):
        assert survivor.returncode != 0
        error = next(line for line in survivor.stdout.splitlines() if "thinwire.comm.errors.Communication" in line)
        assert "rank 3 did not answer" in error
    engine = build("AdamW", 1, 1, 1)
    assert engine.load_checkpoint(str(tmp_path))[0] is not None
    assert engine.global_steps == 1


@pytest.mark.parametrize(("shape", "cut"), [((5, 3), Cut(0, 2)), ((4, 6), Cut(1, 3)), ((2, 12), Cut(1, 2, 3))])
def test_parts_of_a_matrix_are_put_together(shape: tuple[int, int], cut: Cut) -> None:
    whole = torch.randn(shape)
    matrices = [one.chunk(cut.parts, cut.dim) for one in whole.chunk(cut.matrices, cut.dim)]
    parts = [torch.cat(of_part, cut.dim).reshape(-1) for of_part in zip(*matrices, strict=True)]
    assert torch.equal(cut.put_together(torch.cat(parts), shape).view(shape), whole)
