"""What every 1-bit optimizer has in common, whatever its arithmetic: it synchronises by itself during backward, and
skips, accumulates, unscales and saves alike."""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, Self, overload

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from thinwire import comm as communication
from thinwire.comm.agreement import raise_together
from thinwire.comm.nodes import NodeLinks, agree_on_nodes
from thinwire.compress.codecs import CodecName, make_codec
from thinwire.compress.ddp_hook import leave_gradients_alone
from thinwire.optim import options as agreement
from thinwire.optim.freeze_rule import FreezeRule, make_freeze_rule
from thinwire.optim.replicated import checkpoint as state_io
from thinwire.optim.replicated.freeze_group import AdamBucket, Cohort
from thinwire.optim.replicated.parameters import ParameterTable
from thinwire.optim.replicated.synchronizer import Bucket, GradientSynchronizer
from thinwire.zero import BucketLayout, Slot
from thinwire.zero.rank_checks import broadcast_from_rank_0, check_parameters, check_same_on_every_rank

if TYPE_CHECKING:
    from torch.nn.parallel import DistributedDataParallel

__all__ = ["Nodes", "OneBitOptimizer", "WarmupWire"]


WarmupWire = Literal["fp32", "bf16"]
Nodes = Literal["auto", "flat"] | Sequence[int]


class OneBitOptimizer(torch.optim.Optimizer):
    """A torch optimizer whose gradients leave during `backward()`: exactly in the warmup, through `codec` once frozen.

    A subclass gives the groups' `defaults`, says with `_check_options`, `_check_group` and `_own_settings` what its
    options must be and what ranks and checkpoints must agree on, and makes the cohorts that turn averages into steps.
    For the arguments, see OneBitAdam.

    Raises:
        ValueError: bad hyperparameters, no parameters, or ranks that do not hold the same ones; on every rank.
        TypeError: complex, integer or fp64 parameters, or parameters on several devices.
    """

    # GradScaler then passes its scale in and leaves the unscaling to step().
    _step_supports_amp_scaling = True

    def __init__(
        self,
        params: ParamsT,
        defaults: dict[str, Any],
        *,
        freeze_step: int | Literal["auto"],
        comm: communication.Communicator | None,
        comm_backend_name: Literal["nccl", "gloo", "mpi"] | None,
        codec: CodecName,
        block_size: int,
        bucket_bytes: int | None,
        warmup_wire: WarmupWire,
        nodes: Nodes,
    ) -> None:
        self._table = ParameterTable(self)
        error: Exception | None = None
        try:
            self._check_options()
            agreement.check_wire(bucket_bytes, warmup_wire)
            self._check_group(defaults)
            make_freeze_rule(freeze_step, defaults["betas"][1])
            self._codec = make_codec(codec, block_size)
            super().__init__(params, defaults)
        except (ValueError, TypeError) as raised:
            error = raised
        self.comm = comm if comm is not None else communication.init(backend=comm_backend_name)
        raise_together(self.comm, error, "build its optimizer")
        self._freeze_step = freeze_step
        self._warmup_codec = make_codec("none" if warmup_wire == "fp32" else "bf16", block_size)
        self._exchange_comm = self.comm.duplicate()
        self._groups = agree_on_nodes(self.comm, None if isinstance(nodes, str) else nodes)
        self._links = NodeLinks(self.comm, self._groups) if self._groups.hierarchical and nodes != "flat" else None
        self._bytes_before_resume = 0
        self._synchronizer = GradientSynchronizer(
            self.comm,
            self._table,
            bucket_bytes=bucket_bytes,
            block_size=block_size,
            place=self._make_cohort,
            fill=self._fill,
        )
        self._synchronizer.follow(lambda: not self._scales_apart)
        self._cohorts: list[Cohort] = []
        self._loss_scale: float | None = None
        self.skipped_steps = 0
        self.bytes_uncompressed = 0
        self._agreed_settings = {
            **self._stage_settings(),
            "codec": codec,
            "block_size": block_size,
            "bucket_bytes": bucket_bytes,
            "warmup_wire": warmup_wire,
            "nodes": nodes if isinstance(nodes, str) else list(nodes),
            **self._own_settings(),
        }
        self._adopt_new_parameters()

    # What a subclass says

    def _check_options(self) -> None:
        """Raise ValueError for options of the class itself that cannot work."""

    def _check_group(self, group: Mapping[str, Any]) -> None:
        """Raise ValueError for a parameter group, or defaults for one, whose hyperparameters cannot work."""
        agreement.check_group(group)

    @abstractmethod
    def _own_settings(self) -> dict[str, Any]:
        """Further options that all ranks must share, and that give momenta and residuals their meaning."""

    def _stage_settings(self) -> dict[str, Any]:
        """Options about when stages begin: all ranks must share them, and a resume may change them."""
        return {"freeze_step": self._freeze_step}

    @property
    def _scales_apart(self) -> bool:
        """Whether the loss scales of the ranks' GradScalers may differ: then no gradient leaves before step()."""
        return False

    def _is_outdated(self, scale_changed: bool) -> bool:
        """Whether what left during backward is not what would be sent now, on every rank alike."""
        return scale_changed and self.freeze_step_taken is not None

    @abstractmethod
    def _new_cohort(self, rule: FreezeRule, layouts: Sequence[BucketLayout], first_index: int) -> Cohort:
        """The arithmetic for the parameters of `layouts`, which entered together."""

    # What it reports

    @property
    def frozen(self) -> bool:
        """Whether every parameter's variance is frozen, so that steps send one bit an element."""
        return bool(self._cohorts) and all(cohort.frozen_at is not None for cohort in self._cohorts)

    @property
    def freeze_step_taken(self) -> int | None:
        """The warmup step after which the first parameters froze; None before."""
        return self._cohorts[0].frozen_at if self._cohorts else None

    @property
    def bytes_sent(self) -> int:
        """Bytes this rank has sent to synchronise steps, headers, scales and padding included."""
        hierarchical = 0 if self._links is None else self._links.bytes_inside + self._links.bytes_between
        return self._bytes_before_resume + self._exchange_comm.traffic.bytes_sent + hierarchical

    @property
    def bytes_sent_between_nodes(self) -> int:
        """The part of them that left this rank's node, since this object was made."""
        flat = round(self._exchange_comm.traffic.bytes_sent * self._groups.part_between(self.comm.rank))
        return flat if self._links is None else flat + self._links.bytes_between

    bytes_uncompressed: int
    """Bytes a ring all-reduce of the gradients in the parameters' own dtype would have sent for the same steps."""

    skipped_steps: int
    """Steps skipped because a gradient was not finite."""

    # What a training loop calls

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Apply this step's synchronised gradients; collective.

        Raises RuntimeError where gradients were changed after backward(), ValueError where a parameter has a gradient
        on some ranks only, and CommunicationError where a rank failed.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        loss_scale = self._present_loss_scale()
        self._check_gradients_untouched(scaled=loss_scale is not None)
        if self._scales_apart:
            self._loss_scale = loss_scale
        scaler_has_seen = self._synchronizer.finished or loss_scale is None or self._scales_apart
        outcome = self._synchronizer.finish()
        if not scaler_has_seen and 0 < len(outcome.guilty) < self.comm.size:
            self._synchronizer.end_round()
            raise RuntimeError(
                f"a gradient overflowed on ranks {list(outcome.guilty)} in a step that some parameters took no part "
                "in, so that the GradScalers of other ranks could not see it and would keep their scale. Give every "
                "parameter a gradient in each backward, or train in bf16 without a GradScaler"
            )
        scale_changed = loss_scale != self._loss_scale
        self._loss_scale = loss_scale
        if outcome.finite and self._is_outdated(scale_changed):
            # Momentum left during backward as if this step's scale were the last one's. Scales change rarely, and
            # alike on every rank; nothing is committed yet, so the round is simply sent again.
            outcome = self._synchronizer.repeat()
        if len(outcome.absent) < len(self._table):
            self._count_uncompressed()
            if outcome.finite:
                for cohort in self._cohorts:
                    cohort.update(outcome, self._loss_scale)
                self._synchronizer.step += 1
            else:
                self._skip(outcome.guilty)
        self._synchronizer.end_round()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients. Between backward() and step() this drops the step: do it on every rank or none."""
        if self._synchronizer.in_round:
            self._synchronizer.finish()
            self._synchronizer.end_round()
        super().zero_grad(set_to_none)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradient accumulation: backwards inside only add to `.grad`; the first one outside sends the sum."""
        with self._synchronizer.no_sync():
            yield

    def leave_out(self, parameters: Iterable[Tensor]) -> None:
        """Promise, before a step's synchronised backward, that no rank's reaches these: `drop.dropped_parameters()`.

        Buckets of nothing else are not sent; other buckets do not wait for them. Until the freeze the parameters are
        left alone, after it their gradients count as zero. Collective. Raises ValueError, on every rank, where ranks
        leave out different parameters or one has a gradient already.
        """
        self._synchronizer.leave_out(parameters)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, on every rank alike. They warm up and freeze on their own."""
        super().add_param_group(param_group)
        if len(self._table):
            try:
                self._adopt_new_parameters()
            except (ValueError, TypeError):
                self.param_groups.pop()
                raise

    def attach(self, ddp_model: DistributedDataParallel) -> Self:
        """Take gradient synchronisation over from DDP, which keeps its other duties; returns the optimizer.

        Its all-reduce is replaced by nothing, and `ddp_model.no_sync()` is obeyed. Call before the first backward.
        """
        trainable = [parameter for parameter in ddp_model.parameters() if parameter.requires_grad]
        ours = {id(parameter) for parameter in self._table.parameters}
        foreign = sum(id(parameter) not in ours for parameter in trainable)
        if foreign:
            raise ValueError(
                f"{foreign} of the model's {len(trainable)} trainable parameters are not in this optimizer, so nobody "
                f"would synchronise them: pass all of model.parameters() to {type(self).__name__}"
            )
        ddp_model.register_comm_hook(None, leave_gradients_alone)
        self._synchronizer.follow(lambda: bool(ddp_model.require_backward_grad_sync))
        return self

    def close(self) -> None:
        """Release the communicator, on every rank; the optimizer cannot step afterwards."""
        self._exchange_comm.close()
        if self._links is not None:
            self._links.close()

    def state_dict(self) -> dict[str, Any]:
        """The state of this rank, error-feedback residuals included: every rank saves its own.

        Beside torch's `state` and `param_groups` there is `thinwire`, with the buckets, their residuals and counters.
        Parameters' states hold `exp_avg` and `exp_avg_sq`, or `denominator` once frozen, as views of flat buckets; once
        frozen with `compress="update"`, `exp_avg` is divided by `denominator`.
        """
        state = super().state_dict()
        state["thinwire"] = state_io.save(self)
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what `state_dict` returned on this rank; training then goes on bit for bit.

        With another number of ranks, or another rank's file, everything is restored but the residuals, which start
        again from zero, with a warning. Raises ValueError where the state is another optimizer's or model's.
        """
        state_io.check(self, state_dict)
        super().load_state_dict({"state": {}, "param_groups": state_dict["param_groups"]})
        state_io.load(self, state_dict)

    def _adopt_new_parameters(self) -> None:
        new = self._table.new_parameters()
        tensors = [parameter for parameter, _ in new]
        error: Exception | None = None
        try:
            for group in self.param_groups:
                self._check_group(group)
            check_parameters([*self._table.parameters, *tensors], type(self).__name__)
        except (ValueError, TypeError) as raised:
            error = raised
        raise_together(self.comm, error, "build its optimizer")
        check_same_on_every_rank(self.comm, tensors, self.param_groups, self._agreed_settings)
        broadcast_from_rank_0(self.comm, tensors)
        for parameter, group_number in new:
            self._table.add(parameter, group_number)
        self._synchronizer.watch(len(new))

    def _make_cohort(self, layouts: Sequence[BucketLayout], first_index: int) -> list[Bucket]:
        rule = make_freeze_rule(self._freeze_step, max(group["betas"][1] for group in self.param_groups))
        cohort = self._new_cohort(rule, layouts, first_index)
        self._cohorts.append(cohort)
        return list(cohort.buckets)

    def _fill(self, bucket: Bucket, slot: Slot, gradient: Tensor | None) -> None:
        assert isinstance(bucket, AdamBucket)
        bucket.cohort.fill(bucket, slot, gradient, self._loss_scale)

    def _skip(self, guilty: tuple[int, ...]) -> None:
        self.skipped_steps += 1
        # Under a GradScaler overflows are how it finds its scale: nothing to warn of.
        if self._loss_scale is None and self.comm.rank == 0:
            warnings.warn(
                f"step {self._synchronizer.step + 1} was skipped on every rank: a gradient was NaN or infinite "
                f"{f'on ranks {list(guilty)}' if guilty else 'after averaging, on no rank before'}. Weights, momentum "
                "and residuals are as before the step",
                RuntimeWarning,
                stacklevel=4,
            )

    def _present_loss_scale(self) -> float | None:
        """The loss scale a GradScaler passes to this step, if one does."""
        grad_scale: Tensor | None = getattr(self, "grad_scale", None)
        if grad_scale is None and getattr(self, "found_inf", None) is not None:
            raise RuntimeError(
                "GradScaler.unscale_() was called on this optimizer, but its gradients left, scaled, during "
                "backward(): delete the call; step() unscales"
            )
        return None if grad_scale is None else float(grad_scale)

    def _check_gradients_untouched(self, scaled: bool) -> None:
        # GradScaler's check for infinities writes gradients back without changing them.
        if scaled or not self._synchronizer.in_round:
            return
        if changed := self._synchronizer.changed_gradients:
            raise RuntimeError(
                f"the gradient of {self._table.name(changed[0])} was changed or dropped between backward() and step(), "
                "after it had left for the other ranks, so the change would be ignored. Gradient clipping and other "
                "edits of .grad are not supported: remove them"
            )

    def _count_uncompressed(self) -> None:
        parameters = self._table.parameters
        gradient_bytes = sum(
            slot.numel * parameters[slot.parameter].dtype.itemsize
            for cohort in self._cohorts
            for bucket in cohort.buckets
            for slot in bucket.layout.slots
        )
        self.bytes_uncompressed += round(2 * (self.comm.size - 1) / self.comm.size * gradient_bytes)
