"""The fp32 weights that one rank keeps for one bucket: what ZeRO shards, and how the model's parameters follow them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor

from thinwire.zero.flat_bucket import FlatBucket
from thinwire.zero.saved_slices import SavedSlice, SliceSource
from thinwire.zero.saved_state import read_weight

__all__ = ["MasterWeights", "bring_beside"]


class MasterWeights:
    """Master weights of a bucket, fp32: the whole bucket's or this rank's shard's.

    fp32 parameters are their own master weights, unless `offload` keeps them in CPU memory, page-locked with
    `pin_memory`, for parameters on a GPU.

    `runs`: the stretches of parameters that this rank keeps, with places in `weights`. `views`: their weights, fp32,
    one-dimensional.
    """

    def __init__(self, bucket: FlatBucket, *, whole: bool, offload: bool, pin_memory: bool) -> None:
        self.bucket = bucket
        self.whole = whole
        self._offload = offload and bucket.flat.device.type != "cpu"
        self._pin_memory = pin_memory
        self.runs = bucket.runs(0, bucket.layout.numel) if whole else bucket.own_runs
        self.weights = self._initial_weights()
        self._landing: Tensor | None = None
        self.views = [self.weights[run.place] for run in self.runs]

    @property
    def separate(self) -> bool:
        """Whether they are other tensors than the parameters' own."""
        return self._offload or self.bucket.dtype != torch.float32

    @property
    def offloaded(self) -> bool:
        """Whether they are in CPU memory, and the parameters are not."""
        return self._offload

    @property
    def held(self) -> slice:
        """What this rank keeps, as elements of the bucket, padding included."""
        layout = self.bucket.layout
        first = 0 if self.whole else self.bucket.comm.rank * layout.shard
        return slice(first, layout.padded_numel if self.whole else first + layout.shard)

    def publish(self) -> Callable[[], None]:
        """Give the new weights to the parameters of every rank; returns what waits until they are there."""
        if self.whole:
            if self.separate:
                self.bucket.flat.copy_(self.weights)
            return lambda: None
        shard = self.weights if self.separate else self.weights.clone()
        # Page-locked weights leave while the host goes on, and are rounded where that is fast. They change again only
        # after the host has waited for the next step's gradients, which come behind them.
        shard = shard.to(self.bucket.flat.device, non_blocking=True)
        return self.bucket.gather(shard.to(self.bucket.dtype))

    def start_bringing(self, values: Tensor) -> Tensor:
        """`values`, fp32 like the weights, on their way to lie beside them: there once the host has waited."""
        if not self._offload:
            return values
        if self._landing is None:
            self._landing = self._rest(torch.empty_like(self.weights))
        return self._landing.copy_(values, non_blocking=self._pin_memory)

    def own_cuts(self) -> list[tuple[int, slice]]:
        """The numbers of the runs that reach into this rank's shard, each with those of its elements that do."""
        low, high = self.bucket.own_range
        first = low if self.whole else 0
        cuts = []
        for number, run in enumerate(self.runs):
            begin, end = max(run.place.start, first), min(run.place.stop, first + high - low)
            if begin < end:
                cuts.append((number, slice(begin - run.place.start, end - run.place.start)))
        return cuts

    def saved_slices(self, names: Sequence[str]) -> list[SavedSlice]:
        """Weights and master weights of this rank's shard."""
        own = self.bucket.own_shard
        slices = [SavedSlice("weight", names[run.parameter], run.start, own[run.place]) for run in self.bucket.own_runs]
        for number, cut in self.own_cuts() if self.separate else ():
            run = self.runs[number]
            slices.append(SavedSlice("master", names[run.parameter], run.start + cut.start, self.views[number][cut]))
        return slices

    @torch.no_grad()
    def load(self, source: SliceSource, names: Sequence[str]) -> None:
        """Take them over; the parameters hold their weights already."""
        if self._offload:
            _wait_for(self.bucket.flat.device)  # earlier weights may be leaving
        for run, view in zip(self.runs, self.views, strict=True):
            view.copy_(read_weight(source, torch.float32, names[run.parameter], run.start, run.numel))

    def take_over(self, parameters: Collection[int]) -> None:
        """Have the values that these parameters show, by number."""
        if self.separate:
            shown = self.bucket.flat[self.held]
            for run, view in zip(self.runs, self.views, strict=True):
                if run.parameter in parameters:
                    view.copy_(shown[run.place])

    def _initial_weights(self) -> Tensor:
        replica = self.bucket.flat if self.whole else self.bucket.own_shard
        if not self.separate:
            return replica.detach()
        if self.bucket.dtype == torch.float32:
            return self._rest(replica.detach().to("cpu", copy=True))
        weights = self.bucket.take_initial()
        return self._rest(weights.to("cpu")) if self._offload else weights

    def _rest(self, weights: Tensor) -> Tensor:
        return weights.pin_memory() if self._pin_memory else weights


def bring_beside(masters: Sequence[MasterWeights], values: Sequence[Tensor]) -> list[Tensor]:
    """`values`, fp32 like each of `masters`' weights, where those are: for weights that are offloaded copies, which the
    next call for them overwrites. All leave before the host waits, once."""
    brought = [one.start_bringing(of_one) for one, of_one in zip(masters, values, strict=True)]
    if any(one.offloaded for one in masters):
        _wait_for(masters[0].bucket.flat.device)
    return brought


def _wait_for(device: torch.device) -> None:
    torch.accelerator.current_stream(device).synchronize()
