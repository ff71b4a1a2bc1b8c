"""A model that lies on several ranks in stages, and trains a global batch at a time by a schedule of torch's."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining.schedules import (
    PipelineScheduleMulti,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleZBVZeroBubble,
    _Action,
    _ComputationType,
    _PipelineScheduleRuntime,
    get_schedule_class,
)

from thinwire.comm import Communicator, TorchCommunicator
from thinwire.comm.agreement import check_same_on_every_rank, on_every_rank
from thinwire.compress.packet_layout import MemorylessCodec
from thinwire.parallel.compressed_stage import CompressedStage
from thinwire.parallel.splitting import SCHEDULES, HuggingFaceStage, Split, StageModules, split_model
from thinwire.zero.initial_values import InitialValues
from thinwire.zero.replica import Stages

Loss = Callable[[Any, Any], Tensor]
_STAGES_A_RANK = 2  # of schedules that take several
_V_SHAPED = (ScheduleZBVZeroBubble, ScheduleDualPipeV)


class Pipeline:
    """A model in stages over the ranks of a pipeline, each of which keeps its own.

        pipeline = Pipeline(model, micro_batches=8)
        optimizer = torch.optim.AdamW(pipeline.parameters(), lr=1e-3)
        loss = pipeline.train_batch(batches, optimizer)

    model: a Hugging Face encoder or decoder with a loss of its own, or an nn.Sequential; the whole of it, on its
        device, alike on every rank. Of one on the meta device each rank makes its own stages' values, and no others.
    micro_batches: of a global batch, all of one shape.
    mesh: with a dimension "pp" for the stages, if there are replicas of them "dp", and if torch has parallelised the
        model's modules, all in the same way, over "tp"; None: all ranks are stages.
    schedule: the name of one of torch's, or "Eager1F1B". Those that take several stages a rank get two. "1F1B" is
        "GPipe" for fewer micro-batches than stages.
    split: `parameters`, so that the largest stage is as small as can be, `time`, so that it has as few operations, by
        the forward of a Hugging Face model, or the names of the blocks that stages but the first begin with.
    loss_fn: of the outputs of an nn.Sequential and the batch's targets.
    activations, gradients: as `CompressedStage` takes them; tensors travel as they are unless told otherwise.
    weights: a safetensors file, or a folder of them, with the values of a model on the meta device; None: they begin as
        its modules begin, alike in replicas.

    `loss_scale`: what gradients are times, for fp16; losses that are returned are not.

    Collective to make. Weights that stages share (tied embeddings) begin as the first of these has them, and their
    gradients are added up. Raises ValueError, on every rank, for a model that cannot be split, or where ranks differ in
    it or in what they ask for.
    """

    def __init__(
        self,
        model: nn.Module,
        micro_batches: int,
        *,
        mesh: DeviceMesh | None = None,
        schedule: str = "1F1B",
        split: Split = "parameters",
        loss_fn: Loss | None = None,
        activations: MemorylessCodec | None = None,
        gradients: MemorylessCodec | None = None,
        weights: str | Path | None = None,
    ) -> None:
        if mesh is not None and "pp" not in (mesh.mesh_dim_names or ()):
            raise ValueError(f'a pipeline\'s mesh has a dimension "pp" for its stages, not {mesh.mesh_dim_names} alone')
        named = {} if mesh is None else {name: mesh.get_group(name) for name in mesh.mesh_dim_names or ()}
        group = named["pp"] if mesh is not None else None
        self.comm = TorchCommunicator(group)
        self.comm.attend()
        others = {name: TorchCommunicator(group) for name, group in named.items() if name != "pp"}
        averaging = others.get("dp")
        self._averaging = averaging if averaging is not None and averaging.size > 1 else None
        self.micro_batches = micro_batches
        self._read_batch = _from_tuples if isinstance(model, nn.Sequential) else _from_mappings
        self._loss_fn: Loss = loss_fn or _loss_of_model
        initial = InitialValues.of(model, [self.comm, *others.values()])

        def prepare() -> tuple[Any, list[list[int]], list[nn.Module]]:
            if not isinstance(micro_batches, int) or isinstance(micro_batches, bool) or micro_batches < 1:
                raise ValueError(f"micro_batches is a whole number, at least 1, not {micro_batches!r}")
            if isinstance(model, nn.Sequential) and loss_fn is None:
                raise ValueError("an nn.Sequential has no loss of its own: give loss_fn")
            kind = schedule_class(schedule)
            if kind is Schedule1F1B and micro_batches < self.comm.size:
                kind = ScheduleGPipe  # torch's 1F1B takes as many as stages, and with fewer holds no less
            places = places_of_stages(kind, self.comm.size)
            parts = split_model(model, sum(map(len, places)), split)
            for number in places[self.comm.rank]:
                part = parts[number]
                initial.give(part.model if isinstance(part, HuggingFaceStage) else part, number, weights)
            return kind, places, parts

        kind, places, parts = on_every_rank(self.comm, prepare, "split the model into stages", (ValueError, OSError))
        asked = {"micro_batches": micro_batches, "schedule": schedule, "split": split}
        for comm in (self.comm, *others.values()):
            check_same_on_every_rank(comm, [*model.parameters()] if comm is self.comm else [], [], asked)
        mine = places[self.comm.rank]
        self.modules = StageModules({str(number): parts[number] for number in mine}, model)
        self._ties = self._tie([[parts[number] for number in of_rank] for of_rank in places])
        options: dict[str, Any] = {"group": group, "activations": activations, "gradients": gradients}
        stages = [CompressedStage(parts[number], number, len(parts), initial.device, **options) for number in mine]
        self._first, self._last = 0 in mine, len(parts) - 1 in mine
        self._last_rank = next(rank for rank, of_rank in enumerate(places) if len(parts) - 1 in of_rank)
        # A gradient that two stages of a rank share must be scaled once: the loss is, instead.
        one_or_all: Any = stages if issubclass(kind, PipelineScheduleMulti) else stages[0]
        self._schedule = kind(one_or_all, micro_batches, loss_fn=self._loss, scale_grads=False)
        self._expected: tuple[Any, ...] = ()
        self._targets: list[Any] = []
        self.loss_scale = 1.0

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Those of this rank's stages, under the names that the whole model has for them."""
        return self.modules.named_parameters()

    def parameters(self) -> Iterator[nn.Parameter]:
        """Those of this rank's stages."""
        return self.modules.parameters()

    def train_batch(self, batches: Iterator[Any], optimizer: Any = None, *, max_norm: float | None = None) -> Tensor:
        """Train on the next micro-batches, alike on every rank of a pipeline, and return their mean loss on every rank.

        batches: gives a micro-batch a time: names and tensors for a Hugging Face model, inputs and targets for an
            nn.Sequential.
        optimizer: takes its step, and lets gradients go; None leaves both to the caller. Where it has `no_sync`,
            gradients leave for the replicas once the last micro-batch is done.
        max_norm: of the gradients of all stages together, for a plain optimizer or none; one of thinwire's has its own,
            which counts all stages after averaging, and takes a step on all of them or on none.

        Raises StopIteration where no micro-batch is left, and ValueError, on every rank, where one is amiss, or for an
        optimizer that would step stages or replicas apart.
        """
        self._check(optimizer, max_norm)
        waiting = optimizer.no_sync() if hasattr(optimizer, "no_sync") else contextlib.nullcontext()
        with self.comm.transfers("a pipeline's step"):
            with waiting:
                loss = self._run(self._schedule.step, batches)
                for comm, parameter in self._ties:
                    if parameter.requires_grad:
                        comm.all_reduce(_local_gradient(parameter))
            if max_norm is not None:
                self.clip_grad_norm_(max_norm)
            if optimizer is not None:
                optimizer.step()
                optimizer.zero_grad()
        return loss

    @torch.no_grad()
    def eval_batch(self, batches: Iterator[Any]) -> Tensor:
        """The mean loss of the next micro-batches on every rank; nothing is trained. Modules stay in their mode.

        Raises RuntimeError for schedules in a V, ZBVZeroBubble and DualPipeV, whose evaluation torch lacks.
        """
        if isinstance(self._schedule, _V_SHAPED):
            raise RuntimeError(f"torch's {type(self._schedule).__name__} cannot evaluate: take another schedule")
        with self.comm.transfers("a pipeline's evaluation"):
            return self._run(self._schedule.eval, batches)

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale gradients, in place, to a norm over all stages of at most `max_norm`, and return what it was.
        Collective."""
        elsewhere = {*self._stages.ties} - self._stages.counted
        gradients = [one.grad for one in self.parameters() if one.grad is not None and id(one) not in elsewhere]
        total = torch.nn.utils.get_total_norm(gradients).float().square()
        self.comm.all_reduce(total)
        norm = total.sqrt()
        torch.nn.utils.clip_grads_with_norm_(self.parameters(), max_norm, norm)
        return norm

    def _check(self, optimizer: Any, max_norm: float | None) -> None:
        name = type(optimizer).__name__
        if optimizer is not None and self._averaging is not None and not hasattr(optimizer, "no_sync"):
            raise ValueError(
                f"{name} averages no gradients over the replicas of the pipeline, which would drift apart: take "
                f'thinwire.zero.ShardedOptimizer(pipeline.parameters(), torch.optim.{name}, mesh=mesh["dp"])'
            )
        if self.comm.size > 1 and hasattr(optimizer, "no_sync") and optimizer.replica is None:
            raise ValueError(f"{name} has parameters of no pipeline: build it of this one's pipeline.parameters()")
        cut = any(hasattr(one, "placements") for one in self.parameters())
        if max_norm is not None and (self._averaging is not None or cut):
            raise ValueError(
                f"max_norm={max_norm} would clip what each rank has, before it is averaged over replicas or by what "
                "tensor parallelism has left of it: give max_norm to an optimizer of thinwire"
            )

    def _run(self, schedule: Callable[..., Any], batches: Iterator[Any]) -> Tensor:
        given, others, self._targets = on_every_rank(
            self.comm, lambda: self._next(batches), "read micro-batches", (ValueError, StopIteration)
        )
        losses: list[Tensor] = []
        schedule(
            *(given if self._first else ()),
            target=torch.arange(self.micro_batches) if self._last else None,
            losses=losses,
            return_outputs=False,
            **others,
        )
        loss = torch.zeros((), dtype=torch.float32, device=given[0].device)
        if self._last:
            loss += torch.stack(losses).sum().detach() / self.loss_scale
        self.comm.broadcast(loss, root=self._last_rank)
        if self._averaging is not None:
            self._averaging.all_reduce(loss, "mean")
        return loss

    def _next(self, batches: Iterator[Any]) -> tuple[list[Tensor], dict[str, Tensor], list[Any]]:
        """A global batch: the first stage's inputs, what every stage gets, and the targets of each micro-batch."""
        taken = next_batches(batches, self.micro_batches, self._read_batch)
        read = [given for given, _ in taken]
        for one in (value for batch in read for value in batch.values()):
            if not (isinstance(one, Tensor) and one.dim() and len(one)):
                what = f"shape {tuple(one.shape)}" if isinstance(one, Tensor) else f"class {type(one).__name__}"
                raise ValueError(f"the inputs of a micro-batch are tensors with a row a sample, and one is of {what}")
        # Torch finds shapes out in a first step, and anew where training and evaluation take turns.
        mode = torch.is_grad_enabled()
        shapes = [(mode, {name: (tuple(one.shape), one.dtype) for name, one in batch.items()}) for batch in read]
        if not self._expected or self._expected[0] != mode:
            self._expected = shapes[0]
        for number, shape in enumerate(shapes):
            if shape != self._expected:
                raise ValueError(
                    f"micro-batch {number} is {shape[1]} and the first one was {self._expected[1]}: torch's schedules "
                    "take micro-batches of one shape. Pad samples, and leave the last ones out (drop_last=True)"
                )
        whole: dict[Any, Tensor] = {name: torch.cat([batch[name] for batch in read]) for name in read[0]}
        inputs = [whole.pop(place) for place in range(len(whole)) if place in whole]
        return inputs, whole, [target for _, target in taken]

    def _loss(self, output: Any, number: Tensor) -> Tensor:
        """Of a micro-batch of this number, its share of the mean, times the loss scale."""
        loss: Any = self._loss_fn(output, self._targets[int(number)])
        if not isinstance(loss, Tensor) or loss.numel() != 1 or loss.requires_grad != torch.is_grad_enabled():
            of_shape = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise ValueError(
                f"loss_fn returned {of_shape}: let it return a tensor of one number, which depends on the outputs, "
                "and these on parameters that require a gradient"
            )
        return loss.float() * (self.loss_scale / self.micro_batches)

    def _tie(self, parts: list[list[nn.Module]]) -> list[tuple[Communicator, nn.Parameter]]:
        """Parameters that other ranks have too, with a communicator over those who do."""
        held = [{id(one): one for part in of_rank for one in part.parameters()} for of_rank in parts]
        mine, ties = held[self.comm.rank], []
        self._stages = Stages(self.comm, {}, set())
        for number, key in enumerate(dict.fromkeys(key for of_rank in held for key in of_rank)):
            ranks = [rank for rank, of_rank in enumerate(held) if key in of_rank]
            if len(ranks) > 1:
                comm = self.comm.split(0 if self.comm.rank in ranks else None)
                if comm is not None:
                    comm.broadcast(_local(mine[key].detach()), root=0)
                    ties.append((comm, mine[key]))
                    self._stages.ties[key] = number
                    self._stages.counted |= {key} if comm.rank == 0 else set()
        if self.comm.size > 1:
            self._stages.note(mine.values())
        return ties


def next_batches(batches: Iterator[Any], count: int, read: Callable[[Any], Any]) -> list[Any]:
    """What `read` makes of the next micro-batches, which raises ValueError for one that is amiss.

    Raises StopIteration where there are none, ValueError where there are fewer.
    """
    if not hasattr(batches, "__next__"):
        raise ValueError(f"batches must be an iterator, not a {type(batches).__name__}: give iter(...) of it")
    taken = [read(batch) for batch in itertools.islice(batches, count)]
    if not taken:
        raise StopIteration
    if len(taken) < count:
        raise ValueError(
            f"only {len(taken)} micro-batches were left, and a global batch takes {count}: leave the last ones out, or "
            "begin anew"
        )
    return taken


class Eager1F1B(_PipelineScheduleRuntime):
    """1F1B for slow links: stages run further ahead, so that what travels does so while they compute.

    A micro-batch's way from a stage to the last one and back is that of `hops` = p - 1 - r transfers there and as many
    back, and of `hops` + 1 stages. Where no transfer takes longer than a stage's forward and backward, 3 `hops` + 1
    micro-batches on it leave no stage and no link waiting; 1F1B has `hops` + 1 and waits for each transfer. Stages hold
    the activations of as many (Zhuang et al. 2022, "On Optimizing the Communication of Model Parallelism").

    It takes what torch's `ScheduleInterleaved1F1B` takes, with one stage in the list.
    """

    def __init__(self, stages: list[Any], n_microbatches: int, **options: Any) -> None:
        super().__init__(stages, n_microbatches, **options)  # type: ignore[no-untyped-call]
        forward, backward = _ComputationType.FORWARD, _ComputationType.FULL_BACKWARD
        orders: dict[int, list[_Action | None]] = {}
        for rank in range(self.pp_group_size):
            ahead = min(n_microbatches, 3 * (self.pp_group_size - 1 - rank) + 1)
            order = orders[rank] = [_Action(rank, forward, number) for number in range(ahead)]
            for number in range(n_microbatches):
                order.append(_Action(rank, backward, number))
                if number + ahead < n_microbatches:
                    order.append(_Action(rank, forward, number + ahead))
        self._prepare_schedule_with_comms(orders)


def schedule_class(name: str) -> type:
    """A schedule by its name; raises ValueError."""
    found = SCHEDULES.get(str(name).lower())
    if found is None:
        raise ValueError(f"the schedule of a pipeline is {', '.join(SCHEDULES.values())}, not {name!r}")
    return Eager1F1B if found == "Eager1F1B" else get_schedule_class(found)


def places_of_stages(kind: type, ranks: int) -> list[list[int]]:
    """The numbers of each rank's stages."""
    if kind is Eager1F1B or not issubclass(kind, PipelineScheduleMulti):
        return [[rank] for rank in range(ranks)]
    if issubclass(kind, _V_SHAPED):
        return [[rank, 2 * ranks - 1 - rank] for rank in range(ranks)]
    return [[rank + ranks * turn for turn in range(_STAGES_A_RANK)] for rank in range(ranks)]


def _loss_of_model(output: Tensor, target: None) -> Tensor:
    """A Hugging Face model has found it."""
    return output


def _from_mappings(batch: Any) -> tuple[dict[Any, Tensor], None]:
    """What a micro-batch gives to stages, by name, the first stage's by number; and its targets."""
    if not isinstance(batch, Mapping) or not {"input_ids", "labels"} <= {*batch}:
        raise ValueError(
            "a micro-batch for a Hugging Face model has input_ids and labels, and whatever else it takes, by name; got "
            f"{sorted(batch) if isinstance(batch, Mapping) else type(batch).__name__}"
        )
    return {0 if name == "input_ids" else name: one for name, one in batch.items()}, None


def _from_tuples(batch: Any) -> tuple[dict[Any, Tensor], Any]:
    """The same of a pair."""
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        raise ValueError(
            f"a micro-batch for an nn.Sequential is a pair, inputs and targets; got {type(batch).__name__}"
        )
    return dict(enumerate(batch[0] if isinstance(batch[0], tuple | list) else [batch[0]])), batch[1]


def _local(tensor: Tensor) -> Tensor:
    """What is here of a tensor, which may be a DTensor."""
    local: Tensor = getattr(tensor, "_local_tensor", tensor)
    return local


def _local_gradient(parameter: Tensor) -> Tensor:
    """Of a parameter that another rank may use, with zeros where this one has not."""
    found: Any = parameter.grad
    if found is None:
        parameter.grad = found = torch.zeros_like(parameter)
    whole: Any = parameter
    if getattr(found, "placements", None) != getattr(whole, "placements", None):
        parameter.grad = found = found.redistribute(placements=whole.placements)
    return _local(found)
