"""Names of a checkpoint that stand for no file of one: no hang, no endless reading, nothing written elsewhere, and no
commands to the terminal."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from tests.engine.checkpoint.jobs import Values, load, save
from thinwire.comm import threads
from thinwire.command_line import main
from thinwire.engine.checkpoint import manifest
from thinwire.engine.checkpoint.files import write_tensors, write_whole
from thinwire.engine.checkpoint.manifest import Manifest
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
