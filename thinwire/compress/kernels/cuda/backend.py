"""The CUDA backend: kernels of csrc/, compiled at run time once a device, launched on torch's current stream. A call
over many tensors is one launch, and before it, where that has changed, one asynchronous copy of a table that says where
they lie. The host waits for nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from thinwire.compress.kernels.buckets import KernelCall, RenewFactors
from thinwire.compress.kernels.calls import DecodeAndMove, EncodePayload
from thinwire.compress.kernels.cuda.bucket_launches import (
    adam_step_launch,
    average_and_encode_launch,
    decode_and_move_launch,
    encode_packed_payload_launch,
    encode_payload_launch,
    move_packed_launch,
    moved_factors,
    payload_factors,
)
from thinwire.compress.kernels.cuda.launch import (
    Launch,
    architecture_option,
    compile_options,
    decode_launch,
    encode_launch,
    source_text,
    store_rounded_launch,
    write_headers_launch,
)
from thinwire.compress.kernels.cuda.toolkit import Toolkit, find_toolkit, machine_code


class Runner:
    """Runs launches through one toolkit, and keeps what it compiled."""

    def __init__(self, toolkit: Toolkit) -> None:
        self._toolkit = toolkit
        self._kernels: dict[tuple[str, str, int, int, int], Any] = {}

    def run(self, launch: Launch, device: torch.device) -> None:
        """Launch on `device`, a CUDA device, whatever device is current; nothing where there is nothing to do."""
        if 0 in launch.grid:
            return
        index = torch.cuda.current_device() if device.index is None else device.index
        key = (launch.source, launch.function, launch.block_size, launch.threads, index)
        kernel = self._kernels.get(key)
        if kernel is None:
            kernel = self._kernels[key] = self._load(launch, index)
        stream = torch.cuda.current_stream(index).cuda_stream
        self._toolkit.launch(kernel, launch.grid, launch.threads, launch.arguments, index, stream)

    def _load(self, launch: Launch, device: int) -> Any:
        """A kernel on a device: a loaded module belongs to one."""
        architecture = architecture_option(torch.cuda.get_device_capability(device), self._toolkit.architectures)
        options = (*compile_options(launch.block_size, launch.threads), architecture)
        code = machine_code(self._toolkit, source_text(launch.source), options)
        return self._toolkit.load(code, launch.function, device)


_LAUNCHES: dict[str, Callable[[Any], Launch]] = {
    "encode": encode_launch,
    "decode": decode_launch,
    "store_rounded": store_rounded_launch,
    "write_headers": write_headers_launch,
    "encode_payload": encode_payload_launch,
    "decode_and_move": decode_and_move_launch,
    "average_and_encode": average_and_encode_launch,
    "encode_packed_payload": encode_packed_payload_launch,
    "move_packed": move_packed_launch,
    "adam_step": adam_step_launch,
}


class CudaBackend:
    """Calls in, launches out: a method for each kernel."""

    def __init__(self, run: Callable[[Launch, torch.device], None]) -> None:
        """`run` launches on a device, as `Runner.run` does."""
        self._run = run

    def __getattr__(self, kernel: str) -> Callable[[KernelCall], None]:
        if kernel not in _LAUNCHES:
            raise AttributeError(kernel)
        plan = _LAUNCHES[kernel]

        def launch(call: KernelCall) -> None:
            self._run(plan(call), call.device)

        setattr(self, kernel, launch)
        return launch

    def renew_factors(self, call: RenewFactors) -> None:
        """Change what launches that are captured find in their tables."""
        call.tables.change(EncodePayload.kernel, payload_factors(call.beta1, call.divisors))
        call.tables.change(DecodeAndMove.kernel, moved_factors(call.rates, call.decays))


def make_backend() -> CudaBackend:
    """The backend on the toolkit that there is; raises ImportError where there is none."""
    return CudaBackend(Runner(find_toolkit()).run)
