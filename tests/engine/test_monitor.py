"""Scalars in TensorBoard, CSV and Weights & Biases: from rank 0 only, whole after a crash, one value a sample after a
resume."""

from __future__ import annotations

import csv
import sys
import warnings
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.engine.tiny import MICRO, make_engine, settings, train
from tests.refusing import refused
from thinwire.comm import Communicator, threads
from thinwire.deepspeed.monitors import (
    CsvMonitor,
    DeepSpeedMonitorConfig,
    MonitorMaster,
    TensorBoardMonitor,
    WandbMonitor,
    get_monitor_config,
)
from thinwire.engine import monitor as monitor_module
from thinwire.engine.config import load_config
from thinwire.engine.config.models import WandbConfig
from thinwire.engine.monitor import Monitor, ScalarFiles

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
@examples(max_examples=50)
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


def test_what_is_lacking_is_an_error_on_every_rank(tmp_path, monkeypatch) -> None:
    """A package, or a folder that can be written."""
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    monkeypatch.setitem(sys.modules, "wandb", None)
    (tmp_path / "file").write_text("")

    def rank(comm: Communicator) -> None:
        refused((ImportError, ValueError), "pip install tensorboard", Monitor, comm, tensorboard=tmp_path)
        refused((ImportError, ValueError), "pip install wandb", make_engine, comm, settings(1, wandb={"enabled": True}))
        assert not make_engine(comm, settings(1, wandb={"enabled": False, "project": "p"})).monitor.enabled
        refused((OSError, ValueError), "file", Monitor, comm, csv=tmp_path / "file" / "logs")
        comm.barrier()

    threads.run(rank, 3)


def test_bad_events_are_errors_on_every_rank(tmp_path) -> None:
    def rank(comm: Communicator) -> None:
        monitor = Monitor(comm, csv=tmp_path)
        for event in (("", 1.0, 1), ("a\nb", 1.0, 1), (3, 1.0, 1)):
            with pytest.raises(TypeError):
                monitor.write([("good", 1.0, 1), event])
        for event in (("a", "much", 1), ("a", 1.0, -1), ("a", 1.0, 1.5), ("a", 1.0)):
            with pytest.raises(ValueError):  # noqa: PT011
                monitor.write([("good", 1.0, 1), event])

    threads.run(rank, 2)
    assert list(tmp_path.iterdir()) == []


class Recorded(ModuleType):
    """A package whose calls are noted, in order; `refuses` says why nothing can begin."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.calls: list[tuple[Any, ...]] = []
        self.refuses: Exception | None = None

    def begin(self, **given: Any) -> Recorded:
        if self.refuses is not None:
            raise self.refuses
        self.calls.append(("begin", given))
        return self

    def log(self, values: dict[str, float], step: int) -> None:
        self.calls.append(("log", values, step))

    def finish(self) -> None:
        self.calls.append(("finish",))


@pytest.fixture
def wandb(monkeypatch) -> Recorded:
    package = Recorded("wandb")
    package.init = package.begin
    package.errors = SimpleNamespace(Error=type("Error", (Exception,), {}))
    monkeypatch.setitem(sys.modules, "wandb", package)
    return package


def test_wandb_gets_the_values_of_a_sample_together_from_rank_0(wandb) -> None:
    def rank(comm: Communicator) -> None:
        monitor = Monitor(comm, wandb=WandbConfig(project="p", group="g", team="t"))
        assert monitor.enabled
        monitor.write_events([("a", 1, 8), ("b", 2.5, 8), ("a", 3.0, 16)])
        monitor.close()
        monitor.close()

    threads.run(rank, 3)
    assert wandb.calls == [
        ("begin", {"project": "p", "group": "g", "entity": "t"}),
        ("log", {"a": 1.0, "b": 2.5}, 8),
        ("log", {"a": 3.0}, 16),
        ("finish",),
    ]


def test_a_run_that_cannot_begin_is_an_error_on_every_rank(wandb) -> None:
    wandb.refuses = wandb.errors.Error("api_key not configured")

    def rank(comm: Communicator) -> None:
        refused(ValueError, r"api_key not configured.*WANDB_MODE=offline", Monitor, comm, wandb=WandbConfig())

    threads.run(rank, 2)


def test_a_run_that_ends_early_is_a_warning(wandb) -> None:
    monitor = Monitor(threads.single(60.0), wandb=WandbConfig())

    def ended(values: dict[str, float], step: int) -> None:
        raise wandb.errors.Error("the run is finished")

    wandb.log = ended
    with pytest.warns(RuntimeWarning, match="scalars are being lost.*the run is finished"):
        monitor.write([("a", 1.0, 1)])


def test_a_training_logs_under_deepspeeds_names_and_takes_the_users_own(wandb) -> None:
    engine = make_engine(threads.single(60.0), settings(1, wandb={"enabled": True, "group": "g"}))
    losses = train(engine, range(3))
    engine.monitor.write_events([("mine", 4.0, engine.global_samples)])
    engine.close()
    begin, *logged, mine, finish = wandb.calls
    assert begin == ("begin", {"project": "thinwire", "group": "g", "entity": None})
    assert [one[2] for one in logged] == [MICRO, 2 * MICRO, 3 * MICRO]
    assert [one[1][LOSS] for one in logged] == pytest.approx(losses)
    assert all(one[1]["Train/Samples/lr"] == 1e-2 for one in logged)
    assert (mine, finish) == (("log", {"mine": 4.0}, 3 * MICRO), ("finish",))


def test_monitors_of_a_section_alone(wandb, tmp_path: Path) -> None:
    on = {"enabled": True, "output_path": str(tmp_path), "job_name": "test"}
    sections = {"csv_monitor": on, "wandb": {"enabled": False, "team": "t"}}
    config = load_config({"train_batch_size": 2, "tensorboard": {}, **sections}, 2)
    assert get_monitor_config(sections) == DeepSpeedMonitorConfig(csv_monitor=config.csv_monitor, wandb=config.wandb)
    assert get_monitor_config(sections).enabled
    assert not get_monitor_config({"train_batch_size": 2}).enabled

    def rank(comm: Communicator) -> None:
        board, files = TensorBoardMonitor(config), CsvMonitor(config.csv_monitor)
        assert (board.enabled, board.output_path, board.job_name) == (False, "", "thinwire")
        assert (files.enabled, files.output_path, files.job_name) == (True, str(tmp_path), "test")
        service = WandbMonitor(config)
        assert (service.enabled, service.team, service.project) == (False, "t", "thinwire")
        for monitor in (board, files, service, MonitorMaster(config)):
            monitor.write_events([("a", 1.0, 4 + comm.rank)])

    threads.run(rank, 2)
    assert not wandb.calls
    assert (tmp_path / "test" / "a.csv").read_text() == "sample,a\n4,1.0\n"
