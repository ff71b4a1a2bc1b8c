"""Saves and loads the checkpoints of a job, on all its ranks together: whole or absent, and never one at the cost of
another."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import sys
import threading
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from thinwire.comm import Communicator
from thinwire.comm.agreement import raise_together
from thinwire.engine.checkpoint.files import CheckpointError
from thinwire.engine.checkpoint.folder import CheckpointFolder, ClearedUp, check_folder, check_tag
from thinwire.engine.checkpoint.locks import Claim
from thinwire.engine.checkpoint.manifest import Manifest, ModelDescription, Run
from thinwire.engine.checkpoint.reading import LoadedCheckpoint
from thinwire.engine.checkpoint.selection import select
from thinwire.engine.checkpoint.writing import (
    SaveInFlight,
    Snapshot,
    await_receipts,
    write_manifest,
    write_rank_file,
)
from thinwire.zero.synchronized_optimizer import SynchronizedOptimizer

__all__ = ["CheckpointStore", "TagError", "load_optimizer", "one_tag", "save_optimizer"]


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
        self._in_flight: SaveInFlight | None = None
        self._run = Run(secrets.token_hex(8), {})
        self._claim: Claim | None = None
        self._told: set[str] = set()

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
        if not self._prepare(tag, nonce):
            return False
        try:
            self._check_sight(tag, nonce)
            if self._asynchronous:
                snapshot = self._copy(snapshot)
            _finish_computing(snapshot)
        except BaseException:
            if self._claim is not None:
                self._claim.release()
                self._folder.discard(tag, nonce)
            raise
        folder = self._folder.partial(tag, nonce)
        publish = None
        if self._claim is not None:
            publish = partial(self._publish, tag, nonce, snapshot, self._claim, latest)
        self._in_flight = SaveInFlight(tag, nonce, partial(write_rank_file, folder, self._comm.rank, snapshot), publish)
        return True if self._asynchronous else self.wait()

    def wait(self) -> bool:
        """Wait for the save in flight, and return whether it is published; True if there is none.

        Raises what writing has failed with where that is not the disk's fault.
        """
        save, self._in_flight = self._in_flight, None
        if save is None:
            return True
        try:
            error = save.write_error()
            failures = self._failures(error)
            if not failures:
                error = save.publish_error()
                failures = self._failures(error)
        finally:
            save.abandon()
        if failures:
            self._discard(save)
            raise_together(self._comm, _unexpected(error), f"save checkpoint {save.tag!r}")
            self._warn_of_failure(save.tag, failures)
            return False
        cleared_up = save.cleared_up()
        self._tell(f"checkpoint {save.tag!r} is saved, but not all could be cleared up", cleared_up.problems)
        for tag in cleared_up.removed:
            newer = f"{self._keep} newer ones are kept (keep_last)"
            print(f"thinwire: checkpoint {tag!r} of {self.folder} is removed: {newer}", file=sys.stderr, flush=True)
        return True

    def close(self) -> None:
        """Wait for the save in flight."""
        self.wait()

    def load(
        self,
        tag: str | None = None,
        description: ModelDescription | None = None,
        continues: bool = True,
        fault_of: Callable[[Manifest], str | None] = lambda _: None,
    ) -> LoadedCheckpoint | None:
        """Verify a checkpoint, every byte of it, the files divided among the ranks, and open it.

        Without a tag it is the one that `latest` names, else the newest; one that is damaged, or of another model than
        `description`, is passed over for the one before it, with a RuntimeWarning on rank 0 that says why. With a tag
        it is that one. None where there is no checkpoint at all and no tag.

        `continues`: the job goes on from it, so that `keep` takes those before it for this job's own. `fault_of` finds
        in a manifest what else is against a checkpoint, if anything.

        Raises CheckpointError, on every rank: there are checkpoints but none is whole; the one asked for is missing or
        damaged; the model has changed since; pickles are offered as a checkpoint.
        """
        self.wait()

        def any_fault_of(manifest: Manifest) -> str | None:
            difference = None if description is None else description.difference_to(manifest.model)
            return f"it is of another model: {difference}" if difference else fault_of(manifest)

        found = select(self._folder, self._comm, tag, any_fault_of)
        if found is not None and continues:
            self._run = self._run.going_on_from(found.manifest)
        return found

    # One save

    def _agree(self, tag: str, snapshot: Snapshot) -> str:
        """Check that all ranks save the same; returns a number that no other save uses."""
        error: Exception | None = None
        try:
            check_tag(tag)
            if self._comm.rank == 0:
                self._folder.check_free(tag)
            snapshot.check()
        except (TypeError, ValueError) as raised:
            error = raised
        raise_together(self._comm, error, "save a checkpoint")
        model = hashlib.sha256(json.dumps(snapshot.model.to_json()).encode()).hexdigest()
        mine = {"tag": tag, "model": model, "nonce": secrets.token_hex(4)}
        everyones = [
            json.loads(message)
            for message in self._comm.all_gather_bytes(json.dumps(mine).encode(), "save a checkpoint")
        ]
        first = everyones[0]
        for rank, other in enumerate(everyones):
            if (other["tag"], other["model"]) != (first["tag"], first["model"]):
                what = "another model" if other["tag"] == first["tag"] else f"tag {other['tag']!r}"
                raise ValueError(
                    f"rank {rank} saves {what}, rank 0 tag {first['tag']!r}: every rank must save the same checkpoint"
                )
        nonce: str = first["nonce"]
        return nonce

    def _prepare(self, tag: str, nonce: str) -> bool:
        """Have rank 0 make the new folder, and claim it; whether it could."""
        error: OSError | None = None
        problems: list[str] = []
        if self._comm.rank == 0:
            try:
                self._claim, problems = self._folder.prepare(tag, nonce, self._patience)
            except OSError as raised:
                error = raised
        if failures := self._failures(error):
            self._warn_of_failure(tag, failures)
            return False
        self._tell(f"checkpoint {tag!r} is being saved, but not all could be put in order before", problems)
        return True

    def _check_sight(self, tag: str, nonce: str) -> None:
        """Raise CheckpointError, on every rank, where one does not see the folder that rank 0 has made."""
        blind: CheckpointError | None = None
        if not self._folder.partial(tag, nonce).is_dir():
            blind = CheckpointError(
                f"rank {self._comm.rank} does not see what rank 0 writes to {self.folder.absolute()}: checkpoints need "
                "a folder on a file system that all ranks share"
            )
        self._raise_on_every_rank(blind)

    def _copy(self, snapshot: Snapshot) -> Snapshot:
        copy, error = snapshot, None
        try:
            copy = snapshot.copied_to_cpu()
        except (MemoryError, RuntimeError) as raised:
            error = raised
        raise_together(self._comm, error, "copy its tensors for an asynchronous save")
        return copy

    def _publish(
        self, tag: str, nonce: str, snapshot: Snapshot, claim: Claim, latest: bool, abandoned: threading.Event
    ) -> ClearedUp:
        folder, comm = self._folder, self._comm
        path = folder.partial(tag, nonce)
        try:
            files = await_receipts(path, comm.size, comm.timeout, abandoned, claim.beat)
            with folder.locked(self._patience):
                manifest = Manifest(tag, folder.next_serial(), self._run, snapshot.model, files, snapshot.shared)
                write_manifest(path, manifest)
                claim.release()
                folder.publish(tag, nonce, latest)
                try:
                    return folder.prune(tag, nonce, self._keep, self._run)
                except OSError as error:  # the checkpoint is there all the same
                    return ClearedUp([], [f"older ones cannot be looked for: {error}"])
        finally:
            claim.release()

    def _discard(self, save: SaveInFlight) -> None:
        save.publish_error()  # it must have stopped writing
        if self._comm.rank == 0:
            self._folder.discard(save.tag, save.nonce)

    # Agreement

    def _failures(self, error: BaseException | None) -> dict[int, str]:
        """What has failed on which rank, the same on every rank."""
        mine = "" if error is None else str(error) or type(error).__name__
        # A file's name may hold bytes that are no text.
        messages = self._comm.all_gather_bytes(mine.encode(errors="backslashreplace"), "publish a checkpoint")
        return {rank: message.decode() for rank, message in enumerate(messages) if message}

    def _raise_on_every_rank(self, error: CheckpointError | None) -> None:
        for message in self._failures(error).values():
            raise error or CheckpointError(message)

    def _warn_of_failure(self, tag: str, failures: dict[int, str]) -> None:
        what = "; ".join(f"rank {rank}: {message}" for rank, message in failures.items())
        self._warn(f"checkpoint {tag!r} was not saved to {self.folder}: {what}. The checkpoints before it stay")

    def _tell(self, what: str, problems: list[str]) -> None:
        """Warn of problems that do no harm by themselves, of each once."""
        new = [problem for problem in problems if problem not in self._told]
        self._told.update(new)
        if new:
            self._warn(f"{what}: {'; '.join(new)}")

    @property
    def _patience(self) -> float:
        """Seconds for which another job may have the folder locked; the other ranks wait for as long and longer."""
        return self._comm.timeout / 2

    def _warn(self, message: str) -> None:
        if self._comm.rank == 0:
            warnings.warn(message, RuntimeWarning, stacklevel=4)


def _finish_computing(snapshot: Snapshot) -> None:
    """Let the GPUs finish what they compute, as the thread that reads the tensors has streams of its own."""
    for device in {tensor.device for tensor in snapshot.tensors()}:
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()


def _unexpected(error: BaseException | None) -> Exception | None:
    """An error that no disk causes."""
    return error if isinstance(error, Exception) and not isinstance(error, OSError) else None


def save_optimizer(optimizer: SynchronizedOptimizer, folder: str | os.PathLike[str], tag: str) -> None:
    """Save weights, state and every rank's residuals to `folder`/`tag`, one file a rank. Collective.

    Raises CheckpointError, on every rank, where it could not be written, as on a full disk.
    """
    snapshot = Snapshot(
        slices=optimizer.saved_slices(),
        model=ModelDescription.of(optimizer.saved_parameters()),
        rank_tensors=optimizer.rank_tensors(),
        shared={"optimizer": optimizer.counters(), "tied": {}},
    )
    if not CheckpointStore(folder, optimizer.comm).save(tag, snapshot):
        raise CheckpointError(f"the optimizer's state was not saved to {folder}: rank 0 has warned of what failed")


def load_optimizer(optimizer: SynchronizedOptimizer, folder: str | os.PathLike[str], tag: str, advice: str) -> None:
    """Load what `save_optimizer` wrote, on any number of ranks. Collective.

    `advice`: what to do where it is not there.

    Raises CheckpointError, on every rank, where it is missing or damaged, and ValueError where it is another
    optimizer's.
    """
    description = ModelDescription.of(optimizer.saved_parameters())
    try:
        found = CheckpointStore(folder, optimizer.comm).load(tag, description)
    except CheckpointError as error:
        raise CheckpointError(f"{error}. {advice}") from error
    assert found is not None, "a tag was given"
    with found:
        optimizer.load(found)


class TagError(ValueError, AssertionError):
    """Ranks give a checkpoint several names. An AssertionError too, which scripts of other libraries catch."""


def one_tag(comm: Communicator, tag: str, validation: str) -> str:
    """Rank 0's tag, on every rank. Collective.

    Where a rank has another one: with `validation` "Fail" TagError on every rank, with "Warn" a warning on rank 0.
    """
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
