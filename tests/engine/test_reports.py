"""Step times on a clock that the test holds, and their lines; operations by module, as multiplying by hand gives; what
a training prints and logs."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.engine.tiny import FEATURES, HIDDEN, MICRO, make_engine, settings, train
from tests.refusing import refused
from thinwire.comm import Communicator, threads
from thinwire.engine import reports
from thinwire.engine.flops_profiler import FlopsProfiler, get_model_profile
from thinwire.engine.reports import StepSummary, StepTimers, StepTimes, breakdown_line, progress_line


class Clock:
    def __init__(self) -> None:
        self.seconds = 100.0

    def perf_counter(self) -> float:
        return self.seconds


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(reports, "time", clock)
    return clock


@pytest.fixture
def spend(clock: Clock) -> Callable[[StepTimers, str, float], None]:
    def spend(timers: StepTimers, name: str, milliseconds: float) -> None:
        with timers(name):
            clock.seconds += milliseconds / 1000

    return spend


def test_last_step_mean_and_throughput_since_the_last_report(clock: Clock, spend) -> None:
    timers = StepTimers()
    for step in range(1, 4):
        spend(timers, "forward", 10 * step)
        spend(timers, "backward", 5)
        spend(timers, "forward", 1)
        clock.seconds += 0.004
        timers.end_step(samples=8)
    report = timers.report()
    assert report.steps == 3
    assert dict(report.last) == pytest.approx({"forward": 31, "backward": 5})
    assert dict(report.mean) == pytest.approx({"forward": 21, "backward": 5})
    assert report.samples_per_second == pytest.approx(24 / 0.090)
    spend(timers, "save", 30)  # that only some steps have
    timers.end_step(1)
    for _ in range(2):
        spend(timers, "step", 3)
        timers.end_step(1)
    report = timers.report()
    assert dict(report.last) == pytest.approx({"step": 3})
    assert dict(report.mean) == pytest.approx({"save": 10, "step": 2})
    assert report.samples_per_second == pytest.approx(3 / 0.036)
    empty = timers.report()
    assert (empty.steps, empty.last, empty.mean) == (0, {}, {})
    assert math.isnan(empty.samples_per_second)


def test_spans_nest_and_one_that_raises_does_not_count(clock: Clock, spend) -> None:
    timers = StepTimers()
    with timers("step"):
        clock.seconds += 0.002
        spend(timers, "communication", 3)
    with pytest.raises(RuntimeError, match="out of memory"), timers("forward"):
        raise RuntimeError("out of memory")
    timers.end_step(1)
    assert dict(timers.report().last) == pytest.approx({"step": 5, "communication": 3})


def test_without_timing_there_is_only_throughput(clock: Clock, spend) -> None:
    timers = StepTimers(enabled=False)
    spend(timers, "forward", 500)
    timers.end_step(10)
    report = timers.report()
    assert (report.steps, report.last, report.mean) == (1, {}, {})
    assert report.samples_per_second == pytest.approx(20)


class StreamEvent:
    """A GPU event whose stream runs `lag` host seconds behind."""

    clock: Clock
    lag = 0.5
    waits = 0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self, stream: object) -> None:
        self.at = self.clock.seconds + self.lag

    def query(self) -> bool:
        return self.clock.seconds >= self.at

    def synchronize(self) -> None:
        type(self).waits += 1
        self.clock.seconds = max(self.clock.seconds, self.at)

    def elapsed_time(self, end: StreamEvent) -> float:
        assert end.query(), "elapsed_time of an event that has not happened yet"
        return 1000 * (end.at - self.at)


def test_on_a_gpu_nothing_waits_until_the_report(clock: Clock, spend, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", type("Event", (StreamEvent,), {"clock": clock}))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    timers = StepTimers("cuda")
    for step in range(20):
        spend(timers, "forward", 100 + step)
        timers.end_step(1)
        assert len(timers._pending) <= 6  # no more than the stream is behind
    assert torch.cuda.Event.waits == 0
    report = timers.report()
    assert torch.cuda.Event.waits > 0
    assert dict(report.last) == pytest.approx({"forward": 119})
    assert dict(report.mean) == pytest.approx({"forward": 109.5})


def test_breakdown_line() -> None:
    report = StepTimes(2, {"forward": 12.341, "step": 3.0}, {"forward": 12.0, "step": 2.5, "save": 9.999}, 1.0)
    assert breakdown_line(report) == (
        "time (ms): forward 12.34 (mean 12.00) | step 3.00 (mean 2.50) | save 0.00 (mean 10.00)"
    )
    assert breakdown_line(StepTimes(0, {}, {}, math.nan)) == "time (ms): nothing was timed"


def test_progress_line() -> None:
    plain = StepSummary(7, 28, 0, 4, [0.0004, 0.0004], None, None)
    assert progress_line(plain, None, math.nan) == "step 7 | lr 0.0004"
    summary = StepSummary(100, 400, 2, 4, [4e-4, 1e-5], 1.23456, None)
    assert progress_line(summary, 2.34567, 312.44) == (
        "step 100 | 2 skipped | loss 2.3457 | lr 0.0004, 1e-05 | gradient norm 1.235 | 312.4 samples/s"
    )


FORWARD = 2 * MICRO * (2 * FEATURES * FEATURES + 3 * 2 * FEATURES * HIDDEN)


class Nested(nn.Module):
    """3 batches through 5 -> 7 twice by the same layer, then a convolution on its own list."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(5, 5, bias=False)
        self.again = self.shared
        self.parts = nn.ModuleList([nn.Linear(5, 7), nn.Sequential(nn.ReLU(), nn.Linear(7, 2))])

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.again(self.shared(inputs))
        for part in self.parts:
            hidden = part(hidden)
        return hidden @ torch.ones(2, 1)


def test_counts_by_module() -> None:
    model = Nested()
    profiler = FlopsProfiler(model)
    profiler.start_profile()
    loss = model(torch.ones(3, 5)).sum()
    loss.backward()  # not a forward: not counted
    costs = {one.name: one for one in profiler.module_costs()}
    assert {name: one.flops for name, one in costs.items()} == {
        "": 2 * 3 * (2 * 25 + 35 + 14 + 2),
        "shared": 2 * 3 * 2 * 25,
        "parts": 2 * 3 * (35 + 14),
        "parts.0": 2 * 3 * 35,
        "parts.1": 2 * 3 * 14,
        "parts.1.0": 0,
        "parts.1.1": 2 * 3 * 14,
    }
    assert costs["parts"].params == 5 * 7 + 7 + 7 * 2 + 2
    assert costs["parts.1.1"].depth == 3
    assert profiler.get_total_macs() == 3 * (2 * 25 + 35 + 14 + 2)
    assert profiler.get_total_params() == 25 + costs["parts"].params
    assert profiler.get_total_flops(as_string=True) == "606 FLOPs"
    assert 0 < costs["parts"].seconds <= profiler.get_total_duration()
    model(torch.ones(3, 5))
    assert profiler.get_total_flops() == 2 * costs[""].flops
    profiler.reset_profile()
    assert profiler.get_total_flops() == 0
    profiler.end_profile()
    model(torch.ones(3, 5))
    assert profiler.flops == 0
    refused(RuntimeError, "call start_profile", profiler.get_total_flops)
    assert not any(one._forward_hooks or one._forward_pre_hooks for one in model.modules())


class Called(nn.Module):
    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.function(*inputs)


@pytest.mark.parametrize(
    ("module", "shapes", "macs", "sums"),
    [
        (nn.Linear(8, 16), [(2, 4, 8)], 2 * 4 * 16 * 8, 2 * 4 * 16),
        (nn.Linear(8, 16, bias=False), [(4, 8)], 4 * 16 * 8, 0),
        (nn.ConvTranspose2d(4, 8, 3, stride=2, groups=2), [(2, 4, 5, 5)], 2 * 25 * 4 * 4 * 9, 2 * 8 * 11 * 11),
        (nn.LayerNorm(6), [(3, 6)], 0, 5 * 18),
        (Called(torch.mul), [(4, 1, 7), (1, 5, 7)], 0, 4 * 5 * 7),
        (Called(torch.addmm), [(1, 5), (4, 8), (8, 5)], 4 * 5 * 8, 4 * 5),
        (Called(torch.baddbmm), [(5,), (2, 4, 8), (2, 8, 5)], 2 * 4 * 5 * 8, 2 * 4 * 5),
        (Called(torch.matmul), [(4, 8), (8,)], 4 * 8, 0),
        (Called(torch.matmul), [(8,), (8,)], 8, 0),
        (Called(nn.functional.scaled_dot_product_attention), [(2, 4, 16, 8)] * 3, 2 * 2 * 4 * 16 * 16 * 8, 0),
    ],
    ids=str,
)
def test_sums_count_where_asked(module: nn.Module, shapes: list[tuple[int, ...]], macs: int, sums: int) -> None:
    for counts_sums in (False, True):
        profiler = FlopsProfiler(module, counts_sums=counts_sums)
        profiler.start_profile()
        module(*(torch.randn(shape) for shape in shapes))
        assert profiler.get_total_macs() == macs
        assert profiler.get_total_flops() == 2 * macs + counts_sums * sums
        profiler.end_profile()


def test_ignored_classes_have_no_line_and_an_error_leaves_nothing_behind() -> None:
    profiler = FlopsProfiler(Nested())
    profiler.start_profile(ignore_list=[nn.Sequential])
    profiler.model(torch.ones(1, 5))
    assert [one.name for one in profiler.module_costs()] == ["", "shared", "parts", "parts.0"]
    assert profiler.get_total_flops() == 2 * (2 * 25 + 35 + 14 + 2)
    profiler.end_profile()
    model = nn.Linear(3, 2)
    refused(RuntimeError, "shape", get_model_profile, model, (4, 5), warm_up=0)
    assert not model._forward_hooks
    assert get_model_profile(model, (4, 3), print_profile=False, as_string=False) == (48, 24, 8)


def test_a_profile_of_a_model(capsys, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.Flatten(), nn.Linear(4 * 6 * 6, 10))
    macs = 5 * (4 * 6 * 6 * 2 * 9 + 4 * 6 * 6 * 10)
    params = 4 * 2 * 9 + 4 + 1440 + 10
    assert get_model_profile(model, (5, 2, 8, 8), as_string=False) == (2 * macs, macs, params)
    printed = capsys.readouterr().out
    assert "2: Linear" in printed
    assert f"{macs / 1e3:.2f} KMACs" in printed
    report = tmp_path / "new" / "profile.txt"
    found = get_model_profile(model, args=[torch.ones(5, 2, 8, 8)], detailed=False, output_file=str(report))
    assert found == (f"{2 * macs / 1e3:.2f} KFLOPs", f"{macs / 1e3:.2f} KMACs", f"{params / 1e3:.2f} K")
    assert "2: Linear" not in report.read_text()
    assert not capsys.readouterr().out


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"model": "bert"}, TypeError, "takes a torch.nn.Module, got str"),
        ({"mode": "train"}, ValueError, '"forward" or "generate", got \'train\''),
        ({}, ValueError, "give get_model_profile\\(\\) an input_shape"),
        ({"input_shape": ()}, ValueError, "must be a tuple of sizes"),
    ],
)
def test_what_cannot_be_profiled(given, error, message) -> None:
    refused(error, message, get_model_profile, **{"model": nn.Linear(1, 1), **given})


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_training_reports_the_step_it_was_asked_for(tmp_path: Path, capsys, accumulation: int) -> None:
    report = tmp_path / "logs" / "profile.txt"

    def rank(comm: Communicator) -> None:
        section = {"enabled": True, "profile_step": 2, "output_file": str(report), "recompute_fwd_factor": 1.0}
        config = settings(1, flops_profiler=section, gradient_accumulation_steps=accumulation)
        engine = make_engine(comm, config)
        train(engine, range(2))
        assert engine.flops_profiler.flops is None
        assert not comm.rank or not report.read_text()
        train(engine, range(2, 4))
        if comm.rank == 0:
            assert engine.flops_profiler.flops == FORWARD
            assert engine.flops_profiler.params == sum(one.numel() for one in engine.module.parameters())

    threads.run(rank, 2)
    text = report.read_text()
    assert "profile of a step after 2 steps" in text
    assert "at 3 times the forward's operations" in text
    assert f"step of {accumulation} micro-batches: " in text
    assert text.count("layers: ModuleList") == 1
    assert not capsys.readouterr().out


def test_a_resumed_training_does_not_report_again(tmp_path: Path, capsys) -> None:
    config = settings(0, flops_profiler={"enabled": True})
    engine = make_engine(None, config)
    losses = train(engine, range(3))
    engine.save_checkpoint(tmp_path)
    assert capsys.readouterr().out.count("profile of a step after 1 steps") == 1
    resumed = make_engine(None, config)
    resumed.load_checkpoint(tmp_path)
    train(resumed, range(3, 6))
    assert not capsys.readouterr().out
    assert losses == train(make_engine(None, settings(0)), range(3))


def test_a_file_that_cannot_be_written_is_an_error_on_every_rank(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    def rank(comm: Communicator) -> None:
        section = {"enabled": True, "output_file": str(tmp_path / "file" / "profile.txt")}
        refused((OSError, ValueError), "file", make_engine, comm, settings(1, flops_profiler=section))
        comm.barrier()

    threads.run(rank, 2)


def test_a_training_prints_lines_and_logs_losses(tmp_path, capsys) -> None:
    log = {"enabled": True, "output_path": str(tmp_path), "job_name": "job"}
    shown = {"steps_per_print": 2, "wall_clock_breakdown": True, "memory_breakdown": True, "csv_monitor": log}
    engine = make_engine(None, settings(**shown))
    losses = train(engine, range(4))
    engine.close()
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(" | ")[0] for line in lines if line.startswith("step")] == ["step 2", "step 4"]
    assert sum(line.startswith("time (ms): forward") for line in lines) == 2
    assert sum(line.startswith("optimizer state") for line in lines) == 2
    assert column(tmp_path / "job" / "Train_Samples_train_loss.csv") == pytest.approx(losses, rel=1e-4)
    assert column(tmp_path / "job" / "Train_Samples_train_loss.csv", 0) == [MICRO, 2 * MICRO, 3 * MICRO, 4 * MICRO]


def test_bytes_and_stage_are_logged(tmp_path) -> None:
    optimizer = {"type": "OneBitAdam", "params": {"lr": 1e-3, "freeze_step": 2, "block_size": 64}}
    log = {"enabled": True, "output_path": str(tmp_path), "job_name": "job"}

    def body(comm) -> list[int]:
        engine = make_engine(comm, settings(1, optimizer=optimizer, csv_monitor=log))
        sent = []
        for step in range(4):
            train(engine, [step])
            sent.append(engine.optimizer.bytes_sent)
        engine.close()
        return sent

    sent = threads.run(body, 2)[0]
    assert column(tmp_path / "job" / "Train_bytes_sent.csv") == sent
    assert column(tmp_path / "job" / "Train_frozen.csv") == [0.0, 1.0, 1.0, 1.0]


def column(path: Path, number: int = 1) -> list[float]:
    return [float(line.split(",")[number]) for line in path.read_text().splitlines()[1:]]
