"""What reaches Weights & Biases: its public calls, recorded; and, where the package is installed, what it writes
without a network."""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tests.engine.tiny import MICRO, make_engine, settings, train
from thinwire.comm import Communicator, threads
from thinwire.deepspeed.monitors import (
    CsvMonitor,
    MonitorMaster,
    TensorBoardMonitor,
    WandbMonitor,
)
from thinwire.engine.config import load_config
from thinwire.engine.config.models import WandbConfig
from thinwire.engine.monitor import Monitor

LOSS = "Train/Samples/train_loss"


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


def test_without_the_package_every_rank_is_told_what_to_install(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)

    def rank(comm: Communicator) -> None:
        with pytest.raises((ImportError, ValueError), match="pip install wandb"):
            make_engine(comm, settings(1, wandb={"enabled": True}))
        comm.barrier()

    threads.run(rank, 2)


def test_a_run_that_cannot_begin_is_an_error_on_every_rank(wandb) -> None:
    wandb.refuses = wandb.errors.Error("api_key not configured")

    def rank(comm: Communicator) -> None:
        with pytest.raises(ValueError, match=r"api_key not configured.*WANDB_MODE=offline"):
            Monitor(comm, wandb=WandbConfig())

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


def test_a_section_that_is_off_needs_no_package(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    engine = make_engine(threads.single(60.0), settings(1, wandb={"enabled": False, "project": "p"}))
    assert not engine.monitor.enabled


def wandb_records(file: bytes) -> Iterator[bytes]:
    """LevelDB's log format after 7 bytes of head: checksum, length and kind (1: a whole record) before each record."""
    at = 7
    while at < len(file):
        _, length, kind = struct.unpack("<IHB", file[at : at + 7])
        assert kind == 1
        yield file[at + 7 : at + 7 + length]
        at += 7 + length


def test_the_real_wandb_writes_a_run_offline(tmp_path: Path, monkeypatch) -> None:
    pytest.importorskip("wandb")
    records = pytest.importorskip("wandb.proto.wandb_internal_pb2")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_SILENT", "true")
    monitor = Monitor(threads.single(60.0), wandb=WandbConfig(project="p", group="g"))
    for sample in (8, 16):
        monitor.write([(LOSS, sample / 4, sample)])
    monitor.close()
    (file,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    found, projects = [], []
    for raw in wandb_records(file.read_bytes()):
        record = records.Record()
        record.ParseFromString(raw)
        if record.WhichOneof("record_type") == "run":
            projects.append((record.run.project, record.run.run_group))
        if record.WhichOneof("record_type") == "history":
            row = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
            found.append((row["_step"], row[LOSS]))
    assert projects[0] == ("p", "g")
    assert found == [(8, 2.0), (16, 4.0)]
