"""The CUDA backend of Adam's step: what `adam_reference` describes, one launch for all tensors, and before it one
asynchronous copy of a table that says where they lie."""

from __future__ import annotations

from thinwire.compress.kernels.adam_calls import AdamStep
from thinwire.compress.kernels.cuda.bucket_launches import adam_runs, adam_step_launch
from thinwire.compress.kernels.cuda.runner import Runner
from thinwire.compress.kernels.cuda.toolkit import find_toolkit
from thinwire.compress.kernels.tables import on_device

__all__ = ["CudaAdam", "make_backend"]


class CudaAdam:
    """Calls in, launches out; the host waits for nothing."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner

    def adam_step(self, call: AdamStep) -> None:
        """See `thinwire.compress.kernels.adam.adam_step`."""
        runs = on_device(adam_runs(call), call.variances[0].device)
        self._runner.run(adam_step_launch(call, runs), runs.device)


def make_backend() -> CudaAdam:
    """The backend on the toolkit that there is; raises ImportError where there is none."""
    return CudaAdam(Runner(find_toolkit()))
