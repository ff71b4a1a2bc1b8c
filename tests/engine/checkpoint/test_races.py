"""A load beside saves: what is read is what was verified, of one save, whatever has happened to the names since."""

from __future__ import annotations

import os
import shutil
import warnings
from pathlib import Path

import pytest

from tests.engine.checkpoint.jobs import Values, load, missing, save
from thinwire.comm import Communicator, threads
from thinwire.engine.checkpoint import files, loading
from thinwire.engine.checkpoint.loading import Examination
from thinwire.engine.checkpoint.store import CheckpointStore
from thinwire.engine.errors import CheckpointError


def test_a_tag_saved_anew_after_the_load_is_not_mixed_into_it(tmp_path: Path) -> None:
    older = Values(1, 3)
    save(tmp_path, ("best", older))
    with CheckpointStore(tmp_path, threads.single(10.0)).load("best") or missing() as checkpoint:
        save(tmp_path, ("best", Values(2, 3)))
        older.check(checkpoint)


def test_a_tag_saved_anew_while_it_is_verified_is_of_one_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    older, newer = Values(1, 3), Values(2, 3)
    save(tmp_path, ("best", older))
    read = loading.unreadable_files

    def save_between(*arguments: object) -> list[str]:
        monkeypatch.setattr(loading, "unreadable_files", read)
        save(tmp_path, ("best", newer))
        return read(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(loading, "unreadable_files", save_between)
    assert load(tmp_path, older) == []
    assert load(tmp_path, newer) == []


def test_a_checkpoint_removed_after_the_load_is_read_to_its_end(tmp_path: Path) -> None:
    values = Values(1, 3)
    save(tmp_path, ("best", values))
    with CheckpointStore(tmp_path, threads.single(10.0)).load() or missing() as checkpoint:
        shutil.rmtree(tmp_path / "best")
        values.check(checkpoint)


@pytest.mark.parametrize("again", [False, True])
def test_a_checkpoint_removed_before_it_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, again: bool) -> None:
    """Where another has taken its place that is loaded; else all ranks say the same."""
    save(tmp_path, ("a", Values(1, 2)))
    save(tmp_path / "elsewhere", ("b", Values(2, 2)))
    hold, removed_on = loading.hold, set()

    def remove_before(path: Path) -> Examination:
        comm = threads.current()
        assert comm is not None
        if comm.rank not in removed_on:
            removed_on.add(comm.rank)
            comm.barrier()
            if comm.rank == 0:
                shutil.rmtree(tmp_path / "a")
                if again:
                    (tmp_path / "elsewhere" / "b").rename(tmp_path / "b")
            comm.barrier()
        return hold(path)

    monkeypatch.setattr(loading, "hold", remove_before)

    def work(comm: Communicator) -> None:
        if again:
            with CheckpointStore(tmp_path, comm).load() or missing() as checkpoint:
                assert checkpoint.tag == "b"
        else:
            with pytest.raises(CheckpointError, match=r"'a' .* cannot be loaded: there is none of that name"):
                CheckpointStore(tmp_path, comm).load("a")

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # `latest` names what is gone
        threads.run(work, 3)


def test_a_file_that_is_opened_again_must_be_the_one_that_was_verified(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "_MOST_OPEN", 1)
    values = Values(1, 3)
    save(tmp_path / "one", ("x", values))
    save(tmp_path / "other", ("x", Values(2, 3)))
    with CheckpointStore(tmp_path / "one", threads.single(10.0)).load() or missing() as checkpoint:
        values.check(checkpoint)
        for name in ("rank-00000.safetensors", "rank-00001.safetensors", "rank-00002.safetensors"):
            os.replace(tmp_path / "other" / "x" / name, tmp_path / "one" / "x" / name)
        with pytest.raises(CheckpointError, match=r"rank-0000.\.safetensors has changed since it was verified"):
            values.check(checkpoint)


def test_a_file_that_is_cut_short_while_it_is_read_is_an_error(tmp_path: Path) -> None:
    save(tmp_path, ("x", Values(1, 1)))
    with CheckpointStore(tmp_path, threads.single(10.0)).load() or missing() as checkpoint:
        checkpoint.read_rank("residual", 0)
        os.truncate(tmp_path / "x" / "rank-00000.safetensors", 100)
        with pytest.raises(CheckpointError, match=r"rank-00000.safetensors of .* can no longer be read"):
            checkpoint.read("master", "embedding", 0, 85)


def test_descriptors_are_given_back(tmp_path: Path) -> None:
    save(tmp_path, ("a", Values(1, 2)), ("b", Values(2, 2)))
    (tmp_path / "b" / "rank-00000.safetensors").write_bytes(b"damaged")
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        load(tmp_path, Values(1, 2), 2)
        with pytest.raises(CheckpointError):
            CheckpointStore(tmp_path, threads.single(10.0)).load("b")
    assert len(os.listdir("/proc/self/fd")) <= before
