"""What a full disk, a loss of power and kill -9 must not take: every name stands for content that the disk has, in the
order that names it; training goes on, and one warning says what failed."""

import os
import random
import resource
import subprocess
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.checkpoint.jobs import Values, alone, load, missing, save, tags
from tests.engine.checkpoint.kill import exit_code, fork
from thinwire.comm import Communicator, threads
from thinwire.engine.checkpoint.exporting import write_weights
from thinwire.engine.checkpoint.manifest import ModelDescription
from thinwire.engine.checkpoint.store import CheckpointStore, Snapshot
from thinwire.zero import SavedSlice

DISK_BYTES = 1 << 20


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.safetensors"])
def test_a_model_that_does_not_fit(disk: Path, name: str) -> None:
    before = {"w": torch.ones(3, dtype=torch.bfloat16)}
    assert write_weights(disk / name, before, {}, threads.single(10.0))
    content = (disk / name).read_bytes()
    with pytest.warns(RuntimeWarning, match=f"could not be written to .*{name}: .*stays"):
        assert not write_weights(disk / name, {"w": torch.ones(2 * DISK_BYTES)}, {}, threads.single(10.0))
    assert [path.name for path in disk.iterdir()] == [name]
    assert (disk / name).read_bytes() == content


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(folder)], capture_output=True
    )
    if mounted.returncode:
        pytest.skip("mounting a small file system needs the rights to")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def snapshot_of_bytes(nbytes: int, rank: int, size: int) -> Snapshot:
    """One that needs `nbytes` on the last rank, and next to nothing on the others."""
    model = ModelDescription({"w": ((nbytes,), torch.uint8)})
    whole = torch.zeros(nbytes, dtype=torch.uint8)
    return Snapshot([SavedSlice("weight", "w", 0, whole)] if rank == size - 1 else [], model)


def fill_all_but(free: int, ballast: Path) -> None:
    """Fill a file system with one file, but for some bytes."""
    with ballast.open("wb", buffering=0) as file:
        with suppress(OSError):
            while True:
                file.write(bytes(4096))
        file.truncate(file.tell() - free)


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("size", [1, 3])
def test_a_disk_that_one_rank_fills(disk: Path, size: int, asynchronous: bool) -> None:
    values = Values(1, size)

    def work(comm: Communicator) -> list[bool]:
        store = CheckpointStore(disk, comm, asynchronous=asynchronous)
        fitting, too_large = values.snapshot(comm.rank), snapshot_of_bytes(2 * DISK_BYTES, comm.rank, size)
        outcomes = []
        for number, snapshot in enumerate([fitting, too_large, fitting]):
            published = store.save(f"step-{number}", snapshot)
            outcomes.append(store.wait() if asynchronous else published)
            if number == 1:
                values.check(store.load() or missing(), random.Random(comm.rank))
                assert tags(disk) == ["step-0"]
                comm.barrier()
        return outcomes

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert threads.run(work, size) == [[True, False, True]] * size
    (warning,) = caught
    assert warning.category is RuntimeWarning
    assert f"'step-1' was not saved to {disk}" in str(warning.message)
    assert f"rank {size - 1}: [Errno 28] No space left" in str(warning.message)
    assert load(disk, values) == []


def test_every_amount_of_space_saves_whole_or_not_at_all(disk: Path) -> None:
    first, second = Values(1, 2), Values(2, 2)
    save(disk, ("first", first))
    ballast = disk / "ballast"
    published = []
    for free in range(0, 40 << 10, 4 << 10):
        fill_all_but(free, ballast)

        def work(comm: Communicator) -> bool:
            return CheckpointStore(disk, comm).save("second", second.snapshot(comm.rank))

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            outcomes = threads.run(work, 2)
        assert outcomes[0] == outcomes[1]
        published.append(outcomes[0])
        expected = ["ballast", "first", "second"] if any(published) else ["ballast", "first"]
        assert tags(disk) == expected
        assert load(disk, second if any(published) else first) == []
    assert not published[0]
    assert published[-1]


def test_a_file_that_may_not_grow(tmp_path: Path) -> None:
    """The same without rights to mount: the process may not write files beyond a size."""
    values = Values(1, 2)
    save(tmp_path, ("a", values))

    def fill() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (DISK_BYTES, DISK_BYTES))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            too_large = [snapshot_of_bytes(2 * DISK_BYTES, rank, 2) for rank in range(2)]
            outcomes = threads.run(lambda comm: CheckpointStore(tmp_path, comm).save("b", too_large[comm.rank]), 2)
        assert outcomes == [False, False]
        (warning,) = caught
        assert "rank 1: [Errno 27] File too large" in str(warning.message)

    assert exit_code(fork(fill)) == 0
    assert tags(tmp_path) == ["a"]
    assert load(tmp_path, values) == []


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
    store = alone(folder)
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


def test_an_older_one_is_removed_only_after_the_new_one_is_on_the_disk(tmp_path, calls) -> None:
    store = alone(tmp_path, keep=2)
    for tag in "abc":
        calls.clear()
        assert store.save(tag, Values(1, 1).snapshot(0))
    removed = next(index for index, (_, name) in enumerate(calls) if name.endswith(".removed"))
    assert calls.index(("name", "latest")) + 1 == calls.index(("sync", tmp_path.name), calls.index(("name", "latest")))
    assert calls.index(("sync", tmp_path.name), calls.index(("name", "latest"))) < removed


@pytest.mark.programs
def test_a_job_that_is_killed_leaves_a_whole_checkpoint(jobs) -> None:
    """Rank 0 alone at each of its calls, and ranks among others at random, anew in every run of this."""
    # A kill takes nothing from the kernel, on disk or not: only fsync takes its time on one.
    memory = {"TMPDIR": "/dev/shm"} if os.access("/dev/shm", os.W_OK) else {}
    ended = jobs.alone("-m", "tests.engine.checkpoint.kill", "sweep", "8", TORCH_CPP_LOG_LEVEL="ERROR", **memory)
    assert ended.returncode == 0, ended.stderr
    assert "\n8: 8 kills" in ended.stdout
