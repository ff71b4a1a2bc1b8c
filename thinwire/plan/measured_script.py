"""Inside the process that `thinwire plan --measure` starts: runs a script under hooks that time its steps."""

from __future__ import annotations

import json
import os
import runpy
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NoReturn

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

__all__ = ["StepTimer", "main"]


class StepTimer:
    """Times the steps of the one optimizer of a training, between its calls of backward and step.

    `skipped` steps come before the `wanted` ones; after those `done` is called with what was found, or with a problem.
    """

    def __init__(self, skipped: int, wanted: int, done: Callable[[dict[str, Any]], None]) -> None:
        self._skipped = skipped
        self._wanted = wanted
        self._done = done
        self._optimizer: torch.optim.Optimizer | None = None
        self._steps: list[tuple[float, float, float, int]] = []
        self._since = 0.0
        self._backward = 0.0
        self._backwards = 0
        self._depth = 0
        self._step_began = 0.0

    @property
    def steps(self) -> int:
        """Those that were seen."""
        return len(self._steps)

    def install(self) -> list[RemovableHandle]:
        """Hook every optimizer's step, and backward of tensors and of torch.autograd; returns the handles of steps."""
        handles = [
            register_optimizer_step_pre_hook(lambda optimizer, *_: self._before_step(optimizer)),
            register_optimizer_step_post_hook(lambda *_: self._after_step()),
        ]
        plain = torch.autograd.backward

        def timed(*arguments: Any, **keywords: Any) -> None:
            began = _now()
            self._depth += 1
            try:
                plain(*arguments, **keywords)
            finally:
                self._depth -= 1
                if not self._depth:
                    self._backward += _now() - began
                    self._backwards += 1

        # Tensor.backward calls it by this name.
        torch.autograd.backward = timed
        self._since = _now()
        return handles

    def _before_step(self, optimizer: torch.optim.Optimizer) -> None:
        if self._optimizer is None:
            self._optimizer = optimizer
        elif self._optimizer is not optimizer:
            both = f"{type(self._optimizer).__name__} and {type(optimizer).__name__}"
            self._done({"problem": f"it steps several optimizers, {both}: give --forward and --backward"})
        if not self._backwards:
            self._done({"problem": "it steps without a backward before, as with a closure: give --forward, --backward"})
        self._step_began = _now()

    def _after_step(self) -> None:
        now = _now()
        forward = self._step_began - self._since - self._backward
        self._steps.append((forward, self._backward, now - self._step_began, self._backwards))
        self._since, self._backward, self._backwards = now, 0.0, 0
        if self.steps == self._skipped + self._wanted:
            self._done(self._summary())

    def _summary(self) -> dict[str, Any]:
        assert self._optimizer is not None
        timed = self._steps[self._skipped :]
        times = {step[3] for step in timed}
        if len(times) > 1:
            return {"problem": f"its steps have {min(times)} to {max(times)} backwards: give --forward, --backward"}
        (accumulation,) = times
        parameters = [one for group in self._optimizer.param_groups for one in group["params"]]
        trained = [one for one in parameters if one.requires_grad]
        return {
            "steps": len(timed),
            "forward": median(step[0] for step in timed) / accumulation,
            "backward": median(step[1] for step in timed) / accumulation,
            "update": median(step[2] for step in timed),
            "accumulation": accumulation,
            "dtype": "bf16" if any(one.element_size() == 2 for one in trained) else "fp32",
            "shapes": [list(one.shape) for one in trained],
        }


def _now() -> float:
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
    return time.perf_counter()


def main(arguments: Sequence[str]) -> None:
    """Run `SKIPPED STEPS OUTPUT SCRIPT`, and end this process once the steps are made, whatever the script is doing."""
    skipped, wanted, output, script = arguments
    path = Path(output)

    def done(found: dict[str, Any]) -> NoReturn:
        path.write_text(json.dumps(found))
        sys.stdout.flush()
        sys.stderr.flush()
        # Loaders' workers and process groups are not waited for.
        os._exit(0)

    timer = StepTimer(int(skipped), int(wanted), done)
    timer.install()
    sys.argv = [script]
    sys.path[0] = str(Path(script).resolve().parent)
    runpy.run_path(script, run_name="__main__")
    needed = int(skipped) + int(wanted)
    done({"problem": f"it ended after {timer.steps} steps of an optimizer, and {needed} are needed: --measure-steps"})


if __name__ == "__main__":
    main(sys.argv[1:])
