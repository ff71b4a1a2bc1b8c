"""0/1 Adam whose masters, variance and owner residuals are sharded, on ZeRO stage 1: the algorithm of ZeroOneAdam, step
for step, with what every worker needs for its own steps kept whole and everything else on its owner."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from thinwire import comm as communication
from thinwire.compress.codecs import DEFAULT_BLOCK_SIZE, make_codec
from thinwire.optim import options as agreement
from thinwire.optim.common_weights import CommonWeights
from thinwire.optim.sharded.full_bucket import ShardedZeroOneBucket
from thinwire.optim.sharded.full_checkpoint import load_buckets, own_tensors, save_buckets
from thinwire.optim.zero_one.clock import GroupSettings, ZeroOneClock
from thinwire.optim.zero_one.schedule import StepKind, ZeroOneSchedule, check_count
from thinwire.zero import LARGEST_BUCKET_BYTES, Piece, PieceSource, ShardedOptimizer
from thinwire.zero.optimizer import Vote
from thinwire.zero.saved_state import check_same_optimizer

__all__ = ["ShardedZeroOneAdam"]

_LEFT_OUT_STEPS = "left_out_steps"


class ShardedZeroOneAdam(ShardedOptimizer):
    """0/1 Adam (Lu et al. 2022, arXiv 2202.06009, Algorithm 1) on ZeRO stage 0 or 1: see ZeroOneAdam for the algorithm.

    With fp32 parameters it moves the weights as `ZeroOneAdam(compress="update", codec="sign1")` does, bit for bit where
    buckets hold the same parameters. 16-bit parameters have fp32 masters on the owner, and every worker keeps the
    common weights in 16 bits, rounded stochastically with one seed on all ranks, and taken from the masters at every
    exact step and after `resync_interval` steps; denominators and residuals are then bf16.

    Bytes an element at stage 1 on N ranks, beside gradients: fp32 parameters 16 + 8/N until the variance is frozen,
    24 + 4/N afterwards; 16-bit ones 10 + 12/N and 16 + 8/N. An exact step sends the denominators too, so that it sends
    half as much again as ZeroOneAdam's.

    Args:
        params, comm, named_parameters, param_dtype, bucket_bytes: as in ShardedOptimizer. A group may hold
            `exp_avg_mask`, a tensor that broadcasts to its parameters: they stay where it is zero.
        lr, betas, eps, weight_decay: as in torch.optim.AdamW.
        var_freeze_step, var_update_scaler, local_step_scaler, local_step_clipper: as in ZeroOneAdam.
        stage: 0 or 1.
        block_size: elements that share one scale.
        resync_interval: steps after which 16-bit weights are taken from the masters again, at the next that sends.

    A parameter that has a gradient on some ranks only counts as zero on the others. A step that sends and is not finite
    on any rank is skipped on all: see `last_step`, whose `grad_norm` is not known (NaN) otherwise. A local step counts
    as applied on every rank; one that was not finite on this rank adds nothing here: see `left_out_steps`.

    Raises ValueError or TypeError, on every rank, for parameters or options that cannot work.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        var_freeze_step: int = 100_000,
        var_update_scaler: int = 16,
        local_step_scaler: int = 32_678,
        local_step_clipper: int = 16,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        stage: int = 1,
        comm: communication.Communicator | None = None,
        named_parameters: Iterable[tuple[str, Tensor]] | None = None,
        param_dtype: torch.dtype | None = None,
        bucket_bytes: int = LARGEST_BUCKET_BYTES,
        block_size: int = DEFAULT_BLOCK_SIZE,
        resync_interval: int = 100,
    ) -> None:
        self.left_out_steps = 0
        self._var_freeze_step = var_freeze_step
        self._intervals = {
            "var_update_scaler": var_update_scaler,
            "local_step_scaler": local_step_scaler,
            "local_step_clipper": local_step_clipper,
        }
        self._resync_interval = resync_interval
        self._resynchronized_at = 0
        super().__init__(
            params,
            torch.optim.AdamW,
            stage=stage,
            comm=comm,
            named_parameters=named_parameters,
            param_dtype=param_dtype,
            bucket_bytes=bucket_bytes,
            block_size=block_size,
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
        )
        self._name = type(self).__name__
        self._clock = ZeroOneClock(self._schedule)
        self._groups = GroupSettings(self.param_groups, self._placement.group_of)
        for masters in self._masters:
            masters.keep_state(False)
        self._zero_one = [
            ShardedZeroOneBucket(
                bucket,
                CommonWeights(bucket, masters),
                self._exchange_comm,
                self._codec,
                self._clock,
                self._groups,
                lambda: self.loss_scale,
            )
            for bucket, masters in zip(self._buckets, self._masters, strict=True)
        ]
        self._rounds.use(self._zero_one, True)

    # What it reports

    @property
    def steps(self) -> int:
        """Steps applied, local ones among them."""
        return self._clock.steps

    @property
    def frozen(self) -> bool:
        """Whether the variance is frozen, so that some steps send nothing."""
        return self._clock.frozen_at is not None

    @property
    def frozen_at(self) -> int | None:
        """The step after which the variance was frozen; None before."""
        return self._clock.frozen_at

    @property
    def in_sync(self) -> bool:
        """Whether all ranks hold the same weights: no local step has been taken since the last sync."""
        return self._clock.in_sync

    left_out_steps: int
    """Local steps to which this rank added nothing, as its gradient was not finite."""

    # What a training loop calls

    @torch.no_grad()
    def synchronize_weights(self) -> None:
        """Meet the other ranks now, so that all hold the same weights: before evaluation, or any change of weights.
        Collective, unless the ranks are in sync already: call it at the same step on every rank.

        This is a sync between two steps, 1 bit an element: training goes on from there, not bit for bit as without.
        Raises RuntimeError between backward() and step().
        """
        if self._rounds.in_step:
            raise RuntimeError("synchronize_weights() was called between backward() and step(): call step() first")
        if self.in_sync:
            return
        self._notice_written_weights()
        for bucket in self._zero_one:
            bucket.meet()
            bucket.sync_step(decay=False)
        self._clock.progress.reset()

    def leave_out(self, parameters: Iterable[Tensor]) -> None:
        """Refused with a RuntimeError: to agree on what to leave out takes a message, and local steps send none."""
        raise RuntimeError(
            "ShardedZeroOneAdam leaves no parameters out of a step: without a gradient on any rank they count as zero "
            "by themselves. Use ShardedOneBitAdam to save their bytes"
        )

    # Checkpoints

    def pieces(self) -> list[Piece]:
        """See ShardedOptimizer; between two syncs the weights are those of the last."""
        return save_buckets(self._zero_one, self._placement.names)

    def rank_tensors(self) -> dict[str, Tensor]:
        """Return this rank's residuals and, once the variance is frozen, its own momenta, by parameter."""
        left_out = {_LEFT_OUT_STEPS: torch.tensor([self.left_out_steps])}
        return own_tensors(self._zero_one, self._placement.names) | left_out

    def counters(self) -> dict[str, Any]:
        """Settings, and where the run is."""
        mine = self._clock.state() | {"resynchronized_at": self._resynchronized_at}
        return super().counters() | {"zero_one": mine}

    @torch.no_grad()
    def load(self, source: PieceSource) -> None:
        """Take over what another run saved, of any stage and number of ranks. Collective.

        Where the number of ranks differs, every rank's residuals and local progress become the mean of the saved ones,
        which is all that the average over ranks depends on.
        """
        saved = source.counters()
        check_same_optimizer(saved, self._name, self.param_groups)
        self.reset_state()
        super().load(source)
        self._clock.load(saved["zero_one"])
        self._resynchronized_at = saved["zero_one"]["resynchronized_at"]
        if self.frozen:
            for bucket in self._zero_one:
                bucket.begin_local_steps()
        load_buckets(self._zero_one, self._placement.names, source, self.comm.rank, self.comm.size)
        if self.frozen:
            for bucket in self._zero_one:
                bucket.show()
        if source.world_size == self.comm.size:
            self.left_out_steps = int(source.read_rank(_LEFT_OUT_STEPS, self.comm.rank))

    @torch.no_grad()
    def load_weights(self, source: PieceSource) -> None:
        """See ShardedOptimizer; local progress is dropped: all ranks hold what was saved."""
        super().load_weights(source)
        self._clock.progress.reset()
        for bucket in self._zero_one:
            bucket.adopt_weights()

    def reset_state(self) -> None:
        """Forget moments, residuals and the schedule's position; the weights are those of the last sync."""
        self.zero_grad()
        self._clock.reset()
        self._resynchronized_at = self.left_out_steps = 0
        for bucket in self._zero_one:
            bucket.weights.reset()
            bucket.begin()

    # One step

    def _vote(self) -> Vote:
        if self._clock.next_kind is StepKind.LOCAL:
            return Vote(True, math.nan, frozenset())
        outcomes = [bucket.outcome() for bucket in self._zero_one]
        absent = frozenset[int]()
        if any(outcome.incomplete for outcome in outcomes):
            absent = self._agree_on_absent(self._rounds.missing)
        finite = all(outcome.finite for outcome in outcomes)
        return Vote(finite, math.nan if finite else math.inf, absent)

    def _apply(self, norm: float, absent: frozenset[int]) -> None:
        self._notice_written_weights()
        kind, interval = self._clock.next_kind, self._variance_interval
        self._clock.steps += 1
        if kind is StepKind.EXACT:
            self._clock.variance_updates += 1
            for bucket in self._zero_one:
                bucket.exact_step(absent)
        elif kind is StepKind.COMPRESSED:
            for bucket in self._zero_one:
                bucket.compressed_step()
        else:
            self._frozen_step(kind)
        if kind is not StepKind.LOCAL:
            self._resynchronize(now=kind is StepKind.EXACT)
        if not self.frozen and self.steps >= self._var_freeze_step:
            self._freeze()
        if self.frozen_at == self.steps or interval != self._variance_interval:
            rates = [float(group["lr"]) for group in self.param_groups]
            agreement.check_same_freeze(self._exchange_comm, self.frozen, rates)

    def _frozen_step(self, kind: StepKind) -> None:
        progress, shares = self._clock.progress, {}
        for number in sorted(set(self._placement.group_of)):
            settings = self._groups.of_group(number)
            shares[number] = progress.share(number, settings, self.steps)
            progress.advance(number, settings, self.steps)
        if kind is StepKind.SYNC:
            for bucket in self._zero_one:
                bucket.sync_step()
            progress.reset()
        else:
            finite = self._local_step_is_finite()
            for bucket in self._zero_one:
                bucket.local_step(shares, finite)

    def _local_step_is_finite(self) -> bool:
        if all(bucket.local_is_finite for bucket in self._zero_one):
            return True
        self.left_out_steps += 1
        warnings.warn(
            f"local step {self.steps} adds nothing on rank {self.comm.rank}: a gradient was NaN or infinite there. "
            "The other ranks go on",
            RuntimeWarning,
            stacklevel=6,
        )
        return False

    def _notice_written_weights(self) -> None:
        """Take over weights that somebody wrote into the parameters.

        Raises RuntimeError where those were this rank's own: what was written need not be the same on other ranks.
        """
        for bucket in self._zero_one:
            changed = bucket.check_written(self.in_sync)
            if changed is not None:
                raise RuntimeError(
                    f"{self._placement.describe(changed.parameter)} was changed between local steps, in which ranks "
                    "hold weights of their own: call optimizer.synchronize_weights() on every rank before you change "
                    "weights"
                )

    def _freeze(self) -> None:
        self._clock.frozen_at = self.steps
        for bucket in self._zero_one:
            bucket.freeze()

    def _resynchronize(self, *, now: bool) -> None:
        """Take 16-bit weights from the owners' masters; between no local steps."""
        if not now and self.steps - self._resynchronized_at < self._resync_interval:
            return
        self._resynchronized_at = self.steps
        rounded = [bucket for bucket in self._zero_one if bucket.weights.rounded_masters]
        for wait in [bucket.weights.publish() for bucket in rounded]:
            wait()
        for bucket in rounded:
            bucket.adopt_weights()

    @property
    def _variance_interval(self) -> int:
        return self._schedule.variance_interval(self._clock.variance_updates)

    # Setting up

    def _own_settings(self) -> dict[str, Any]:
        intervals = {"var_freeze_step": self._var_freeze_step, **self._intervals}
        return intervals | {"resync_interval": self._resync_interval}

    def _check_options(self, **settings: Any) -> None:
        if settings["stage"] in (2, 3):
            raise ValueError(
                f"stage must be 0 or 1, got {settings['stage']}: a local step needs this rank's own whole gradient, "
                "momentum and weights, which stages 2 and 3 would shard"
            )
        super()._check_options(**settings)
        self._schedule = ZeroOneSchedule(**self._intervals)
        check_count("var_freeze_step", self._var_freeze_step)
        check_count("resync_interval", self._resync_interval)
        self._codec = make_codec("sign1", settings["block_size"])
