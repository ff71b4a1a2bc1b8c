"""The engine's checkpoints: everything that the next steps depend on goes in, and comes back on any number of ranks and
at any ZeRO stage."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from thinwire.comm import Communicator
from thinwire.comm.agreement import on_every_rank
from thinwire.engine.checkpoint.client_state import ClientState, pack_client_state, unpack_client_state
from thinwire.engine.checkpoint.exporting import in_16_bits, state_dict_of, write_weights
from thinwire.engine.checkpoint.loading import LoadedCheckpoint
from thinwire.engine.checkpoint.manifest import MANIFEST, ModelDescription, check_folder
from thinwire.engine.checkpoint.part_source import PartSource
from thinwire.engine.checkpoint.regions import Regions
from thinwire.engine.checkpoint.store import CheckpointStore, Snapshot
from thinwire.engine.errors import CheckpointError
from thinwire.engine.job import Job
from thinwire.engine.saved_job import (
    RANDOM_TENSORS,
    SavedJob,
    fault_of_saved_job,
    load_random_state,
    load_schedule_state,
    random_tensors,
    random_values,
    reseed,
    schedule_state,
)
from thinwire.zero import SavedSlice, SliceSource
from thinwire.zero.fsdp import fill, local_run, whole
from thinwire.zero.replica import local_part
from thinwire.zero.saved_state import DamagedStateError, OwnSlices
from thinwire.zero.tensor_on_disk import saved_slice


@dataclass(frozen=True)
class Parts:
    """What of a checkpoint is loaded. Without `optimizer` its state starts afresh, without `schedule` or
    `data_position` those go on as they are; with `weights_only` nothing but weights and buffers is loaded. Without
    `strict`, parameters that the checkpoint lacks keep their values, and those that the model lacks are passed over.

    `custom`: called with `src`, the checkpoint's weights and buffers by name, and `dst`, the model, in place of the
    loading of weights.
    """

    optimizer: bool = True
    schedule: bool = True
    data_position: bool = True
    weights_only: bool = False
    strict: bool = True
    custom: Callable[..., object] | None = None


class JobCheckpoints:
    """Saves and loads a training job as a whole. Every method is collective."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._names = job.names
        held = {id(one) for group in job.optimizer.param_groups for one in group["params"] if one.requires_grad}
        # Kept by object: at stage 3 the model's own attributes are whole parameters while they are gathered.
        self._parameters = dict(job.model.named_parameters())
        self._others = {name: one for name, one in self._parameters.items() if id(local_part(one)) not in held}
        self._stores: dict[Path, CheckpointStore] = {}
        self._here: Regions | None = None

    def save(
        self,
        folder: str | os.PathLike[str],
        tag: str,
        progress: dict[str, int],
        client_state: Mapping[str, Any] | None,
        data_position: dict[str, Any] | None,
        *,
        latest: bool = True,
        exclude_frozen: bool = False,
    ) -> bool:
        """Save under `tag`; whether that went well, or, with async_save, has begun. A full disk is a warning.

        `data_position`: of the loader, None where there is none. `latest`: name it in the file of that name.
        `exclude_frozen`: leave out the parameters that require no gradient.

        Raises, on every rank, TypeError for a client state that cannot be kept, what `check_folder` raises, and
        TagError where ranks give several tags and "checkpoint.tag_validation" is "Fail".
        """

        def check() -> ClientState:
            check_folder(folder, "save_dir")
            return ClientState({}) if client_state is None else pack_client_state(client_state)

        comm = self._job.world
        state = on_every_rank(comm, check, "save a checkpoint", (TypeError, ValueError))
        tag = _one_tag(comm, tag, self._job.config.checkpoint.tag_validation)
        left_out = self._frozen() if exclude_frozen else []
        snapshot = self._snapshot(progress, state, data_position, left_out)
        return self._store(folder).save(tag, self._placed(snapshot), latest)

    def load(
        self, folder: str | os.PathLike[str], tag: str | None, parts: Parts
    ) -> tuple[LoadedCheckpoint, dict[str, Any]] | None:
        """Load `parts` of the checkpoint `tag`, or of the newest whole one, and return it, closed, with its client
        state; None where there is none.

        On another number of ranks than that which saved, generators are seeded afresh from the configuration's seed,
        the step and the rank.

        Raises CheckpointError, or ValueError where optimizer, schedule or data are others than those that were saved.
        """
        comm = self._job.world
        on_every_rank(comm, lambda: check_folder(folder, "load_dir"), "load a checkpoint", (TypeError, ValueError))
        if parts.custom is not None and (self._job.config.zero_optimization.stage == 3 or self._job.mesh is not None):
            raise ValueError(
                "custom_load_fn writes to a whole model, and a rank has parts of it here: load the weights into the "
                "model before thinwire.initialize"
            )
        fault_of = partial(self._fault_of, parts)
        found = self._store(folder).load(tag, None, not parts.weights_only, fault_of)
        if found is None:
            return None
        with found:
            client_state = self._client_state(found)
            if not parts.weights_only:
                self._check(found, parts)
            self._load_weights(found, parts)
            if not parts.weights_only:
                self._load_state(found, parts)
            return found, client_state

    def export(self, folder: str | os.PathLike[str], filename: str, exclude_frozen: bool = False) -> bool:
        """Write all weights and buffers in 16 bits to one file; see `write_weights`."""
        comm = self._job.world
        on_every_rank(comm, lambda: check_folder(folder, "save_dir"), "write the model", (TypeError, ValueError))
        return write_weights(Path(folder) / filename, self._without_frozen(exclude_frozen), self._names.tied, comm)

    def weights_in_16_bits(self, exclude_frozen: bool) -> dict[str, Tensor] | None:
        """What `export` would write for torch.save, tied names too, on rank 0; None on other ranks. Collective."""
        tensors = {name: in_16_bits(one) for name, one in self._without_frozen(exclude_frozen).items()}
        tied = {alias: tensors[name] for alias, name in self._names.tied.items() if name in tensors}
        return tensors | tied if self._job.world.rank == 0 else None

    def _without_frozen(self, exclude: bool) -> dict[str, Tensor]:
        left_out = self._frozen() if exclude else []
        return {name: one for name, one in self.whole_weights().items() if name not in left_out}

    def whole_weights(self) -> dict[str, Tensor]:
        """All weights, in the dtypes that the model computes in, and buffers, on rank 0; nothing on other ranks."""
        optimizer = self._job.optimizer
        optimizer.wait_for_weights()
        if optimizer.comes_and_goes and optimizer.in_training:  # synchronised, its part in the job would end
            optimizer.eval()
            try:
                return {name: one.clone() for name, one in self.whole_weights().items()}
            finally:
                optimizer.train()
        shown = optimizer.comes_and_goes or (optimizer.steps_alone and not optimizer.in_training)  # what was evaluated
        if not shown:
            optimizer.synchronize_weights()
        tensors = {}
        for name, parameter in self._parameters.items():
            _, dtype = self._names.description.parameters[name]
            tensor = whole(parameter, self._job.device).to(dtype)
            if self._job.world.rank == 0:
                tensors[name] = tensor.cpu()
        if self._job.world.rank == 0:
            tensors |= {name: buffer.cpu() for name, buffer in self._buffers().items()}
        return tensors

    def close(self) -> None:
        """Wait for saves in flight."""
        for store in self._stores.values():
            store.wait()

    def _fault_of(self, parts: Parts, found: LoadedCheckpoint) -> str | None:
        """Why this job cannot take up these parts of a checkpoint; None where it can, or they are another job's."""
        job, manifest = self._job, found.manifest
        others = {
            "progress": True,
            "loss_scale": True,
            "optimizer": parts.optimizer,
            "schedule": parts.schedule,
            "data": parts.data_position,
        }
        used = [name for name, wanted in others.items() if wanted and not parts.weights_only]
        always = ["client_state", "client_values", "frozen", "left_out"]
        fault = fault_of_saved_job(manifest, [*always, *used], self._schedule())
        if fault:
            return f"{MANIFEST} does not hold what an engine saves: {fault}"
        if parts.custom is not None:
            return None
        saved = manifest.model.parameters
        left_out = set(manifest.shared.get("left_out", ())) & set(self._frozen())
        mine = {name: one for name, one in self._names.description.parameters.items() if name not in left_out}
        if not parts.strict:
            mine = {name: one for name, one in mine.items() if name in saved}
            saved = {name: one for name, one in saved.items() if name in mine}
        if difference := ModelDescription(mine).difference_to(ModelDescription(saved)):
            return f"it is of another model: {difference}"
        if "optimizer" in used and parts.strict:
            try:
                job.optimizer.check(self._source(found))
            except DamagedStateError as error:
                return f"{MANIFEST} does not hold what an engine saves: {error}"
            except (ValueError, TypeError):
                pass  # of another optimizer, as loading says
        return None

    def _frozen(self) -> list[str]:
        return [name for name, parameter in self._others.items() if not parameter.requires_grad]

    def _schedule(self) -> dict[str, Any] | None:
        schedule = self._job.schedule
        return None if schedule is None else {"type": type(schedule).__name__, "state": schedule_state(schedule)}

    def _store(self, folder: str | os.PathLike[str]) -> CheckpointStore:
        path = Path(folder).absolute()
        if path not in self._stores:
            settings = self._job.config.checkpoint
            self._stores[path] = CheckpointStore(path, self._job.world, settings.keep_last, settings.async_save)
        return self._stores[path]

    def _snapshot(
        self,
        progress: dict[str, int],
        client_state: ClientState,
        data_position: dict[str, Any] | None,
        left_out: Collection[str],
    ) -> Snapshot:
        job = self._job
        shared = SavedJob.plain(
            progress=progress,
            optimizer=job.optimizer.counters(),
            schedule=self._schedule(),
            loss_scale=None if job.loss_scale is None else job.loss_scale.state(),
            data=data_position,
            client_state=client_state.plain,
            client_values=client_state.special,
            tied={alias: name for alias, name in self._names.tied.items() if name not in left_out},
            frozen=self._frozen(),
            left_out=list(left_out),
        )
        own = client_state.tensors if job.world.rank == 0 else {}
        rank_values: dict[str, Any] = {"random": random_values()}
        if job.loss_scale is not None and job.optimizer.steps_alone:  # of a worker
            rank_values["loss_scale"] = job.loss_scale.state()
        return Snapshot(
            slices=[*job.optimizer.saved_slices(), *self._other_slices(left_out)],
            model=self._names.without(left_out) if left_out else self._names.description,
            rank_tensors=job.optimizer.rank_tensors() | random_tensors(job.device) | own,
            shared=shared,
            rank_values=rank_values,
            buffers=self._buffers() if job.world.rank == 0 else {},
        )

    def _placed(self, snapshot: Snapshot) -> Snapshot:
        """What was found here, at its place in the whole model."""
        return snapshot

    def _client_state(self, found: LoadedCheckpoint) -> dict[str, Any]:
        if not (found.shared["client_state"] or found.shared.get("client_values")):
            return {}
        try:
            return unpack_client_state(found.shared, lambda key: found.read_rank(key, 0))
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"the client_state of checkpoint {found.tag!r} cannot be put together: {error!r}. Load another one"
            ) from error

    def _other_slices(self, left_out: Collection[str]) -> list[SavedSlice]:
        """Weights that no optimizer holds: this rank's shard where they are sharded, else rank 0's."""
        slices = []
        for name, parameter in self._others.items():
            if name in left_out:
                continue
            start, values = local_run(parameter)
            sharded = values.numel() < parameter.numel()
            if values.numel() and (sharded or self._job.comm.rank == 0):
                slices.append(saved_slice("weight", name, start, values))
        return slices

    def _buffers(self) -> dict[str, Tensor]:
        return {name: buffer for name, buffer in self._job.model.named_buffers() if name in self._names.buffers}

    def _load_weights(self, found: LoadedCheckpoint, parts: Parts) -> None:
        """Weights and buffers, and the optimizer's state with them where it is wanted."""
        optimizer = self._job.optimizer
        self._keep_missing(found)
        source = self._source(found)
        if not (parts.weights_only or parts.optimizer):
            optimizer.reset_state()
        if parts.optimizer and not parts.weights_only:
            optimizer.load(source)
        elif parts.custom is None:
            optimizer.load_weights(source)
        with torch.no_grad():
            if parts.custom is not None:
                parts.custom(src=state_dict_of(found), dst=self._job.model)
                return
            for name, parameter in self._others.items():
                if name in found.model.parameters:
                    fill(parameter, partial(source.read, "weight", name))
            saved = found.buffers()
            for name, buffer in self._buffers().items():
                if name in saved:
                    buffer.copy_(saved[name])

    def _source(self, found: LoadedCheckpoint) -> SliceSource:
        """What is here of a checkpoint, whichever ranks saved it."""
        if self._here is None and "mesh" not in found.shared:
            return found
        here = self._here or Regions(self._job.world, None, self._parameters)
        return PartSource(found, here, self._job.comm, self._job.optimizer.counters())

    def _keep_missing(self, found: LoadedCheckpoint) -> None:
        """Let the checkpoint answer with the present values of what the optimizer holds and it lacks."""
        missing = [name for name in self._parameters if name not in found.model.parameters and name not in self._others]
        if not missing:
            return
        self._job.optimizer.wait_for_weights()
        kept = []
        for name in missing:
            _, dtype = self._names.description.parameters[name]
            weights = whole(self._parameters[name], self._job.device).to(dtype).cpu().clone()
            kept.append(SavedSlice("weight", name, 0, weights.reshape(-1)))
        for one in self._job.optimizer.saved_slices():
            if one.kind == "master" and one.name in missing:
                # Values of their own: loading writes to the memory that these are views of.
                kept.append(SavedSlice(one.kind, one.name, one.start, one.values().clone()))
        found.kept = OwnSlices(found.world_size, {}, kept, {})

    def _check(self, found: LoadedCheckpoint, parts: Parts) -> None:
        """Raise what schedule, data and buffers have against this checkpoint, before anything has changed."""
        job, saved = self._job, found.shared
        if parts.schedule and job.schedule is not None and saved["schedule"] is not None:
            mine, theirs = type(job.schedule).__name__, saved["schedule"]["type"]
            if mine != theirs:
                raise ValueError(
                    f"checkpoint {found.tag!r} was saved with the schedule {theirs}, this job has {mine}: build the "
                    "same one, or load with load_lr_scheduler_states=False"
                )
        if parts.data_position and job.loader is not None and saved["data"] is not None:
            job.loader.check_state(saved["data"])
        theirs = found.buffers()
        for name, buffer in self._buffers().items():
            if name in theirs and theirs[name].shape != buffer.shape:
                raise ValueError(
                    f"buffer {name!r} has shape {tuple(buffer.shape)}, checkpoint {found.tag!r} holds "
                    f"{tuple(theirs[name].shape)}: build the model as it was"
                )

    def _load_state(self, found: LoadedCheckpoint, parts: Parts) -> None:
        job, saved = self._job, found.shared
        if job.schedule is not None:
            saved_state = saved["schedule"]["state"] if parts.schedule and saved["schedule"] is not None else {}
            load_schedule_state(job.schedule, saved_state)
        if parts.data_position and job.loader is not None and saved["data"] is not None:
            job.loader.load_state(saved["data"])
        rank, mesh = job.world.rank, found.shared.get("mesh")
        alike = found.world_size == job.world.size and mesh == (self._here and self._here.sizes)
        if job.loss_scale is not None and saved["loss_scale"] is not None:
            of_rank = found.rank_values(rank) if alike else {}
            job.loss_scale.load(of_rank.get("loss_scale", saved["loss_scale"]))
        if alike and "random" in found.rank_values(rank):
            saved_names = RANDOM_TENSORS & found.manifest.files[rank].rank_tensors.keys()
            tensors = {name: found.read_rank(name, rank) for name in saved_names}
            load_random_state(tensors, found.rank_values(rank)["random"], job.device)
        else:
            alike_on = max(1, job.config.tensor_parallel.autotp_size)
            reseed(job.config.seed, saved["progress"]["global_steps"], rank // alike_on)


class TagError(ValueError, AssertionError):
    """Ranks give a checkpoint several names. An AssertionError too, which scripts of other libraries catch."""


def _one_tag(comm: Communicator, tag: str, validation: str) -> str:
    """Rank 0's tag, on every rank. Collective."""
    tags = [one.decode() for one in comm.all_gather_bytes(tag.encode(errors="backslashreplace"), "save a checkpoint")]
    other = next((rank for rank, one in enumerate(tags) if one != tags[0]), None)
    if other is None or validation == "Ignore":
        return tags[0] if other is not None else tag
    what = f"rank {other} saves under the tag {tags[other]!r}, rank 0 under {tags[0]!r}"
    if validation == "Fail":
        raise TagError(f'{what}: give every rank the same, or set "checkpoint.tag_validation" to "Warn"')
    if comm.rank == 0:
        warnings.warn(f"{what}: all of the checkpoint goes under rank 0's", RuntimeWarning, stacklevel=5)
    return tags[0]
