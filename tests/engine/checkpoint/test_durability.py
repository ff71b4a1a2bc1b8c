"""What a loss of power must not take, nor kill -9 of a random rank at a random moment: every name stands for content
that the disk has, in the order that names it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.engine.checkpoint.jobs import Values
from tests.launching import environment
from thinwire.comm import threads
from thinwire.engine.checkpoint.store import CheckpointStore


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """What is synced, and which names are given, in order."""
    calls: list[tuple[str, str]] = []
    fsync = os.fsync

    def record_sync(descriptor: int) -> None:
        calls.append(("sync", Path(os.readlink(f"/proc/self/fd/{descriptor}")).name))
        fsync(descriptor)

    def recording(rename: Callable[..., None]) -> Callable[..., None]:
        def record(source: Any, target: Any) -> None:
            calls.append(("name", Path(target).name))
            rename(source, target)

        return record

    monkeypatch.setattr(os, "fsync", record_sync)
    monkeypatch.setattr(os, "rename", recording(os.rename))
    monkeypatch.setattr(os, "replace", recording(os.replace))
    return calls


def test_everything_is_on_the_disk_before_it_is_named(tmp_path: Path, calls: list[tuple[str, str]]) -> None:
    folder = tmp_path / "checkpoints"
    store = CheckpointStore(folder, threads.single(10.0))
    assert store.save("a", Values(1, 1).snapshot(0))
    named, pointed = calls.index(("name", "a")), calls.index(("name", "latest"))
    partial = next(name for what, name in calls if what == "sync" and name.endswith(".partial"))
    synced_before = {name for what, name in calls[:named] if what == "sync"}
    assert {"rank-00000.safetensors", "manifest.json.unfinished", partial} <= synced_before
    assert max(calls.index(("sync", file)) for file in ("rank-00000.safetensors", "manifest.json.unfinished")) < max(
        index for index, call in enumerate(calls) if call == ("sync", partial)
    )
    assert ("sync", f"{partial.replace('.a.', '.latest.')}.unfinished") in calls[:pointed]
    assert calls[named + 1] == ("sync", "checkpoints")
    assert calls[pointed + 1] == ("sync", "checkpoints")
    assert named < pointed


def test_an_older_one_is_removed_only_after_the_new_one_is_on_the_disk(
    tmp_path: Path, calls: list[tuple[str, str]]
) -> None:
    store = CheckpointStore(tmp_path, threads.single(10.0), keep=2)
    for tag in "abc":
        calls.clear()
        assert store.save(tag, Values(1, 1).snapshot(0))
    removed = next(index for index, (_, name) in enumerate(calls) if name.endswith(".removed"))
    assert calls.index(("name", "latest")) + 1 == calls.index(("sync", tmp_path.name), calls.index(("name", "latest")))
    assert calls.index(("sync", tmp_path.name), calls.index(("name", "latest"))) < removed


@pytest.mark.launch
def test_a_job_that_is_killed_leaves_a_whole_checkpoint() -> None:
    """Rank 0 alone at each of its calls, and ranks among others at random, anew in every run of this."""
    command = [sys.executable, "-m", "tests.engine.checkpoint.kill", "sweep", "20"]
    # A kill takes nothing from the kernel, on disk or not: only fsync takes its time on one.
    memory = {"TMPDIR": "/dev/shm"} if os.access("/dev/shm", os.W_OK) else {}
    quiet = environment(TORCH_CPP_LOG_LEVEL="ERROR", **memory)
    ended = subprocess.run(command, env=quiet, capture_output=True, text=True, timeout=280)
    assert ended.returncode == 0, ended.stderr
    assert "\n20: 20 kills" in ended.stdout
