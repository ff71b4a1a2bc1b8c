"""The home of optimizers whose state every rank holds: buckets laid out as gradients arrive, exchanged during backward,
and steps that are skipped, accumulated and unscaled alike on all ranks."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from thinwire.comm import Communicator
from thinwire.comm.agreement import raise_together
from thinwire.comm.nodes import NodeLinks, agree_on_nodes
from thinwire.compress.codecs import make_codec
from thinwire.optim.algorithm import Algorithm, Send
from thinwire.optim.algorithm_home import AlgorithmHome, check_may_leave_out
from thinwire.optim.bucket import AlgorithmBucket, StepUnderWay
from thinwire.optim.crossing import as_plain
from thinwire.optim.freeze_rule import FreezeRule
from thinwire.optim.home_options import HomeOptions
from thinwire.optim.norm_sketch import NormSketch
from thinwire.optim.recipe import Recipe
from thinwire.optim.replicated import checkpoint
from thinwire.optim.replicated.freeze_group import FreezeGroup
from thinwire.optim.replicated.parameters import ParameterTable
from thinwire.optim.replicated.placing import agree_on_absent, agree_on_order, cut_into_buckets, find_overflowing
from thinwire.optim.replicated.wire import Wire
from thinwire.zero import BucketLayout
from thinwire.zero.backward import BackwardWatcher
from thinwire.zero.home import NO_GRADIENTS, TRAFFIC, StepResult, ring_bytes
from thinwire.zero.rank_checks import broadcast_from_rank_0, check_parameters, check_same_on_every_rank
from thinwire.zero.rank_state import OneRankState
from thinwire.zero.saved_slices import Piece, PieceSource
from thinwire.zero.saved_state import read_weight
from thinwire.zero.sharded_home import clip_coefficient

__all__ = ["ReplicatedHome"]

_LEFT_OUT_STEPS = "left_out_steps"


@dataclass(frozen=True)
class _Synchronized:
    """One synchronised backward, the same on every rank.

    `absent`: the parameters that had no gradient on any rank. `overflowing`: where the averages are not finite, the
    ranks whose own gradients were not.
    """

    finite: bool
    absent: frozenset[int]
    overflowing: tuple[int, ...] = ()


class ReplicatedHome(AlgorithmHome):
    """All state on every rank: whole parameters, in buckets in the order in which rank 0 saw their gradients arrive.

    Early buckets are then whole early, whatever order the parameter groups list them in. The first backward is
    therefore exchanged as a whole, at its end.
    """

    kind = "replicated"
    elastic = True

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        comm: Communicator,
        options: HomeOptions,
        recipe: Recipe,
        make_rule: Callable[[], FreezeRule | None],
    ) -> None:
        """`optimizer` holds the groups; `make_rule`: for parameters that enter now."""
        self.comm = comm
        self.options = options
        self.settings = {**recipe.settings, "codec": options.codec, "block_size": options.block_size}
        self.table = ParameterTable(
            optimizer, recipe.algorithm().settings_class, options.named_parameters, options.param_dtype
        )
        self.groups: list[FreezeGroup] = []
        self.nodes = agree_on_nodes(comm, None if isinstance(options.nodes, str) else options.nodes)
        self._links = NodeLinks(comm, self.nodes) if self.nodes.hierarchical and options.nodes != "flat" else None
        self._exchange_comm = comm.duplicate()
        self._wire = Wire(
            self._exchange_comm,
            self._links,
            make_codec(options.codec, options.block_size),
            make_codec("none" if options.warmup_wire == "fp32" else "bf16", options.block_size),
        )
        self._optimizer_name = type(optimizer).__name__
        self._recipe = recipe
        self._make_rule = make_rule
        self.step_under_way = StepUnderWay(self._has_unplaced)
        self._unplaced: list[int] = []
        self._outcome: _Synchronized | None = None
        self._heard = 0
        self._loss_scale = 1.0
        self._sketch: NormSketch | None = None
        self._norm = math.nan
        self._watched: tuple[list[AlgorithmBucket], Callable[[], None] | None] = ([], None)
        self._watcher = BackwardWatcher(self.table.describe, self._on_whole)
        self._watcher.follow(lambda: not self._scales_apart)
        self.add_parameters()

    # What it reports

    @property
    def buckets(self) -> list[AlgorithmBucket]:
        """Of all freeze groups, in the order in which they leave."""
        return [bucket for group in self.groups for bucket in group.buckets]

    @property
    def algorithms(self) -> list[Algorithm]:
        """See AlgorithmHome."""
        return [group.algorithm for group in self.groups]

    @property
    def parameters(self) -> Sequence[Tensor]:
        """See Home."""
        return self.table.parameters

    @property
    def steps(self) -> int:
        """See Home."""
        return self.step_under_way.number

    @property
    def frozen(self) -> bool:
        """Whether all freeze groups are."""
        return bool(self.groups) and all(group.clock.frozen for group in self.groups)

    @property
    def frozen_at(self) -> int | None:
        """See Home."""
        return self.groups[0].clock.frozen_at if self.groups else None

    @property
    def in_sync(self) -> bool:
        """See Home."""
        return all(group.algorithm.in_sync for group in self.groups)

    @property
    def left_out_steps(self) -> int:
        """Local steps to which this rank added nothing, as its gradient was not finite."""
        return sum(group.left_out_steps for group in self.groups)

    @property
    def bytes_sent(self) -> int:
        """See Home."""
        by_node = 0 if self._links is None else self._links.bytes_inside + self._links.bytes_between
        return self._exchange_comm.traffic.bytes_sent + by_node

    @property
    def bytes_sent_between_nodes(self) -> int:
        """See Home."""
        flat = round(self._exchange_comm.traffic.bytes_sent * self.nodes.part_between(self.comm.rank))
        return flat if self._links is None else flat + self._links.bytes_between

    @property
    def uncompressed_step_bytes(self) -> int:  # type: ignore[override]
        """See Home."""
        placed = [slot.parameter for bucket in self.buckets for slot in bucket.layout.slots]
        return ring_bytes(self.comm, (self.parameters[index] for index in placed))

    @property
    def loss_scale(self) -> float:
        """What gradients are times."""
        return self._loss_scale

    @loss_scale.setter
    def loss_scale(self, scale: float) -> None:
        self._loss_scale = scale
        if not self._watcher.in_step:
            self.step_under_way.loss_scale = scale

    # One step

    def step(self) -> StepResult:
        """See Home."""
        self._check_gradients_untouched()
        under_way = self.step_under_way
        apart = self._scales_apart
        if apart:
            under_way.loss_scale = self._loss_scale
        scaler_has_seen = self._outcome is not None or not self.scaled or apart
        outcome = self._finish()
        if not scaler_has_seen and 0 < len(outcome.overflowing) < self.comm.size:
            self._end_step()
            raise RuntimeError(
                f"a gradient overflowed on ranks {list(outcome.overflowing)} in a step that some parameters took no part "
                "in, so that the GradScalers of other ranks could not see it and would keep their scale. Give every "
                "parameter a gradient in each backward, or train in bf16 without a GradScaler"
            )
        if outcome.finite and self._is_outdated():
            # Payloads left during backward as if this step's scale, or settings, were other ones. They change rarely,
            # and alike on every rank; nothing is committed yet, so all is simply sent again.
            under_way.loss_scale = self._loss_scale
            under_way.settings_sent = {}
            outcome = self._repeat()
        result = self._apply(outcome)
        self._end_step()
        return result

    def _apply(self, outcome: _Synchronized) -> StepResult:
        if len(outcome.absent) == len(self.table):
            return StepResult(False, math.nan, NO_GRADIENTS)
        if not outcome.finite:
            ranks = list(outcome.overflowing)
            where = f"on ranks {ranks}" if ranks else "after averaging, on no rank before"
            return StepResult(False, math.inf, f"a gradient was NaN or infinite {where}")
        for group in self.groups:
            group.receive_averages()
        self._find_clip(outcome.absent)
        for group in self.groups:
            group.update(outcome.absent, self._loss_scale, self.step_under_way.clip)
        self.step_under_way.number += 1
        return StepResult(True, self._norm)

    def drop(self) -> None:
        """See Home."""
        if self._watcher.in_step:
            self._finish()
            self._end_step()

    def no_sync(self) -> AbstractContextManager[None]:
        """See Home."""
        return self._watcher.no_sync()

    def leave_out(self, parameters: Iterable[Tensor]) -> None:
        """See Home."""
        check_may_leave_out(self._recipe.algorithm())
        self._watcher.leave_out(parameters, self.comm)

    def end_backward(self) -> None:
        """See Home; buckets that a parameter holds back leave in `step`."""

    def follow(self, gate: Callable[[], bool]) -> None:
        """See Home."""
        self._watcher.follow(gate)

    def name(self, names: Mapping[int, str]) -> None:
        """See Home."""
        self.table.call(names)

    def add_parameters(self) -> None:
        """See Home."""
        new = self.table.new_parameters()
        tensors = [parameter for parameter, _ in new]
        error: Exception | None = None
        try:
            for group in self.table.groups():
                self._recipe.check_group(group)
            check_parameters([*self.table.parameters, *tensors], self._optimizer_name)
        except (ValueError, TypeError) as raised:
            error = raised
        raise_together(self.comm, error, "build its optimizer")
        compared = {**self.options.compared(), **self.settings, **self._recipe.schedule}
        check_same_on_every_rank(self.comm, tensors, self.table.groups(), compared)
        broadcast_from_rank_0(self.comm, tensors)
        for parameter, group_number in new:
            self._unplaced.append(len(self.table))
            self.table.add(parameter, group_number)
        self._watcher.watch(tensors)

    # Weights

    def synchronize_weights(self) -> None:
        """See Home."""
        if self._watcher.in_step:
            raise RuntimeError("synchronize_weights() was called between backward() and step(): call step() first")
        for group in self.groups:
            group.meet(self.step_under_way.number)

    def show_own_weights(self, own: bool) -> None:
        """See Home."""
        with torch.no_grad():
            for group in self.groups:
                group.show_own_weights(own)

    # Checkpoints

    def pieces(self) -> list[Piece]:
        """See Home."""
        found = [piece for group in self.groups for piece in checkpoint.slices(group, self.table, self.comm.rank)]
        if self.comm.rank == 0:
            placed = {slot.parameter for bucket in self.buckets for slot in bucket.layout.slots}
            found += checkpoint.unplaced_slices(self.table, placed)
        return found

    def rank_tensors(self) -> dict[str, Tensor]:
        """See Home."""
        found = {_LEFT_OUT_STEPS: torch.tensor([group.left_out_steps for group in self.groups], dtype=torch.int64)}
        for group in self.groups:
            found |= checkpoint.rank_tensors(group, self.table)
        return found

    def counters(self) -> dict[str, Any]:
        """See Home."""
        return {
            "names": list(self.table.names),
            "settings": dict(self.settings),
            "nodes": None if self._links is None else list(self.nodes.node_of),
            "step": self.step_under_way.number,
            "loss_scale": self._loss_scale,
            "freeze_groups": [checkpoint.group_counters(group, self.table) for group in self.groups],
        }

    def load(self, source: PieceSource) -> None:
        """See Home. Residuals that cannot be had start from zero, with a warning."""
        saved = source.counters()
        checkpoint.check_settings(saved["settings"], self.settings)
        saved_by = f"rank {source.rank}" if isinstance(source, OneRankState) else "a job"
        source = as_plain(source)
        if "weight" in source.kinds():
            self.load_weights(source)
        checkpoint.load_masters(self.table, source)
        number_of = {name: index for index, name in enumerate(self.table.names)}
        self.place(
            [
                [[number_of[name] for name in bucket] for bucket in group["buckets"]]
                if group["buckets"] is not None
                else self._all_buckets()
                for group in saved["freeze_groups"]
            ]
        )
        ranks = self._ranks_to_resume(source, saved_by)
        for group, of_group in zip(self.groups, saved["freeze_groups"], strict=True):
            checkpoint.load_group(group, self.table, of_group, source, ranks)
        self.step_under_way.number = saved["step"]
        self.loss_scale = saved["loss_scale"]
        if ranks == [self.comm.rank]:
            try:
                left_out = source.read_rank(_LEFT_OUT_STEPS, self.comm.rank).tolist()
            except KeyError:  # from a home without local steps
                left_out = [0] * len(self.groups)
            for group, steps in zip(self.groups, left_out, strict=True):
                group.left_out_steps = steps
        self._prepare()

    def _ranks_to_resume(self, source: PieceSource, saved_by: str) -> list[int] | None:
        """The ranks whose residuals this one goes on with: its own, all of them, or none that can be had."""
        nodes = None if self._links is None else list(self.nodes.node_of)
        same = source.world_size == self.comm.size and source.counters()["nodes"] == nodes
        ranks = [self.comm.rank] if same else list(range(source.world_size))
        flat = nodes is None and source.counters()["nodes"] is None
        try:
            for rank in ranks if same or flat else ():
                source.read_rank(TRAFFIC, rank)
        except KeyError:
            pass
        else:
            if same or flat:
                return ranks
        frozen = any(group["frozen_at"] is not None for group in source.counters()["freeze_groups"])
        if frozen or any(group.compresses for group in self.groups):
            warnings.warn(
                f"this state was saved by {saved_by} of {source.world_size} and is loaded by rank {self.comm.rank} of "
                f"{self.comm.size}, or on other nodes: error-feedback residuals belong to one rank, so they start from "
                "zero here. To keep them, save and load state_dict() on every rank",
                RuntimeWarning,
                stacklevel=6,
            )
        return None

    def _all_buckets(self) -> list[list[int]]:
        """Buckets of all trainable parameters, last ones first, as backward is likely to bring them."""
        order = [index for index in reversed(range(len(self.table))) if self.parameters[index].requires_grad]
        layouts = cut_into_buckets(self.parameters, order, self.comm.size, self.options)
        return [[slot.parameter for slot in layout.slots] for layout in layouts]

    def load_weights(self, source: PieceSource) -> None:
        """See Home."""
        for index, parameter in enumerate(self.parameters):
            values = read_weight(source, parameter.dtype, self.table.names[index], 0, parameter.numel())
            parameter.copy_(values.view(parameter.shape))
            self.table.make_master(index)
            if "master" in self.table.state(index):
                exact = read_weight(source, torch.float32, self.table.names[index], 0, parameter.numel())
                self.table.state(index)["master"].copy_(exact.view(parameter.shape))
        for group in self.groups:
            group.algorithm.end_sync()

    def reset_state(self) -> None:
        """See Home."""
        self.place([])
        self.step_under_way.number = 0
        for index, parameter in enumerate(self.parameters):
            self.table.state(index).clear()
            if parameter.dtype != torch.float32:
                self.table.make_master(index)

    def torch_state(self) -> dict[int, dict[str, Tensor]]:
        """See Home."""
        states = ((index, self.table.state(index)) for index in range(len(self.table)))
        return {index: dict(state) for index, state in states if state}

    def model_state_bytes(self) -> dict[str, float]:
        """See Home."""
        held = [tensor for state in self.torch_state().values() for name, tensor in state.items() if name != "master"]
        masters = [state["master"] for state in self.torch_state().values() if "master" in state]
        weights = float(sum(parameter.nbytes for parameter in self.parameters))
        residuals = [bucket.compressed.worker_residual for bucket in self.buckets if bucket.compresses]
        owners = [bucket.compressed.owner_residual for bucket in self.buckets if bucket.compresses]
        return {
            "weights": weights,
            "masters": float(sum(tensor.nbytes for tensor in masters)),
            "gradients": weights,
            "residuals": float(sum(one.nbytes for one in [*residuals, *owners] if one is not None)),
            "optimizer state": float(sum(tensor.nbytes for tensor in held)),
        }

    def place(self, freeze_groups: Sequence[Sequence[Sequence[int]]]) -> list[FreezeGroup]:
        """Lay parameters out anew: for each freeze group, each bucket's parameters; others wait for a gradient."""
        placed = {index for group in freeze_groups for order in group for index in order}
        self._unplaced = [index for index in range(len(self.table)) if index not in placed]
        self.groups = []
        for group in freeze_groups:
            self._add_group(
                [
                    cut_into_buckets(self.parameters, order, self.comm.size, self.options, whole=True)[0]
                    for order in group
                ]
            )
        self._prepare()
        return self.groups

    def close(self) -> None:
        """See Home."""
        self._exchange_comm.close()
        if self._links is not None:
            self._links.close()

    # Parts of a step

    @property
    def _scales_apart(self) -> bool:
        """Whether GradScalers' scales may differ: local steps leave each alone with its overflows."""
        return bool(self.scaled) and any(one.algorithm.local_steps and one.clock.frozen for one in self.groups)

    def _is_outdated(self) -> bool:
        """Whether what left is not what would be sent now, on every rank alike."""
        under_way = self.step_under_way
        scale_changed = under_way.loss_scale != self._loss_scale and any(
            group.send is not Send.EXACT for group in self.groups
        )
        sent = under_way.settings_sent.items()
        return scale_changed or any(settings != self.table.settings(group) for group, settings in sent)

    def _has_unplaced(self) -> bool:
        return any(self.parameters[index].requires_grad for index in self._unplaced)

    def _on_whole(self) -> None:
        outcome = self._finish()
        if not outcome.finite:
            # Where another rank's gradients are not finite: a GradScaler must see it on every rank.
            for index in self._watcher.arrived:
                gradient = self.parameters[index].grad
                if gradient is not None and gradient.numel():
                    gradient[(0,) * gradient.dim()] = math.inf
                    return

    def _finish(self) -> _Synchronized:
        """Send what has not left yet, wait for everything and say what became of it. Collective.

        Raises PacketError where the ranks have lost step, and ValueError, on every rank, where some rank has no
        gradient for a parameter that has one on others.
        """
        if self._outcome is not None:
            return self._outcome
        try:
            self._watcher.finish()
            outcomes = self._hear()
            if not self.buckets or any(outcome.unplaced for outcome in outcomes):
                self._place_in_order_of_arrival()
                self._watcher.finish()
                outcomes += self._hear()
            absent: frozenset[int] = frozenset()
            if any(outcome.incomplete for outcome in outcomes):
                absent = agree_on_absent(self.comm, self.table, set(self._watcher.arrived))
            finite = all(outcome.finite for outcome in outcomes)
            overflowing = () if finite else find_overflowing(self.comm, self.parameters)
        except BaseException:
            self._end_step()
            raise
        self._outcome = _Synchronized(finite, absent | self._watcher.left_out, overflowing)
        self._watcher.usually_absent = absent - self._watcher.left_out
        return self._outcome

    def _repeat(self) -> _Synchronized:
        """Send this step's gradients once more, as payloads are written now. Collective, after `_finish`."""
        self._outcome = None
        self._heard = 0
        self._watcher.send_again()
        return self._finish()

    def _hear(self) -> list[Any]:
        """The outcomes of the buckets not heard of yet."""
        heard = [bucket.outcome() for bucket in self.buckets[self._heard :]]
        self._heard = len(self.buckets)
        return [outcome for outcome in heard if outcome is not None]

    def _end_step(self) -> None:
        self._watcher.end_step()
        self._outcome = None
        self._heard = 0
        self.step_under_way.loss_scale = self._loss_scale
        self._prepare()

    def _check_gradients_untouched(self) -> None:
        # GradScaler's check for infinities writes gradients back without changing them.
        if self.scaled:
            return
        if changed := self._watcher.changed_gradients:
            raise RuntimeError(
                f"the gradient of {self.table.describe(changed[0])} was changed or dropped between backward() and "
                "step(), after it had left for the other ranks, so the change would be ignored. To clip, pass max_norm= "
                "to the optimizer; remove other edits of .grad"
            )

    def _place_in_order_of_arrival(self) -> None:
        order = agree_on_order(self.comm, self.table, self._unplaced, self._watcher.arrived)
        if order:
            self._unplaced = [index for index in self._unplaced if index not in set(order)]
            group = self._add_group(cut_into_buckets(self.parameters, order, self.comm.size, self.options))
            self._watcher.add(group.buckets)

    def _add_group(self, layouts: Sequence[BucketLayout]) -> FreezeGroup:
        group = FreezeGroup(
            self.table,
            self._wire,
            self._recipe.algorithm(),
            self._make_rule(),
            self.step_under_way,
            layouts,
            len(self.buckets),
        )
        self.groups.append(group)
        return group

    # Clipping

    def _prepare(self) -> None:
        """Be ready for the next step: where its averaged gradient's norm has to be known before leg 2, hold that."""
        self.step_under_way.clip = 1.0
        self.step_under_way.settings_sent = {}
        self._norm = math.nan
        sends = {group.send for group in self.groups}
        sketched = bool(self.options.max_norm) and bool(sends - {Send.EXACT})
        if sketched and self._sketch is None:
            self._sketch = NormSketch(self._exchange_comm, self.parameters[0].device)
        if self._sketch is not None:
            self._sketch.discard()
        self.step_under_way.sketch = self._sketch if sketched else None
        between_legs = self._sketch_clip if sketched and Send.LOCAL not in sends else None
        if (buckets := self.buckets, between_legs) != self._watched:
            self._watched = (buckets, between_legs)
            self._watcher.use(buckets, keeps_gradients=True, between_legs=between_legs)

    def _sketch_clip(self) -> None:
        assert self._sketch is not None
        self._take_norm(self._sketch.norm())

    def _find_clip(self, absent: frozenset[int]) -> None:
        """The clip of steps in which averaged gradients are there, or only this rank's own."""
        if not self.options.max_norm:
            return
        exact = [group for group in self.groups if group.send is Send.EXACT]
        local = [group for group in self.groups if group.send is Send.LOCAL]
        if exact and len(exact) + len(local) == len(self.groups):
            square = torch.tensor([sum(group.square_of_averages(absent) for group in exact)], dtype=torch.float64)
            self._exchange_comm.broadcast(square)
            self._take_norm(math.sqrt(float(square)))
        if local:
            assert self._sketch is not None
            clip = clip_coefficient(self.options.max_norm, self._sketch.own_norm() / self._loss_scale)
            for bucket in (one for group in local for one in group.buckets if clip < 1.0):
                bucket.clip_own(clip)

    def _take_norm(self, norm: float) -> None:
        self._norm = norm / self._loss_scale
        finite = math.isfinite(self._norm)
        self.step_under_way.clip = clip_coefficient(self.options.max_norm, self._norm) if finite else 1.0
