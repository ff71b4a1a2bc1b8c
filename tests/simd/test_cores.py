"""The number of cores that a process may use: control groups as Linux and containers lay them out, and real masks."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from thinwire.simd.workers import Cores

pytestmark = pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs Linux")


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


@pytest.mark.usefixtures("_sixty_four_cores")
def test_a_new_quota_is_seen_once_the_old_one_has_aged(tmp_path, monkeypatch):
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    cores = cores_of(tmp_path, "0::/\n", {"cpu.max": "200000 100000"})
    assert cores.usable() == 2
    (tmp_path / "mount" / "cpu.max").write_text("500000 100000")
    now[0] += 1.0
    assert cores.usable() == 5


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
