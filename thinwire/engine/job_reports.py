"""What a training job says about itself: lines on stderr every few steps, scalars for files and services that keep
them, a profile of one step."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from thinwire.engine.backwards import StepLosses
from thinwire.engine.job import Job
from thinwire.engine.monitoring.flops_profiler import FlopsProfiler, ProfiledTimers
from thinwire.engine.monitoring.monitor import Monitor
from thinwire.engine.monitoring.timers import StepTimers, breakdown_line, progress_line
from thinwire.zero.memory import MemoryReport, live_tensor_bytes

__all__ = ["JobReports", "StepSummary"]


@dataclass(frozen=True)
class StepSummary:
    """One step. `samples`: that all ranks have seen so far. `batch_size`: of them in this step. `grad_norm`: None where
    it is not known. `loss_scale`: None but in fp16."""

    step: int
    samples: int
    skipped: int
    batch_size: int
    rates: list[float]
    grad_norm: float | None
    loss_scale: float | None


class JobReports:
    """Reports steps as the configuration asks; only then do the ranks average their losses. Construction is collective.

    Every `steps_per_print` steps rank 0 prints a line, and with it what `wall_clock_breakdown` and `memory_breakdown`
    ask for; without `steps_per_print`, times after every step and memory after the first. Logs get every step.
    `timers` wants the spans of each step. `monitor` takes scalars of the user's own; `flops_profiler` is None where
    none was asked for.

    Raises, on every rank, OSError, ImportError or ValueError where logs cannot be written.
    """

    def __init__(self, job: Job) -> None:
        config = job.config
        timers = StepTimers(job.device, enabled=config.wall_clock_breakdown)
        self.timers: StepTimers | ProfiledTimers = timers
        self.flops_profiler: FlopsProfiler | None = None
        if config.flops_profiler.enabled:
            self.timers = ProfiledTimers(timers, job.model, config, job.comm)
            self.flops_profiler = self.timers.profiler
        self._job = job
        self.monitor = Monitor.of(job.comm, config)
        self._reported = False

    def report(self, summary: StepSummary, losses: StepLosses) -> None:
        """Print and write what is due after a step. Collective where something is."""
        config, comm = self._job.config, self._job.comm
        self.timers.end_step(summary.batch_size)
        every = config.steps_per_print
        due = every is not None and summary.step % every == 0
        if due or self.monitor.enabled:
            loss = losses.mean(comm)
            self._write(summary, loss)
        lines = []
        if due or (every is None and config.wall_clock_breakdown):
            times = self.timers.report()
            if due:
                lines.append(
                    progress_line(
                        summary.step,
                        rates=summary.rates,
                        skipped=summary.skipped,
                        loss=loss,
                        grad_norm=summary.grad_norm,
                        samples_per_second=times.samples_per_second,
                    )
                )
            if config.wall_clock_breakdown:
                lines.append(breakdown_line(times))
        if config.memory_breakdown and (due or (every is None and not self._reported)):
            lines.append(self._memory().table())
        self._reported = True
        if lines and comm.rank == 0:
            print("\n".join(lines), file=sys.stderr, flush=True)

    def resume(self, steps: int) -> None:
        """Go on after `steps` steps of an earlier run."""
        if isinstance(self.timers, ProfiledTimers):
            self.timers.resume(steps)

    def close(self) -> None:
        """Close the logs."""
        self.monitor.close()

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
        known = [(name, value, summary.samples) for name, value in scalars.items() if value is not None]
        self.monitor.write(known)

    def _memory(self) -> MemoryReport:
        return MemoryReport(
            live_tensor_bytes(self._job.model, self._job.optimizer), self._job.optimizer.model_state_bytes()
        )
