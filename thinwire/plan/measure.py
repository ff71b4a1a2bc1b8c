"""Runs a training script on one rank for some steps and takes its times: what `thinwire plan --measure script.py` does,
and inside the process that it starts, the hooks that time steps."""

from __future__ import annotations

import json
import os
import runpy
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from math import prod
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, NoReturn

from thinwire.plan.units import PlanError
from thinwire.plan.workload import Matrices, Transformer, Workload

# A plan without --measure needs no torch.
if TYPE_CHECKING:
    import torch
    from torch.utils.hooks import RemovableHandle


def workload_of(script: str, found: Mapping[str, Any], model: Transformer | None = None) -> Workload:
    """Make a workload of what `StepTimer` has found of a script, of its own model unless another is given.

    The forward holds all that is neither backward nor the optimizer, the loading of data too; the optimizer's time
    counts as AdamW's. The model's first parameter is taken for an embedding, whose gradient comes last, if none is
    larger.
    """
    if model is None:
        shapes = [tuple(shape) for shape in found["shapes"]]
        matrices = [Matrices(shape[0], prod(shape[1:])) for shape in shapes if len(shape) > 1 and 0 not in shape]
        largest = max((one.numel for one in matrices), default=0)
        begins_with_it = bool(matrices) and len(shapes[0]) == 2 and matrices[0].numel == largest
        last = matrices[0] if begins_with_it else None
        model = Transformer(script, sum(map(prod, shapes)), tuple(matrices), last)
    return Workload(model, found["forward"], found["backward"], found["accumulation"], found["update"], found["dtype"])


_SKIPPED_STEPS = 3  # before those that are timed: memory is allocated, kernels compile
_LAST_LINES = 8


def measure_script(script: Path, steps: int, limit: float, model: Transformer | None = None) -> Workload:
    """Run `script` with this Python as one rank until it has made `steps` steps after the first three; then it is
    ended. What it prints goes to this process's stderr. Returns its medians, as a workload of `model` or of its own.

    Raises PlanError where the script fails, ends before, takes longer than `limit` seconds, or trains in a way that
    cannot be told apart into forward, backward and update.
    """
    if not script.is_file():
        raise PlanError(f"--measure {script}: there is no such file")
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "steps.json"
        told = Path(folder) / "stderr.txt"
        wanted = [str(_SKIPPED_STEPS), str(steps), str(output)]
        command = [sys.executable, "-m", "thinwire.plan.measure", *wanted, str(script)]
        with told.open("w+") as errors:
            try:
                # The script's own output is no part of the answer, which goes to stdout.
                code = subprocess.run(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=sys.stderr.fileno(),
                    stderr=errors,
                    env=_alone(),
                    timeout=limit,
                    check=False,
                ).returncode
            except subprocess.TimeoutExpired:
                raise PlanError(
                    f"{script} did not make {_SKIPPED_STEPS + steps} steps in {limit:.0f} s: give --measure-limit a "
                    "longer time, or --measure-steps fewer steps"
                ) from None
        try:
            found: dict[str, Any] = json.loads(output.read_text())
        except (OSError, ValueError):
            last = "\n".join(told.read_text(errors="replace").splitlines()[-_LAST_LINES:])
            raise PlanError(f"{script} ended with exit code {code} before it could be measured:\n{last}") from None
    if "problem" in found:
        raise PlanError(f"{script} cannot be measured: {found['problem']}")
    return workload_of(script.name, found, model)


def _alone() -> dict[str, str]:
    """The environment of a job of one rank, so that scripts for torchrun run as well."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    job = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    return {**os.environ, **job, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}


# Inside the measured process


class StepTimer:
    """Times the steps of the one optimizer of a training, between its calls of backward and step.

    `skipped` steps come before the `wanted` ones; after those `done` is called with what was found, or with a problem.
    """

    def __init__(self, skipped: int, wanted: int, done: Callable[[dict[str, Any]], None]) -> None:
        self._skipped = skipped
        self._wanted = wanted
        self._done = done
        self._optimizer: torch.optim.Optimizer | None = None
        self.steps: list[tuple[float, float, float, int]] = []
        self._since = 0.0
        self._backward = 0.0
        self._backwards = 0
        self._depth = 0
        self._step_began = 0.0

    def install(self) -> list[RemovableHandle]:
        """Hook every optimizer's step, and backward of tensors and of torch.autograd; returns the handles of steps."""
        import torch
        from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

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
        self.steps.append((forward, self._backward, now - self._step_began, self._backwards))
        self._since, self._backward, self._backwards = now, 0.0, 0
        if len(self.steps) == self._skipped + self._wanted:
            self._done(self._summary())

    def _summary(self) -> dict[str, Any]:
        assert self._optimizer is not None
        timed = self.steps[self._skipped :]
        times = {step[3] for step in timed}
        if len(times) > 1:
            return {"problem": f"its steps have {min(times)} to {max(times)} backwards: give --forward, --backward"}
        (accumulation,) = times
        parameters = [one for group in self._optimizer.param_groups for one in group["params"]]
        trained = [one for one in parameters if one.requires_grad]
        return {
            "forward": median(step[0] for step in timed) / accumulation,
            "backward": median(step[1] for step in timed) / accumulation,
            "update": median(step[2] for step in timed),
            "accumulation": accumulation,
            "dtype": "bf16" if any(one.element_size() == 2 for one in trained) else "fp32",
            "shapes": [list(one.shape) for one in trained],
        }


def _now() -> float:
    import torch

    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
    return time.perf_counter()


def _run_timed(arguments: Sequence[str]) -> None:
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
    problem = f"it ended after {len(timer.steps)} steps of an optimizer, and {int(skipped) + int(wanted)} are needed"
    done({"problem": f"{problem}: --measure-steps"})


if __name__ == "__main__":
    _run_timed(sys.argv[1:])
