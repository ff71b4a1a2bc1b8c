"""A full disk during a save: the checkpoints before it stay, training goes on, one warning says what failed."""

from __future__ import annotations

import random
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from tests.engine.checkpoint.jobs import Values, load, missing, save, tags
from tests.launching import environment
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


def test_a_file_that_may_not_grow() -> None:
    """The same without rights to mount: the process may not write files beyond a size."""
    code = """
import pathlib, resource, tempfile, warnings
from tests.engine.checkpoint.jobs import Values, load, save, tags
from tests.engine.checkpoint.test_full_disk import snapshot_of_bytes
from thinwire.comm import threads
from thinwire.engine.checkpoint.store import CheckpointStore

with tempfile.TemporaryDirectory() as temporary:
    folder, values = pathlib.Path(temporary), Values(1, 2)
    save(folder, ("a", values))
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        work = lambda comm: CheckpointStore(folder, comm).save("b", snapshot_of_bytes(2 << 20, comm.rank, 2))
        assert threads.run(work, 2) == [False, False]
    assert "rank 1: [Errno 27] File too large" in str(caught[0].message), caught
    assert len(caught) == 1
    assert tags(folder) == ["a"]
    assert load(folder, values) == []
"""
    ended = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True, timeout=100)
    assert ended.returncode == 0, ended.stderr
