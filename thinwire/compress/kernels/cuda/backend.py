"""The CUDA backend: kernels of csrc/, compiled at run time once a device, launched on torch's current stream. A call
over many tensors is one launch, and before it, where that has changed, one asynchronous copy of a table that says where
they lie. The host waits for nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from thinwire.compress.kernels.adam_reference import AdamStep
from thinwire.compress.kernels.bucket_calls import AverageAndEncode, DecodeAndMove, DigestGradients, EncodePayload
from thinwire.compress.kernels.calls import Decode, Encode, StoreRounded
from thinwire.compress.kernels.cuda.bucket_launches import (
    Runs,
    adam_runs,
    adam_step_launch,
    average_and_encode_launch,
    decode_and_move_launch,
    digest_gradients_launch,
    encode_packed_payload_launch,
    encode_payload_launch,
    gradient_runs,
    move_packed_launch,
    moved_factors,
    moved_runs,
    packed_runs,
    payload_factors,
    payload_runs,
)
from thinwire.compress.kernels.cuda.launch import (
    Launch,
    architecture_option,
    check_headers_launch,
    compile_options,
    decode_launch,
    encode_launch,
    source_text,
    store_rounded_launch,
    write_headers_launch,
)
from thinwire.compress.kernels.cuda.toolkit import Toolkit, find_toolkit, machine_code
from thinwire.compress.kernels.headers import CheckHeaders, WriteHeaders
from thinwire.compress.kernels.packed_calls import EncodePackedPayload, MovePacked
from thinwire.compress.kernels.tables import CapturedTables, on_device

__all__ = ["CudaBackend", "Runner", "make_backend"]


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


class CudaBackend:
    """Calls in, launches out, through one toolkit."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner

    def encode(self, call: Encode) -> None:
        """Encode payload + residual; see `thinwire.compress.kernels.encode` and `encode_rounded`."""
        for run in call.runs():
            self._runner.run(encode_launch(run), call.packets.device)

    def decode(self, call: Decode) -> None:
        """Decode every row, or average the rows; see `thinwire.compress.kernels.decode` and `decode_mean`."""
        for run in call.runs():
            self._runner.run(decode_launch(run), call.packets.device)

    def store_rounded(self, call: StoreRounded) -> None:
        """Rounding at random; see `thinwire.compress.kernels.store_rounded`."""
        self._runner.run(store_rounded_launch(call), call.weights.device)

    def write_headers(self, call: WriteHeaders) -> None:
        """Headers of packets to be sent; see `thinwire.compress.kernels.headers`."""
        self._runner.run(write_headers_launch(call), call.packets.device)

    def check_headers(self, call: CheckHeaders) -> None:
        """Headers of packets that came; see `thinwire.compress.kernels.headers`."""
        self._runner.run(check_headers_launch(call), call.headers.device)

    def encode_payload(self, call: EncodePayload) -> None:
        """See `thinwire.compress.kernels.buckets.encode_payload`."""
        runs = _placed(call, payload_runs(call), call.packets)
        self._runner.run(encode_payload_launch(call, runs), runs.device)

    def decode_and_move(self, call: DecodeAndMove) -> None:
        """See `thinwire.compress.kernels.buckets.decode_and_move`."""
        runs = _placed(call, moved_runs(call), call.packets)
        self._runner.run(decode_and_move_launch(call, runs), runs.device)

    def average_and_encode(self, call: AverageAndEncode) -> None:
        """See `thinwire.compress.kernels.buckets.average_and_encode`."""
        self._runner.run(average_and_encode_launch(call), call.packets.device)

    def encode_packed_payload(self, call: EncodePackedPayload) -> None:
        """See `thinwire.compress.kernels.buckets.encode_packed_payload`."""
        runs = _placed(call, payload_runs(call), call.packets)
        self._runner.run(encode_packed_payload_launch(call, runs), runs.device)

    def move_packed(self, call: MovePacked) -> None:
        """See `thinwire.compress.kernels.buckets.move_packed`."""
        runs = call.segments.tables.on_device((call.kernel, call.first), packed_runs(call), call.weights.device)
        self._runner.run(move_packed_launch(call, runs), runs.device)

    def digest_gradients(self, call: DigestGradients) -> None:
        """See `thinwire.compress.kernels.buckets.digest_gradients`."""
        runs = call.segments.tables.on_device((call.kernel, 0), gradient_runs(call), call.digests.device)
        self._runner.run(digest_gradients_launch(call, runs), runs.device)

    def renew_factors(
        self,
        tables: CapturedTables,
        beta1: Sequence[float],
        divisors: Sequence[float],
        rates: Sequence[float],
        decays: Sequence[float],
    ) -> None:
        """See `thinwire.compress.kernels.buckets.renew_factors`."""
        tables.change(EncodePayload.kernel, payload_factors(beta1, divisors))
        tables.change(DecodeAndMove.kernel, moved_factors(rates, decays))

    def adam_step(self, call: AdamStep) -> None:
        """See `thinwire.compress.kernels.adam.adam_step`."""
        runs = on_device(adam_runs(call), call.variances[0].device)
        self._runner.run(adam_step_launch(call, runs), runs.device)


def make_backend() -> CudaBackend:
    """The backend on the toolkit that there is; raises ImportError where there is none."""
    return CudaBackend(Runner(find_toolkit()))


def _placed(call: EncodePayload | DecodeAndMove | EncodePackedPayload, runs: Runs, packets: Tensor) -> Tensor:
    return call.segments.tables.on_device((call.kernel, call.part.first), runs, packets.device)
