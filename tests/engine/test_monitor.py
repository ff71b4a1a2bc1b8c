"""Scalars in TensorBoard and CSV: rank 0 only, whole after a crash, one value a sample after a resume."""

from __future__ import annotations

import csv
import math
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from thinwire.comm import Communicator, threads
from thinwire.engine import monitor as monitor_module
from thinwire.engine.monitor import Monitor, ScalarFiles, log_folder

LOSS = "Train/Samples/train_loss"
LOSS_FILE = "Train_Samples_train_loss.csv"


def alone(**folders: Path) -> Monitor:
    return Monitor(threads.single(60.0), **folders)


def read(path: Path) -> list[tuple[int, float]]:
    with path.open() as file:
        header, *rows = csv.reader(file)
    assert header[0] == "sample"
    return [(int(sample), float(value)) for sample, value in rows]


def read_events(folder: Path, name: str) -> list[tuple[int, float]]:
    events = EventAccumulator(str(folder))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(name)]


def test_both_kinds_hold_what_was_written_before_they_are_closed(tmp_path) -> None:
    monitor = alone(tensorboard=tmp_path / "a" / "board", csv=tmp_path / "csv")
    assert monitor.enabled
    for sample in (8, 16, 24):
        monitor.write([(LOSS, 0.5 * sample, sample), ("lr", 0.1 + sample, sample)])
    expected = [(sample, 0.5 * sample) for sample in (8, 16, 24)]
    assert read(tmp_path / "csv" / LOSS_FILE) == expected
    assert read(tmp_path / "csv" / "lr.csv") == [(8, 8.1), (16, 16.1), (24, 24.1)]
    assert read_events(tmp_path / "a" / "board", LOSS) == expected
    monitor.close()
    monitor.write([(LOSS, 0.0, 32)])
    monitor.close()
    assert len(read(tmp_path / "csv" / LOSS_FILE)) == 3


def test_only_rank_0_writes(tmp_path) -> None:
    def rank(comm: Communicator) -> bool:
        monitor = Monitor(comm, csv=tmp_path)
        monitor.write([("rank", comm.rank, 1)])
        monitor.close()
        return monitor.enabled

    assert threads.run(rank, 3) == [True] * 3
    assert read(tmp_path / "rank.csv") == [(1, 0.0)]


def test_without_folders_nothing_happens(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    monitor = alone()
    assert not monitor.enabled
    monitor.write([("loss", 1.0, 1)])
    monitor.close()
    assert list(tmp_path.iterdir()) == []


def test_a_resumed_run_replaces_what_came_after_its_checkpoint(tmp_path) -> None:
    first = alone(tensorboard=tmp_path / "board", csv=tmp_path)
    for sample in (10, 20, 30, 40):
        first.write([(LOSS, float(sample), sample)])
    first.write([("eval", 7.0, 40)])
    resumed = alone(tensorboard=tmp_path / "board", csv=tmp_path)
    for sample in (30, 40, 50):
        resumed.write([(LOSS, sample + 0.5, sample)])
    resumed.close()
    expected = [(10, 10.0), (20, 20.0), (30, 30.5), (40, 40.5), (50, 50.5)]
    assert read(tmp_path / LOSS_FILE) == expected
    assert read_events(tmp_path / "board", LOSS) == expected
    assert (tmp_path / f"{LOSS_FILE}.replaced").read_text() == "30,30.0\n40,40.0\n"
    assert read(tmp_path / "eval.csv") == [(40, 7.0)]


def test_a_run_that_goes_back_while_it_lives_replaces_too(tmp_path) -> None:
    monitor = alone(tensorboard=tmp_path / "board", csv=tmp_path)
    for value, sample in enumerate((1, 2, 3, 2, 3, 3, 4)):
        monitor.write([("loss", float(value), sample)])
    expected = [(1, 0.0), (2, 3.0), (3, 5.0), (4, 6.0)]
    assert read(tmp_path / "loss.csv") == expected
    assert read_events(tmp_path / "board", "loss") == expected


@given(runs=st.lists(st.lists(st.integers(0, 12), max_size=8), max_size=4))
@settings(max_examples=50, deadline=None)
def test_csv_never_holds_two_values_for_a_sample_and_loses_none(runs, tmp_path_factory) -> None:
    folder = tmp_path_factory.mktemp("csv")
    held: dict[int, float] = {}
    written = 0
    for run in runs:
        files = ScalarFiles(folder)
        for sample in run:
            files.write([("x", float(written), sample)])
            held = {earlier: value for earlier, value in held.items() if earlier < sample} | {sample: float(written)}
            written += 1
    if written:
        assert read(folder / "x.csv") == sorted(held.items())
        replaced = folder / "x.csv.replaced"
        moved = replaced.read_text().splitlines() if replaced.exists() else []
        assert len(moved) + len(held) == written


@pytest.mark.parametrize("damage", [b"30,", b"30,1.2", b"\0" * 20, b"4\xff,1\n"])
def test_a_line_cut_short_by_a_crash_is_removed(tmp_path, damage: bytes) -> None:
    path = tmp_path / "loss.csv"
    alone(csv=tmp_path).write([("loss", 1.0, 10), ("loss", 2.0, 20)])
    with path.open("ab") as file:
        file.write(damage)
    alone(csv=tmp_path).write([("loss", 3.0, 30)])
    assert read(path) == [(10, 1.0), (20, 2.0), (30, 3.0)]


def test_a_killed_process_leaves_everything_it_wrote(tmp_path) -> None:
    code = f"""
import os
from thinwire.comm import threads
from thinwire.engine.monitor import Monitor
monitor = Monitor(threads.single(60.0), tensorboard={str(tmp_path / "board")!r}, csv={str(tmp_path)!r})
for sample in range(50):
    monitor.write([("loss", sample / 2, sample)])
os.kill(os.getpid(), 9)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2], check=False)
    assert done.returncode == -9
    expected = [(sample, sample / 2) for sample in range(50)]
    assert read(tmp_path / "loss.csv") == expected
    assert read_events(tmp_path / "board", "loss") == expected


def test_names_that_share_a_file_name_get_a_file_each(tmp_path) -> None:
    for value, sample in ((1.0, 1), (2.0, 2)):
        alone(csv=tmp_path).write([("a/b", value, sample), ("a_b", -value, sample), ('"a,b', 0.5, sample)])
    assert read(tmp_path / "a_b.csv") == [(1, 1.0), (2, 2.0)]
    assert read(tmp_path / "a_b.2.csv") == [(1, -1.0), (2, -2.0)]
    assert read(tmp_path / "_a_b.csv") == [(1, 0.5), (2, 0.5)]


def test_a_file_of_somebody_else_is_left_alone(tmp_path) -> None:
    (tmp_path / "loss.csv").write_text("step,loss\n1,2.0\n")
    alone(csv=tmp_path).write([("loss", 3.0, 1)])
    assert (tmp_path / "loss.csv").read_text() == "step,loss\n1,2.0\n"
    assert read(tmp_path / "loss.2.csv") == [(1, 3.0)]


def test_a_file_deleted_meanwhile_is_begun_anew(tmp_path) -> None:
    monitor = alone(csv=tmp_path)
    monitor.write([("loss", 1.0, 1)])
    (tmp_path / "loss.csv").unlink()
    monitor.write([("loss", 2.0, 2)])
    assert read(tmp_path / "loss.csv") == [(2, 2.0)]


def test_values_that_are_not_finite_are_kept(tmp_path) -> None:
    alone(csv=tmp_path).write([("loss", math.nan, 1), ("loss", math.inf, 2)])
    (_, first), (_, second) = read(tmp_path / "loss.csv")
    assert math.isnan(first)
    assert second == math.inf


def test_a_full_disk_is_one_warning_and_leaves_whole_lines(tmp_path, monkeypatch) -> None:
    monitor = alone(csv=tmp_path)
    monitor.write([("loss", 1.0, 1)])
    append = monitor_module.ScalarFiles.write

    def full(self: ScalarFiles, events) -> None:
        with (tmp_path / "loss.csv").open("ab") as file:
            file.write(b"2,0.")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(ScalarFiles, "write", full)
    with pytest.warns(RuntimeWarning, match="scalars are being lost, training goes on.*No space left"):
        monitor.write([("loss", 2.0, 2)])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        monitor.write([("loss", 3.0, 3)])
    monkeypatch.setattr(ScalarFiles, "write", append)
    monitor.write([("loss", 4.0, 4)])
    assert read(tmp_path / "loss.csv") == [(1, 1.0), (4, 4.0)]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is always full")
def test_a_device_without_space_is_an_error_of_the_files(tmp_path) -> None:
    files = ScalarFiles(tmp_path)
    files.write([("loss", 1.0, 1)])
    (tmp_path / "loss.csv").unlink()
    (tmp_path / "loss.csv").symlink_to("/dev/full")
    with pytest.raises(OSError, match=r"(?i)space|invalid"):
        files.write([("loss", 2.0, 2)])


def test_without_the_tensorboard_package_every_rank_hears_what_to_install(tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)

    def rank(comm: Communicator) -> None:
        with pytest.raises((ImportError, ValueError), match="pip install tensorboard"):
            Monitor(comm, tensorboard=tmp_path)
        comm.barrier()

    threads.run(rank, 3)


def test_a_folder_that_cannot_be_written_is_an_error_on_every_rank(tmp_path) -> None:
    (tmp_path / "file").write_text("")

    def rank(comm: Communicator) -> None:
        with pytest.raises((OSError, ValueError), match="file"):
            Monitor(comm, csv=tmp_path / "file" / "logs")
        comm.barrier()

    threads.run(rank, 2)


@pytest.mark.parametrize(
    ("event", "error"),
    [
        (("", 1.0, 1), TypeError),
        (("a\nb", 1.0, 1), TypeError),
        ((3, 1.0, 1), TypeError),
        (("a", "much", 1), ValueError),
        (("a", 1.0, -1), ValueError),
        (("a", 1.0, 1.5), ValueError),
        (("a", 1.0), ValueError),
    ],
)
def test_bad_events_are_errors_on_every_rank(tmp_path, event, error) -> None:
    def rank(comm: Communicator) -> None:
        monitor = Monitor(comm, csv=tmp_path)
        with pytest.raises(error):
            monitor.write([("good", 1.0, 1), event])

    threads.run(rank, 2)
    assert list(tmp_path.iterdir()) == []


def test_log_folder() -> None:
    assert log_folder("", "job") == Path("job")
    assert log_folder("/logs/", "job") == Path("/logs/job")
