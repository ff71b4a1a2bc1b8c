"""A damaged checkpoint is never used: refused by name, and the one before it is loaded; nor is what is no file, or a
pickle."""

import json
import os
import pickle
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.engine.checkpoint.jobs import Values, alone, load, opened, save, tags
from tests.launching import on_threads
from tests.pairwise import each_once, pairwise
from tests.refusing import refused
from thinwire.comm import Communicator, threads
from thinwire.command_line import main
from thinwire.engine.checkpoint import manifest
from thinwire.engine.checkpoint.files import write_tensors, write_whole
from thinwire.engine.checkpoint.loading import examine
from thinwire.engine.checkpoint.manifest import Manifest, ModelDescription, _sealed
from thinwire.engine.checkpoint.pickles import is_pickle
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
    torch.save({"weight": torch.zeros(3)}, path, _use_new_zipfile_serialization=random.random() < 0.5)


DAMAGES = (flip_a_byte, truncate, lengthen, Path.unlink, put_a_folder_there, put_a_pickle_there)


@pytest.mark.parametrize(("damage", "file", "size"), pairwise(DAMAGES, FILES, [1, 3]))
def test_the_one_before_is_loaded_with_a_warning(two, file, damage, size) -> None:
    folder, older, _ = two
    damage(folder / "step-2" / file)
    (warning,) = load(folder, older, size)
    assert "'step-2'" in warning
    assert file in warning
    assert "'step-1'" in warning
    assert damage is not put_a_pickle_there or "pickle" in warning


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


def test_a_damaged_checkpoint_that_is_asked_for_is_refused(two: tuple[Path, Values, Values]) -> None:
    flip_a_byte(two[0] / "step-2" / FILES[2])

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


@pytest.mark.parametrize(
    ("latest", "loaded", "told"),
    [
        (b"step-9\n", 2, "latest"),
        (b"\xff\xfe", 2, "latest"),
        (b"", 2, "latest"),
        (b"step-2\n\n", 2, "latest"),
        (b"step-1\n", 1, "'step-2' is newer"),
        (None, 2, None),
    ],
)
def test_latest_is_obeyed_where_it_names_a_checkpoint(two, latest: bytes | None, loaded: int, told: str | None) -> None:
    (two[0] / "latest").unlink() if latest is None else (two[0] / "latest").write_bytes(latest)
    warnings = load(two[0], two[loaded])
    assert len(warnings) == (told is not None)
    assert all(told in warning for warning in warnings)


def test_a_manifest_of_another_version_or_save_is_refused(two: tuple[Path, Values, Values]) -> None:
    manifest = two[0] / "step-2" / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"version":3', '"version":4'))
    (warning,) = load(two[0], two[1])
    assert "version 4" in warning
    shutil.copyfile(two[0] / "step-1" / "manifest.json", manifest)
    (warning,) = load(two[0], two[1])
    assert "rank-0000" in warning
    manifest.write_text("[]")
    (warning,) = load(two[0], two[1])
    assert "manifest.json is not one of a thinwire checkpoint" in warning


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
def test_a_model_changed_since_the_save_is_refused_on_every_rank(two, change, complaint) -> None:
    parameters = {**two[2].model.parameters, **change}
    changed = ModelDescription({name: one for name, one in parameters.items() if one is not None})

    def work(comm: Communicator) -> None:
        for tag in (None, "step-2"):
            refused(CheckpointError, complaint, CheckpointStore(two[0], comm).load, tag, changed)

    threads.run(work, 3)


@on_threads(2)
def test_a_model_that_one_rank_has_otherwise_is_refused_on_every_rank(comm, two) -> None:
    description = two[2].model if comm.rank else ModelDescription({})
    refused(CheckpointError, "not in this model", CheckpointStore(two[0], comm).load, description=description)


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
def test_slices_with_gaps_or_overlaps_are_not_published(tmp_path, starts, complaint) -> None:
    model = ModelDescription({"w": ((2, 3), torch.float32)})
    flat = torch.arange(6.0)

    def work(comm: Communicator) -> None:
        own = [SavedSlice("weight", "w", start, flat[start:stop]) for start, stop in starts[comm.rank :: 2]]
        refused(ValueError, complaint, CheckpointStore(tmp_path, comm).save, "x", Snapshot(own, model))
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


def put_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def put_endless_device(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def put_loop(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.name)


@pytest.mark.parametrize("put", [put_fifo, put_endless_device, put_loop])
@pytest.mark.parametrize("name", ["latest", "b/manifest.json", "b/rank-00001.safetensors"])
def test_what_is_no_file_is_not_read(tmp_path: Path, name: str, put: object) -> None:
    older, newer = Values(1, 2), Values(2, 2)
    save(tmp_path, ("a", older), ("b", newer))
    put(tmp_path / name)  # type: ignore[operator]
    if name == "latest":
        assert load(tmp_path, newer, 2) == []
    else:
        assert f"'b' in {tmp_path} cannot be loaded: {Path(name).name}" in load(tmp_path, older, 2)[0]
    save(tmp_path, ("c", newer))
    assert load(tmp_path, newer) == []


def test_a_manifest_of_no_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest, "_MOST_BYTES", 100)
    save(tmp_path, ("a", Values(1, 1)))
    refused(CheckpointError, r"manifest.json cannot be read: it is longer than the 100 bytes", opened, tmp_path)


def test_a_link_in_the_place_of_a_new_file_is_not_written_through(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    (tmp_path / "x.unfinished").symlink_to(outside)
    (tmp_path / "y").symlink_to(outside)
    write_whole(tmp_path / "x", b"content")
    assert (tmp_path / "x").read_bytes() == b"content"
    with pytest.raises(FileExistsError):
        write_tensors(tmp_path / "y", {})
    assert not outside.exists()


def test_what_comes_from_files_gives_the_terminal_no_commands(tmp_path, capsys, monkeypatch) -> None:
    escape = "\x1b]0;owned\x07\x9b31m"
    save(tmp_path, ("a", Values(1, 1, {f"{escape}weight": (2,)}, {"weight": torch.float32, escape: torch.float32})))
    encode = Manifest.decode((tmp_path / "a" / "manifest.json").read_bytes())
    (tmp_path / "a" / "manifest.json").write_bytes(
        Manifest(escape, encode.serial, encode.run, encode.model, encode.files, encode.shared).encode()
    )
    (tmp_path / "a").rename(tmp_path / f"{escape}folder")
    for command in ("inspect", "verify"):
        assert main(["checkpoint", command, str(tmp_path)]) == 0
    (tmp_path / f"{escape}folder" / "manifest.json").unlink()
    main(["checkpoint", "inspect", str(tmp_path)])
    main(["checkpoint", "verify", str(tmp_path), "--tag", escape])
    printed = capsys.readouterr()
    for text in (printed.out, printed.err):
        assert text
        assert not {"\x1b", "\x07", "\x9b"} & set(text)


class Bomb:
    """Would end the test if it were ever loaded."""

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return exec, ("raise SystemExit('a pickle was loaded')",)


def write_bomb(path: Path, how: str = "zip") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if how == "bare":
        path.write_bytes(pickle.dumps(Bomb()))
    else:
        torch.save(Bomb(), path, _use_new_zipfile_serialization=how == "zip")


DEEPSPEEDS = r"`thinwire checkpoint import FOLDER`|`thinwire checkpoint import FOLDER --tag global_step10`"


@pytest.mark.parametrize(
    ("name", "how", "complaint"),
    [
        *(
            (name, how, f"{name} is a pickle.* safetensors.torch.save_model")
            for name, how in each_once(["model_states.pt", "pytorch_model.bin", "state"], ["zip", "legacy", "bare"])
        ),
        ("mp_rank_00_model_states.pt", "zip", DEEPSPEEDS),
        ("bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt", "zip", DEEPSPEEDS),
    ],
)
def test_a_folder_of_pickles_is_refused_on_every_rank(tmp_path: Path, name: str, how: str, complaint: str) -> None:
    """DeepSpeed's with the command that imports them."""
    write_bomb(tmp_path / "global_step10" / name, how)
    (tmp_path / "latest").write_text("global_step10")

    def work(comm: Communicator) -> None:
        for folder, tag in ((tmp_path, None), (tmp_path, "global_step10"), (tmp_path / "global_step10", None)):
            with pytest.raises(CheckpointError, match=complaint.replace("FOLDER", str(tmp_path))):
                CheckpointStore(folder, comm).load(tag)

    threads.run(work, 2)


@pytest.mark.parametrize("name", ["checkpoint.pt", "weights.ckpt", "bytes"])
def test_a_pickle_offered_as_the_folder_or_the_tag_is_refused(tmp_path: Path, name: str) -> None:
    write_bomb(tmp_path / name)
    for folder, tag in ((tmp_path / name, None), (tmp_path, name)):
        refused(CheckpointError, "a pickle", alone(folder).load, tag)


def test_other_files_are_not_taken_for_pickles(tmp_path: Path) -> None:
    # The sizes make headers whose length starts like a pickle does.
    for tensors in range(1, 60):
        save_file({f"tensor {number}": torch.zeros(1) for number in range(tensors)}, tmp_path / "tensors")
        assert not is_pickle(tmp_path / "tensors")
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "text").write_text("step-1")
    for name in ("empty", "text", "nothing"):
        assert not is_pickle(tmp_path / name)
