"""ZeRO stages 0, 1 and 2 for any elementwise torch optimizer: swap the class, and masters, moments and (stage 2)
gradients are divided among the ranks of any Communicator."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, overload

import torch
from torch import Tensor, nn
from torch.optim.optimizer import ParamsT

from thinwire import comm as communication
from thinwire.comm.agreement import raise_together
from thinwire.zero.backward import BackwardRounds
from thinwire.zero.bucket_layout import LARGEST_BUCKET_BYTES
from thinwire.zero.flat_bucket import FlatBucket
from thinwire.zero.gradients import BucketGradients
from thinwire.zero.master_weights import BucketMasters, OptimizerClass
from thinwire.zero.parameter_order import Placement
from thinwire.zero.prefetch import WeightGate
from thinwire.zero.rank_checks import broadcast_from_rank_0, check_parameters, check_same_on_every_rank, check_sharding
from thinwire.zero.saved_slices import Piece, PieceSource
from thinwire.zero.saved_state import check_same_optimizer, counters_of, read_weight, take_over_settings

__all__ = ["STATE_IS_ON_ALL_RANKS", "ShardedOptimizer", "StepResult"]


STATE_IS_ON_ALL_RANKS = (
    "its state lies on all ranks, and one rank's would not be enough to go on from. Save with the engine's "
    "save_checkpoint(), or take pieces() and counters() of every rank, and load() them"
)


@dataclass(frozen=True)
class StepResult:
    """What became of a step, the same on every rank.

    `applied`: weights have moved. `grad_norm`: 2-norm of the averaged gradient, loss scale divided out, before
    clipping; not finite where the step was skipped for that.
    """

    applied: bool
    grad_norm: float


class Vote(NamedTuple):
    """What the ranks find out together before a step is applied.

    `finite`: the averaged gradient is. `norm`: of the averaged gradient, loss scale divided out. `absent`: the
    parameters that had a gradient on no rank.
    """

    finite: bool
    norm: float
    absent: frozenset[int]


class ShardedOptimizer(torch.optim.Optimizer):
    """A torch optimizer whose state is sharded over the ranks: ZeRO (Rajbhandari et al. 2020, arXiv 1910.02054).

    Gradients leave during `backward()`, bucket by bucket; `step()` steps the shard that this rank owns and gives the
    new weights to all. Every stage gives the same bits. Stage 0 keeps everything everywhere, stage 1 shards masters and
    optimizer state, stage 2 gradients as well. Single process, torchrun, mpirun and threads alike.

    Args:
        params: parameters or groups, fp32, bf16 or fp16, on one device; the same on every rank. Their storage moves
            into flat buckets; rank 0's values are given to all. Parameters that require no gradient now are left alone.
        optimizer_class: any elementwise torch.optim class, or a function that builds one from groups.
        stage: 0, 1 or 2.
        comm: a Communicator; by default `thinwire.comm.init()` finds out how the process was launched.
        named_parameters: names, and the order in which forward uses them; by default that of the groups.
        param_dtype: torch.bfloat16 or torch.float16 lays fp32 parameters out in it, keeping fp32 masters on the owner.
        bucket_bytes: gradients that leave together.
        block_size: shards are whole blocks of so many elements.
        max_norm: the averaged gradient's global norm is clipped to it; 0 does not clip.
        offload: keep masters and optimizer state in CPU memory, for parameters on a GPU; with `pin_memory` the masters
            are page-locked, for faster copies.
        options: for the optimizer class: lr, betas, ...

    A parameter without a gradient on some ranks counts as zero there; without one on any rank it is left alone, as in
    torch. A step whose averaged gradient is not finite is skipped on every rank: see `last_step`.

    Raises ValueError or TypeError, on every rank, for parameters or options that cannot work.
    """

    _masters_class = BucketMasters

    def __init__(
        self,
        params: ParamsT,
        optimizer_class: OptimizerClass,
        *,
        stage: int = 1,
        comm: communication.Communicator | None = None,
        named_parameters: Iterable[tuple[str, Tensor]] | None = None,
        param_dtype: torch.dtype | None = None,
        bucket_bytes: int = LARGEST_BUCKET_BYTES,
        max_norm: float = 0.0,
        offload: bool = False,
        pin_memory: bool = True,
        block_size: int = 2048,
        **options: Any,
    ) -> None:
        self.comm = comm if comm is not None else communication.init()
        self.stage = stage
        self.max_norm = max_norm
        self.loss_scale = 1.0
        self.last_step = StepResult(applied=False, grad_norm=math.nan)
        self._name = getattr(optimizer_class, "__name__", type(optimizer_class).__name__)
        error: Exception | None = None
        try:
            self._check_options(
                stage=stage,
                param_dtype=param_dtype,
                bucket_bytes=bucket_bytes,
                max_norm=max_norm,
                block_size=block_size,
            )
            defaults = optimizer_class([torch.zeros(1)], **options).defaults
            super().__init__(params, defaults)
            self._placement = Placement(self.param_groups, named_parameters)
            check_parameters(self._placement.parameters, type(self).__name__)
        except (ValueError, TypeError) as raised:
            error = raised
        raise_together(self.comm, error, "build its optimizer")
        self._agree(param_dtype, bucket_bytes, block_size)
        self._exchange_comm = self.comm.duplicate()
        layouts = self._placement.partition(self.comm.size, block_size, bucket_bytes, param_dtype)
        self._buckets: list[FlatBucket] = []
        self._masters: list[BucketMasters] = []
        for index, (layout, dtype) in enumerate(layouts):
            masters_are = None if dtype == torch.float32 else self._extent
            bucket = FlatBucket(self._exchange_comm, index, layout, self._placement.parameters, dtype, masters_are)
            self._buckets.append(bucket)
            self._masters.append(self._make_masters(bucket, optimizer_class, options, offload, pin_memory))
        self._gate: WeightGate | None = None
        self._gradients = [BucketGradients(bucket, self._exchange_comm, stage) for bucket in self._buckets]
        self._rounds = BackwardRounds(self._placement, self._gradients, keeps_gradients=stage < 2)

    @property
    def _extent(self) -> Literal["whole", "shard"]:
        """How much of each bucket this rank holds masters and state of."""
        return "whole" if self.stage == 0 else "shard"

    def gather_during_forward(self, module: nn.Module) -> None:
        """Let `step` return while new weights are on their way, and wait for each when it is read.

        Read through `module`'s attributes, `parameters()` or `state_dict()` they are always the new ones; before
        reading parameters that were kept from before, `param_groups` among them, call `wait_for_weights`. Parameters
        outside of `module` are there when `step` returns. Raises RuntimeError at a second call.
        """
        if self._gate is not None:
            raise RuntimeError(
                "gather_during_forward() was called before: pass it the one module that holds all others"
            )
        within = {id(parameter) for parameter in module.parameters()}
        bucket_of = {id(parameter): bucket.index for bucket in self._buckets for parameter in bucket.parameters}
        self._gated = {
            bucket.index for bucket in self._buckets if all(id(parameter) in within for parameter in bucket.parameters)
        }
        self._gate = WeightGate(module, bucket_of)

    def wait_for_weights(self) -> None:
        """Wait until this rank has the last step's weights."""
        if self._gate is not None:
            self._gate.open()

    def synchronize_weights(self) -> None:
        """Nothing: all ranks hold the same weights. Optimizers with local steps meet here, all ranks together."""

    @property
    def bytes_sent(self) -> int:
        """Bytes this rank has sent to synchronise steps."""
        return self._exchange_comm.traffic.bytes_sent

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradient accumulation: backwards inside only add up, in `.grad` or (stage 2) in the owners' shards."""
        with self._rounds.no_sync():
            yield

    def leave_out(self, parameters: Iterable[Tensor]) -> None:
        """Promise, before a backward that is sent, that no rank's reaches these: `drop.dropped_parameters()`.

        Buckets of nothing else are not sent, neither gradients nor weights; other buckets do not wait for them. Left
        out of a whole step they are left alone. Collective. Raises ValueError, on every rank, where ranks leave out
        different parameters or one has a gradient already.
        """
        self._rounds.leave_out(parameters, self._exchange_comm)

    def end_backward(self) -> None:
        """Send what a backward has left unsent, once it is over. Collective; `step` does it where nobody did."""
        self._rounds.end_backward()

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Clip, and step the own shard, or skip where the average is not finite; collective. See `last_step`."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._placement.check_none_unfrozen()
        self.wait_for_weights()
        self._rounds.finish()
        vote = self._vote()
        applied = vote.finite and len(vote.absent) < len(self._placement.parameters)
        if applied:
            self._apply(vote.norm, vote.absent)
        self.last_step = StepResult(applied, vote.norm)
        self._rounds.end_step()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients. Between backward() and step() this drops the step: do it on every rank or none."""
        self._rounds.drop()
        super().zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Only at construction: buckets are laid out once. Raises RuntimeError later."""
        if hasattr(self, "_rounds"):
            raise RuntimeError(
                "parameters cannot be added to a sharded optimizer: build a new one with all of them, and load the "
                "old one's state"
            )
        super().add_param_group(param_group)

    def close(self) -> None:
        """Release the communicator, on every rank; the optimizer cannot step afterwards."""
        self.wait_for_weights()
        self._exchange_comm.close()

    # Checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Not of one rank: raises RuntimeError, which says what to use."""
        raise RuntimeError(STATE_IS_ON_ALL_RANKS)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Not from one rank: raises RuntimeError, which says what to use."""
        raise RuntimeError(STATE_IS_ON_ALL_RANKS)

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(f"a {type(self).__name__} cannot be copied or pickled: {STATE_IS_ON_ALL_RANKS}")

    def pieces(self) -> list[Piece]:
        """What this rank owns of weights, masters and optimizer state; the ranks' union holds everything once."""
        self.wait_for_weights()
        names = self._placement.names
        return [piece for masters in self._masters for piece in masters.pieces(names)]

    def rank_tensors(self) -> dict[str, Tensor]:
        """What belongs to this rank alone."""
        return {}

    def counters(self) -> dict[str, Any]:
        """The groups' settings, as plain values: the same on every rank."""
        return counters_of(self._name, self.param_groups)

    @torch.no_grad()
    def load(self, source: PieceSource) -> None:
        """Take over what `pieces` and `counters` gave, of any stage and number of ranks. Collective.

        Raises KeyError where a parameter was not saved, ValueError where another optimizer's state was.
        """
        saved = source.counters()
        check_same_optimizer(saved, self._name, self.param_groups)
        self.load_weights(source)
        for masters in self._masters:
            masters.load_state(source, self._placement.names)
        take_over_settings(saved, self.param_groups)

    def reset_state(self) -> None:
        """Forget moments and step counts: the optimizer is as new, the weights and settings stay."""
        for masters in self._masters:
            masters.keep_state(False)
            masters.keep_state(True)

    @torch.no_grad()
    def load_weights(self, source: PieceSource) -> None:
        """Take over the weights alone, whatever optimizer they were trained with; its own state stays as it is.

        Raises KeyError where a parameter was not saved.
        """
        self.wait_for_weights()
        self.zero_grad()
        for bucket in self._buckets:
            for slot in bucket.layout.slots:
                name = self._placement.names[slot.parameter]
                values = read_weight(source, bucket.dtype, name, 0, slot.numel)
                bucket.view(bucket.flat, slot).copy_(values.view(bucket.view(bucket.flat, slot).shape))
        for masters in self._masters:
            masters.load_weights(source, self._placement.names)

    # One step

    def _vote(self) -> Vote:
        missing = self._rounds.missing
        norms = [torch.linalg.vector_norm(average, dtype=torch.float32) for average in self._own_averages()]
        norms.append(torch.zeros((), device=self._buckets[0].flat.device))  # where there are no others
        square = torch.stack(norms).double().square().sum()
        votes = torch.stack([square, torch.full_like(square, bool(missing))])
        self._exchange_comm.all_reduce(votes)
        total, anything_missing = votes.tolist()
        absent = self._agree_on_absent(missing) if anything_missing else frozenset[int]()
        absent |= self._rounds.left_out
        norm = math.sqrt(total) / self.loss_scale if total >= 0 else math.nan
        return Vote(math.isfinite(norm), norm, absent)

    def _own_averages(self) -> list[Tensor]:
        return [
            bucket.shard_of(gradients.average) if self.stage == 0 else gradients.average
            for bucket, gradients in zip(self._buckets, self._gradients, strict=True)
            if gradients.filled
        ]

    def _agree_on_absent(self, missing: Sequence[int]) -> frozenset[int]:
        mask = bytearray(len(self._placement.parameters))
        for index in missing:
            mask[index] = 1
        of_rank = self._exchange_comm.all_gather_bytes(bytes(mask))
        return frozenset(index for index in range(len(mask)) if all(other[index] for other in of_rank))

    def _clip(self, norm: float) -> float:
        """What a gradient of this norm is multiplied by: torch's clip_grad_norm_."""
        return min(1.0, self.max_norm / (norm + 1e-6)) if self.max_norm else 1.0

    def _apply(self, norm: float, absent: frozenset[int]) -> None:
        """Move the weights of all ranks."""
        coefficient = self._clip(norm) / self.loss_scale
        self._move_and_publish(lambda masters, average: masters.step(average, coefficient, absent))

    def _move_and_publish(self, move: Callable[[BucketMasters, Tensor], None]) -> None:
        """Call `move` with the masters and the averaged gradient of every bucket that has one; give all ranks the new
        weights."""
        # The buckets that forward uses first come last in backward: their weights leave first.
        waits = []
        for masters, gradients in reversed(list(zip(self._masters, self._gradients, strict=True))):
            if gradients.filled:
                move(masters, gradients.average)
                waits.append((masters.bucket.index, masters.publish()))
        for bucket, wait in waits:
            if self._gate is None or bucket not in self._gated:
                wait()
            else:
                self._gate.close(bucket, wait)

    # Setting up

    def _own_settings(self) -> dict[str, Any]:
        """What else has to be the same on every rank."""
        return {}

    def _agree(self, param_dtype: torch.dtype | None, bucket_bytes: int, block_size: int) -> None:
        settings = {"stage": self.stage, "param_dtype": str(param_dtype), "bucket_bytes": bucket_bytes}
        settings |= {"max_norm": self.max_norm, "block_size": block_size, "names": self._placement.names}
        settings |= self._own_settings()
        check_same_on_every_rank(self.comm, self._placement.parameters, self.param_groups, settings)
        broadcast_from_rank_0(self.comm, self._placement.parameters)

    def _make_masters(
        self,
        bucket: FlatBucket,
        optimizer_class: OptimizerClass,
        options: dict[str, Any],
        offload: bool,
        pin_memory: bool,
    ) -> BucketMasters:
        return self._masters_class(
            bucket,
            self.param_groups,
            self._placement.group_of,
            lambda groups: optimizer_class(groups, **options),
            whole=self.stage == 0,
            offload=offload,
            pin_memory=pin_memory,
        )

    def _check_options(
        self, *, stage: int, param_dtype: torch.dtype | None, bucket_bytes: int, max_norm: float, block_size: int
    ) -> None:
        """Raise ValueError or TypeError for options that cannot work, before anything is built."""
        check_sharding(stage=stage, param_dtype=param_dtype, bucket_bytes=bucket_bytes, max_norm=max_norm)
        if isinstance(block_size, bool) or not block_size >= 1:
            raise ValueError(f"block_size must be at least 1, got {block_size!r}")
