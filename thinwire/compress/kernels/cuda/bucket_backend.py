"""The CUDA backend of the kernels over a whole bucket: what `bucket_reference` describes, one launch a call, and before
it one asynchronous copy of a table that says where the bucket's runs lie."""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.compress.kernels.bucket_calls import AverageAndEncode, DecodeAndMove, EncodePayload
from thinwire.compress.kernels.cuda.bucket_launches import (
    Runs,
    average_and_encode_launch,
    decode_and_move_launch,
    encode_packed_payload_launch,
    encode_payload_launch,
    move_packed_launch,
    moved_runs,
    packed_runs,
    payload_runs,
)
from thinwire.compress.kernels.cuda.runner import Runner
from thinwire.compress.kernels.cuda.toolkit import find_toolkit
from thinwire.compress.kernels.packed_calls import EncodePackedPayload, MovePacked

__all__ = ["CudaBuckets", "make_backend", "on_device"]


class CudaBuckets:
    """Calls in, launches out. The host waits for nothing: tables leave from pinned memory, which torch keeps until the
    copy is over, and what they are copied into is theirs until the launch is, in the order of the stream."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner

    def encode_payload(self, call: EncodePayload) -> None:
        """See `thinwire.compress.kernels.buckets.encode_payload`."""
        runs = on_device(payload_runs(call), call.packets.device)
        self._runner.run(encode_payload_launch(call, runs), runs.device)

    def decode_and_move(self, call: DecodeAndMove) -> None:
        """See `thinwire.compress.kernels.buckets.decode_and_move`."""
        runs = on_device(moved_runs(call), call.packets.device)
        self._runner.run(decode_and_move_launch(call, runs), runs.device)

    def average_and_encode(self, call: AverageAndEncode) -> None:
        """See `thinwire.compress.kernels.buckets.average_and_encode`."""
        self._runner.run(average_and_encode_launch(call), call.packets.device)

    def encode_packed_payload(self, call: EncodePackedPayload) -> None:
        """See `thinwire.compress.kernels.buckets.encode_packed_payload`."""
        runs = on_device(payload_runs(call), call.packets.device)
        self._runner.run(encode_packed_payload_launch(call, runs), runs.device)

    def move_packed(self, call: MovePacked) -> None:
        """See `thinwire.compress.kernels.buckets.move_packed`."""
        runs = on_device(packed_runs(call), call.weights.device)
        self._runner.run(move_packed_launch(call, runs), runs.device)


def make_backend() -> CudaBuckets:
    """The backend on the toolkit that there is; raises ImportError where there is none."""
    return CudaBuckets(Runner(find_toolkit()))


def on_device(runs: Runs, device: torch.device) -> Tensor:
    """The bytes of a table, on their way. Raises RuntimeError within a CUDA graph's capture, whose replays would copy
    what by then lies in the pinned memory."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "a kernel over a whole bucket cannot be captured in a CUDA graph: the host writes its table of runs for "
            "every launch. Capture forward and backward, and call step() outside of the graph"
        )
    pinned = torch.empty(runs.nbytes, dtype=torch.uint8, pin_memory=True)
    pinned.numpy()[:] = runs.view("u1")
    return pinned.to(device, non_blocking=True)
