"""The exchange with as little memory as it can have: the payload lives while its bucket is in flight only, and the
worker's residual is kept in bf16."""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.comm import Communicator
from thinwire.compress.codecs import Codec
from thinwire.compress.exchange import Exchange

__all__ = ["LeanExchange"]


class LeanExchange(Exchange):
    """An Exchange whose result is kept as leg 2's packets, and whose worker residual is in `residual_dtype`.

    With `reversible`, the residuals before this step are kept until `commit` or `revert`, at the price of a second
    worker
    residual: then a skipped step leaves them untouched, and `scale_step` can shrink what the step did to them. Without,
    a step that is not finite sets the residual to zero where its payload was not.
    """

    def __init__(
        self,
        comm: Communicator,
        numel: int,
        codec: Codec,
        *,
        bucket: int,
        device: torch.device,
        residual_dtype: torch.dtype,
        reversible: bool,
    ) -> None:
        super().__init__(comm, numel, codec, bucket=bucket, error_feedback=False, device=device)
        self.worker_residual = torch.zeros(self.padded_numel, dtype=residual_dtype, device=device)
        self.owner_residual = torch.zeros(self.shard, device=device)
        self._reversible = reversible
        self._next: Tensor | None = None

    def scale_step(self, coefficient: float) -> None:
        """Change the new worker residual to what it were had this step's change been `coefficient` times as large.

        With e the residual before and e' after, payload x and packet p: e' = x + e - p, so that e + c·(e' - e) is the
        residual of a payload c·x sent as c·p.
        """
        assert self._next is not None, "scale_step needs a reversible exchange, after start()"
        assert self.worker_residual is not None
        self._next = torch.lerp(self.worker_residual, self._next, coefficient)

    def take_packets(self) -> Tensor:
        """What leg 2 brought, uint8 [ranks, packet_bytes], instead of `read`."""
        assert self._leg_2 is not None, "take_packets() follows wait()"
        packets = self._leg_2[1]
        self._leg_2 = None
        return packets

    def commit(self) -> None:
        """Take over the new residuals."""
        assert self._average is not None, "commit() follows wait()"
        if self._next is not None:
            self.worker_residual, self._next = self._next, None
        self.owner_residual, self._average = self._average, None

    def revert(self) -> None:
        """Go back to the residuals before this step; nothing after `commit`.

        Where they were not kept the residual starts again from zero: it holds this step's, however large, by now.
        """
        if self._average is None:
            return
        if self._next is None and self.worker_residual is not None:
            self.worker_residual.zero_()
        self._next = self._average = None

    def hold_zero(self, mask: Tensor) -> None:
        """Zero the new residuals where `mask`, bool [padded_numel], holds; between `wait` and `commit`."""
        worker = self.worker_residual if self._next is None else self._next
        assert worker is not None
        worker.masked_fill_(mask, 0.0)
        if self._average is not None:
            self._average.masked_fill_(mask.view(self._comm.size, self.shard)[self._comm.rank], 0.0)

    def _encode_payload(self, packets: Tensor) -> None:
        assert self.worker_residual is not None
        if self.worker_residual.dtype == torch.float32:
            self.codec.encode(self.payload, self.worker_residual, packets, self.numel)
            new = self.payload
        else:
            new = torch.empty_like(self.worker_residual) if self._reversible else self.worker_residual
            self.codec.encode_rounded(self.payload, self.worker_residual, new, packets, self.numel)
        self._payload = None
        if self._reversible:
            self._next = new
        else:
            self.worker_residual = new
