"""Threads that share the parts of a call; and how many cores they may use: control groups of containers, and masks."""

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from thinwire.simd.workers import Cores, Workers

linux = pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs Linux")


@pytest.mark.parametrize(("parts", "threads"), [(0, 2), (1, 4), (7, 1), (50, 3)])
def test_every_part_is_done_once(parts, threads) -> None:
    done: list[int] = []
    Workers().each(done.append, parts, threads)
    assert sorted(done) == list(range(parts))


def test_an_error_is_raised_by_the_call() -> None:
    def work(part: int) -> None:
        if part == 3:
            raise ValueError("part 3")

    with pytest.raises(ValueError, match="part 3"):
        Workers().each(work, 8, 2)


def test_callers_do_not_wait_for_each_other() -> None:
    workers = Workers()
    meeting = threading.Barrier(2, timeout=60)  # both calls must be running at once to pass it
    callers = [threading.Thread(target=workers.each, args=(lambda _: meeting.wait(), 1, 1)) for _ in range(2)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert not meeting.broken


class CoresOf(Cores):
    """As many cores as a test wants."""

    def __init__(self, number: int) -> None:
        self._number = number

    def usable(self) -> int:
        return self._number


@pytest.fixture
def _threads_of_torch() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("_threads_of_torch")
@pytest.mark.parametrize(("of_torch", "cores", "threads"), [(1, 8, 1), (3, 8, 3), (8, 3, 3), (8, 1, 1)])
def test_no_more_threads_than_torch_uses_and_than_there_are_cores(of_torch, cores, threads) -> None:
    torch.set_num_threads(of_torch)
    found = []
    caller = threading.Thread(target=lambda: found.append(Workers(CoresOf(cores)).threads()))
    caller.start()
    caller.join()
    assert [Workers(CoresOf(cores)).threads(), *found] == [threads, threads]


@linux
def test_all_threads_run_where_the_caller_may() -> None:
    workers = Workers()
    masks: list[set[int]] = []

    def call() -> None:
        meeting = threading.Barrier(2, timeout=60)  # passed by two threads only

        def work(_: int) -> None:
            masks.append(os.sched_getaffinity(0))
            meeting.wait()

        workers.each(work, 2, 2)

    def call_bound() -> None:
        os.sched_setaffinity(0, bound)  # of this thread only
        call()

    everywhere = os.sched_getaffinity(0)
    bound = {max(everywhere)}
    call()
    caller = threading.Thread(target=call_bound)
    caller.start()
    caller.join()
    call()
    assert masks == [everywhere] * 2 + [bound] * 2 + [everywhere] * 2


def cores_of(folder: Path, membership: str, files: dict[str, str]) -> Cores:
    (folder / "membership").write_text(membership)
    for name, text in files.items():
        path = folder / "mount" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return Cores(folder / "membership", folder / "mount")


@pytest.fixture
def _sixty_four_cores(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))


@linux
@pytest.mark.usefixtures("_sixty_four_cores")
@pytest.mark.parametrize(
    ("membership", "files", "usable"),
    [
        ("0::/\n", {"cpu.max": "250000 100000\n"}, 3),
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000\n", "a/cpu.max": "800000 100000\n"}, 8),
        ("0::/a/b\n", {"a/b/cpu.max": "400000 100000\n", "a/cpu.max": "800000 100000\n"}, 4),
        ("0::/outside/the/container\n", {"cpu.max": "1000 100000\n"}, 1),
        ("0::/\n", {"cpu.max": "max 100000\n"}, 64),
        ("0::/\n", {"cpu.max": "9900000 100000\n"}, 64),
        ("0::/\n", {}, 64),
        ("", {}, 64),
        (
            "4:memory:/\n3:cpu,cpuacct:/x\n0::/\n",
            {"cpu,cpuacct/x/cpu.cfs_quota_us": "600000\n", "cpu,cpuacct/x/cpu.cfs_period_us": "100000\n"},
            6,
        ),
        ("1:cpu:/\n", {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 64),
        ("1:cpuset:/\n", {"cpuset/cpu.cfs_quota_us": "100000\n", "cpuset/cpu.cfs_period_us": "100000\n"}, 64),
    ],
)
def test_the_tightest_quota_counts(tmp_path, membership, files, usable):
    assert cores_of(tmp_path, membership, files).usable() == usable


@linux
@pytest.mark.usefixtures("_sixty_four_cores")
def test_a_new_quota_is_seen_once_the_old_one_has_aged(tmp_path, monkeypatch):
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    cores = cores_of(tmp_path, "0::/\n", {"cpu.max": "200000 100000"})
    assert cores.usable() == 2
    (tmp_path / "mount" / "cpu.max").write_text("500000 100000")
    now[0] += 1.0
    assert cores.usable() == 5


@linux
def test_the_mask_counts_as_it_is_at_the_call(tmp_path):
    cores = cores_of(tmp_path, "0::/\n", {})
    found = []

    def bound() -> None:
        found.append(cores.usable())
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # of this thread only
        found.append(cores.usable())

    thread = threading.Thread(target=bound)
    thread.start()
    thread.join()
    assert found == [len(os.sched_getaffinity(0)), 1]
