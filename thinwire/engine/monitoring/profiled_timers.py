"""The profile of one step of a training, taken while the engine times its parts anyway."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch import nn

from thinwire.comm import Communicator
from thinwire.comm.agreement import on_every_rank
from thinwire.engine.config.models import EngineConfig
from thinwire.engine.monitoring.clock import seconds_now
from thinwire.engine.monitoring.flops_profiler import FlopsProfiler
from thinwire.engine.monitoring.flops_report import StepCost
from thinwire.engine.monitoring.timers import StepReport, StepTimers

__all__ = ["ProfiledTimers"]


class ProfiledTimers:
    """`timers`, and on rank 0 a profile of the step after `flops_profiler.profile_step` steps.

    The last micro-batch's forward is counted. `profiler` keeps its totals. Construction is collective, and raises, on
    every rank, OSError (ValueError on the others) where the report's file cannot be written.
    """

    def __init__(self, timers: StepTimers, model: nn.Module, config: EngineConfig, comm: Communicator) -> None:
        section = config.flops_profiler
        self.profiler = FlopsProfiler(model, recompute_fwd_factor=section.recompute_fwd_factor)
        self._timers = timers
        self._config = config
        self._writes = comm.rank == 0
        self._steps = 0
        self._spans: dict[str, float] = {}
        if section.output_file:
            file = Path(section.output_file)
            action = (lambda: _touch(file)) if self._writes else lambda: None
            on_every_rank(comm, action, "write its profile", (OSError,))

    def resume(self, steps: int) -> None:
        """Go on after `steps` steps."""
        self._steps = steps

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Time what is inside as a part of this step."""
        if not self._writes or self._steps != self._config.flops_profiler.profile_step:
            with self._timers(name):
                yield
            return
        with self._timers(name):
            start = seconds_now()
            if name == "forward":
                self.profiler.start_profile()
            try:
                yield
            finally:
                if name == "forward":
                    self.profiler.stop_profile()
            self._spans[name] = seconds_now() - start

    def end_step(self, samples: int) -> None:
        """End a step in which all ranks together took `samples` samples; report it where it was to be profiled."""
        self._timers.end_step(samples)
        if self.profiler.started:
            self._report(samples)
            self.profiler.end_profile()
        self._spans.clear()
        self._steps += 1

    def report(self) -> StepReport:
        """What was measured since the last report."""
        return self._timers.report()

    def _report(self, samples: int) -> None:
        section, spans = self._config.flops_profiler, self._spans
        micro_batches = self._config.gradient_accumulation_steps
        factor = 2 + section.recompute_fwd_factor
        cost = StepCost(spans.get("forward"), spans.get("backward"), spans.get("step"), micro_batches, samples, factor)
        try:
            self.profiler.print_model_profile(
                self._steps, section.module_depth, section.top_modules, section.detailed, section.output_file, cost
            )
        except OSError as error:
            warnings.warn(f"the profile could not be written, training goes on: {error}", RuntimeWarning, stacklevel=3)


def _touch(file: Path) -> None:
    file.absolute().parent.mkdir(parents=True, exist_ok=True)
    file.open("a").close()
