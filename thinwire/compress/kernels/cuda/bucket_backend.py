"""The CUDA backend of the kernels over a whole bucket: what `bucket_reference` describes, one launch a call, and before
it, where that has changed, one asynchronous copy of a table that says where the bucket's runs lie."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from thinwire.compress.kernels.bucket_calls import AverageAndEncode, DecodeAndMove, DigestGradients, EncodePayload
from thinwire.compress.kernels.cuda.bucket_launches import (
    Runs,
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
from thinwire.compress.kernels.cuda.runner import Runner
from thinwire.compress.kernels.cuda.toolkit import find_toolkit
from thinwire.compress.kernels.packed_calls import EncodePackedPayload, MovePacked
from thinwire.compress.kernels.tables import CapturedTables

__all__ = ["CudaBuckets", "make_backend"]


class CudaBuckets:
    """Calls in, launches out. The host waits for nothing."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner

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


def make_backend() -> CudaBuckets:
    """The backend on the toolkit that there is; raises ImportError where there is none."""
    return CudaBuckets(Runner(find_toolkit()))


def _placed(call: EncodePayload | DecodeAndMove | EncodePackedPayload, runs: Runs, packets: Tensor) -> Tensor:
    return call.segments.tables.on_device((call.kernel, call.part.first), runs, packets.device)
