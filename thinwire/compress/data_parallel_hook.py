"""Compressed gradient averaging as a DDP communication hook, for people who keep DDP and their optimizer.
Error feedback on the gradients; the exchange of one bucket overlaps with the backward of the next."""

import warnings
from typing import Annotated, Any

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor

# DDP inspects a hook's annotations, so they must be the types themselves and not strings.
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh

from thinwire import comm as communication
from thinwire.comm.agreement import check_same_on_every_rank, on_every_rank
from thinwire.comm.errors import first_fault
from thinwire.comm.launch import join
from thinwire.compress.codecs import make_codec
from thinwire.compress.exchange import Exchange, bring_headers
from thinwire.compress.kernels.loading import compiled_backend
from thinwire.compress.packet_layout import DEFAULT_BLOCK_SIZE, CodecName, shard_numel

_Count = Annotated[int, Field(ge=0, lt=1 << 63)]


class _SavedBucket(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", arbitrary_types_allowed=True)

    numel: _Count
    worker: Tensor
    owner: Tensor


class _SavedHook(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    codec: str
    block_size: _Count
    rank: _Count
    ranks: _Count
    step: _Count
    buckets: dict[_Count, _SavedBucket]


class CompressionState:
    """What `ddp_hook` remembers between steps: residuals, and the buckets in flight.

        model.register_comm_hook(thinwire.compress.CompressionState(start_step=1000), thinwire.compress.ddp_hook)

    Args:
        comm: a Communicator over the model's ranks; by default `thinwire.comm.init()`.
        codec: "sign1", "stat2", "int4", "fp8", "int8", "bf16", "fp16" or "none"; see `make_codec`.
        block_size: elements that share one scale, a multiple of 64.
        start_step: steps whose gradients are averaged exactly before compression begins. DDP lays its buckets anew
            after the first step, which empties the residuals, so at least 1 is a good choice.
        mesh: in the place of `comm`, a DeviceMesh of one dimension.

    `state_dict()` of every rank, saved beside the model, lets a resumed run go on with the residuals.
    """

    def __init__(
        self,
        comm: communication.Communicator | None = None,
        codec: CodecName = "sign1",
        block_size: int = DEFAULT_BLOCK_SIZE,
        start_step: int = 1,
        mesh: DeviceMesh | None = None,
    ) -> None:
        if start_step < 0:
            raise ValueError(f"start_step must be at least 0, got {start_step}")
        self.comm = join(comm, mesh).duplicate()
        self.step = 0
        self._exact_steps = start_step
        self._buckets_are_final = False
        self._saved: dict[int, dict[str, Any]] = {}  # residuals of buckets that DDP has not laid yet
        self._codec = make_codec(codec, block_size)
        self._exact = make_codec("none", block_size)
        self._exchanges: dict[int, Exchange] = {}
        self._in_flight: list[tuple[Exchange, Tensor, torch.futures.Future[Tensor]]] = []

    @property
    def bytes_sent(self) -> int:
        """Bytes this rank has sent, headers, scales and padding included."""
        return self.comm.traffic.bytes_sent

    def close(self) -> None:
        """Release the communicator, on every rank; the hook cannot be used afterwards."""
        self.comm.close()

    def state_dict(self) -> dict[str, Any]:
        """This rank's residuals, fp32, bucket by bucket, and the number of steps; between two steps."""
        kept = {
            index: {"numel": one.numel, "worker": one.worker_residual, "owner": one.owner_residual}
            for index, one in self._exchanges.items()
            if one.codec is self._codec
        }
        return {**self._settings(), "step": self.step, "buckets": {**self._saved, **kept}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` gave on this rank, before the first backward of the new DDP model.

        Collective. The next step is averaged exactly: only after it does DDP lay the buckets that residuals are of.
        Raises ValueError, on every rank, for a state of another codec, block size, rank or number of ranks, or one that
        is not as it was saved.
        """
        on_every_rank(self.comm, lambda: self._check(state), "load the state of its hook", (ValueError,))
        sizes = {str(index): bucket["numel"] for index, bucket in state["buckets"].items()}
        check_same_on_every_rank(self.comm, [], [], {"step of the state": state["step"], "buckets of it": sizes})
        self.step = int(state["step"])
        self._exact_steps = max(self._exact_steps, self.step + 1)
        self._buckets_are_final = False
        self._saved = dict(state["buckets"])
        self._exchanges.clear()

    def _check(self, state: dict[str, Any]) -> None:
        """Raise ValueError for a state that is not this rank's, or not whole."""
        try:
            saved = _SavedHook.model_validate(state)
        except ValidationError as error:
            raise ValueError(f"the hook's state is not as it was saved: {first_fault(error)}") from None
        for name, mine in self._settings().items():
            if state[name] != mine:
                raise ValueError(
                    f"the hook's state was saved with {name}={state[name]!r}, and here it is {mine!r}: residuals "
                    "belong to one rank and codec. Load it where these are the same, or start with empty residuals"
                )
        for index, bucket in saved.buckets.items():
            shard = shard_numel(bucket.numel, self.comm.size, self._codec.block_size)
            for residual, numel in ((bucket.worker, shard * self.comm.size), (bucket.owner, shard)):
                if residual.shape != (numel,) or not residual.is_floating_point():
                    raise ValueError(
                        f"a residual of bucket {index} in the hook's state is {residual.dtype} of shape "
                        f"{tuple(residual.shape)}, {numel} floats were expected. Load it as it was saved"
                    )

    def _settings(self) -> dict[str, Any]:
        codec = self._codec
        return {"codec": codec.name, "block_size": codec.block_size, "rank": self.comm.rank, "ranks": self.comm.size}

    def send(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """Start averaging this bucket and move the earlier ones on; the last bucket of a step completes all."""
        gradients = bucket.buffer()
        exchange = self._exchange(bucket.index(), gradients)
        exchange.payload[: exchange.numel].copy_(gradients)
        exchange.start(self.step)
        devices: list[int | str | torch.device] | None = [gradients.device] if gradients.is_cuda else None
        future: torch.futures.Future[Tensor] = torch.futures.Future(devices=devices)
        self._in_flight.append((exchange, gradients, future))
        if len(self._in_flight) >= 2:
            self._in_flight[-2][0].advance()
        if bucket.is_last():
            self._complete_step()
        return future

    def _complete_step(self) -> None:
        in_flight, self._in_flight = self._in_flight, []
        in_flight[-1][0].advance()
        for exchange, _, _ in in_flight:
            exchange.wait()
        bring_headers(exchange for exchange, _, _ in in_flight)
        finite = all([exchange.outcome().finite for exchange, _, _ in in_flight])
        for exchange, gradients, future in in_flight:
            # A NaN goes on to every rank's gradients, where a GradScaler finds it; the residuals stay clean.
            average = torch.empty(exchange.padded_numel, device=gradients.device)
            exchange.read(average)
            if finite:
                exchange.commit()
            gradients.copy_(average[: exchange.numel])
            future.set_result(gradients)
        self.step += 1
        if not self._buckets_are_final:
            # DDP lays its buckets anew after its first backward: residuals would belong to other parameters.
            self._buckets_are_final = True
            self._exchanges.clear()

    def _exchange(self, index: int, gradients: Tensor) -> Exchange:
        codec = self._exact if self.step < self._exact_steps else self._codec
        known = self._exchanges.get(index)
        if known is None or known.numel != gradients.numel() or known.codec is not codec:
            if gradients.is_cuda:
                compiled_backend(gradients.device.type)  # a missing compiler is told when training starts
            known = self._exchanges[index] = Exchange(
                self.comm,
                gradients.numel(),
                codec,
                bucket=index,
                error_feedback=codec is not self._exact,
                device=gradients.device,
            )
            self._take_up(index, known)
        return known

    def _take_up(self, index: int, exchange: Exchange) -> None:
        """Give a new exchange the residuals that its bucket was saved with."""
        if exchange.codec is self._exact or index not in self._saved:
            return
        saved = self._saved.pop(index)
        if saved["numel"] != exchange.numel:
            warnings.warn(
                f"bucket {index} has {exchange.numel} elements, and its residuals were saved with {saved['numel']}: "
                "they start from zero. Give DistributedDataParallel the options it had",
                RuntimeWarning,
                stacklevel=2,
            )
            return
        for mine, other in ((exchange.worker_residual, saved["worker"]), (exchange.owner_residual, saved["owner"])):
            assert mine is not None
            mine.copy_(other)


def ddp_hook(state: CompressionState, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """A DDP communication hook that averages gradients through `state`'s codec, with error feedback."""
    return state.send(bucket)
