"""Step times on a clock that the test holds: sums, means, nesting, exceptions, and the printed lines."""

from __future__ import annotations

import math

import pytest
import torch

from thinwire.engine import reports
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


def spend(timers: StepTimers, clock: Clock, name: str, milliseconds: float) -> None:
    with timers(name):
        clock.seconds += milliseconds / 1000


def test_last_step_mean_and_throughput(clock: Clock) -> None:
    timers = StepTimers()
    for step in range(1, 4):
        spend(timers, clock, "forward", 10 * step)
        spend(timers, clock, "backward", 5)
        spend(timers, clock, "forward", 1)
        clock.seconds += 0.004
        timers.end_step(samples=8)
    report = timers.report()
    assert report.steps == 3
    assert dict(report.last) == pytest.approx({"forward": 31, "backward": 5})
    assert dict(report.mean) == pytest.approx({"forward": 21, "backward": 5})
    assert report.samples_per_second == pytest.approx(24 / 0.090)


def test_a_report_forgets_what_it_told(clock: Clock) -> None:
    timers = StepTimers()
    spend(timers, clock, "forward", 10)
    timers.end_step(2)
    timers.report()
    spend(timers, clock, "step", 4)
    spend(timers, clock, "step", 4)
    timers.end_step(2)
    report = timers.report()
    assert (dict(report.last), dict(report.mean)) == (pytest.approx({"step": 8}), pytest.approx({"step": 8}))
    assert report.samples_per_second == pytest.approx(2 / 0.008)
    empty = timers.report()
    assert (empty.steps, empty.last, empty.mean) == (0, {}, {})
    assert math.isnan(empty.samples_per_second)


def test_a_span_that_only_some_steps_have_counts_as_nothing_in_the_others(clock: Clock) -> None:
    timers = StepTimers()
    spend(timers, clock, "save", 30)
    timers.end_step(1)
    for _ in range(2):
        spend(timers, clock, "step", 3)
        timers.end_step(1)
    report = timers.report()
    assert dict(report.last) == pytest.approx({"step": 3})
    assert dict(report.mean) == pytest.approx({"save": 10, "step": 2})


def test_spans_nest(clock: Clock) -> None:
    timers = StepTimers()
    with timers("step"):
        clock.seconds += 0.002
        spend(timers, clock, "communication", 3)
    timers.end_step(1)
    assert dict(timers.report().last) == pytest.approx({"step": 5, "communication": 3})


def test_a_span_that_raises_does_not_count_and_its_error_comes_through(clock: Clock) -> None:
    timers = StepTimers()
    with pytest.raises(RuntimeError, match="out of memory"), timers("forward"):
        raise RuntimeError("out of memory")
    spend(timers, clock, "forward", 7)
    timers.end_step(1)
    assert dict(timers.report().last) == pytest.approx({"forward": 7})


def test_without_timing_there_is_only_throughput(clock: Clock) -> None:
    timers = StepTimers(enabled=False)
    spend(timers, clock, "forward", 500)
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


def test_on_a_gpu_nothing_waits_until_the_report(clock: Clock, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", type("Event", (StreamEvent,), {"clock": clock}))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    timers = StepTimers("cuda")
    for step in range(20):
        spend(timers, clock, "forward", 100 + step)
        timers.end_step(1)
        assert len(timers._pending) <= 6  # no more than the stream is behind
    assert torch.cuda.Event.waits == 0
    report = timers.report()
    assert torch.cuda.Event.waits > 0
    assert dict(report.last) == pytest.approx({"forward": 119})
    assert dict(report.mean) == pytest.approx({"forward": 109.5})


def test_the_real_clock_runs() -> None:
    timers = StepTimers()
    with timers("forward"):
        torch.randn(100, 100).mm(torch.randn(100, 100))
    timers.end_step(3)
    report = timers.report()
    assert report.last["forward"] > 0
    assert 0 < report.samples_per_second < math.inf


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
