"""Checkpoints of a job whose ranks hold a model together: of the whole model, for any others."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain

import torch
from safetensors.torch import load, save
from torch import Tensor
from torch.distributed.tensor import DTensor
from typing_extensions import override

from thinwire.comm.agreement import gather
from thinwire.engine.checkpoint.part_source import part_values
from thinwire.engine.checkpoint.regions import Regions
from thinwire.engine.checkpoint.store import Snapshot
from thinwire.engine.job import Job
from thinwire.engine.job_checkpoints import JobCheckpoints


class PartCheckpoints(JobCheckpoints):
    """Saves and loads parts of a model. Collective to make."""

    _here: Regions

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self._here = Regions(job.world, job.mesh, self._parameters)
        mine = [name for name, one in self._others.items() if not one.requires_grad]
        every = {*chain.from_iterable(gather(job.world, mine, "see what is frozen"))}
        self._all_frozen = [name for name in self._names.description.parameters if name in every]
        self._parameters = {name: getattr(one, "_local_tensor", one) for name, one in self._parameters.items()}
        self._others = {name: self._parameters[name] for name in self._others}

    @override
    def _frozen(self) -> list[str]:
        return self._all_frozen

    @override
    def _placed(self, snapshot: Snapshot) -> Snapshot:
        here = self._here
        first = here.place["dp"] == here.place["tp"] == 0
        return replace(
            snapshot,
            slices=here.of_whole(snapshot.slices),
            shared=snapshot.shared | here.shared(),
            rank_values=snapshot.rank_values | part_values(here, self._job.optimizer.counters()),
            buffers=self._buffers() if first else {},
        )

    @override
    @torch.no_grad()
    def whole_weights(self) -> dict[str, Tensor]:
        world, here = self._job.world, self._here
        self._job.optimizer.wait_for_weights()
        self._job.optimizer.synchronize_weights()
        tensors = {}
        for name, (shape, dtype) in self._names.description.parameters.items():
            held: Tensor | None = here.held.get(name)
            if isinstance(held, DTensor):
                held = held.full_tensor()
            given = torch.empty(shape, device=self._job.device) if held is None else held
            tensor = given.to(dtype, copy=True).contiguous()
            world.broadcast(tensor, root=here.first_with[name])
            if world.rank == 0:
                tensors[name] = tensor.cpu()
        mine = {name: buffer.cpu().contiguous() for name, buffer in self._buffers().items()}
        of_rank = world.all_gather_bytes(
            save(mine) if here.place["dp"] == here.place["tp"] == 0 else b"", "see buffers"
        )
        if world.rank == 0:
            tensors |= {name: buffer for one in of_rank if one for name, buffer in load(one).items()}
        return tensors
