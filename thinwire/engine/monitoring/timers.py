"""Where a step's time goes: named spans on the device's own clock, samples a second, and the lines that show them."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

__all__ = ["StepReport", "StepTimers", "breakdown_line", "progress_line", "seconds_now"]


@dataclass(frozen=True)
class StepReport:
    """What a rank measured: `steps` since the last report; milliseconds by span in the `last` of them, and their `mean`
    over all (a span counts 0 in a step without it); `samples_per_second` over the wall time of all, nan for none.

    Spans are {} where timing is off.
    """

    steps: int
    last: Mapping[str, float]
    mean: Mapping[str, float]
    samples_per_second: float


class StepTimers:
    """Times the parts of every step: `with timers("forward"): ...`, then `timers.end_step(samples)`.

    On a GPU a span is the time between two events in the current stream: kernels it queued and waits it caused, not the
    time of calls that return early. What overlaps costs nothing in it. Nothing waits for the GPU until `report`, which
    waits for the last step. Spans of one name in one step add up, as those of accumulated micro-batches do; others may
    nest. A span that ends in an exception does not count. Without `enabled` spans cost nothing, and `report` knows
    samples a second only.
    """

    def __init__(self, device: torch.device | str = "cpu", *, enabled: bool = True) -> None:
        self.enabled = enabled
        self._device = torch.device(device)
        self._step = _Step()
        self._pending: deque[_Step] = deque()
        self._since = time.perf_counter()
        self._forget()

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Time what is inside as a part of this step."""
        if not self.enabled:
            yield
            return
        start = _mark(self._device)
        yield
        self._step.spans.append((name, start, _mark(self._device)))

    def end_step(self, samples: int) -> None:
        """End a step in which all ranks together took `samples` samples."""
        self._steps += 1
        self._samples += samples
        if self.enabled:
            self._pending.append(self._step)
            self._step = _Step()
            while self._pending and self._pending[0].is_over():
                self._add(self._pending.popleft())

    def report(self) -> StepReport:
        """What was measured since the last report, which this one forgets."""
        while self._pending:
            step = self._pending.popleft()
            step.wait()
            self._add(step)
        now = time.perf_counter()
        rate = self._samples / (now - self._since) if self._steps else math.nan
        mean = {name: total / self._steps for name, total in self._totals.items()}
        report = StepReport(self._steps, self._last, mean, rate)
        self._since = now
        self._forget()
        return report

    def _forget(self) -> None:
        self._steps = 0
        self._samples = 0
        self._last: dict[str, float] = {}
        self._totals: dict[str, float] = {}

    def _add(self, step: _Step) -> None:
        self._last = step.milliseconds()
        for name, value in self._last.items():
            self._totals[name] = self._totals.get(name, 0.0) + value


def breakdown_line(report: StepReport) -> str:
    """The line of `wall_clock_breakdown`: milliseconds of the last step by span, and the mean over the report's.

    As in `time (ms): forward 12.34 (mean 12.02) | backward 25.10 (mean 25.31)`; spans in the order they first ended.
    """
    parts = [f"{name} {report.last.get(name, 0.0):.2f} (mean {mean:.2f})" for name, mean in report.mean.items()]
    return f"time (ms): {' | '.join(parts) or 'nothing was timed'}"


def progress_line(
    step: int,
    *,
    rates: Sequence[float],
    skipped: int = 0,
    loss: float | None = None,
    grad_norm: float | None = None,
    samples_per_second: float = math.nan,
) -> str:
    """The line of `steps_per_print`: `step 100 | loss 2.3456 | lr 0.0004 | gradient norm 1.234 | 312.4 samples/s`.

    `rates`: the learning rate of each parameter group; one number where all are equal. What is None or unknown is left
    out.
    """
    parts = [f"step {step}"]
    if skipped:
        parts.append(f"{skipped} skipped")
    if loss is not None:
        parts.append(f"loss {loss:.4f}")
    parts.append(f"lr {', '.join(f'{rate:.6g}' for rate in (rates[:1] if len(set(rates)) == 1 else rates))}")
    if grad_norm is not None:
        parts.append(f"gradient norm {grad_norm:.4g}")
    if not math.isnan(samples_per_second):
        parts.append(f"{samples_per_second:.1f} samples/s")
    return " | ".join(parts)


class _Mark(Protocol):
    """A moment on a clock."""

    def is_over(self) -> bool: ...

    def wait(self) -> None: ...

    def milliseconds_until(self, end: _Mark) -> float: ...


class _Step:
    """The spans of one step, in the order they ended."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, _Mark, _Mark]] = []

    def is_over(self) -> bool:
        return all(end.is_over() for _, _, end in self.spans)

    def wait(self) -> None:
        for _, _, end in self.spans:
            end.wait()

    def milliseconds(self) -> dict[str, float]:
        total: dict[str, float] = {}
        for name, start, end in self.spans:
            total[name] = total.get(name, 0.0) + start.milliseconds_until(end)
        return total


@dataclass(frozen=True)
class _HostMark:
    seconds: float

    def is_over(self) -> bool:
        return True

    def wait(self) -> None:
        return

    def milliseconds_until(self, end: _Mark) -> float:
        assert isinstance(end, _HostMark)
        return 1000 * (end.seconds - self.seconds)


@dataclass(frozen=True)
class _StreamMark:
    event: Any  # torch.cuda.Event

    def is_over(self) -> bool:
        return bool(self.event.query())

    def wait(self) -> None:
        self.event.synchronize()

    def milliseconds_until(self, end: _Mark) -> float:
        assert isinstance(end, _StreamMark)
        return float(self.event.elapsed_time(end.event))


def _mark(device: torch.device) -> _Mark:
    if device.type != "cuda":
        return _HostMark(time.perf_counter())
    make_event: Any = torch.cuda.Event
    event = make_event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return _StreamMark(event)


_gpu_in_use: Callable[[], bool] = torch.cuda.is_initialized


def seconds_now() -> float:
    """Seconds on the host's clock, once the GPU, where one is in use, has done what it was asked for."""
    if _gpu_in_use():
        torch.cuda.synchronize()
    return time.perf_counter()
