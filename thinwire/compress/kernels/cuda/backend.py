"""The CUDA backend: kernels of csrc/, compiled at run time, launched on torch's current stream."""

from __future__ import annotations

from thinwire.compress.kernels.calls import ApplySigns, Decode, Encode, MomentumPayload, StoreRounded
from thinwire.compress.kernels.cuda.launch import (
    apply_signs_launch,
    check_headers_launch,
    decode_launch,
    encode_launch,
    momentum_payload_launch,
    store_rounded_launch,
    write_headers_launch,
)
from thinwire.compress.kernels.cuda.runner import Runner
from thinwire.compress.kernels.cuda.toolkit import Toolkit, find_toolkit
from thinwire.compress.kernels.headers import CheckHeaders, WriteHeaders

__all__ = ["CudaBackend", "make_backend"]


class CudaBackend:
    """Calls in, launches out, through one toolkit."""

    def __init__(self, toolkit: Toolkit) -> None:
        self._runner = Runner(toolkit)

    def encode(self, call: Encode) -> None:
        """Encode payload + residual; see `thinwire.compress.kernels.encode` and `encode_rounded`."""
        for run in call.runs():
            self._runner.run(encode_launch(run), call.packets.device)

    def decode(self, call: Decode) -> None:
        """Decode every row, or average the rows; see `thinwire.compress.kernels.decode` and `decode_mean`."""
        for run in call.runs():
            self._runner.run(decode_launch(run), call.packets.device)

    def momentum_payload(self, call: MomentumPayload) -> None:
        """The payload of leg 1; see `thinwire.compress.kernels.momentum_payload`."""
        self._runner.run(momentum_payload_launch(call), call.packets.device)

    def apply_signs(self, call: ApplySigns) -> None:
        """The update of the weights; see `thinwire.compress.kernels.apply_signs`."""
        self._runner.run(apply_signs_launch(call), call.packets.device)

    def store_rounded(self, call: StoreRounded) -> None:
        """Rounding at random; see `thinwire.compress.kernels.rounding.store_rounded`."""
        self._runner.run(store_rounded_launch(call), call.weights.device)

    def write_headers(self, call: WriteHeaders) -> None:
        """Headers of packets to be sent; see `thinwire.compress.kernels.headers`."""
        self._runner.run(write_headers_launch(call), call.packets.device)

    def check_headers(self, call: CheckHeaders) -> None:
        """Headers of packets that came; see `thinwire.compress.kernels.headers`."""
        self._runner.run(check_headers_launch(call), call.headers.device)


def make_backend() -> CudaBackend:
    """The backend on the toolkit that there is; raises ImportError where there is none."""
    return CudaBackend(find_toolkit())
