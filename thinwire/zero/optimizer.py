"""ZeRO stages 0, 1 and 2 for any elementwise torch optimizer: swap the class, and master weights, moments and (stage 2)
gradients are divided among the ranks of any Communicator."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.optim.optimizer import ParamsT
from typing_extensions import override

from thinwire.comm import Communicator
from thinwire.comm.agreement import Nodes, raise_together
from thinwire.comm.elastic import Elastic
from thinwire.comm.launch import join
from thinwire.compress.packet_layout import CodecName
from thinwire.lazy_imports import provided
from thinwire.zero import rounded
from thinwire.zero.bucket_layout import LARGEST_BUCKET_BYTES, model_state_formula
from thinwire.zero.disk import Disk
from thinwire.zero.gradients import averaging_gradients
from thinwire.zero.home import NO_GRADIENTS, Held, Home, ParameterState, StepResult
from thinwire.zero.master_weights import ShardedParameters, bring_beside
from thinwire.zero.piece_on_disk import MASTER
from thinwire.zero.placement import PLAIN_AVERAGING, Averaging, Sharding
from thinwire.zero.rank_checks import broadcast_from_rank_0, check_same_kind, clip_coefficient, compare_replicas
from thinwire.zero.saved_state import SavedSlice, SliceSource
from thinwire.zero.shard_on_disk import ShardOptimizerOnDisk, StepsAhead, check_in_memory
from thinwire.zero.shard_optimizer import OptimizerClass, ShardOptimizer, check_optimizer_class
from thinwire.zero.sharded_home import (
    NOT_FINITE,
    BucketParameterState,
    ComparisonTimes,
    ShardedHome,
    Vote,
    check_interval,
    norm_of_own,
)
from thinwire.zero.synchronized_optimizer import SynchronizedOptimizer


class ShardedOptimizer(SynchronizedOptimizer):
    """A torch optimizer whose state is sharded over the ranks: ZeRO (Rajbhandari et al. 2020, arXiv 1910.02054).

    Gradients leave during `backward()`, bucket by bucket; `step()` steps the shard that this rank owns and gives the
    new weights to all. Every stage gives the same bits. Stage 0 keeps everything everywhere, stage 1 shards master
    weights and optimizer state, stage 2 gradients as well. Single process, torchrun, mpirun and threads alike.

    Args:
        params: parameters or groups, fp32, bf16 or fp16, on one device; the same on every rank. Their storage moves
            into flat buckets; rank 0's values are given to all. Parameters that require no gradient now are left alone.
        optimizer_class: any elementwise torch.optim class, or a function that builds one from groups. One that has
            `whole_parameters(group)` gets those of groups of which it is true whole, each on one rank, one-dimensional
            as others, with the "shapes" in the group; one that has `arrange(params, **options)` makes the groups:
            thinwire.optim's Lamb and Muon.
        stage: 0, 1 or 2.
        comm, mesh: a Communicator, or a DeviceMesh of one dimension; by default `thinwire.comm.init()` finds the job's.
        named_parameters: names, and the order in which forward uses them; by default that of the groups.
        param_dtype: torch.bfloat16 or torch.float16 lays fp32 parameters out in it, keeping fp32 master weights on the
            owner.
        bucket_bytes: gradients that leave together; block_size: shards are whole blocks of so many elements.
        max_norm: the averaged gradient's global norm is clipped to it; 0 and None do not clip.
        offload, pin_memory: keep master weights, page-locked, and state in CPU memory, for parameters on a GPU. With a
            folder of an NVMe disk they rest in files there, each rank's its own, and steps are on the CPU.
        averaging: the dtypes in which gradients add up and travel, division before they are summed, and sums in place
            of means; by default none of it.
        codec: round what is sent, with error feedback: gradients through `int4`, `int8`, `fp8`, `stat2` or `sign1`, and
            at stages 1 and 2 new weights as differences against what all ranks hold, in 8 bits or through the second
            of a pair. Replicas are alike; master weights may be ahead. Gradients leave once a step. None: exactly.
        rest_codec, low_rank: as in OneBitMuon, for what needs no single owner, and for what does.
        nodes: with `codec`, which ranks share a node, in which gradients are added up exactly, and which sends what one
            rank would: as in OneBitAdam, but nodes must have equally many.
        resync_interval: steps between two comparisons of replicas, at stage 0 and with `codec`.
        elastic: workers, each a process, that come and go while the job runs, over Gloo; for classes whose state has an
            fp32 value for each element, or one for all. `.grad` then keeps this worker's own gradients. At stage 1, in
            fp32 and without a codec, or with one for matrices as in OneBitMuon, a parameter's state lies whole on two
            workers: if both die, the job ends.
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
        comm: Communicator | None = None,
        mesh: DeviceMesh | None = None,
        named_parameters: Iterable[tuple[str, Tensor]] | None = None,
        param_dtype: torch.dtype | None = None,
        bucket_bytes: int = LARGEST_BUCKET_BYTES,
        max_norm: float | None = 0.0,
        offload: bool | str | os.PathLike[str] = False,
        pin_memory: bool = True,
        block_size: int = 2048,
        averaging: Averaging = PLAIN_AVERAGING,
        codec: CodecName | tuple[CodecName, CodecName] | None = None,
        rest_codec: CodecName | tuple[CodecName, CodecName] | None = None,
        low_rank: int = 0,
        nodes: Nodes = "auto",
        resync_interval: int = 100,
        elastic: Elastic | None = None,
        **options: Any,
    ) -> None:
        self.stage = stage
        self.max_norm = max_norm = 0.0 if max_norm is None else max_norm
        self._saved_name = getattr(optimizer_class, "__name__", type(optimizer_class).__name__)
        whole = getattr(optimizer_class, "whole_parameters", Sharding.whole_parameters)
        disk = Path(offload) if offload and isinstance(offload, str | os.PathLike) else None
        in_memory: tuple[Any, bool] = (disk is None and offload, pin_memory)
        laid_out = stage, param_dtype, bucket_bytes, block_size, max_norm, *in_memory, averaging, whole
        pairs = ((one, one if stage == 0 else "int8") if isinstance(one, str) else one for one in (codec, rest_codec))
        by, told = nodes if codec is not None else "flat", {"resync_interval": resync_interval}
        sharding = Sharding(*laid_out, by, next(pairs), next(pairs), low_rank, disk)
        homes: Any = None if elastic is None else provided("homes of elastic workers")
        self.comm = join(comm, mesh) if homes is None else homes.own_rank(elastic, sharding, comm, mesh)
        error: Exception | None = None
        try:
            if codec is None and nodes not in ("auto", "flat"):
                raise ValueError(f"nodes={nodes!r} needs codec=: without one every rank sends for itself, exactly")
            check_optimizer_class(optimizer_class)
            sharding.check()
            check_interval(resync_interval)
            if (arrange := getattr(optimizer_class, "arrange", None)) is not None:
                params = arrange(params, **options)
            super().__init__(params, optimizer_class([torch.zeros(1)], **options).defaults)
        except (ValueError, TypeError) as raised:
            error = raised
        raise_together(self.comm, error, "build its optimizer")
        check_same_kind(self.comm, f"{type(self).__name__} of {self._saved_name}", stage)
        build = partial(optimizer_class, **options)
        if homes is None:
            parameters = ShardedParameters(self, self.comm, named_parameters, sharding, told)
            home: Home = (sharded := _ElementwiseHome(parameters, build, resync_interval))
            self._shown = sharded.shown
        else:
            given = self, self.comm, build, self._saved_name, sharding
            home, self._shown = homes.elastic_home(*given, named_parameters, elastic=elastic, **told)
            self.comes_and_goes = True
        self._move_in(home, averaging.times_mean(self.comm.size))

    @property
    def workers(self) -> int:
        """How many ranks average gradients; of an elastic job, since the last step."""
        elastic: Any = getattr(self._home, "workers", None)
        return self.comm.size if elastic is None else int(elastic.comm.size)

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The torch optimizer that steps what this rank keeps of the first bucket of which it keeps anything; its
        parameters are views of master weights, one-dimensional. Where it keeps nothing, one without parameters.

        There is one of that class for each bucket; set rates in `param_groups`, which all of them follow.
        """
        return self._shown()


class _ElementwiseHome(ShardedHome):
    """Gradients averaged exactly, and a torch optimizer's step on what this rank keeps."""

    def __init__(self, parameters: ShardedParameters, optimizer_class: OptimizerClass, resync_interval: int) -> None:
        super().__init__(parameters)
        sharding = parameters.sharding
        # Without a codec, at stage 2, every backward's gradients leave, and add up on their owners.
        (sharding.averaging if self._keeps_gradients else PLAIN_AVERAGING).prepare(self.parameters)
        self.rounded = rounded.rounded_gradients(parameters, self.watcher.seal, lambda: self.loss_scale)
        disk = self.disk = None if sharding.disk is None else Disk(sharding.disk, self.comm)
        waits_on = None if self._keeps_gradients else disk
        self.gradients = self.rounded or averaging_gradients(parameters, self.watcher.seal, waits_on)
        grouped = parameters.groups, parameters.order.group_of
        kept = [(one.runs, one.views, *grouped, optimizer_class, one.bucket) for one in parameters.master_weights]
        self._on_disk: list[ShardOptimizerOnDisk] = []
        if disk is not None:
            self._on_disk = [ShardOptimizerOnDisk(*one, disk=disk, names=self.names) for one in kept]
        self.optimizers: Sequence[ShardOptimizer] = self._on_disk or [ShardOptimizer(*one) for one in kept]
        self._ahead, self._absent = StepsAhead(), frozenset[int]()
        if disk is not None:
            disk.begin()
            for number, (one, weights) in enumerate(zip(self._on_disk, parameters.master_weights, strict=True)):
                if one.can_go_ahead and sharding.stage:
                    self.gradients[number].then = partial(self._step_ahead, number)
                initial, weights.moved_out = weights.bucket.take_initial(), one
                one.begin(None if initial is None else [initial[run.place] for run in weights.runs])
            disk.finish()
        self.watcher.use(self.gradients, self._keeps_gradients)
        self._comparisons = ComparisonTimes(resync_interval)

    def shown(self) -> torch.optim.Optimizer:
        """The torch optimizer of the first bucket of which this rank keeps anything."""
        return next((one for one in self.optimizers if one.optimizer is not None), self.optimizers[0]).shown()

    @override
    def step(self) -> StepResult:
        vote = self._begin_step()
        self.watcher.turn.moving = True
        self._parameters.take_over_written()
        norm = vote.norm / self.loss_scale
        applied = vote.finite and len(vote.absent) < len(self.parameters)
        coefficient = clip_coefficient(self._parameters.sharding.max_norm, norm) / self.loss_scale
        if applied:
            self.steps += 1
            filled = [number for number, gradients in enumerate(self.gradients) if gradients.filled]
            ahead = {number for number, one in enumerate(self._on_disk) if one.is_ahead(coefficient, vote.absent)}

            def move(number: int) -> None:
                kept = self._parameters.master_weights[number]
                if number in ahead:
                    self._on_disk[number].step(())
                    return
                average = self.gradients[number].take_average() if kept.runs else None
                if average is None:
                    return
                gradient = average.to(torch.float32)
                if coefficient != 1.0:
                    gradient.mul_(coefficient)
                (beside,) = bring_beside([kept], [gradient])
                self.optimizers[number].step(
                    [None if run.parameter in vote.absent else beside[run.place] for run in kept.runs]
                )

            for one in self.rounded:
                one.commit()
            if self.disk is not None:
                for number in reversed(filled):
                    self.disk.ring.expect(() if number in ahead else self.gradients[number].files)
                    self.disk.ring.expect(self.optimizers[number].files)
            self._parameters.move_and_publish(filled, move)
            if self.disk is not None:
                self.disk.finish()
            if (self.rounded or self._parameters.sharding.stage == 0) and self._comparisons.due(self.steps, True):
                self._compare_replicas()
        self._ahead.end_step(self._on_disk, applied and coefficient == 1.0 / self.loss_scale)
        self._absent = vote.absent
        self._expect_after(None)
        self.end_step()
        return StepResult(applied, norm, "" if applied else NO_GRADIENTS if vote.finite else NOT_FINITE)

    def _step_ahead(self, number: int, average: Tensor) -> None:
        """Step a bucket's files beside, if this average is likely to be the step's, but what had none in the last."""
        self._on_disk[number].forget()
        if self._ahead.due(number):
            self._expect_after(number)
            runs = enumerate(self._parameters.master_weights[number].runs)
            gradients = {run: average[one.place] for run, one in runs if one.parameter not in self._absent}
            self._on_disk[number].step_ahead(gradients, 1.0 / self.loss_scale, gradients, not self._keeps_gradients)

    def _expect_after(self, number: int | None) -> None:
        if (following := self._ahead.following.get(number)) is not None:
            runs = range(len(self._parameters.master_weights[following].runs))
            self._on_disk[following].expect(runs, runs)

    @override
    def drop(self) -> None:
        super().drop()
        self._ahead.drop(self._on_disk)

    def _compare_replicas(self) -> None:
        """Compare the ranks' weights, and give all of them rank 0's, or their owners', if they differ. Collective."""
        self._parameters.wait_for_weights()
        replicas = [one.flat for one in self._parameters.buckets]
        owned = self._parameters.sharding.stage > 0
        if not compare_replicas(self.comm, replicas, self.steps, "repair", "their owners'" if owned else "rank 0's"):
            for one in self._parameters.master_weights:
                if not owned:
                    broadcast_from_rank_0(self.comm, [one.weights])
                one.publish(exactly=True)()

    def _find_vote(self) -> Vote:
        rounded.check_arrived(self.rounded)
        sent = enumerate(self.gradients)
        return self._vote_on_averages({number: one.voted_on for number, one in sent if one.filled})

    @override
    def _vote_on_edited(self) -> Vote:
        """As of averages, but without a message: a rank may edit its own alone, as behind DistributedDataParallel."""
        assert self._vote is not None, "averages are shown once the ranks have voted"
        norm = norm_of_own([one.average for one in self.gradients if one.filled], self.comm.size)
        return Vote(math.isfinite(norm), norm, self._vote.absent)

    @override
    def parameter_state(self) -> ParameterState:
        return _ElementwiseState(self)

    @override
    def saved_slices(self) -> list[SavedSlice]:
        residuals = [found for one in self.rounded for found in one.saved_slices(self.names)]
        return super().saved_slices() + self._state_slices() + residuals

    @override
    def rank_tensors(self) -> dict[str, Tensor]:
        return {key: tensor for one in self.rounded for key, tensor in one.rank_tensors(self.names).items()}

    @override
    def counters(self) -> dict[str, Any]:
        return {"nodes": self._parameters.saved_nodes} if self._parameters.links else {}

    @override
    def check(self, source: SliceSource) -> None:
        super().check(source)
        if self.rounded:
            rounded.ranks_with_residuals(self.rounded, source, self._parameters)

    def _state_slices(self) -> list[SavedSlice]:
        pairs = zip(self.optimizers, self._parameters.master_weights, strict=True)
        return [found for one, kept in pairs for found in one.saved_slices(self.names, kept.own_cuts())]

    @override
    def load(self, source: SliceSource) -> None:
        self._parameters.load_weights(source)
        for one in self.optimizers:
            one.load(source, self._parameters.names)
        if self.rounded:
            rounded.load_residuals(self.rounded, source, self._parameters)

    @override
    def reset_state(self) -> None:
        for one in self.optimizers:
            one.reset()
        for gradients in self.rounded:
            gradients.reset()

    @override
    def model_state_bytes(self) -> dict[str, float]:
        kinds = {one.kind for one in self._state_slices()}
        stage, size = self._parameters.sharding.stage, self._parameters.buckets[0].dtype.itemsize
        state, held = 4 * sum(not kind.startswith("scalar.") for kind in kinds), self._parameters.gradient_bytes
        found = model_state_formula(
            stage, self._numel, self.comm.size, element_bytes=size, state_bytes=state, gradient_bytes=held
        )
        if any(one.layout.whole for one in self._parameters.buckets):  # other kinds of state, and unequal shares
            found["optimizer state"] = float(sum(one.state_bytes() for one in self.optimizers))
        if self.disk is not None:
            found |= {"master weights": 0.0, "optimizer state": 0.0}
            found |= {} if self._keeps_gradients else {"gradients": 0.0}
        return found | rounded.bytes_of_rounding(self.rounded, self._parameters)

    @override
    def close(self) -> None:
        super().close()
        if self.disk is not None:
            self.disk.close()


class _ElementwiseState(BucketParameterState):
    """With the state of each bucket's torch optimizer."""

    _home: _ElementwiseHome

    @override
    def average(self, bucket: int) -> Tensor | None:
        gradients = self._home.gradients[bucket]
        return gradients.average if gradients.filled else None

    @override
    def gradients_rewritten(self, bucket: int) -> None:
        for one in self._home._on_disk[bucket : bucket + 1]:
            one.forget()

    @override
    def weights(self, number: int) -> Held:
        held = super().weights(number)
        kept = self._home.optimizers[self._bucket_of(number)].fragments(number, MASTER)
        return replace(held, fragments=kept) if kept else held

    @override
    def after_writing_weights(self, number: int, value: Tensor | None) -> None:
        super().after_writing_weights(number, value)
        keeper = self._home.optimizers[self._bucket_of(number)]
        if value is not None and isinstance(keeper, ShardOptimizerOnDisk):
            keeper.write_weights(number, value.reshape(-1))

    @override
    def check_may_write_state(self, kind: str) -> None:
        check_in_memory(self._home.disk, kind)

    @override
    def state_in(self, bucket: int, number: int, kind: str) -> Held:
        fragments = self._home.optimizers[bucket].fragments(number, kind)
        return Held(fragments, self._parameters.sharding.stage == 0, known=kind in self.kinds())

    @override
    def kinds(self) -> list[str]:
        return sorted({kind for one in self._home.optimizers for kind in one.kinds()})
