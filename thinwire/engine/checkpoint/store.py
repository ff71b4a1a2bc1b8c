"""Saves and loads the checkpoints of a job, on all its ranks together: whole or absent, and never one at the cost of
another.

Every rank writes its own file, and a receipt of it, without a collective, so that it can be done in the background."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import sys
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from thinwire.comm import Communicator
from thinwire.comm.agreement import gather, on_every_rank, raise_together
from thinwire.engine.checkpoint.files import (
    CODES,
    DTYPES,
    LazyTensor,
    dtype_name,
    sync_folder,
    write_tensors,
    write_whole,
)
from thinwire.engine.checkpoint.folder import (
    CheckpointFolder,
    Claim,
    await_receipts,
    check_length,
    lock_folder,
    receipt_in,
)
from thinwire.engine.checkpoint.loading import LoadedCheckpoint, select
from thinwire.engine.checkpoint.manifest import (
    BUFFER_KEY,
    MANIFEST,
    RANK_FILE,
    RANK_KEY,
    SLICE_KEY,
    Manifest,
    ModelDescription,
    RankFile,
    Run,
    SliceEntry,
    check_folder,
    check_tag,
    rank_file,
)
from thinwire.engine.errors import CheckpointError
from thinwire.zero import SavedSlice


@dataclass(frozen=True)
class Snapshot:
    """Everything that one rank contributes to a checkpoint.

    Args:
        slices: this rank's share; the ranks' slices of a kind hold each of its parameters once, and every parameter has
            a "weight" or a "master". Parameters that no optimizer holds are slices of one rank as well.
        rank_tensors: what belongs to this rank alone, any shape.
        shared: JSON values that are the same everywhere; rank 0's are written. "optimizer" holds what SliceSource's
            `counters` gives back, "tied" maps other names of a parameter to the one in `model`.
        rank_values: JSON values of this rank.
        buffers: the model's; rank 0's are written.
        model: the same on every rank.
    """

    slices: list[SavedSlice]
    model: ModelDescription
    rank_tensors: dict[str, Tensor] = field(default_factory=dict)
    shared: dict[str, Any] = field(default_factory=dict)
    rank_values: dict[str, Any] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)

    def named(self) -> list[tuple[str, Tensor]]:
        """All tensors, by what an error calls them."""
        slices = [(f"slice {one.kind!r} of {one.name!r} at {one.start}", one.tensor) for one in self.slices]
        return [*slices, *self.rank_tensors.items(), *self.buffers.items()]

    def check(self) -> None:
        """Raise ValueError or TypeError for what could not be read back."""
        for what, tensor in self.named():
            if tensor.dtype not in CODES:
                raise TypeError(
                    f"{what} is {dtype_name(tensor.dtype)}, which a checkpoint cannot hold; expected one of "
                    f"{', '.join(DTYPES)}"
                )
        self.model.check_slices(self.slices)
        for name, values in (("shared", self.shared), ("rank_values", self.rank_values)):
            try:
                json.dumps(values)
            except (TypeError, ValueError) as error:
                raise TypeError(f"{name} must hold what JSON can write: {error}") from error

    def copied_to_cpu(self) -> Snapshot:
        """The same with tensors of its own, which training does not change."""
        return replace(
            self,
            slices=[replace(one, tensor=_copied(one.values()), read=None) for one in self.slices],
            rank_tensors={key: _copied(tensor) for key, tensor in self.rank_tensors.items()},
            buffers={name: _copied(tensor) for name, tensor in self.buffers.items()},
            shared=json.loads(json.dumps(self.shared)),
            rank_values=json.loads(json.dumps(self.rank_values)),
        )


def _copied(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)


@dataclass(frozen=True)
class _Save:
    """One rank's work for a save in flight, on a thread of its own: writing, then on rank 0 publishing, which gives
    (tags of older checkpoints that were removed, what could not be cleared up). `abandoned`: whether to give up."""

    tag: str
    nonce: str
    written: Future[None]
    published: Future[tuple[list[str], list[str]]] | None
    abandoned: threading.Event


class CheckpointStore:
    """The checkpoints of a job in one folder, on a file system that all its ranks share.

    Args:
        folder: made at the first save.
        comm: the job's ranks. Every method is collective.
        keep: of the checkpoints that this job saved, or one before it that it has loaded from this folder and
            continues, older ones are removed once there are this many newer ones with all their files, and rank 0
            prints which; at least 2, so that there is another should one be damaged later. None keeps all.
        asynchronous: `save` copies the tensors to CPU memory and returns; threads write them, without communicating. A
            process that ends first finishes its file, for at most the communicator's timeout.

    Raises ValueError for a `keep` below 2, TypeError or ValueError for what is no path.
    """

    def __init__(
        self, folder: str | os.PathLike[str], comm: Communicator, keep: int | None = None, asynchronous: bool = False
    ) -> None:
        check_folder(folder, "folder")
        if keep is not None and keep < 2:
            raise ValueError(
                f"keep must be at least 2, so that one damaged checkpoint is not the end, or None for all; got {keep}"
            )
        self.folder = Path(folder)
        self._folder = CheckpointFolder(self.folder)
        self._comm = comm
        self._keep = keep
        self._asynchronous = asynchronous
        self._in_flight: _Save | None = None
        self._run = Run(secrets.token_hex(8), {})
        self._told: set[str] = set()
        # Another job may have the folder locked for so long; the other ranks wait for as long and longer.
        self._patience = comm.timeout / 2

    def save(self, tag: str, snapshot: Snapshot, latest: bool = True) -> bool:
        """Save under `tag`, replacing a checkpoint of that tag. Returns whether it is published.

        With `latest` the file of that name says that this is the one to load; otherwise it stays as it is.

        An asynchronous save waits for the one before, and returns True once the new one is in flight; its own outcome
        is what `wait` returns. A save that cannot be written, as on a full disk, leaves the earlier checkpoints as they
        are, warns on rank 0 and returns False, on every rank.

        Raises, on every rank: ValueError or TypeError for a snapshot that could not be loaded again; CheckpointError
        where a rank does not see the folder that rank 0 has made.
        """
        self.wait()
        nonce = self._agree(tag, snapshot)
        folder = self._folder.hidden(tag, nonce)
        claim: Claim | None = None
        error, problems = None, list[str]()
        if self._comm.rank == 0:
            try:
                claim, problems = self._folder.prepare(tag, nonce, self._patience)
            except OSError as raised:
                error = raised
        if failures := self._failures(error):
            self._warn_of_failure(tag, failures)
            return False
        self._tell(f"checkpoint {tag!r} is being saved, but not all could be put in order before", problems)
        try:
            unseen = (
                f"rank {self._comm.rank} does not see what rank 0 writes to {self.folder.absolute()}: checkpoints need "
                "a folder on a file system that all ranks share"
            )
            for message in self._failures(None if folder.is_dir() else CheckpointError(unseen)).values():
                raise CheckpointError(message)
            if self._asynchronous:
                copying = "copy its tensors for an asynchronous save"
                snapshot = on_every_rank(self._comm, snapshot.copied_to_cpu, copying, (MemoryError, RuntimeError))
            for device in {tensor.device for _, tensor in snapshot.named()}:
                if device.type == "cuda":  # the thread that reads the tensors has streams of its own
                    torch.cuda.current_stream(device).synchronize()
        except BaseException:
            if claim is not None:
                claim.release()
                self._folder.discard(tag, nonce)
            raise
        abandoned = threading.Event()
        executor = ThreadPoolExecutor(1, thread_name_prefix=f"checkpoint {tag}")
        written = executor.submit(write_rank_file, folder, self._comm.rank, snapshot)
        published = None
        if claim is not None:
            published = executor.submit(self._publish, tag, nonce, snapshot, claim, latest, abandoned)
        executor.shutdown(wait=False)
        self._in_flight = _Save(tag, nonce, written, published, abandoned)
        return True if self._asynchronous else self.wait()

    def wait(self) -> bool:
        """Wait for the save in flight, and return whether it is published; True if there is none.

        Raises what writing has failed with where that is not the disk's fault.
        """
        save, self._in_flight = self._in_flight, None
        if save is None:
            return True
        try:
            error = save.written.exception()
            failures = self._failures(error)
            if not failures:
                error = save.published.exception() if save.published else None
                failures = self._failures(error)
        finally:
            save.abandoned.set()
        if failures:
            if save.published:
                save.published.exception()  # it must have stopped writing
                self._folder.discard(save.tag, save.nonce)
            unexpected = error if isinstance(error, Exception) and not isinstance(error, OSError) else None
            raise_together(self._comm, unexpected, f"save checkpoint {save.tag!r}")
            self._warn_of_failure(save.tag, failures)
            return False
        removed, problems = save.published.result() if save.published else ([], [])
        self._tell(f"checkpoint {save.tag!r} is saved, but not all could be cleared up", problems)
        for tag in removed:
            newer = f"{self._keep} newer ones are kept (keep_last)"
            print(f"thinwire: checkpoint {tag!r} of {self.folder} is removed: {newer}", file=sys.stderr, flush=True)
        return True

    close = wait

    def load(
        self,
        tag: str | None = None,
        description: ModelDescription | None = None,
        continues: bool = True,
        fault_of: Callable[[LoadedCheckpoint], str | None] = lambda _: None,
    ) -> LoadedCheckpoint | None:
        """Verify a checkpoint, every byte of it, the files divided among the ranks, and open it.

        Without a tag it is the one that `latest` names, else the newest; one that is damaged, or of another model than
        `description`, is passed over for the one before it, with a RuntimeWarning on rank 0 that says why. With a tag
        it is that one. None where there is no checkpoint at all and no tag.

        `continues`: the job goes on from it, so that `keep` takes those before it for this job's own. `fault_of` finds
        what else is against a checkpoint, if anything, of which no values have been verified yet.

        Raises CheckpointError, on every rank: there are checkpoints but none is whole; the one asked for is missing or
        damaged; the model has changed since; pickles are offered as a checkpoint.
        """
        self.wait()

        def any_fault_of(found: LoadedCheckpoint) -> str | None:
            difference = None if description is None else description.difference_to(found.model)
            return f"it is of another model: {difference}" if difference else fault_of(found)

        found = select(self.folder, self._comm, tag, any_fault_of)
        if found is not None and continues:
            self._run = self._run.going_on_from(found.manifest)
        return found

    # One save

    def _agree(self, tag: str, snapshot: Snapshot) -> str:
        """Check that all ranks save the same; returns a number that no other save uses."""

        def check() -> None:
            check_tag(tag)
            if self._comm.rank == 0:
                self._folder.check_free(tag)
            snapshot.check()

        on_every_rank(self._comm, check, "save a checkpoint", (TypeError, ValueError))
        model = hashlib.sha256(json.dumps(snapshot.model.to_json()).encode()).hexdigest()
        mine = {"tag": tag, "model": model, "nonce": secrets.token_hex(4)}
        everyones = gather(self._comm, mine, "save a checkpoint")
        first = everyones[0]
        for rank, other in enumerate(everyones):
            if (other["tag"], other["model"]) != (first["tag"], first["model"]):
                what = "another model" if other["tag"] == first["tag"] else f"tag {other['tag']!r}"
                raise ValueError(
                    f"rank {rank} saves {what}, rank 0 tag {first['tag']!r}: every rank must save the same checkpoint"
                )
        nonce: str = first["nonce"]
        return nonce

    def _publish(
        self, tag: str, nonce: str, snapshot: Snapshot, claim: Claim, latest: bool, abandoned: threading.Event
    ) -> tuple[list[str], list[str]]:
        """Replace the receipts of all ranks by the manifest and give the checkpoint its name; what `prune` has done."""
        folder, comm = self._folder, self._comm
        path = folder.hidden(tag, nonce)
        try:
            files = await_receipts(path, comm.size, comm.timeout, abandoned, claim.beat)
            with lock_folder(folder.path, self._patience):
                manifest = Manifest(tag, folder.next_serial(), self._run, snapshot.model, files, snapshot.shared)
                if problem := manifest.incompleteness():
                    raise ValueError(f"the ranks' slices do not make a checkpoint: {problem}")
                write_whole(path / MANIFEST, manifest.encode())
                for rank, file in enumerate(files):
                    receipt_in(path, rank).unlink()
                    check_length(path, rank, file)
                sync_folder(path)
                claim.release()
                folder.publish(tag, nonce, latest)
                try:
                    return folder.prune(tag, nonce, self._keep, self._run)
                except OSError as error:  # the checkpoint is there all the same
                    return [], [f"older ones cannot be looked for: {error}"]
        finally:
            claim.release()

    # Agreement

    def _failures(self, error: BaseException | None) -> dict[int, str]:
        """What has failed on which rank, the same on every rank."""
        mine = "" if error is None else str(error) or type(error).__name__
        # A file's name may hold bytes that are no text.
        messages = self._comm.all_gather_bytes(mine.encode(errors="backslashreplace"), "publish a checkpoint")
        return {rank: message.decode() for rank, message in enumerate(messages) if message}

    def _warn_of_failure(self, tag: str, failures: dict[int, str]) -> None:
        what = "; ".join(f"rank {rank}: {message}" for rank, message in failures.items())
        self._warn(f"checkpoint {tag!r} was not saved to {self.folder}: {what}. The checkpoints before it stay")

    def _tell(self, what: str, problems: list[str]) -> None:
        """Warn of problems that do no harm by themselves, of each once."""
        new = [problem for problem in problems if problem not in self._told]
        self._told.update(new)
        if new:
            self._warn(f"{what}: {'; '.join(new)}")

    def _warn(self, message: str) -> None:
        if self._comm.rank == 0:
            warnings.warn(message, RuntimeWarning, stacklevel=4)


def write_rank_file(folder: Path, rank: int, snapshot: Snapshot) -> None:
    """Write this rank's tensors, then a receipt with what the manifest must say of them. Raises OSError."""
    name = rank_file(rank)
    tensors: dict[str, Tensor | LazyTensor] = {}
    entries = []
    for one in snapshot.slices:
        key = SLICE_KEY.format(one.kind, one.name, one.start)
        dtype = str(one.tensor.dtype).removeprefix("torch.")
        entries.append(SliceEntry(one.kind, one.name, one.start, one.tensor.numel(), dtype, name, key))
        tensors[key] = LazyTensor(one.tensor.dtype, tuple(one.tensor.shape), one.read) if one.read else one.tensor
    tensors |= {RANK_KEY.format(key): tensor for key, tensor in snapshot.rank_tensors.items()}
    rank_keys = {key: RANK_KEY.format(key) for key in snapshot.rank_tensors}
    tensors |= {BUFFER_KEY.format(key): tensor for key, tensor in snapshot.buffers.items()}
    buffer_keys = {key: BUFFER_KEY.format(key) for key in snapshot.buffers}
    size, sha256 = write_tensors(folder / name, tensors)
    file = RankFile(name, size, sha256, entries, rank_keys, buffer_keys, snapshot.rank_values)
    write_whole(receipt_in(folder, rank), json.dumps(RANK_FILE.dump_python(file)).encode())
