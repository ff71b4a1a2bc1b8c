"""Several jobs on one folder, and entries that nobody can remove: each job's saves succeed, and it removes nothing but
its own and what the dead have left."""

from __future__ import annotations

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

from tests.engine.checkpoint.jobs import Values, load, missing, save, tags
from thinwire.comm import threads
from thinwire.engine.checkpoint import folder, store
from thinwire.engine.checkpoint.store import CheckpointStore, Snapshot

NONCE = "00ff00ff"


def store_of(folder: Path, keep: int | None = None, asynchronous: bool = False) -> CheckpointStore:
    """A job of its own."""
    return CheckpointStore(folder, threads.single(30.0), keep, asynchronous)


def put_unfinished(inside: Path, **owner: object) -> Path:
    """A save of another process that is under way, or is not any more."""
    partial = inside / f".other.{NONCE}.partial"
    partial.mkdir()
    (partial / "rank-00000.safetensors").write_bytes(b"half")
    (partial / "owner.json").write_text(json.dumps({**folder._process(os.getpid()), "locked": False, **owner}))
    return partial


def save_all(job: CheckpointStore, tags: str, warning: str = "") -> None:
    """Save under each tag; all together give this one warning, or none."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for number, tag in enumerate(tags):
            assert job.save(tag, Values(number, 1).snapshot(0))
    assert len(caught) == bool(warning)
    assert all(re.search(warning, str(one.message)) for one in caught)


def put_back(path: Path, seconds: float) -> None:
    """Make a folder look as if nothing has been written to it for long."""
    for one in (*path.iterdir(), path):
        os.utime(one, times=(time.time() - seconds,) * 2)


# Saves at the same time


def test_jobs_that_save_at_once_both_succeed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, begin = store.write_rank_file, threading.Event()

    def write_later(folder: Path, rank: int, snapshot: Snapshot) -> None:
        assert ".slow." not in folder.name or begin.wait(60.0)
        write(folder, rank, snapshot)

    monkeypatch.setattr(store, "write_rank_file", write_later)
    slow = store_of(tmp_path, asynchronous=True)
    first, second = Values(1, 1), Values(2, 1)
    assert slow.save("slow", first.snapshot(0))
    save(tmp_path, ("fast", second))
    begin.set()
    assert slow.wait()
    assert tags(tmp_path) == ["fast", "slow"]
    assert load(tmp_path, first) == []
    with store_of(tmp_path).load("fast") or missing() as checkpoint:
        second.check(checkpoint)


def test_a_save_that_failed_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError("the cable is out")

    monkeypatch.setattr(store, "write_rank_file", fail)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.warns(RuntimeWarning, match="the cable is out"):
        assert not store_of(tmp_path).save("a", Values(1, 1).snapshot(0))
    assert tags(tmp_path) == []
    assert len(os.listdir("/proc/self/fd")) == before


def test_the_folder_is_locked_for_too_long(tmp_path: Path) -> None:
    job = CheckpointStore(tmp_path, threads.single(0.1))
    refused = pytest.warns(RuntimeWarning, match=r"'a' was not saved .* another process has held .*\.lock")
    with folder.lock_folder(tmp_path, 1.0), refused:
        assert not job.save("a", Values(1, 1).snapshot(0))
    save(tmp_path, ("a", Values(1, 1)))


# What others have left


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


def test_without_locks_only_the_dead_are_cleared_up_and_one_warning_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    alive = put_unfinished(tmp_path)
    fresh = tmp_path / f".x.{NONCE}.removed"
    dead = tmp_path / f".y.{NONCE}.removed"
    for path in (fresh, dead):
        path.mkdir()
    put_back(dead, 5000)
    save_all(store_of(tmp_path), "ab", "no locks: let no two jobs save")
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


# What cannot be removed


def test_links_are_removed_and_not_followed(tmp_path: Path) -> None:
    folder, archive = tmp_path / "in", tmp_path / "archive"
    job = store_of(folder, keep=2)
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
    job = store_of(mount.parent, keep=2)
    assert job.save("b", Values(2, 1).snapshot(0))
    # One of this job's own, and as old as its oldest.
    manifest = (mount.parent / "b" / "manifest.json").read_bytes()
    shutil.copytree(mount.parent / "b", mount, dirs_exist_ok=True)
    (mount / "manifest.json").write_bytes(as_tag(manifest, "a"))
    save_all(job, "cde", "is saved, but .*a cannot be moved: Device or resource busy")
    assert tags(mount.parent) == ["a", "d", "e"]


def as_tag(manifest: bytes, tag: str) -> bytes:
    from thinwire.engine.checkpoint.manifest import _sealed

    body = json.loads(manifest)
    del body["sha256"]
    return _sealed({**body, "tag": tag, "serial": 1})


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
    save_all(store_of(tmp_path), "abc", "removed cannot be removed: Directory not empty")


# What `keep` removes


def test_everything_is_kept_where_nothing_is_said(tmp_path: Path) -> None:
    job = store_of(tmp_path)
    for tag in "abcd":
        assert job.save(tag, Values(1, 1).snapshot(0))
    assert tags(tmp_path) == ["a", "b", "c", "d"]


def test_what_is_removed_is_announced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = store_of(tmp_path, keep=2)
    for tag in "ab":
        assert job.save(tag, Values(1, 1).snapshot(0))
    assert capsys.readouterr().err == ""
    assert job.save("c", Values(1, 1).snapshot(0))
    assert f"checkpoint 'a' of {tmp_path} is removed: 2 newer ones are kept" in capsys.readouterr().err
    assert tags(tmp_path) == ["b", "c"]


def test_a_new_job_removes_nothing_that_was_there(tmp_path: Path) -> None:
    save(tmp_path, *((tag, Values(1, 1)) for tag in "abc"))
    job = store_of(tmp_path, keep=2)
    for tag in "xyz":
        assert job.save(tag, Values(1, 1).snapshot(0))
    assert tags(tmp_path) == ["a", "b", "c", "y", "z"]


def test_a_job_that_goes_on_removes_what_it_goes_on_from_and_no_other_branch(tmp_path: Path) -> None:
    job = store_of(tmp_path)
    for tag in ("s1", "s2", "s3", "s4"):
        assert job.save(tag, Values(1, 1).snapshot(0))
    branches = [store_of(tmp_path, keep=2), store_of(tmp_path, keep=2)]
    for name, branch in zip("xy", branches, strict=True):
        (branch.load("s3") or missing()).close()
        assert branch.save(f"{name}1", Values(1, 1).snapshot(0))
    for number in (2, 3):
        for name, branch in zip("xy", branches, strict=True):
            assert branch.save(f"{name}{number}", Values(1, 1).snapshot(0))
    assert tags(tmp_path) == ["s4", "x2", "x3", "y2", "y3"]


def test_taking_weights_alone_is_not_going_on(tmp_path: Path) -> None:
    save(tmp_path, *((tag, Values(1, 1)) for tag in "abc"))
    job = store_of(tmp_path, keep=2)
    (job.load(continues=False) or missing()).close()
    for tag in "xy":
        assert job.save(tag, Values(1, 1).snapshot(0))
    assert tags(tmp_path) == ["a", "b", "c", "x", "y"]


def test_a_checkpoint_of_the_version_before_is_loaded_and_stays(tmp_path: Path) -> None:
    from thinwire.engine.checkpoint.manifest import _sealed

    values = Values(1, 1)
    save(tmp_path, ("a", values))
    path = tmp_path / "a" / "manifest.json"
    body = {key: value for key, value in json.loads(path.read_bytes()).items() if key not in ("sha256", "run")}
    path.write_bytes(_sealed({**body, "version": 2}))
    assert load(tmp_path, values) == []
    save(tmp_path, *((tag, Values(2, 1)) for tag in "bcd"), keep=2, continues=True)
    assert tags(tmp_path) == ["a", "c", "d"]
