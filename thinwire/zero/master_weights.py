"""The fp32 weights and the optimizer state that one rank keeps for one bucket, and any elementwise torch optimizer's
step on them: what ZeRO shards."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from thinwire.zero.flat_bucket import FlatBucket
from thinwire.zero.saved_slices import Piece, PieceSource
from thinwire.zero.saved_state import group_settings, read_state, read_weight, state_pieces

__all__ = ["BucketMasters", "OptimizerClass"]

OptimizerClass = Callable[..., torch.optim.Optimizer]


class BucketMasters:
    """Master weights of a bucket, fp32, and the optimizer that steps them; the whole bucket's or this rank's shard's.

    The optimizer sees every parameter's part as a parameter of its own, one-dimensional, in the parameter's group:
    elementwise optimizers do not care where a tensor was cut. fp32 parameters are their own masters, unless `offload`
    keeps masters and state in CPU memory, the masters page-locked with `pin_memory`.
    """

    def __init__(
        self,
        bucket: FlatBucket,
        groups: Sequence[Mapping[str, Any]],
        group_of: Sequence[int],
        optimizer_class: OptimizerClass,
        *,
        whole: bool,
        offload: bool,
        pin_memory: bool,
    ) -> None:
        self.bucket = bucket
        self.whole = whole
        self._groups = groups
        self._group_of = group_of
        self._offload = offload and bucket.flat.device.type != "cpu"
        self._pin_memory = pin_memory
        self.runs = bucket.runs(0, bucket.layout.numel) if whole else bucket.own_runs
        self.weights = self._make_masters()
        self.parts = [self.weights[run.place] for run in self.runs]
        self._used_groups = sorted({group_of[run.parameter] for run in self.runs})
        self._optimizer_class = optimizer_class
        self.optimizer: torch.optim.Optimizer | None = None
        self.keep_state(True)

    @property
    def _replica(self) -> Tensor:
        return self.bucket.flat if self.whole else self.bucket.own_shard

    @property
    def separate(self) -> bool:
        """Whether masters are other tensors than the parameters' own."""
        return self._offload or self.bucket.dtype != torch.float32

    def keep_state(self, keep: bool) -> None:
        """Let the optimizer go, for one that steps the weights by itself, or have a new one."""
        if not keep or not self.runs:
            self.optimizer = None
        elif self.optimizer is None:
            self.optimizer = self._optimizer_class([self._inner_group(number) for number in self._used_groups])

    def step(self, average: Tensor, coefficient: float, absent: frozenset[int]) -> None:
        """Step with `coefficient * average`, a tensor like `weights` in the gradients' dtype; `absent` parameters stay.

        `average` may be scaled in place.
        """
        if self.optimizer is None:
            return
        self._run_optimizer(average, coefficient, absent)
        for part in self.parts:
            part.grad = None

    def publish(self) -> Callable[[], None]:
        """Give the new weights to the parameters of every rank; returns what waits until they are there."""
        if self.whole:
            if self.separate:
                self.bucket.flat.copy_(self.weights)
            return lambda: None
        shard = self.weights if self.separate else self.weights.clone()
        return self.bucket.gather(shard.to(device=self.bucket.flat.device, dtype=self.bucket.dtype))

    def state_of(self, part: int) -> dict[str, Any]:
        """The optimizer's state of `parts[part]`; empty where it was let go."""
        if self.optimizer is None:
            return {}
        state: dict[str, Any] = self.optimizer.state[self.parts[part]]
        return state

    def own_cuts(self) -> list[tuple[int, slice]]:
        """The numbers of the parts that reach into this rank's shard, each with those of its elements that do."""
        low, high = self.bucket.own_range
        first = low if self.whole else 0
        cuts = []
        for number, run in enumerate(self.runs):
            begin, end = max(run.place.start, first), min(run.place.stop, first + high - low)
            if begin < end:
                cuts.append((number, slice(begin - run.place.start, end - run.place.start)))
        return cuts

    def pieces(self, names: Sequence[str]) -> list[Piece]:
        """Weights, masters and optimizer state of this rank's shard."""
        own = self.bucket.own_shard
        pieces = [Piece("weight", names[run.parameter], run.start, own[run.place]) for run in self.bucket.own_runs]
        for number, cut in self.own_cuts():
            run = self.runs[number]
            name, start = names[run.parameter], run.start + cut.start
            if self.separate:
                pieces.append(Piece("master", name, start, self.parts[number][cut]))
            pieces += state_pieces(self.state_of(number), name, start, cut)
        return pieces

    @torch.no_grad()
    def load_weights(self, source: PieceSource, names: Sequence[str]) -> None:
        """Take over the masters; the parameters hold their weights already."""
        for run, part in zip(self.runs, self.parts, strict=True):
            part.copy_(read_weight(source, torch.float32, names[run.parameter], run.start, run.numel))

    def load_state(self, source: PieceSource, names: Sequence[str]) -> None:
        """Take over the optimizer's state, where there is an optimizer."""
        if self.optimizer is not None:
            state = [read_state(source, names[run.parameter], run.start, run.numel) for run in self.runs]
            order = [self._number_of(part) for group in self.optimizer.param_groups for part in group["params"]]
            packed = self.optimizer.state_dict()
            packed["state"] = {place: state[number] for place, number in enumerate(order) if state[number]}
            self.optimizer.load_state_dict(packed)

    def _run_optimizer(self, average: Tensor, coefficient: float, absent: frozenset[int]) -> None:
        assert self.optimizer is not None
        gradient = average.to(device=self.weights.device, dtype=torch.float32)
        if coefficient != 1.0:
            gradient.mul_(coefficient)
        for run, part in zip(self.runs, self.parts, strict=True):
            part.grad = None if run.parameter in absent else gradient[run.place]
        self._take_over_settings()
        self.optimizer.step()

    def _number_of(self, part: Tensor) -> int:
        return next(number for number, mine in enumerate(self.parts) if mine is part)

    def _make_masters(self) -> Tensor:
        if not self.separate:
            return self._replica.detach()
        if self.bucket.dtype == torch.float32:
            return self._rest(self._replica.detach().to("cpu", copy=True))
        masters = self.bucket.take_initial()
        return self._rest(masters.to("cpu")) if self._offload else masters

    def _rest(self, masters: Tensor) -> Tensor:
        return masters.pin_memory() if self._pin_memory else masters

    def _inner_group(self, number: int) -> dict[str, Any]:
        parts = [
            part for run, part in zip(self.runs, self.parts, strict=True) if self._group_of[run.parameter] == number
        ]
        return {**group_settings(self._groups[number]), "params": parts}

    def _take_over_settings(self) -> None:
        assert self.optimizer is not None
        for number, inner in zip(self._used_groups, self.optimizer.param_groups, strict=True):
            inner.update(group_settings(self._groups[number]))
