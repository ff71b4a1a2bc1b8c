"""Report of a training job: lines on stderr every few steps with the times of its parts, scalars for files and
services that keep them, a profile of one step."""

from __future__ import annotations

import math
import sys
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from thinwire.comm.agreement import on_every_rank
from thinwire.engine.backwards import StepLosses
from thinwire.engine.flops_profiler import FlopsProfiler, seconds_now
from thinwire.engine.flops_report import StepCost
from thinwire.engine.job import Job
from thinwire.engine.monitor import Monitor
from thinwire.zero.memory import MemoryReport, live_tensor_bytes


@dataclass(frozen=True)
class StepTimes:
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
        self._on_gpu = self._device.type == "cuda"
        self._spans: list[tuple[str, Any, Any]] = []
        self._pending: deque[list[tuple[str, Any, Any]]] = deque()
        self._since = time.perf_counter()
        self._forget()

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Time what is inside as a part of this step."""
        if not self.enabled:
            yield
            return
        start = self._now()
        yield
        self._spans.append((name, start, self._now()))

    def end_step(self, samples: int) -> None:
        """End a step in which all ranks together took `samples` samples."""
        self._steps += 1
        self._samples += samples
        if self.enabled:
            self._pending.append(self._spans)
            self._spans = []
            while self._pending and not (self._on_gpu and any(not end.query() for _, _, end in self._pending[0])):
                self._add(self._pending.popleft())

    def report(self) -> StepTimes:
        """What was measured since the last report, which this one forgets."""
        while self._pending:
            for _, _, end in self._pending[0]:
                end.synchronize()
            self._add(self._pending.popleft())
        now = time.perf_counter()
        rate = self._samples / (now - self._since) if self._steps else math.nan
        mean = {name: total / self._steps for name, total in self._totals.items()}
        times = StepTimes(self._steps, self._last, mean, rate)
        self._since = now
        self._forget()
        return times

    def _now(self) -> Any:
        """An event in the GPU's current stream, or the host's seconds."""
        if not self._on_gpu:
            return time.perf_counter()
        make_event: Any = torch.cuda.Event
        event = make_event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _forget(self) -> None:
        self._steps = 0
        self._samples = 0
        self._last: dict[str, float] = {}
        self._totals: dict[str, float] = {}

    def _add(self, spans: list[tuple[str, Any, Any]]) -> None:
        self._last = {}
        for name, start, end in spans:
            milliseconds = start.elapsed_time(end) if self._on_gpu else 1000 * (end - start)
            self._last[name] = self._last.get(name, 0.0) + milliseconds
        for name, value in self._last.items():
            self._totals[name] = self._totals.get(name, 0.0) + value


@dataclass(frozen=True)
class StepSummary:
    """One step. `samples`: that all ranks have seen so far. `batch_size`: of them in this step. `rates`: of each
    parameter group. `grad_norm`: None where it is not known. `loss_scale`: None but in fp16."""

    step: int
    samples: int
    skipped: int
    batch_size: int
    rates: list[float]
    grad_norm: float | None
    loss_scale: float | None


def breakdown_line(times: StepTimes) -> str:
    """The line of `wall_clock_breakdown`: milliseconds of the last step by span, and the mean over the report's.

    As in `time (ms): forward 12.34 (mean 12.02) | backward 25.10 (mean 25.31)`; spans in the order they first ended.
    """
    parts = [f"{name} {times.last.get(name, 0.0):.2f} (mean {mean:.2f})" for name, mean in times.mean.items()]
    return f"time (ms): {' | '.join(parts) or 'nothing was timed'}"


def progress_line(summary: StepSummary, loss: float | None, samples_per_second: float) -> str:
    """The line of `steps_per_print`: `step 100 | loss 2.3456 | lr 0.0004 | gradient norm 1.234 | 312.4 samples/s`.

    One rate where those of all groups are equal. What is None or nan is left out.
    """
    rates = summary.rates[:1] if len(set(summary.rates)) == 1 else summary.rates
    parts = {
        f"step {summary.step}": True,
        f"{summary.skipped} skipped": summary.skipped,
        f"loss {loss or 0.0:.4f}": loss is not None,
        f"lr {', '.join(f'{rate:.6g}' for rate in rates)}": True,
        f"gradient norm {summary.grad_norm or 0.0:.4g}": summary.grad_norm is not None,
        f"{samples_per_second:.1f} samples/s": not math.isnan(samples_per_second),
    }
    return " | ".join(part for part, known in parts.items() if known)


class JobReports:
    """Reports steps as the configuration asks; only then do the ranks average their losses. Construction is collective.

    Every `steps_per_print` steps rank 0 prints a line, and with it what `wall_clock_breakdown` and `memory_breakdown`
    ask for; without `steps_per_print`, times after every step and memory after the first. Logs get every step.

    `span` times a part of each step: `with reports.span("forward"): ...`. `monitor` takes scalars of the user's own.
    `flops_profiler`, None where none was asked for, counts the last micro-batch's forward of one step on rank 0.
    `steps`: taken so far, in earlier runs too.

    Raises, on every rank, OSError, ImportError or ValueError where logs cannot be written.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        config, comm, section = job.config, job.world, job.config.flops_profiler
        self._timers = StepTimers(job.device, enabled=config.wall_clock_breakdown)
        self.span: Callable[[str], AbstractContextManager[Any]] = self._timers if self._timers.enabled else nullcontext
        self.flops_profiler: FlopsProfiler | None = None
        self.steps = 0
        self._profiled: dict[str, float] = {}  # seconds by span
        if section.enabled:
            self.flops_profiler = FlopsProfiler(job.model, recompute_fwd_factor=section.recompute_fwd_factor)
            if section.output_file:
                file = Path(section.output_file).absolute()

                def touch() -> None:
                    if comm.rank == 0:
                        file.parent.mkdir(parents=True, exist_ok=True)
                        file.open("a").close()

                on_every_rank(comm, touch, "write its profile", (OSError,))
            if comm.rank == 0:
                self.span = self._profile
        self.monitor = Monitor.of(comm, config)
        self._reported = False

    def report(self, summary: StepSummary, losses: StepLosses) -> None:
        """Print and write what is due after a step. Collective where something is."""
        config, comm = self._job.config, self._job.world
        self._timers.end_step(summary.batch_size)
        if self.flops_profiler is not None:
            self._end_profile(self.flops_profiler, summary.batch_size)
        self.steps += 1
        every = config.steps_per_print
        due = every is not None and summary.step % every == 0
        if due or self.monitor.enabled:
            loss = losses.mean(comm)
            self._write(summary, loss)
        lines = []
        if due or (every is None and config.wall_clock_breakdown):
            times = self._timers.report()
            if due:
                lines.append(progress_line(summary, loss, times.samples_per_second))
            if config.wall_clock_breakdown:
                lines.append(breakdown_line(times))
        if config.memory_breakdown and (due or (every is None and not self._reported)):
            model, optimizer = self._job.model, self._job.optimizer
            lines.append(MemoryReport(live_tensor_bytes(model, optimizer), optimizer.model_state_bytes()).table())
        self._reported = True
        if lines and comm.rank == 0:
            print("\n".join(lines), file=sys.stderr, flush=True)

    @contextmanager
    def _profile(self, name: str) -> Iterator[None]:
        """A span of each step; of the one that is profiled its seconds are kept, and its forward is counted."""
        profiler = self.flops_profiler
        if profiler is None or self.steps != self._job.config.flops_profiler.profile_step:
            with self._timers(name):
                yield
            return
        with self._timers(name):
            start = seconds_now()
            if name == "forward":
                profiler.start_profile()
            try:
                yield
            finally:
                if name == "forward":
                    profiler.stop_profile()
            self._profiled[name] = seconds_now() - start

    def _end_profile(self, profiler: FlopsProfiler, samples: int) -> None:
        """Report the step that was profiled, if this was it."""
        section = self._job.config.flops_profiler
        if profiler.started:
            micro_batches = self._job.config.gradient_accumulation_steps
            cost = StepCost(**self._profiled, micro_batches=micro_batches, samples=samples)
            try:
                profiler.print_model_profile(
                    self.steps, section.module_depth, section.top_modules, section.detailed, section.output_file, cost
                )
            except OSError as error:
                what = f"the profile could not be written, training goes on: {error}"
                warnings.warn(what, RuntimeWarning, stacklevel=3)
            profiler.end_profile()
        self._profiled.clear()

    def _write(self, summary: StepSummary, loss: float | None) -> None:
        # Of optimizers that compress: whether the steps from here on do.
        frozen = getattr(self._job.optimizer, "frozen", None)
        scalars = {
            "Train/Samples/train_loss": loss,
            "Train/Samples/lr": summary.rates[0],
            "Train/Samples/loss_scale": summary.loss_scale,
            "Train/grad_norm": summary.grad_norm,
            "Train/bytes_sent": self._job.optimizer.bytes_sent,
            "Train/frozen": None if frozen is None else float(frozen),
        }
        self.monitor.write([(name, value, summary.samples) for name, value in scalars.items() if value is not None])
