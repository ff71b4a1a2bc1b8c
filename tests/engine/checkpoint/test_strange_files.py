"""Names of a checkpoint that stand for no file of one: no hang, no endless reading, nothing written elsewhere, no
commands to the terminal; and pickles, which are refused by name wherever they are offered, and never loaded."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.engine.checkpoint.jobs import Values, load, save
from thinwire.comm import Communicator, threads
from thinwire.command_line import main
from thinwire.engine.checkpoint import manifest
from thinwire.engine.checkpoint.files import write_tensors, write_whole
from thinwire.engine.checkpoint.manifest import Manifest
from thinwire.engine.checkpoint.pickles import is_pickle
from thinwire.engine.checkpoint.store import CheckpointStore
from thinwire.engine.errors import CheckpointError


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
    with pytest.raises(CheckpointError, match=r"manifest.json cannot be read: it is longer than the 100 bytes"):
        CheckpointStore(tmp_path, threads.single(10.0)).load()


def test_a_link_in_the_place_of_a_new_file_is_not_written_through(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    (tmp_path / "x.unfinished").symlink_to(outside)
    (tmp_path / "y").symlink_to(outside)
    write_whole(tmp_path / "x", b"content")
    assert (tmp_path / "x").read_bytes() == b"content"
    with pytest.raises(FileExistsError):
        write_tensors(tmp_path / "y", {})
    assert not outside.exists()


def test_what_comes_from_files_gives_the_terminal_no_commands(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
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


def write_bomb(path: Path, how: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if how == "bare":
        path.write_bytes(pickle.dumps(Bomb()))
    else:
        torch.save(Bomb(), path, _use_new_zipfile_serialization=how == "zip")


@pytest.mark.parametrize("how", ["zip", "legacy", "bare"])
@pytest.mark.parametrize("name", ["model_states.pt", "pytorch_model.bin", "state"])
def test_a_folder_of_pickles_is_refused_on_every_rank(tmp_path: Path, name: str, how: str) -> None:
    write_bomb(tmp_path / "global_step10" / name, how)
    (tmp_path / "latest").write_text("global_step10")

    def work(comm: Communicator) -> None:
        for folder, tag in ((tmp_path, None), (tmp_path, "global_step10"), (tmp_path / "global_step10", None)):
            with pytest.raises(CheckpointError, match=rf"{name} is a pickle.* safetensors.torch.save_model"):
                CheckpointStore(folder, comm).load(tag)

    threads.run(work, 2)


@pytest.mark.parametrize("name", ["mp_rank_00_model_states.pt", "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"])
def test_deepspeeds_files_are_refused_with_the_command_that_imports_them(tmp_path: Path, name: str) -> None:
    write_bomb(tmp_path / "global_step10" / name, "zip")
    comm = threads.single(10.0)
    tag = " --tag global_step10"
    for folder, given, options in (
        (tmp_path, None, ""),
        (tmp_path, "global_step10", tag),
        (tmp_path / "global_step10", None, tag),
    ):
        with pytest.raises(CheckpointError, match=rf"`thinwire checkpoint import {tmp_path}{options}`"):
            CheckpointStore(folder, comm).load(given)


@pytest.mark.parametrize("name", ["checkpoint.pt", "weights.ckpt", "bytes"])
def test_a_pickle_offered_as_the_folder_or_the_tag_is_refused(tmp_path: Path, name: str) -> None:
    write_bomb(tmp_path / name, "zip")
    comm = threads.single(10.0)
    with pytest.raises(CheckpointError, match="a pickle"):
        CheckpointStore(tmp_path / name, comm).load()
    with pytest.raises(CheckpointError, match="a pickle"):
        CheckpointStore(tmp_path, comm).load(name)


def test_other_files_are_not_taken_for_pickles(tmp_path: Path) -> None:
    # The sizes make headers whose length starts like a pickle does.
    for tensors in range(1, 60):
        save_file({f"tensor {number}": torch.zeros(1) for number in range(tensors)}, tmp_path / "tensors")
        assert not is_pickle(tmp_path / "tensors")
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "text").write_text("step-1")
    for name in ("empty", "text", "nothing"):
        assert not is_pickle(tmp_path / name)
