"""ZeRO stages 0, 1 and 2 for any elementwise torch optimizer: swap the class, and master weights, moments and (stage 2)
gradients are divided among the ranks of any Communicator."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT
from typing_extensions import override

from thinwire import comm as communication
from thinwire.comm.agreement import raise_together
from thinwire.zero.bucket_layout import LARGEST_BUCKET_BYTES, model_state_formula
from thinwire.zero.gradients import PLAIN_AVERAGING, Averaging, BucketGradients
from thinwire.zero.home import NO_GRADIENTS, Fragment, Held, StepResult
from thinwire.zero.master_weights import MasterWeights, bring_beside
from thinwire.zero.rank_checks import check_same_kind
from thinwire.zero.saved_state import SavedSlice, SliceSource, group_settings, read_state, state_slices
from thinwire.zero.sharded_home import NOT_FINITE, ShardedHome, StateOfBuckets, Vote, clip_coefficient, own_fragments
from thinwire.zero.sharded_parameters import ShardedParameters, Sharding
from thinwire.zero.synchronized_optimizer import SynchronizedOptimizer

__all__ = ["BucketOptimizer", "OptimizerClass", "ShardedOptimizer"]


OptimizerClass = Callable[..., torch.optim.Optimizer]


class BucketOptimizer:
    """A torch optimizer over what this rank keeps of a bucket.

    It sees every run of `masters` as a parameter of its own, one-dimensional, in the parameter's group: elementwise
    optimizers do not care where a tensor was cut. A rank that keeps nothing has no optimizer. Where runs are `whole`
    parameters, groups have their "shapes", for optimizers that do care.
    """

    def __init__(
        self,
        masters: MasterWeights,
        groups: Sequence[Mapping[str, Any]],
        group_of: Sequence[int],
        optimizer_class: OptimizerClass,
        whole: bool = False,
    ) -> None:
        self._whole = whole
        self._masters = masters
        self._groups = groups
        self._group_of = group_of
        self._used_groups = sorted({group_of[run.parameter] for run in masters.runs})
        self._optimizer_class = optimizer_class
        self.optimizer: torch.optim.Optimizer | None = None
        self.reset()

    def reset(self) -> None:
        """Have a new optimizer, without state."""
        if self._masters.runs:
            self.optimizer = self._optimizer_class([self._inner_group(number) for number in self._used_groups])

    def without_parameters(self) -> torch.optim.Optimizer:
        """What a rank that keeps nothing can show: the class and the groups' settings, with no parameter in them."""
        shapes: dict[str, Any] = {"shapes": []} if self._whole else {}
        return self._optimizer_class([{**group_settings(one), "params": [], **shapes} for one in self._groups])

    def step(self, average: Tensor, coefficient: float, absent: frozenset[int]) -> None:
        """Step with `coefficient * average`, a tensor like the master weights in the gradients' dtype.

        `absent` parameters stay. `average` may be scaled in place.
        """
        if self.optimizer is None:
            return
        masters = self._masters
        gradient = average.to(torch.float32)
        if coefficient != 1.0:
            gradient.mul_(coefficient)
        (gradient,) = bring_beside([masters], [gradient])
        for run, view in zip(masters.runs, masters.views, strict=True):
            view.grad = None if run.parameter in absent else gradient[run.place]
        for number, inner in zip(self._used_groups, self.optimizer.param_groups, strict=True):
            inner.update(group_settings(self._groups[number]))
        self.optimizer.step()
        for view in masters.views:
            view.grad = None

    def kinds(self) -> set[str]:
        """The kinds of state that have a value for each element, of any parameter."""
        states = [] if self.optimizer is None else [self.optimizer.state.get(view, {}) for view in self._masters.views]
        return {kind for state in states for kind, value in state.items() if _is_of_elements(value)}

    def state_of(self, parameter: int, kind: str) -> list[Fragment]:
        """What this rank keeps of a parameter's state of this kind; nothing where it was never stepped."""
        if self.optimizer is None:
            return []
        states = [self.optimizer.state.get(view, {}).get(kind) for view in self._masters.views]
        return own_fragments(self._masters, parameter, [one if _is_of_elements(one) else None for one in states])

    def state_bytes(self) -> int:
        """Of the state that this rank holds, step counts left out."""
        states = [] if self.optimizer is None else self.optimizer.state.values()
        return sum(
            value.nbytes for state in states for value in state.values() if isinstance(value, Tensor) and value.dim()
        )

    def saved_slices(self, names: Sequence[str]) -> list[SavedSlice]:
        """The optimizer's state of this rank's shard."""
        slices: list[SavedSlice] = []
        for number, cut in self._masters.own_cuts():
            run = self._masters.runs[number]
            state = {} if self.optimizer is None else self.optimizer.state[self._masters.views[number]]
            slices += state_slices(state, names[run.parameter], run.start + cut.start, cut, run.numel)
        return slices

    def load(self, source: SliceSource, names: Sequence[str]) -> None:
        """Take over the optimizer's state."""
        if self.optimizer is not None:
            runs, views = self._masters.runs, self._masters.views
            number_of = {id(view): number for number, view in enumerate(views)}
            state = [read_state(source, names[run.parameter], run.start, run.numel) for run in runs]
            order = [number_of[id(view)] for group in self.optimizer.param_groups for view in group["params"]]
            packed = self.optimizer.state_dict()
            # Copies, as what was read may be the memory of a state_dict, which torch would share.
            copies = [copy.deepcopy(of_run) for of_run in state]
            packed["state"] = {place: copies[number] for place, number in enumerate(order) if copies[number]}
            self.optimizer.load_state_dict(packed)

    def _inner_group(self, number: int) -> dict[str, Any]:
        runs = zip(self._masters.runs, self._masters.views, strict=True)
        held = [(run, view) for run, view in runs if self._group_of[run.parameter] == number]
        inner = {**group_settings(self._groups[number]), "params": [view for _, view in held]}
        if self._whole:
            inner["shapes"] = [self._masters.bucket.shape_of(run.parameter) for run, _ in held]
        return inner


def _is_of_elements(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() == 1


class ShardedOptimizer(SynchronizedOptimizer):
    """A torch optimizer whose state is sharded over the ranks: ZeRO (Rajbhandari et al. 2020, arXiv 1910.02054).

    Gradients leave during `backward()`, bucket by bucket; `step()` steps the shard that this rank owns and gives the
    new weights to all. Every stage gives the same bits. Stage 0 keeps everything everywhere, stage 1 shards master
    weights and optimizer state, stage 2 gradients as well. Single process, torchrun, mpirun and threads alike.

    Args:
        params: parameters or groups, fp32, bf16 or fp16, on one device; the same on every rank. Their storage moves
            into flat buckets; rank 0's values are given to all. Parameters that require no gradient now are left alone.
        optimizer_class: any elementwise torch.optim class, or a function that builds one from groups. One that has
            `whole_parameters = True` gets every parameter whole, on one rank, one-dimensional as others, with the
            "shapes" in its groups; one that has `arrange(params, **options)` makes the groups: thinwire.optim's Lamb
            and Muon.
        stage: 0, 1 or 2.
        comm: a Communicator; by default `thinwire.comm.init()` finds out how the process was launched.
        named_parameters: names, and the order in which forward uses them; by default that of the groups.
        param_dtype: torch.bfloat16 or torch.float16 lays fp32 parameters out in it, keeping fp32 master weights on the
            owner.
        bucket_bytes: gradients that leave together.
        block_size: shards are whole blocks of so many elements.
        max_norm: the averaged gradient's global norm is clipped to it; 0 and None do not clip.
        offload: keep master weights and optimizer state in CPU memory, for parameters on a GPU; with `pin_memory` the
            master weights are page-locked, for faster copies.
        averaging: the dtypes in which gradients add up and travel, division before they are summed, and sums in place
            of means; by default none of it.
        options: for the optimizer class: lr, betas, ...

    A parameter without a gradient on some ranks counts as zero there; without one on any rank it is left alone, as in
    torch. A step whose averaged gradient is not finite is skipped on every rank: see `last_step`.

    Raises ValueError or TypeError, on every rank, for parameters or options that cannot work.
    """

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
        max_norm: float | None = 0.0,
        offload: bool = False,
        pin_memory: bool = True,
        block_size: int = 2048,
        averaging: Averaging = PLAIN_AVERAGING,
        **options: Any,
    ) -> None:
        self.comm = comm if comm is not None else communication.init()
        self.stage = stage
        self.max_norm = max_norm = 0.0 if max_norm is None else max_norm
        self._name = getattr(optimizer_class, "__name__", type(optimizer_class).__name__)
        whole = getattr(optimizer_class, "whole_parameters", False)
        sharding = Sharding(
            stage, param_dtype, bucket_bytes, block_size, max_norm, offload, pin_memory, averaging, whole
        )
        error: Exception | None = None
        try:
            sharding.check()
            if (arrange := getattr(optimizer_class, "arrange", None)) is not None:
                params = arrange(params, **options)
            super().__init__(params, optimizer_class([torch.zeros(1)], **options).defaults)
        except (ValueError, TypeError) as raised:
            error = raised
        raise_together(self.comm, error, "build its optimizer")
        check_same_kind(self.comm, f"{type(self).__name__} of {self._name}", stage)
        parameters = ShardedParameters(
            self.comm, self.param_groups, named_parameters, sharding, optimizer=type(self).__name__, settings={}
        )
        home = _ElementwiseHome(parameters, lambda groups: optimizer_class(groups, **options))
        self._move_in(home, averaging.times_mean(self.comm.size))
        self._optimizers = home.optimizers

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The torch optimizer that steps what this rank keeps of the first bucket of which it keeps anything; its
        parameters are views of master weights, one-dimensional. Where it keeps nothing, one without parameters.

        There is one of that class for each bucket; set rates in `param_groups`, which all of them follow.
        """
        for one in self._optimizers:
            if one.optimizer is not None:
                return one.optimizer
        return self._optimizers[0].without_parameters()

    @property
    def _saved_name(self) -> str:
        return self._name


class _ElementwiseHome(ShardedHome):
    """Gradients averaged exactly, and a torch optimizer's step on what this rank keeps."""

    def __init__(self, parameters: ShardedParameters, optimizer_class: OptimizerClass) -> None:
        super().__init__(parameters)
        self._steps = 0
        sharding = parameters.sharding
        # At stage 2 every backward's gradients leave, and add up on their owners.
        (sharding.averaging if sharding.stage < 2 else PLAIN_AVERAGING).prepare(self.parameters)
        self._gradients = parameters.averaging_gradients()
        whole = parameters.sharding.whole_parameters
        self.optimizers = [
            BucketOptimizer(masters, parameters.groups, parameters.order.group_of, optimizer_class, whole)
            for masters in parameters.masters
        ]
        self._watcher.use(self._gradients, self._keeps_gradients)

    @property
    def steps(self) -> int:
        """Bytes since this object was made."""
        return self._steps

    @override
    def step(self) -> StepResult:
        vote = self._begin_step()
        self._parameters.take_over_written()
        norm = vote.norm / self.loss_scale
        applied = vote.finite and len(vote.absent) < len(self.parameters)
        if applied:
            self._steps += 1
            coefficient = clip_coefficient(self._parameters.sharding.max_norm, norm) / self.loss_scale
            filled = [number for number, gradients in enumerate(self._gradients) if gradients.filled]

            def move(number: int) -> None:
                self.optimizers[number].step(self._gradients[number].average, coefficient, vote.absent)

            self._parameters.move_and_publish(filled, move)
        self._end_step()
        return StepResult(applied, norm, "" if applied else NO_GRADIENTS if vote.finite else NOT_FINITE)

    def _find_vote(self) -> Vote:
        return self._vote_on_averages(self._gradients)

    def _state_of_buckets(self) -> StateOfBuckets:
        return _ElementwiseState(self._gradients, self.optimizers, self._parameters.sharding.stage == 0)

    @override
    def saved_slices(self) -> list[SavedSlice]:
        return super().saved_slices() + [
            saved_slice for one in self.optimizers for saved_slice in one.saved_slices(self._parameters.names)
        ]

    @override
    def load(self, source: SliceSource) -> None:
        self._parameters.load_weights(source)
        for one in self.optimizers:
            one.load(source, self._parameters.names)

    @override
    def reset_state(self) -> None:
        for one in self.optimizers:
            one.reset()

    @override
    def model_state_bytes(self) -> dict[str, float]:
        kinds = {
            saved_slice.kind for one in self.optimizers for saved_slice in one.saved_slices(self._parameters.names)
        }
        found = model_state_formula(
            self._parameters.sharding.stage,
            self._numel,
            self.comm.size,
            element_bytes=self._parameters.buckets[0].dtype.itemsize,
            state_bytes=4 * sum(not kind.startswith("scalar.") for kind in kinds),
            gradient_bytes=self._parameters.gradient_bytes,
        )
        if self._parameters.sharding.whole_parameters:  # which have state of other kinds, at owners of unequal shares
            found["optimizer state"] = float(sum(one.state_bytes() for one in self.optimizers))
        return found


class _ElementwiseState(StateOfBuckets):
    """Averaged gradients, and the state of torch optimizers."""

    def __init__(
        self, gradients: Sequence[BucketGradients], optimizers: Sequence[BucketOptimizer], everywhere: bool
    ) -> None:
        self._gradients = gradients
        self._optimizers = optimizers
        self._everywhere = everywhere

    @override
    def average(self, bucket: int) -> Tensor | None:
        return self._gradients[bucket].average if self._gradients[bucket].filled else None

    @override
    def state(self, bucket: int, parameter: int, kind: str) -> Held:
        fragments = self._optimizers[bucket].state_of(parameter, kind)
        return Held(fragments, self._everywhere, known=kind in self.kinds())

    @override
    def kinds(self) -> list[str]:
        return sorted({kind for one in self._optimizers for kind in one.kinds()})
