"""The CUDA backend: kernels of csrc/, compiled at run time, launched on torch's current stream."""

from __future__ import annotations

from typing import Any

import torch

from thinwire.compress.kernels.calls import ApplySigns, Decode, Encode, MomentumPayload, StoreRounded
from thinwire.compress.kernels.cuda.launch import (
    Launch,
    apply_signs_launch,
    architecture_option,
    check_headers_launch,
    compile_options,
    decode_launch,
    encode_launch,
    momentum_payload_launch,
    source_text,
    store_rounded_launch,
    write_headers_launch,
)
from thinwire.compress.kernels.cuda.machine_code import machine_code
from thinwire.compress.kernels.cuda.toolkit import Toolkit, find_toolkit
from thinwire.compress.kernels.header_calls import CheckHeaders, WriteHeaders

__all__ = ["CudaBackend", "make_backend"]


class CudaBackend:
    """Calls in, launches out, through one toolkit."""

    def __init__(self, toolkit: Toolkit) -> None:
        self._toolkit = toolkit
        self._kernels: dict[tuple[str, str, int, int, int], Any] = {}

    def encode(self, call: Encode) -> None:
        """Encode payload + residual; see `thinwire.compress.kernels.encode` and `encode_rounded`."""
        for run in call.runs():
            self._run(encode_launch(run), call.packets.device)

    def decode(self, call: Decode) -> None:
        """Decode every row, or average the rows; see `thinwire.compress.kernels.decode` and `decode_mean`."""
        for run in call.runs():
            self._run(decode_launch(run), call.packets.device)

    def momentum_payload(self, call: MomentumPayload) -> None:
        """The payload of leg 1; see `thinwire.compress.kernels.momentum_payload`."""
        self._run(momentum_payload_launch(call), call.packets.device)

    def apply_signs(self, call: ApplySigns) -> None:
        """The update of the weights; see `thinwire.compress.kernels.apply_signs`."""
        self._run(apply_signs_launch(call), call.packets.device)

    def store_rounded(self, call: StoreRounded) -> None:
        """Rounding at random; see `thinwire.compress.kernels.rounding.store_rounded`."""
        self._run(store_rounded_launch(call), call.weights.device)

    def write_headers(self, call: WriteHeaders) -> None:
        """Headers of packets to be sent; see `thinwire.compress.kernels.headers`."""
        self._run(write_headers_launch(call), call.packets.device)

    def check_headers(self, call: CheckHeaders) -> None:
        """Headers of packets that came; see `thinwire.compress.kernels.headers`."""
        self._run(check_headers_launch(call), call.headers.device)

    def _run(self, launch: Launch, device: torch.device) -> None:
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


def make_backend() -> CudaBackend:
    """The backend on the toolkit that there is; raises ImportError where there is none."""
    return CudaBackend(find_toolkit())
