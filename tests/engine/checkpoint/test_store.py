"""What a store keeps, replaces, removes and refuses, and that all its ranks agree on it."""

import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.engine.checkpoint.jobs import Values, alone, load, missing, opened, save, tags
from tests.launching import on_threads
from tests.refusing import refused
from thinwire.comm import Communicator, threads
from thinwire.engine.checkpoint import store
from thinwire.engine.checkpoint.manifest import ModelDescription, RankFile
from thinwire.engine.checkpoint.store import CheckpointStore, Snapshot
from thinwire.engine.errors import CheckpointError
from thinwire.zero import SavedSlice


def test_a_folder_without_checkpoints_gives_none(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "events.csv").write_text("1")
    for folder in (tmp_path, tmp_path / "nothing"):
        assert threads.run(lambda comm, folder=folder: CheckpointStore(folder, comm).load(), 2) == [None, None]
    refused(ValueError, "keep must be at least 2", alone, tmp_path, keep=1)
    refused(CheckpointError, r"'step-1' .* none of that name", alone(tmp_path).load, "step-1")


@pytest.mark.parametrize("keep", [2, 3])
def test_the_newest_are_kept(tmp_path: Path, keep: int) -> None:
    jobs = [(f"step-{number}", Values(number, 2)) for number in (5, 40, 300, 2, 1)]
    for count in range(1, len(jobs) + 1):
        save(tmp_path, jobs[count - 1], keep=keep, continues=True)
        assert tags(tmp_path) == sorted(tag for tag, _ in jobs[max(0, count - keep) : count])
    assert (tmp_path / "latest").read_text() == "step-1\n"
    assert load(tmp_path, jobs[-1][1]) == []


def test_an_incomplete_checkpoint_does_not_count_as_kept(tmp_path: Path) -> None:
    def work(comm: Communicator) -> None:
        checkpoints = CheckpointStore(tmp_path, comm, keep=2)
        for number, tag in enumerate("abcd"):
            if tag == "c" and comm.rank == 0:
                (tmp_path / "b" / "rank-00001.safetensors").unlink()
            assert checkpoints.save(tag, Values(number, 2).snapshot(comm.rank))
            if tag == "c":
                assert tags(tmp_path) == ["a", "b", "c"]
            comm.barrier()

    threads.run(work, 2)
    assert tags(tmp_path) == ["c", "d"]


def test_what_is_not_the_stores_stays(tmp_path: Path) -> None:
    save(tmp_path, ("a", Values(1, 1)))
    (tmp_path / "a").rename(tmp_path / "best so far")
    (tmp_path / "logs").mkdir()
    (tmp_path / ".hidden").write_text("x")
    (tmp_path / "latest").unlink()
    save(tmp_path, *((f"step-{number}", Values(number, 1)) for number in range(4)), keep=2, continues=True)
    assert tags(tmp_path) == [".hidden", "best so far", "logs", "step-2", "step-3"]
    assert opened(tmp_path, "best so far")


def test_a_replaced_checkpoint_is_found_while_its_name_is_free(tmp_path: Path) -> None:
    values = Values(1, 2)
    save(tmp_path, ("best", values))
    (tmp_path / "best").rename(tmp_path / ".best.0123abcd.replaced")
    assert load(tmp_path, values) == []
    assert opened(tmp_path, "best")
    save(tmp_path, ("other", Values(2, 2)))
    assert tags(tmp_path) == ["best", "other"]


def test_leftovers_of_killed_saves_are_removed_at_the_next(tmp_path: Path) -> None:
    save(tmp_path, ("a", Values(1, 1)))
    for name in (".b.00ff00ff.partial", ".a.00ff00ff.replaced", ".x.00ff00ff.removed"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "rank-00000.safetensors").write_bytes(b"half")
    (tmp_path / ".latest.00ff00ff.partial.unfinished").write_text("b")
    assert load(tmp_path, Values(1, 1)) == []
    second = Values(2, 1)
    save(tmp_path, ("b", second))
    assert tags(tmp_path) == ["a", "b"]
    assert load(tmp_path, second) == []


def test_an_asynchronous_save_holds_what_was_there_when_it_began(tmp_path, monkeypatch) -> None:
    values = Values(1, 3)
    begin = threading.Event()
    write = store.write_rank_file

    def write_later(folder: Path, rank: int, snapshot: Snapshot) -> None:
        assert begin.wait(20.0)
        write(folder, rank, snapshot)

    monkeypatch.setattr(store, "write_rank_file", write_later)

    def work(comm: Communicator) -> None:
        checkpoints = CheckpointStore(tmp_path, comm, asynchronous=True)
        snapshot = values.snapshot(comm.rank)
        copies = [replace(one, tensor=one.tensor.clone()) for one in snapshot.slices]
        snapshot = replace(snapshot, slices=copies, shared=dict(snapshot.shared))
        assert checkpoints.save("step-1", snapshot)
        for one in snapshot.slices:
            one.tensor.fill_(7)
        snapshot.shared["optimizer"] = {"seed": "changed"}
        comm.barrier()
        assert not (tmp_path / "step-1").exists()
        begin.set()
        assert checkpoints.wait()
        assert checkpoints.wait()

    threads.run(work, 3)
    assert load(tmp_path, values) == []


def test_asynchronous_saves_follow_one_another(tmp_path: Path) -> None:
    jobs = [Values(number, 2) for number in range(5)]

    def work(comm: Communicator) -> None:
        checkpoints = CheckpointStore(tmp_path, comm, keep=2, asynchronous=True)
        for number, values in enumerate(jobs):
            assert checkpoints.save(f"step-{number}", values.snapshot(comm.rank))
        jobs[-1].check(checkpoints.load() or missing())
        assert checkpoints.save("last", jobs[0].snapshot(comm.rank))
        checkpoints.close()

    threads.run(work, 2)
    assert tags(tmp_path) == ["last", "step-4"]


def test_a_rank_that_does_not_finish_in_time_fails_the_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, ("a", Values(1, 2)))
    given_up = threading.Event()
    write, wait = store.write_rank_file, store.await_receipts

    def write_late(folder: Path, rank: int, snapshot: Snapshot) -> None:
        assert rank == 0 or given_up.wait(20.0)
        write(folder, rank, snapshot)

    def give_up(folder: Path, size: int, timeout: float, *others: object) -> list[RankFile]:
        try:
            return wait(folder, size, 0.0, *others)  # type: ignore[arg-type]
        finally:
            given_up.set()

    monkeypatch.setattr(store, "write_rank_file", write_late)
    monkeypatch.setattr(store, "await_receipts", give_up)

    def work(comm: Communicator) -> bool:
        return CheckpointStore(tmp_path, comm).save("b", Values(2, 2).snapshot(comm.rank))

    with pytest.warns(RuntimeWarning, match=r"'b' was not saved .* rank 1 did not finish"):
        assert threads.run(work, 2) == [False, False]
    assert tags(tmp_path) == ["a"]


def test_a_rank_that_fails_otherwise_fails_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = store.write_rank_file

    def fail(folder: Path, rank: int, snapshot: Snapshot) -> None:
        if rank == 1:
            raise RuntimeError("the GPU is gone")
        write(folder, rank, snapshot)

    monkeypatch.setattr(store, "write_rank_file", fail)

    def work(comm: Communicator) -> None:
        checkpoints = CheckpointStore(tmp_path, comm, asynchronous=True)
        assert checkpoints.save("a", Values(1, 3).snapshot(comm.rank))
        refused((RuntimeError, ValueError), "the GPU is gone", checkpoints.wait)

    threads.run(work, 3)
    assert tags(tmp_path) == []


def test_a_rank_that_leaves_ends_the_others_and_publishes_nothing(tmp_path: Path) -> None:
    def work(comm: Communicator) -> None:
        checkpoints = CheckpointStore(tmp_path, comm)
        if comm.rank == 1:
            raise KeyError("a bug of the user")
        checkpoints.save("a", Values(1, 2).snapshot(comm.rank))

    with pytest.raises(KeyError):
        threads.run(work, 2)
    assert alone(tmp_path).load() is None


def test_older_ones_that_cannot_be_removed_do_not_undo_the_save(tmp_path, monkeypatch) -> None:
    def fail(*_: object) -> None:
        raise PermissionError("not yours")

    save(tmp_path, ("a", Values(1, 2)), ("b", Values(2, 2)))
    values = Values(3, 2)
    monkeypatch.setattr("thinwire.engine.checkpoint.folder.CheckpointFolder.prune", fail)
    with pytest.warns(RuntimeWarning, match=r"'c' is saved, but .* not yours"):
        save(tmp_path, ("c", values))
    assert load(tmp_path, values) == []


@pytest.mark.parametrize("tag", ["", ".hidden", "a/b", "../up", "latest", "line\n", "x" * 201, "back\\slash"])
def test_tags_that_are_no_names_are_refused(tmp_path: Path, tag: str) -> None:
    def work(comm: Communicator) -> None:
        checkpoints = CheckpointStore(tmp_path, comm)
        refused(ValueError, "cannot be a checkpoint's tag", checkpoints.save, tag, Values(1, 2).snapshot(comm.rank))
        refused(CheckpointError, "cannot be a checkpoint's tag", checkpoints.load, tag)

    threads.run(work, 2)
    assert tags(tmp_path) == []


FLAT = torch.arange(6.0)
MODEL = ModelDescription({"w": ((2, 3), torch.float32)})


@pytest.mark.parametrize(
    ("snapshot", "complaint"),
    [
        (Snapshot([SavedSlice("weight", "v", 0, FLAT)], MODEL), "no parameter of that name"),
        (Snapshot([SavedSlice("weight", "w", 0, FLAT.view(2, 3))], MODEL), "one-dimensional"),
        (Snapshot([SavedSlice("weight", "w", 0, FLAT[::2])], MODEL), "contiguous"),
        (Snapshot([SavedSlice("weight", "w", 1, FLAT)], MODEL), "ends at 7, but there are 6"),
        (Snapshot([SavedSlice("weight", "w", -1, FLAT)], MODEL), "there are 6"),
        (Snapshot([SavedSlice("scalar.step", "w", 0, FLAT)], MODEL), "there are 1"),
        (Snapshot([SavedSlice("a/b", "w", 0, FLAT)], MODEL), "without '/'"),
        (Snapshot([SavedSlice("", "w", 0, FLAT)], MODEL), "a kind is a word"),
        (Snapshot([SavedSlice("weight", "w", 0, FLAT)] * 2, MODEL), "2 slices begin at 1 places"),
        (Snapshot([], MODEL, rank_tensors={"r": torch.zeros(2, dtype=torch.complex128)}), "'?r'? is complex128"),
        (Snapshot([], MODEL, shared={"a": FLAT}), "shared must hold what JSON can write"),
        (Snapshot([], MODEL, rank_values={"a": {1}}), "rank_values must hold what JSON can write"),
    ],
)
def test_a_snapshot_that_could_not_be_loaded_is_refused_on_every_rank(tmp_path, snapshot, complaint) -> None:
    def work(comm: Communicator) -> None:
        own = snapshot if comm.rank == 1 else Snapshot([], MODEL)
        refused((ValueError, TypeError), complaint, CheckpointStore(tmp_path, comm).save, "x", own)

    threads.run(work, 3)
    assert tags(tmp_path) == []


@on_threads(2)
def test_ranks_that_do_different_things_are_told(comm: Communicator, tmp_path: Path) -> None:
    checkpoints = CheckpointStore(tmp_path, comm)
    with pytest.raises(ValueError, match="rank 1 saves tag 'b', rank 0 tag 'a'"):
        checkpoints.save("ab"[comm.rank], Snapshot([], ModelDescription({})))
    with pytest.raises(ValueError, match="rank 1 saves another model"):
        checkpoints.save("a", Snapshot([], MODEL if comm.rank else ModelDescription({})))
    refused(ValueError, "rank 1 loads tag None, rank 0 tag 'a'", checkpoints.load, "a" if comm.rank == 0 else None)


def test_what_is_in_the_way_is_not_removed(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "file").write_text("x")

    def work(comm: Communicator) -> None:
        with pytest.raises(ValueError, match="exists and is no checkpoint"):
            CheckpointStore(tmp_path, comm).save("logs", Snapshot([], ModelDescription({})))
        with pytest.raises(ValueError, match="not a folder"):
            CheckpointStore(tmp_path / "file", comm).save("a", Snapshot([], ModelDescription({})))
        refused(CheckpointError, "a file: give the folder", CheckpointStore(tmp_path / "file", comm).load)

    threads.run(work, 2)


def test_a_folder_or_checkpoint_that_another_rank_does_not_see(tmp_path: Path) -> None:
    save(tmp_path / "0", ("a", Values(1, 2)))

    def work(comm: Communicator) -> None:
        store = CheckpointStore(tmp_path / str(comm.rank), comm)
        with pytest.raises(CheckpointError, match=r"rank 1 does not see .* all ranks share"):
            store.save("a", Snapshot([], ModelDescription({})))
        refused(CheckpointError, r"manifest\.json is missing", store.load)

    threads.run(work, 2)
