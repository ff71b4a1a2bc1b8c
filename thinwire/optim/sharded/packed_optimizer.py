"""What 1-bit optimizers have in common whose masters, variance and owner residuals are sharded: one bit an element on
the wire, and ZeRO's memory. The freeze turns the warmup's state into what every worker needs to go on with one bit."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from thinwire import comm as communication
from thinwire.compress.codecs import make_codec
from thinwire.optim import options as agreement
from thinwire.optim.formulas import AdamSettings
from thinwire.optim.freeze_rule import make_freeze_rule
from thinwire.optim.sharded.checkpoint import load_frozen, load_worker_residual, save_frozen, worker_residuals
from thinwire.optim.sharded.norm_sketch import NormSketch
from thinwire.optim.sharded.packed_bucket import FrozenBucket, StepSettings
from thinwire.optim.sharded.packing import FrozenState, freeze, variance_norm
from thinwire.zero import Piece, PieceSource, ShardedOptimizer
from thinwire.zero.flat_bucket import FlatBucket
from thinwire.zero.master_weights import BucketMasters, OptimizerClass
from thinwire.zero.optimizer import Vote
from thinwire.zero.saved_state import check_same_optimizer

__all__ = ["ReplicaDriftError", "ShardedOneBitOptimizer"]


class ReplicaDriftError(RuntimeError):
    """Ranks' replicas of the weights differ, where every one of them should hold the same bits."""


class ShardedOneBitOptimizer(ShardedOptimizer):
    """A ShardedOptimizer that freezes its variance after a warmup, and then sends one bit an element.

    A subclass gives the warmup's optimizer class with its options, betas among them, and may change what the freeze,
    the frozen buckets and their steps do. For the other arguments, see ShardedOneBitAdam.
    """

    def __init__(
        self,
        params: ParamsT,
        optimizer_class: OptimizerClass,
        *,
        freeze_step: int | Literal["auto"],
        stage: int,
        comm: communication.Communicator | None,
        named_parameters: Iterable[tuple[str, Tensor]] | None,
        param_dtype: torch.dtype | None,
        bucket_bytes: int,
        max_norm: float,
        offload: bool,
        pin_memory: bool,
        block_size: int,
        resync_interval: int,
        on_drift: Literal["repair", "raise"],
        reversible: bool | None,
        **options: Any,
    ) -> None:
        self.steps = 0
        self.frozen_at: int | None = None
        self._frozen: list[FrozenBucket] = []
        self._resync_interval = resync_interval
        self._on_drift = on_drift
        self._reversible = reversible
        self._freeze_step = freeze_step
        self._block_size = block_size
        self._first_beta2 = options["betas"][1]
        super().__init__(
            params,
            optimizer_class,
            stage=stage,
            comm=comm,
            named_parameters=named_parameters,
            param_dtype=param_dtype,
            bucket_bytes=bucket_bytes,
            max_norm=max_norm,
            offload=offload,
            pin_memory=pin_memory,
            block_size=block_size,
            **options,
        )
        for group in self.param_groups:
            self._check_group(group)
        self._name = type(self).__name__
        self._rule = make_freeze_rule(freeze_step, max(group["betas"][1] for group in self.param_groups))
        self._sketch = NormSketch(self._exchange_comm, self._buckets[0].flat.device) if max_norm else None
        self._settings = StepSettings(self._group_settings, lambda: self.loss_scale, lambda: self.steps, self._sketch)

    @property
    def frozen(self) -> bool:
        """Whether the variance is frozen, so that steps send one bit an element."""
        return self.frozen_at is not None

    # Checkpoints

    def pieces(self) -> list[Piece]:
        """See ShardedOptimizer; once frozen, u, the preconditioner and the owners' residuals take the moments'
        place."""
        return super().pieces() + save_frozen(self._frozen, self._placement.names)

    def rank_tensors(self) -> dict[str, Tensor]:
        """The error-feedback residuals of this rank, by parameter."""
        return worker_residuals(self._frozen, self._placement.names)

    def counters(self) -> dict[str, Any]:
        """Settings, steps, and how far the freeze is."""
        mine = {"steps": self.steps, "frozen_at": self.frozen_at, "rule": self._rule.state()}
        return super().counters() | {"onebit": mine}

    @torch.no_grad()
    def load(self, source: PieceSource) -> None:
        """Take over what another run saved, of any stage and number of ranks. Collective.

        Where the number of ranks differs, every rank's residual becomes the mean of the saved ones, which is all that
        the average over ranks depends on.
        """
        saved = source.counters().get("onebit")
        if saved is None:
            raise ValueError(
                f"this state was saved by {source.counters().get('optimizer')}, which has no frozen stage: load the "
                f"weights only, and let {self._name} warm up"
            )
        check_same_optimizer(source.counters(), self._name, self.param_groups)
        frozen = saved["frozen_at"] is not None
        states = load_frozen(self._buckets, self._placement.names, source, self._codec) if frozen else []
        self._begin_warmup(keep_state=not frozen)
        super().load(source)
        self.steps = saved["steps"]
        # Else freeze_step was changed: the new rule starts afresh.
        if saved["rule"].keys() == self._rule.state().keys():
            self._rule.load(saved["rule"])
        if frozen:
            self._begin_frozen_stage(states, saved["frozen_at"])
            for bucket in self._frozen:
                load_worker_residual(bucket, self._placement.names, source, self.comm.rank, self.comm.size)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """See ShardedOptimizer."""
        super().zero_grad(set_to_none)
        if self._sketch is not None:
            self._sketch.discard()

    def reset_state(self) -> None:
        """Forget moments, residuals and the freeze: the warmup begins anew."""
        self._begin_warmup(keep_state=True)
        super().reset_state()
        self.steps = 0
        self._rule = make_freeze_rule(self._freeze_step, self._first_beta2)

    # One step

    def _vote(self) -> Vote:
        if not self.frozen:
            return super()._vote()
        outcomes = [bucket.outcome() for bucket in self._frozen]
        absent = self._rounds.left_out
        if any(outcome.incomplete for outcome in outcomes):
            absent |= self._agree_on_absent(self._rounds.missing)
        finite = all(outcome.finite for outcome in outcomes)
        return Vote(finite, self._settings.norm if finite else math.inf, absent)

    def _apply(self, norm: float, absent: frozenset[int]) -> None:
        if self.frozen:
            self._frozen_step()
        else:
            self._warmup_step(norm, absent)
            self._decide_on_freeze()

    def _warmup_step(self, norm: float, absent: frozenset[int]) -> None:
        """Move the weights of all ranks by the exactly averaged gradients."""
        super()._apply(norm, absent)

    def _decide_on_freeze(self) -> None:
        self.steps += 1
        rates = [float(group["lr"]) for group in self.param_groups]
        reached = self._rule.reached(self.steps, rates, self._variance_norm)
        if self._rule.looks_at(self.steps):
            agreement.check_same_freeze(self._exchange_comm, reached, rates)
        if reached:
            states = freeze(
                self._exchange_comm,
                self._buckets,
                self._masters,
                self.param_groups,
                self._placement.group_of,
                self._codec,
                self._scale_momenta,
            )
            self._begin_frozen_stage(states, self.steps)

    def _scale_momenta(self, momenta: Sequence[Tensor]) -> None:
        """Give u another scale in each parameter, in place, at the freeze; `momenta`: every bucket's own shard of u."""

    def _frozen_step(self) -> None:
        self._take_over()
        for bucket in self._frozen:
            bucket.move(seed=(self.steps << 20) + bucket.bucket.index)
        self.steps += 1
        assert self.frozen_at is not None
        if (self.steps - self.frozen_at) % self._resync_interval == 0:
            self._resynchronize()

    def _take_over(self) -> None:
        """Take every bucket's new u over, and find out what else the moves of this step depend on."""
        for bucket in self._frozen:
            bucket.take_over()

    def _find_clip(self) -> None:
        """Between the legs: the averaged gradient's norm, and what it makes of this step."""
        assert self._sketch is not None
        norm = self._sketch.norm() / self.loss_scale
        self._settings.norm = norm
        self._settings.clip = self._clip(norm) if math.isfinite(norm) else 1.0

    def _resynchronize(self) -> None:
        sums = [bucket.checksum() for bucket in self._frozen]
        mine = b"".join(value.to_bytes(8, "little") for value in sums)
        of_rank = self._exchange_comm.all_gather_bytes(mine)
        drifted = [rank for rank, other in enumerate(of_rank) if other != of_rank[0]]
        if drifted:
            self._report_drift(drifted)
        if drifted or (self.stage > 0 and any(masters.separate for masters in self._masters)):
            for wait in [bucket.synchronize_replica() for bucket in self._frozen]:
                wait()

    def _report_drift(self, ranks: list[int]) -> None:
        message = (
            f"the weights of ranks {ranks} differ from rank 0's after step {self.steps}: something changed them "
            "outside of the optimizer, or a rank's hardware computes differently"
        )
        if self._on_drift == "raise":
            raise ReplicaDriftError(message)
        if self.comm.rank == 0:
            warnings.warn(f"{message}. They were repaired from the owners' masters", RuntimeWarning, stacklevel=4)

    # Parts

    def _begin_warmup(self, *, keep_state: bool) -> None:
        self.zero_grad()
        self.frozen_at = None
        self._frozen = []
        for masters in self._masters:
            masters.keep_state(keep_state)
        self._rounds.use(self._gradients, self.stage < 2)

    def _begin_frozen_stage(self, states: list[FrozenState], frozen_at: int) -> None:
        fp16 = any(bucket.dtype == torch.float16 for bucket in self._buckets)
        reversible = self._reversible if self._reversible is not None else fp16 or bool(self.max_norm)
        self._frozen = [
            self._make_frozen_bucket(bucket, masters, state, reversible)
            for bucket, masters, state in zip(self._buckets, self._masters, states, strict=True)
        ]
        for masters in self._masters:
            masters.keep_state(False)
        for gradients in self._gradients:
            gradients.release()
        self.frozen_at = frozen_at
        self._rounds.use(self._frozen, True, self._find_clip if self._sketch is not None else None)

    def _make_frozen_bucket(
        self, bucket: FlatBucket, masters: BucketMasters, state: FrozenState, reversible: bool
    ) -> FrozenBucket:
        return FrozenBucket(
            bucket, masters, self._exchange_comm, self._codec, self._settings, state, reversible=reversible
        )

    def _variance_norm(self) -> float:
        return variance_norm(self._exchange_comm, self._masters, lambda number: self._group_settings(number).beta2)

    def _group_settings(self, number: int) -> AdamSettings:
        group = self.param_groups[self._placement.group_of[number]]
        return AdamSettings.of_group({"bias_correction": True, "eps_inside_sqrt": False, **group})

    def _check_group(self, group: Mapping[str, Any]) -> None:
        """Raise ValueError for what the warmup could do and the frozen stage cannot."""
        if group.get("maximize") or group.get("amsgrad"):
            raise ValueError(
                f"{type(self).__name__} has no maximize and no amsgrad: a frozen stage descends, with one variance"
            )
        mask: Tensor | None = group.get("exp_avg_mask")
        for parameter in group["params"] if mask is not None else ():
            assert mask is not None
            if not _broadcasts(mask.shape, parameter.shape):
                raise ValueError(
                    f"exp_avg_mask of shape {tuple(mask.shape)} does not broadcast to a parameter of shape "
                    f"{tuple(parameter.shape)} in its group"
                )

    def _own_settings(self) -> dict[str, Any]:
        return {"freeze_step": self._freeze_step, "resync_interval": self._resync_interval}

    def _check_options(self, **settings: Any) -> None:
        super()._check_options(**settings)
        make_freeze_rule(self._freeze_step, self._first_beta2)
        self._codec = make_codec("sign1", self._block_size)
        if isinstance(self._resync_interval, bool) or not self._resync_interval >= 1:
            raise ValueError(f"resync_interval must be at least 1 step, got {self._resync_interval!r}")
        if self._reversible is False and settings["max_norm"]:
            raise ValueError("reversible=False does not go with max_norm: clipping changes residuals after the fact")
        if self._on_drift not in ("repair", "raise"):
            raise ValueError(f"on_drift must be 'repair' or 'raise', got {self._on_drift!r}")


def _broadcasts(shape: torch.Size, to: torch.Size) -> bool:
    return len(shape) <= len(to) and all(
        mine in (1, theirs) for mine, theirs in zip(reversed(shape), reversed(to), strict=False)
    )
