"""The engine's checkpoints: everything that the next steps depend on goes in, and comes back on any number of ranks and
at any ZeRO stage."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.comm.agreement import on_every_rank
from thinwire.engine.checkpoint import CheckpointError, CheckpointStore, LoadedCheckpoint, ModelDescription, Snapshot
from thinwire.engine.checkpoint.client_state import check_client_state
from thinwire.engine.checkpoint.folder import check_folder
from thinwire.engine.checkpoint.manifest import MANIFEST, Manifest
from thinwire.engine.checkpoint.random_state import (
    RANDOM_TENSORS,
    load_random_state,
    random_tensors,
    random_values,
    reseed,
)
from thinwire.engine.checkpoint.weights_file import write_weights
from thinwire.engine.job import Job
from thinwire.engine.model.precision import Precision
from thinwire.engine.saved_job import fault_of_saved_job
from thinwire.engine.schedules import load_schedule_state, schedule_state
from thinwire.zero import SavedSlice
from thinwire.zero.fsdp import fill, local_run, whole

__all__ = ["JobCheckpoints", "ModelNames", "Restored"]


@dataclass(frozen=True)
class ModelNames:
    """What a model is called by, found before it is sharded.

    `tied`: other names of a parameter -> the one in `description`. `buffers`: names of those that are saved.
    """

    description: ModelDescription
    tied: Mapping[str, str]
    buffers: frozenset[str]

    @classmethod
    def of(cls, model: nn.Module, precision: Precision) -> ModelNames:
        """Names, shapes, and the dtypes that `precision` makes of them."""
        first_name = {id(parameter): name for name, parameter in model.named_parameters()}
        every = model.named_parameters(remove_duplicate=False)
        tied = {name: first_name[id(parameter)] for name, parameter in every if first_name[id(parameter)] != name}
        saved = {name for name, _ in model.named_buffers()} & model.state_dict(keep_vars=True).keys()
        parameters = {
            name: (tuple(parameter.shape), precision.dtype_of(parameter))
            for name, parameter in model.named_parameters()
        }
        return cls(ModelDescription(parameters), tied, frozenset(saved))


@dataclass(frozen=True)
class Restored:
    """What a checkpoint held for the engine itself; `progress` is None where only weights were asked for.

    `world_size`: ranks that saved it.
    """

    path: str
    world_size: int
    progress: dict[str, int] | None
    client_state: dict[str, Any]


class JobCheckpoints:
    """Saves and loads a training job as a whole. Every method is collective."""

    def __init__(self, job: Job, names: ModelNames) -> None:
        self._job = job
        self._names = names
        held = {id(one) for group in job.optimizer.param_groups for one in group["params"] if one.requires_grad}
        # Kept by object: at stage 3 the model's own attributes are whole parameters while they are gathered.
        self._parameters = dict(job.model.named_parameters())
        self._others = {name: one for name, one in self._parameters.items() if id(one) not in held}
        self._stores: dict[Path, CheckpointStore] = {}

    def save(
        self,
        folder: str | os.PathLike[str],
        tag: str,
        progress: dict[str, int],
        client_state: Mapping[str, Any] | None,
        data_position: dict[str, Any] | None,
    ) -> bool:
        """Save under `tag`; whether that went well, or, with async_save, has begun. A full disk is a warning.

        `data_position`: of the loader, None where there is none.

        Raises, on every rank, TypeError for a client state that JSON cannot hold, and what `check_folder` raises.
        """
        state = {} if client_state is None else client_state
        comm = self._job.comm
        on_every_rank(comm, lambda: check_folder(folder, "save_dir"), "save a checkpoint", (TypeError, ValueError))
        on_every_rank(comm, lambda: check_client_state(state), "save its client_state", (TypeError,))
        return self._store(folder).save(tag, self._snapshot(progress, state, data_position))

    def load(
        self,
        folder: str | os.PathLike[str],
        tag: str | None,
        *,
        optimizer: bool,
        schedule: bool,
        data_position: bool,
        weights_only: bool,
    ) -> Restored | None:
        """Load the checkpoint `tag`, or the newest whole one; None where there is none.

        Without `optimizer` its state starts afresh, without `schedule` or `data_position` those go on as they are; with
        `weights_only` nothing but weights and buffers is loaded. On another number of ranks than that which saved,
        generators are seeded afresh from the configuration's seed, the step and the rank.

        Raises CheckpointError, or ValueError where optimizer, schedule or data are others than those that were saved.
        """
        comm = self._job.comm
        on_every_rank(comm, lambda: check_folder(folder, "load_dir"), "load a checkpoint", (TypeError, ValueError))
        parts = {
            "progress": True,
            "loss_scale": True,
            "optimizer": optimizer,
            "schedule": schedule,
            "data": data_position,
        }
        used = [name for name, wanted in parts.items() if wanted and not weights_only]
        fault_of = partial(self._fault_of, ["client_state", *used])
        found = self._store(folder).load(tag, self._names.description, not weights_only, fault_of)
        if found is None:
            return None
        with found:
            if not weights_only:
                self._check(found, schedule, data_position)
            try:
                self._load_optimizer(found, optimizer, weights_only)
            except KeyError as error:
                raise CheckpointError(
                    f"checkpoint {found.tag!r} lacks what this optimizer goes on from: {error.args[0]}. Load with "
                    "load_optimizer_states=False, or another checkpoint"
                ) from error
            self._load_others(found)
            if not weights_only:
                self._load_state(found, schedule, data_position)
            progress = None if weights_only else found.shared["progress"]
            return Restored(str(found.path), found.world_size, progress, found.shared["client_state"])

    def export(self, folder: str | os.PathLike[str], filename: str) -> bool:
        """Write all weights, in the dtypes that the model computes in, and buffers to one file; see `write_weights`."""
        comm = self._job.comm
        on_every_rank(comm, lambda: check_folder(folder, "save_dir"), "write the model", (TypeError, ValueError))
        return write_weights(Path(folder) / filename, self.whole_weights(), comm)

    def whole_weights(self) -> dict[str, Tensor]:
        """All weights, in the dtypes that the model computes in, and buffers, on rank 0; nothing on other ranks."""
        self._job.optimizer.wait_for_weights()
        self._job.optimizer.synchronize_weights()
        tensors = {}
        for name, parameter in self._parameters.items():
            _, dtype = self._names.description.parameters[name]
            tensor = whole(parameter, self._job.device).to(dtype)
            if self._job.comm.rank == 0:
                tensors[name] = tensor.cpu()
        if self._job.comm.rank == 0:
            tensors |= {name: buffer.cpu() for name, buffer in self._buffers().items()}
        return tensors

    def close(self) -> None:
        """Wait for saves that are under way."""
        for store in self._stores.values():
            store.close()

    def _fault_of(self, used: Collection[str], manifest: Manifest) -> str | None:
        """Why this job cannot take up these parts of what a manifest says; None where it can."""
        job = self._job
        fault = fault_of_saved_job(manifest, used, job.optimizer.counters(), self._schedule())
        return f"{MANIFEST} does not hold what an engine saves: {fault}" if fault else None

    def _schedule(self) -> dict[str, Any] | None:
        schedule = self._job.schedule
        return None if schedule is None else {"type": type(schedule).__name__, "state": schedule_state(schedule)}

    def _store(self, folder: str | os.PathLike[str]) -> CheckpointStore:
        path = Path(folder).absolute()
        if path not in self._stores:
            settings = self._job.config.checkpoint
            self._stores[path] = CheckpointStore(path, self._job.comm, settings.keep_last, settings.async_save)
        return self._stores[path]

    def _snapshot(
        self, progress: dict[str, int], client_state: Mapping[str, Any], data_position: dict[str, Any] | None
    ) -> Snapshot:
        job = self._job
        shared = {
            "progress": progress,
            "optimizer": job.optimizer.counters(),
            "schedule": self._schedule(),
            "loss_scale": None if job.loss_scale is None else job.loss_scale.state(),
            "data": data_position,
            "client_state": dict(client_state),
            "tied": dict(self._names.tied),
        }
        return Snapshot(
            slices=[*job.optimizer.saved_slices(), *self._other_slices()],
            model=self._names.description,
            rank_tensors=job.optimizer.rank_tensors() | random_tensors(job.device),
            shared=shared,
            rank_values={"random": random_values()},
            buffers=self._buffers(),
        )

    def _other_slices(self) -> list[SavedSlice]:
        """Weights that no optimizer holds: this rank's shard where they are sharded, else rank 0's."""
        slices = []
        for name, parameter in self._others.items():
            start, values = local_run(parameter)
            sharded = values.numel() < parameter.numel()
            if values.numel() and (sharded or self._job.comm.rank == 0):
                slices.append(SavedSlice("weight", name, start, values))
        return slices

    def _buffers(self) -> dict[str, Tensor]:
        return {name: buffer for name, buffer in self._job.model.named_buffers() if name in self._names.buffers}

    def _load_optimizer(self, found: LoadedCheckpoint, state: bool, weights_only: bool) -> None:
        optimizer = self._job.optimizer
        if weights_only:
            optimizer.load_weights(found)
        elif state:
            optimizer.load(found)
        else:
            optimizer.reset_state()
            optimizer.load_weights(found)

    @torch.no_grad()
    def _load_others(self, found: LoadedCheckpoint) -> None:
        for name, parameter in self._others.items():
            fill(parameter, partial(found.read, "weight", name))
        saved = found.buffers()
        for name, buffer in self._buffers().items():
            if name in saved:
                buffer.copy_(saved[name])

    def _check(self, found: LoadedCheckpoint, schedule: bool, data_position: bool) -> None:
        """Raise what schedule, data and buffers have against this checkpoint, before anything has changed."""
        job, saved = self._job, found.shared
        if schedule and job.schedule is not None and saved["schedule"] is not None:
            mine, theirs = type(job.schedule).__name__, saved["schedule"]["type"]
            if mine != theirs:
                raise ValueError(
                    f"checkpoint {found.tag!r} was saved with the schedule {theirs}, this job has {mine}: build the "
                    "same one, or load with load_lr_scheduler_states=False"
                )
        if data_position and job.loader is not None and saved["data"] is not None:
            job.loader.check_state(saved["data"])
        theirs = found.buffers()
        for name, buffer in self._buffers().items():
            if name in theirs and theirs[name].shape != buffer.shape:
                raise ValueError(
                    f"buffer {name!r} has shape {tuple(buffer.shape)}, checkpoint {found.tag!r} holds "
                    f"{tuple(theirs[name].shape)}: build the model as it was"
                )

    def _load_state(self, found: LoadedCheckpoint, schedule: bool, data_position: bool) -> None:
        job, saved = self._job, found.shared
        if job.schedule is not None:
            saved_state = saved["schedule"]["state"] if schedule and saved["schedule"] is not None else {}
            load_schedule_state(job.schedule, saved_state)
        if data_position and job.loader is not None and saved["data"] is not None:
            job.loader.load_state(saved["data"])
        if job.loss_scale is not None and saved["loss_scale"] is not None:
            job.loss_scale.load(saved["loss_scale"])
        rank = job.comm.rank
        if found.world_size == job.comm.size:
            saved_names = RANDOM_TENSORS & found.manifest.files[rank].rank_tensors.keys()
            tensors = {name: found.read_rank(name, rank) for name in saved_names}
            load_random_state(tensors, found.rank_values(rank)["random"], job.device)
        else:
            reseed(job.config.seed, saved["progress"]["global_steps"], rank)
