"""Several jobs on one folder, loads beside saves, and entries that cannot be removed: each save succeeds and removes
nothing but its own and what the dead have left; what is read is what was verified, of one save."""

import errno
import fcntl
import json
import os
import re
import shutil
import subprocess
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine.checkpoint.jobs import Values, alone, load, missing, opened, save, tags
from thinwire.comm import Communicator, threads
from thinwire.engine.checkpoint import files, folder, loading, store
from thinwire.engine.checkpoint.loading import Examination
from thinwire.engine.checkpoint.manifest import _sealed
from thinwire.engine.checkpoint.store import CheckpointStore, Snapshot
from thinwire.engine.errors import CheckpointError

NONCE = "00ff00ff"


def put_unfinished(inside: Path, **owner: object) -> Path:
    """A save of another process that is under way, or is not any more."""
    partial = inside / f".other.{NONCE}.partial"
    partial.mkdir()
    (partial / "rank-00000.safetensors").write_bytes(b"half")
    (partial / "owner.json").write_text(json.dumps({**folder._process(os.getpid()), "locked": False, **owner}))
    return partial


def save_all(job: CheckpointStore, tags: str, warning: str = "") -> None:
    """Save under each letter; all together give this one warning, or none."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert all(job.save(tag, Values(number, 1).snapshot(0)) for number, tag in enumerate(tags))
    assert len(caught) == bool(warning)
    assert all(re.search(warning, str(one.message)) for one in caught)


def put_back(path: Path, seconds: float) -> None:
    """Make a folder look as if nothing has been written to it for long."""
    for one in (*path.iterdir(), path):
        os.utime(one, times=(time.time() - seconds,) * 2)


def test_jobs_that_save_at_once_both_succeed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, begin = store.write_rank_file, threading.Event()

    def write_later(folder: Path, rank: int, snapshot: Snapshot) -> None:
        assert ".slow." not in folder.name or begin.wait(60.0)
        write(folder, rank, snapshot)

    monkeypatch.setattr(store, "write_rank_file", write_later)
    slow = alone(tmp_path, asynchronous=True)
    first, second = Values(1, 1), Values(2, 1)
    assert slow.save("slow", first.snapshot(0))
    save(tmp_path, ("fast", second))
    begin.set()
    assert slow.wait()
    assert tags(tmp_path) == ["fast", "slow"]
    assert load(tmp_path, first) == []
    with opened(tmp_path, "fast") as checkpoint:
        second.check(checkpoint)


def test_a_save_that_failed_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError("the cable is out")

    monkeypatch.setattr(store, "write_rank_file", fail)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.warns(RuntimeWarning, match="the cable is out"):
        assert not alone(tmp_path).save("a", Values(1, 1).snapshot(0))
    assert tags(tmp_path) == []
    assert len(os.listdir("/proc/self/fd")) == before


def test_the_folder_is_locked_for_too_long(tmp_path: Path) -> None:
    job = CheckpointStore(tmp_path, threads.single(0.1))
    refused = pytest.warns(RuntimeWarning, match=r"'a' was not saved .* another process has held .*\.lock")
    with folder.lock_folder(tmp_path, 1.0), refused:
        assert not job.save("a", Values(1, 1).snapshot(0))
    save(tmp_path, ("a", Values(1, 1)))


@pytest.mark.parametrize(
    ("owner", "seconds", "stays"),
    [
        ({}, 0, True),  # this very process
        ({"pid": 1 << 30}, 0, False),
        ({"started": "0"}, 0, False),  # another has its number now
        ({"pid": "1"}, 0, False),
        ({"host": "elsewhere"}, 0, True),
        ({"host": "elsewhere"}, 5000, False),
        ({"locked": True}, 0, False),  # its lock would be held
    ],
)
def test_a_save_stays_as_long_as_its_job_lives(tmp_path: Path, owner: dict, seconds: float, stays: bool) -> None:
    partial = put_unfinished(tmp_path, **owner)
    put_back(partial, seconds)
    save(tmp_path, ("a", Values(1, 1)))
    assert partial.exists() == stays


def test_a_save_whose_mark_is_locked_stays_whatever_it_says(tmp_path: Path) -> None:
    partial = put_unfinished(tmp_path, host="elsewhere")
    put_back(partial, 5000)
    with (partial / "owner.json").open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        save(tmp_path, ("a", Values(1, 1)))
        assert partial.exists()
    save(tmp_path, ("b", Values(1, 1)))
    assert not partial.exists()


@pytest.mark.parametrize("content", [None, "", "[]", '{"host": 1', "[" * 3000])
def test_a_mark_that_says_nothing(tmp_path: Path, content: str | None) -> None:
    partial = put_unfinished(tmp_path)
    if content is None:
        (partial / "owner.json").unlink()
    else:
        (partial / "owner.json").write_text(content)
    save(tmp_path, ("a", Values(1, 1)))
    assert not partial.exists()


def test_without_locks_only_the_dead_are_cleared_up_and_one_warning_says_so(tmp_path, monkeypatch) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    alive = put_unfinished(tmp_path)
    fresh = tmp_path / f".x.{NONCE}.removed"
    dead = tmp_path / f".y.{NONCE}.removed"
    for path in (fresh, dead):
        path.mkdir()
    put_back(dead, 5000)
    save_all(alone(tmp_path), "ab", "no locks: let no two jobs save")
    assert tags(tmp_path) == sorted([alive.name, fresh.name, "a", "b"])


@pytest.mark.parametrize("what", ["folder", "fifo", "link"])
def test_something_else_with_the_name_of_the_lock(tmp_path: Path, what: str) -> None:
    lock, outside = tmp_path / "in" / ".lock", tmp_path / "outside"
    lock.parent.mkdir()
    {"folder": lock.mkdir, "fifo": lambda: os.mkfifo(lock), "link": lambda: lock.symlink_to(outside)}[what]()
    with pytest.warns(RuntimeWarning, match="cannot be locked"):
        save(tmp_path / "in", ("a", Values(1, 1)))
    assert tags(tmp_path / "in") == ["a"]
    assert not outside.exists()


def test_links_are_removed_and_not_followed(tmp_path: Path) -> None:
    folder, archive = tmp_path / "in", tmp_path / "archive"
    job = alone(folder, keep=2)
    for number, tag in enumerate("abc"):
        if tag == "c":
            shutil.move(folder / "a", archive)
            (folder / "a").symlink_to(archive)
            (folder / f".b.{NONCE}.removed").symlink_to(archive)
        assert job.save(tag, Values(number, 1).snapshot(0))
    assert tags(folder) == ["b", "c"]
    assert (archive / "manifest.json").exists()


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Path]:
    """A file system in the place of a checkpoint, which cannot be moved away."""
    folder = tmp_path / "in" / "a"
    folder.mkdir(parents=True)
    if subprocess.run(["mount", "-t", "tmpfs", "tmpfs", str(folder)], capture_output=True).returncode:
        pytest.skip("mounting needs the rights to")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_an_old_checkpoint_that_cannot_be_removed_costs_no_save(tmp_path: Path, mount: Path) -> None:
    job = alone(mount.parent, keep=2)
    assert job.save("b", Values(2, 1).snapshot(0))
    # One of this job's own, and as old as its oldest.
    manifest = (mount.parent / "b" / "manifest.json").read_bytes()
    shutil.copytree(mount.parent / "b", mount, dirs_exist_ok=True)
    (mount / "manifest.json").write_bytes(resealed(manifest, tag="a", serial=1))
    save_all(job, "cde", "is saved, but .*a cannot be moved: Device or resource busy")
    assert tags(mount.parent) == ["a", "d", "e"]


def resealed(manifest: bytes, without: str = "", **changes: object) -> bytes:
    body = {key: value for key, value in json.loads(manifest).items() if key not in ("sha256", without)}
    return _sealed(body | changes)


def test_a_leftover_that_cannot_be_removed_is_told_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stuck = tmp_path / f".x.{NONCE}.removed"
    stuck.mkdir()
    (stuck / ".nfs0001").write_text("open elsewhere")
    rmtree = shutil.rmtree

    def rmtree_but(path: Path, ignore_errors: bool = False) -> None:
        if path != stuck:
            rmtree(path, ignore_errors)
        elif not ignore_errors:
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), str(path))

    monkeypatch.setattr(shutil, "rmtree", rmtree_but)
    save_all(alone(tmp_path), "abc", "removed cannot be removed: Directory not empty")


def test_what_is_removed_is_announced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = alone(tmp_path, keep=2)
    save_all(job, "ab")
    assert capsys.readouterr().err == ""
    save_all(job, "c")
    assert f"checkpoint 'a' of {tmp_path} is removed: 2 newer ones are kept" in capsys.readouterr().err
    assert tags(tmp_path) == ["b", "c"]


def test_a_job_removes_what_it_goes_on_from_and_nothing_else_that_was_there(tmp_path: Path) -> None:
    save_all(alone(tmp_path), "abcd")
    assert tags(tmp_path) == ["a", "b", "c", "d"]  # where nothing is said
    save_all(alone(tmp_path, keep=2), "xyz")
    assert tags(tmp_path) == ["a", "b", "c", "d", "y", "z"]
    branches = {"mno": alone(tmp_path, keep=2), "pqr": alone(tmp_path, keep=2)}
    for branch in branches.values():
        (branch.load("c") or missing()).close()
    for number in range(3):
        for names, branch in branches.items():
            save_all(branch, names[number])
    assert tags(tmp_path) == ["d", "n", "o", "q", "r", "y", "z"]


def test_taking_weights_alone_is_not_going_on(tmp_path: Path) -> None:
    save_all(alone(tmp_path), "abc")
    job = alone(tmp_path, keep=2)
    (job.load(continues=False) or missing()).close()
    save_all(job, "xy")
    assert tags(tmp_path) == ["a", "b", "c", "x", "y"]


def test_a_checkpoint_of_the_version_before_is_loaded_and_stays(tmp_path: Path) -> None:
    values = Values(1, 1)
    save(tmp_path, ("a", values))
    path = tmp_path / "a" / "manifest.json"
    path.write_bytes(resealed(path.read_bytes(), without="run", version=2))
    assert load(tmp_path, values) == []
    save(tmp_path, *((tag, Values(2, 1)) for tag in "bcd"), keep=2, continues=True)
    assert tags(tmp_path) == ["a", "c", "d"]


def test_a_tag_saved_anew_after_the_load_is_not_mixed_into_it(tmp_path: Path) -> None:
    older = Values(1, 3)
    save(tmp_path, ("best", older))
    with opened(tmp_path, "best") as checkpoint:
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
    assert tags(tmp_path) == ["best"]


@pytest.mark.parametrize("again", [False, True])
def test_a_checkpoint_removed_before_it_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, again: bool) -> None:
    """Where another has taken its place that is loaded; else all ranks say the same."""
    save(tmp_path, ("a", Values(1, 2)))
    save(tmp_path / "elsewhere", ("b", Values(2, 2)))
    hold, removed_on = loading.hold, set()

    def remove_before(path: Path) -> Examination:
        comm = threads.current()
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


def test_a_file_that_is_opened_again_must_be_the_one_that_was_verified(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(files, "_MOST_OPEN", 1)
    values = Values(1, 3)
    save(tmp_path / "one", ("x", values))
    save(tmp_path / "other", ("x", Values(2, 3)))
    with opened(tmp_path / "one") as checkpoint:
        values.check(checkpoint)
        for name in ("rank-00000.safetensors", "rank-00001.safetensors", "rank-00002.safetensors"):
            os.replace(tmp_path / "other" / "x" / name, tmp_path / "one" / "x" / name)
        with pytest.raises(CheckpointError, match=r"rank-0000.\.safetensors has changed since it was verified"):
            values.check(checkpoint)


def test_a_file_that_is_cut_short_while_it_is_read_is_an_error(tmp_path: Path) -> None:
    save(tmp_path, ("x", Values(1, 1)))
    with opened(tmp_path) as checkpoint:
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
            opened(tmp_path, "b")
    assert len(os.listdir("/proc/self/fd")) <= before
