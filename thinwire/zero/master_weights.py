"""Parameters as views of flat buckets, the fp32 master weights of their owners, and new weights on their way.

The parameters of one bucket lie in one contiguous tensor, with which the model computes: a collective moves whole
shards without copying parameters together first. New weights may be in flight while the next forward runs: each
parameter is waited for when it is read, so that gathering costs time only where the network is slower than the model.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from thinwire.comm import Communicator
from thinwire.zero.bucket_layout import BucketLayout, Slot
from thinwire.zero.saved_state import SavedSlice, SliceSource, read_weight

__all__ = ["FlatBucket", "MasterWeights", "Run", "WeightGate", "bring_beside"]


@dataclass(frozen=True)
class Run:
    """The part of one parameter that lies in a range of a bucket.

    `start`: its first element within the flattened parameter. `place`: where it lies within the range.
    """

    parameter: int
    start: int
    place: slice

    @property
    def numel(self) -> int:
        """How many elements it is."""
        return int(self.place.stop - self.place.start)


class FlatBucket:
    """Parameters as views of `flat`, [padded_numel] in `dtype`, and the shard of it that this rank owns.

    Construction moves the parameters: their `.data` becomes a view. `keep` says which of the values before rounding to
    `dtype` to keep in fp32 for `take_initial`: the "shard", the "whole" bucket or nothing.
    """

    def __init__(
        self,
        comm: Communicator,
        index: int,
        layout: BucketLayout,
        parameters: Sequence[Tensor],
        dtype: torch.dtype,
        keep: Literal["shard", "whole"] | None,
    ) -> None:
        self.index = index
        self.layout = layout
        self.comm = comm
        self.parameters = [parameters[slot.parameter] for slot in layout.slots]
        self._shapes = {slot: p.shape for slot, p in zip(layout.slots, self.parameters, strict=True)}
        device = self.parameters[0].device
        self.flat = torch.zeros(layout.padded_numel, dtype=dtype, device=device)
        self._initial = self._initial_values(keep) if keep else None
        self._addresses, self._versions = [], []
        for slot, parameter in self.members():
            view = self.view(self.flat, slot)
            view.copy_(parameter.detach())
            parameter.data = view
            self._addresses.append(view.data_ptr())
            self._versions.append(parameter._version)

    @property
    def dtype(self) -> torch.dtype:
        """Of the parameters as the model sees them."""
        return self.flat.dtype

    @property
    def own_range(self) -> tuple[int, int]:
        """The elements of the bucket that this rank owns, valid ones only."""
        start = self.comm.rank * self.layout.shard
        return min(start, self.layout.numel), min(start + self.layout.shard, self.layout.numel)

    @property
    def own_shard(self) -> Tensor:
        """The shard of `flat` that belongs to this rank, a view, [shard]."""
        return self.shard_of(self.flat)

    @property
    def own_runs(self) -> list[Run]:
        """The parts of parameters in this rank's shard."""
        return self.runs(*self.own_range)

    def shard_of(self, bucket: Tensor) -> Tensor:
        """The same shard of another tensor of [padded_numel], a view."""
        return bucket[self.comm.rank * self.layout.shard :][: self.layout.shard]

    def runs(self, start: int, stop: int) -> list[Run]:
        """The parts of parameters in elements `start` to `stop` of the bucket, empty ones left out."""
        runs = []
        for slot in self.layout.slots:
            first, last = max(slot.offset, start), min(slot.offset + slot.numel, stop)
            if first < last:
                runs.append(Run(slot.parameter, first - slot.offset, slice(first - start, last - start)))
        return runs

    def view(self, bucket: Tensor, slot: Slot) -> Tensor:
        """The part of a tensor of [padded_numel] that belongs to a parameter, in the parameter's shape."""
        return bucket[slot.offset : slot.offset + slot.numel].view(self._shapes[slot])

    def shape_of(self, parameter: int) -> torch.Size:
        """The shape of the parameter with this number."""
        return next(shape for slot, shape in self._shapes.items() if slot.parameter == parameter)

    def members(self) -> list[tuple[Slot, Tensor]]:
        """The parameters with their slots."""
        return list(zip(self.layout.slots, self.parameters, strict=True))

    @torch.no_grad()
    def take_written(self) -> list[Slot]:
        """The parameters that were written since the last call; what goes through `flat` does not count.

        One whose `.data` was replaced is moved into `flat` again, with its new values.
        """
        written = []
        for number, parameter in enumerate(self.parameters):
            version, self._versions[number] = self._versions[number], parameter._version
            if (moved := parameter.data_ptr() != self._addresses[number]) or version != self._versions[number]:
                slot = self.layout.slots[number]
                written.append(slot)
                if moved:
                    view = self.view(self.flat, slot)
                    view.copy_(parameter)
                    parameter.data = view
        return written

    def take_initial(self) -> Tensor:
        """The values that the parameters had before they were rounded, fp32, for the masters; forgotten here."""
        assert self._initial is not None
        initial, self._initial = self._initial, None
        return initial

    def gather(self, shard: Tensor) -> Callable[[], None]:
        """Start giving every rank all owners' `shard`, [shard] in this bucket's dtype; returns what waits for it."""
        work = self.comm.all_gather(self.flat, shard, async_op=True)
        return work.wait

    def _initial_values(self, keep: Literal["shard", "whole"]) -> Tensor:
        numel = self.layout.padded_numel if keep == "whole" else self.layout.shard
        values = torch.zeros(numel, device=self.flat.device)
        by_number = {slot.parameter: p for slot, p in zip(self.layout.slots, self.parameters, strict=True)}
        for run in self.runs(0, self.layout.numel) if keep == "whole" else self.own_runs:
            parameter = by_number[run.parameter].detach()
            values[run.place].copy_(parameter.reshape(-1)[run.start : run.start + run.numel])
        return values


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


class WeightGate:
    """Holds what waits for each bucket's weights, and calls it when a parameter of the bucket is read.

    Reading is `module.weight`, whatever module's code does it, `module.parameters()` or `state_dict()`. Code that has
    kept parameters from before must call `open` first. Modules that keep references of their own, as recurrent ones
    do, wait before their forward.
    """

    def __init__(self, module: nn.Module, bucket_of: Mapping[int, int]) -> None:
        self._pending: dict[int, Callable[[], None]] = {}
        self._bucket_of = bucket_of
        for part in module.modules():
            own = part._parameters
            needed = sorted({bucket_of[id(one)] for one in own.values() if id(one) in bucket_of})
            if needed:
                part._parameters = _WaitingParameters(own, self)
                part.register_forward_pre_hook(self._before_forward(needed))

    def close(self, bucket: int, wait: Callable[[], None]) -> None:
        """Note what waits for a bucket's weights."""
        self._pending[bucket] = wait

    def open(self) -> None:
        """Wait for all of them."""
        for bucket in list(self._pending):
            self._wait(bucket)

    def open_for(self, parameter: Tensor | None) -> None:
        """Wait for one parameter."""
        if self._pending and parameter is not None:
            self._wait(self._bucket_of.get(id(parameter), -1))

    def _wait(self, bucket: int) -> None:
        wait = self._pending.pop(bucket, None)
        if wait is not None:
            wait()

    def _before_forward(self, needed: list[int]) -> Callable[..., None]:
        def hook(module: nn.Module, arguments: Any) -> None:
            del module, arguments
            for bucket in needed:
                self._wait(bucket)

        return hook


class _WaitingParameters(dict[str, nn.Parameter | None]):
    """A module's own parameters, which `nn.Module` looks up by name; a copy, as of a module, is a plain dict."""

    def __init__(self, parameters: Mapping[str, nn.Parameter | None], gate: WeightGate) -> None:
        super().__init__(parameters)
        self._gate = gate

    def __getitem__(self, name: str) -> nn.Parameter | None:
        parameter = super().__getitem__(name)
        self._gate.open_for(parameter)
        return parameter

    def get(self, name: str, default: Any = None) -> Any:
        parameter = super().get(name, default)
        self._gate.open_for(parameter)
        return parameter

    def items(self) -> Any:
        self._open()
        return super().items()

    def values(self) -> Any:
        self._open()
        return super().values()

    def __reduce__(self) -> tuple[Any, ...]:
        self._open()
        return dict, (dict(super().items()),)

    def _open(self) -> None:
        for parameter in super().values():
            self._gate.open_for(parameter)
