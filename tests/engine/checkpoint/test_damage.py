"""A damaged checkpoint is never used: refused by name, and the one before it is loaded instead."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.checkpoint.jobs import Values, load, missing, same, save, tags
from thinwire.comm import Communicator, threads
from thinwire.engine.checkpoint.loading import examine
from thinwire.engine.checkpoint.manifest import ModelDescription, _sealed
from thinwire.engine.checkpoint.store import CheckpointStore, Snapshot
from thinwire.engine.errors import CheckpointError
from thinwire.zero import SavedSlice

FILES = ("manifest.json", "rank-00000.safetensors", "rank-00001.safetensors")
Damage = Callable[[Path], None]


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Values, Values]:
    """A folder with two checkpoints, and what is in the older and the newer."""
    folder = tmp_path_factory.mktemp("pristine")
    older, newer = Values(1, 2), Values(2, 2)
    save(folder, ("step-1", older), ("step-2", newer))
    return folder, older, newer


@pytest.fixture
def two(pristine: tuple[Path, Values, Values], tmp_path: Path) -> tuple[Path, Values, Values]:
    """A copy to be damaged."""
    shutil.copytree(pristine[0], tmp_path / "copy")
    return tmp_path / "copy", pristine[1], pristine[2]


def flip_a_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[random.randrange(len(content))] ^= random.randrange(1, 256)
    path.write_bytes(content)


def truncate(path: Path) -> None:
    os.truncate(path, random.randrange(path.stat().st_size))


def lengthen(path: Path) -> None:
    path.write_bytes(path.read_bytes() + bytes(random.randrange(1, 9)))


def put_a_folder_there(path: Path) -> None:
    path.unlink()
    path.mkdir()


def put_a_pickle_there(path: Path) -> None:
    torch.save({"weight": torch.zeros(3)}, path)


def put_a_bare_pickle_there(path: Path) -> None:
    torch.save({"weight": torch.zeros(3)}, path, _use_new_zipfile_serialization=False)


DAMAGES = (
    flip_a_byte,
    truncate,
    lengthen,
    Path.unlink,
    put_a_folder_there,
    put_a_pickle_there,
    put_a_bare_pickle_there,
)


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("file", FILES)
def test_the_one_before_is_loaded_with_a_warning(
    two: tuple[Path, Values, Values], file: str, damage: Damage, size: int
) -> None:
    folder, older, _ = two
    damage(folder / "step-2" / file)
    (warning,) = load(folder, older, size)
    assert "'step-2'" in warning
    assert file in warning
    assert "'step-1'" in warning
    if damage in (put_a_pickle_there, put_a_bare_pickle_there):
        assert "pickle" in warning


@pytest.mark.parametrize("file", FILES)
def test_every_flipped_bit_is_seen(two: tuple[Path, Values, Values], file: str) -> None:
    path = two[0] / "step-2" / file
    content = path.read_bytes()
    assert not examine(path.parent).problems
    for position in range(0, len(content), max(1, len(content) // 300)):
        flipped = bytearray(content)
        flipped[position] ^= 1 << random.randrange(8)
        path.write_bytes(flipped)
        assert any(file in problem for problem in examine(path.parent).problems), position


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_whatever_the_manifest_says_it_is_no_other_error(
    pristine: tuple[Path, Values, Values], tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    json_values = st.recursive(st.none() | st.integers() | st.text(), lambda inner: st.lists(inner, max_size=3))
    document = json.loads((pristine[0] / "step-2" / "manifest.json").read_bytes())
    document[data.draw(st.sampled_from(sorted(document)))] = data.draw(json_values)
    folder = tmp_path_factory.mktemp("changed")
    (folder / "manifest.json").write_text(json.dumps(document))
    assert examine(folder).problems


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_that_is_asked_for_is_refused(two: tuple[Path, Values, Values], damage: Damage) -> None:
    damage(two[0] / "step-2" / FILES[2])

    def work(comm: Communicator) -> None:
        with pytest.raises(CheckpointError, match=r"'step-2' .* rank-00001.safetensors .* whole .*: 'step-1'"):
            CheckpointStore(two[0], comm).load("step-2")

    threads.run(work, 2)


def test_nothing_whole_is_an_error_that_says_why_for_each(two: tuple[Path, Values, Values]) -> None:
    flip_a_byte(two[0] / "step-1" / FILES[0])
    truncate(two[0] / "step-2" / FILES[1])

    def work(comm: Communicator) -> None:
        with pytest.raises(CheckpointError, match=r"'step-2' .* rank-00000\..* bytes.*'step-1' .* manifest.json"):
            CheckpointStore(two[0], comm).load()

    threads.run(work, 3)


@pytest.mark.parametrize("content", [b"step-9\n", b"\xff\xfe", b"", b"step-2\n\n"])
def test_a_wrong_latest_does_not_hide_the_newest(two: tuple[Path, Values, Values], content: bytes) -> None:
    (two[0] / "latest").write_bytes(content)
    (warning,) = load(two[0], two[2])
    assert "latest" in warning


def test_latest_is_obeyed_with_a_warning_where_another_is_newer(two: tuple[Path, Values, Values]) -> None:
    (two[0] / "latest").write_text("step-1\n")
    (warning,) = load(two[0], two[1])
    assert "'step-2' is newer" in warning


def test_without_latest_the_newest_is_loaded(two: tuple[Path, Values, Values]) -> None:
    (two[0] / "latest").unlink()
    assert load(two[0], two[2]) == []


def test_another_version_is_refused(two: tuple[Path, Values, Values]) -> None:
    manifest = two[0] / "step-2" / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"version":3', '"version":4'))
    (warning,) = load(two[0], two[1])
    assert "version 4" in warning


def test_a_manifest_of_another_save_is_refused(two: tuple[Path, Values, Values]) -> None:
    shutil.copyfile(two[0] / "step-1" / "manifest.json", two[0] / "step-2" / "manifest.json")
    (warning,) = load(two[0], two[1])
    assert "rank-0000" in warning


def test_a_checkpoint_of_another_model_is_passed_over(tmp_path: Path) -> None:
    ours, others = Values(1, 2), Values(2, 3, {"embedding": (17, 6)})
    save(tmp_path, ("ours", ours), ("others", others))
    (warning,) = load(tmp_path, ours, 2)
    assert "another model" in warning
    assert "parameter 'embedding' is bfloat16 of shape (17, 6) in it and bfloat16 of shape (17, 5)" in warning


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"bias": ((1,), torch.float32)}, r"'bias' is bfloat16 of shape \(1,\) in it and float32 of shape \(1,\)"),
        ({"scale": ((1,), torch.bfloat16)}, r"'scale' is bfloat16 of shape \(\) in it"),
        ({"new": ((2,), torch.bfloat16)}, r"'new', bfloat16 of shape \(2,\), is not in it"),
        ({"bias": None}, r"'bias', bfloat16 of shape \(1,\), is in it and not in this model"),
    ],
)
def test_a_model_changed_since_the_save_is_refused_on_every_rank(
    two: tuple[Path, Values, Values], change: dict[str, tuple[tuple[int, ...], torch.dtype] | None], complaint: str
) -> None:
    parameters = {**two[2].model.parameters, **change}
    changed = ModelDescription({name: one for name, one in parameters.items() if one is not None})

    def work(comm: Communicator) -> None:
        for tag in (None, "step-2"):
            with pytest.raises(CheckpointError, match=complaint):
                CheckpointStore(two[0], comm).load(tag, changed)

    threads.run(work, 3)


def test_a_model_that_one_rank_has_otherwise_is_refused_on_every_rank(two: tuple[Path, Values, Values]) -> None:
    def work(comm: Communicator) -> None:
        description = two[2].model if comm.rank else ModelDescription({})
        with pytest.raises(CheckpointError, match="not in this model"):
            CheckpointStore(two[0], comm).load(description=description)

    threads.run(work, 2)


@pytest.mark.parametrize(
    ("starts", "complaint"),
    [
        ([(0, 3), (4, 6)], "elements 3 to 4 are in no file"),
        ([(0, 3), (2, 6)], "elements 2 to 3 are there twice"),
        ([(0, 6), (1, 3)], "elements 1 to 3 are there twice"),
        ([(0, 3)], "elements 3 to 6 are in no file"),
        ([], "no rank gave a weight of 'w'"),
    ],
)
def test_slices_with_gaps_or_overlaps_are_not_published(
    tmp_path: Path, starts: list[tuple[int, int]], complaint: str
) -> None:
    model = ModelDescription({"w": ((2, 3), torch.float32)})
    flat = torch.arange(6.0)

    def work(comm: Communicator) -> None:
        own = [SavedSlice("weight", "w", start, flat[start:stop]) for start, stop in starts[comm.rank :: 2]]
        with pytest.raises(ValueError, match=complaint):
            CheckpointStore(tmp_path, comm).save("x", Snapshot(own, model))
        assert CheckpointStore(tmp_path, comm).load() is None

    threads.run(work, 2)
    assert tags(tmp_path) == []


def test_a_file_under_a_foreign_name_is_never_opened(two: tuple[Path, Values, Values]) -> None:
    path = two[0] / "step-2" / "manifest.json"
    document = json.loads(path.read_bytes())
    del document["sha256"]
    document["files"][0]["slices"][0]["file"] = "../step-1/rank-00000.safetensors"
    path.write_bytes(_sealed(document))
    assert "does not name one file a rank" in examine(path.parent).problems[0]


def test_verified_values_are_those_of_the_file(two: tuple[Path, Values, Values]) -> None:
    checkpoint = CheckpointStore(two[0], threads.single(10.0)).load() or missing()
    assert same(checkpoint.read("master", "bias", 0, 1), two[2].flat["master", "bias"])
