"""A job's state as it is handed over to be saved, and its way into files and manifest.

Every rank writes its own file and a note of it without a collective, so that it can be done in the background."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from thinwire.engine.checkpoint.files import sync_folder, write_whole
from thinwire.engine.checkpoint.folder import ClearedUp
from thinwire.engine.checkpoint.manifest import (
    MANIFEST,
    Manifest,
    ModelDescription,
    RankFile,
    SliceEntry,
    rank_file,
    rank_file_bytes,
    read_rank_file,
    values_of_kind,
)
from thinwire.engine.checkpoint.tensor_file import CODES, TensorToWrite, dtype_name, write_tensors
from thinwire.zero import SavedSlice

__all__ = [
    "Abandoned",
    "SaveInFlight",
    "Snapshot",
    "await_receipts",
    "write_manifest",
    "write_rank_file",
]

_POLL_SECONDS = 0.002
_SLOWEST_POLL_SECONDS = 0.1


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

    def check(self) -> None:
        """Raise ValueError or TypeError for what could not be read back."""
        for one in self.slices:
            self._check_slice(one)
        places = {(one.kind, one.name, one.start) for one in self.slices}
        if len(places) < len(self.slices):
            raise ValueError(f"{len(self.slices)} slices begin at {len(places)} places: give each run of values once")
        for key, tensor in (*self.rank_tensors.items(), *self.buffers.items()):
            _check_dtype(key, tensor)
        for name, values in (("shared", self.shared), ("rank_values", self.rank_values)):
            try:
                json.dumps(values)
            except (TypeError, ValueError) as error:
                raise TypeError(f"{name} must hold what JSON can write: {error}") from error

    def copied_to_cpu(self) -> Snapshot:
        """The same with tensors of its own, which training does not change."""
        return replace(
            self,
            slices=[replace(one, tensor=_copied(one.tensor)) for one in self.slices],
            rank_tensors={key: _copied(tensor) for key, tensor in self.rank_tensors.items()},
            buffers={name: _copied(tensor) for name, tensor in self.buffers.items()},
            shared=json.loads(json.dumps(self.shared)),
            rank_values=json.loads(json.dumps(self.rank_values)),
        )

    def tensors(self) -> list[Tensor]:
        """All of them."""
        return [*(one.tensor for one in self.slices), *self.rank_tensors.values(), *self.buffers.values()]

    def _check_slice(self, one: SavedSlice) -> None:
        what = f"slice {one.kind!r} of {one.name!r} at {one.start}"
        _check_dtype(what, one.tensor)
        if not one.kind or "/" in one.kind:
            raise ValueError(f"{what}: a kind is a word without '/'")
        if one.name not in self.model.parameters:
            raise ValueError(f"{what}: the model has no parameter of that name")
        if one.tensor.dim() != 1 or not one.tensor.is_contiguous():
            shape = tuple(one.tensor.shape)
            raise ValueError(f"{what} must be one-dimensional and contiguous, got shape {shape}: give a flat view")
        end, whole = one.start + one.tensor.numel(), values_of_kind(self.model, one.kind, one.name)
        if not 0 <= one.start <= end <= whole:
            raise ValueError(f"{what} ends at {end}, but there are {whole} values")


def _check_dtype(what: str, tensor: Tensor) -> None:
    if tensor.dtype not in CODES:
        known = ", ".join(map(dtype_name, CODES))
        raise TypeError(
            f"{what} is {dtype_name(tensor.dtype)}, which a checkpoint cannot hold; expected one of {known}"
        )


def _copied(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)


class Abandoned(Exception):  # noqa: N818 - it is not a fault
    """No caller waits for this save any more."""


class SaveInFlight:
    """One rank's work for one save, on a thread of its own: `write`, then on rank 0 `publish`.

    `publish` gets an event that says when to give up, and returns what became of older checkpoints.
    """

    def __init__(
        self,
        tag: str,
        nonce: str,
        write: Callable[[], None],
        publish: Callable[[threading.Event], ClearedUp] | None,
    ) -> None:
        self.tag = tag
        self.nonce = nonce
        self._abandoned = threading.Event()
        executor = ThreadPoolExecutor(1, thread_name_prefix=f"checkpoint {tag}")
        self._written: Future[None] = executor.submit(write)
        self._published = executor.submit(publish, self._abandoned) if publish else None
        executor.shutdown(wait=False)

    def write_error(self) -> BaseException | None:
        """What writing has failed with, once it is over."""
        return self._written.exception()

    def publish_error(self) -> BaseException | None:
        """What publishing has failed with, once it is over; None on ranks that do not publish."""
        return self._published.exception() if self._published else None

    def cleared_up(self) -> ClearedUp:
        """What publishing returned, where it has not failed; nothing on ranks that do not publish."""
        return self._published.result() if self._published else ClearedUp()

    def abandon(self) -> None:
        """Have rank 0 wait for no more receipts."""
        self._abandoned.set()


def write_rank_file(folder: Path, rank: int, snapshot: Snapshot) -> None:
    """Write this rank's tensors, then a receipt with what the manifest must say of them. Raises OSError."""
    name = rank_file(rank)
    tensors: dict[str, TensorToWrite] = {}
    entries = []
    for one in snapshot.slices:
        key = f"slice/{one.kind}/{one.name}/{one.start}"
        dtype = dtype_name(one.tensor.dtype)
        entries.append(SliceEntry(one.kind, one.name, one.start, one.tensor.numel(), dtype, name, key))
        tensors[key] = TensorToWrite.of(one.tensor)
    rank_keys = {key: f"rank/{key}" for key in snapshot.rank_tensors}
    tensors |= {rank_keys[key]: TensorToWrite.of(tensor) for key, tensor in snapshot.rank_tensors.items()}
    buffers = snapshot.buffers if rank == 0 else {}
    buffer_keys = {key: f"buffer/{key}" for key in buffers}
    tensors |= {buffer_keys[key]: TensorToWrite.of(tensor) for key, tensor in buffers.items()}
    size, sha256 = write_tensors(folder / name, tensors)
    file = RankFile(name, size, sha256, entries, rank_keys, buffer_keys, snapshot.rank_values)
    write_whole(_receipt(folder, rank), rank_file_bytes(file))


def await_receipts(
    folder: Path, world_size: int, timeout: float, abandoned: threading.Event, beat: Callable[[], None]
) -> list[RankFile]:
    """What the receipts of all ranks say, once they are there, for which `timeout` seconds are waited at most.

    `beat` is called again and again meanwhile. Raises TimeoutError, OSError, Abandoned.
    """
    deadline = time.monotonic() + timeout
    return [_await_receipt(folder, rank, deadline, abandoned, beat) for rank in range(world_size)]


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Replace the receipts of all ranks by the manifest.

    Raises OSError; ValueError where the ranks' slices are not every parameter once.
    """
    if problem := manifest.incompleteness():
        raise ValueError(f"the ranks' slices do not make a checkpoint: {problem}")
    write_whole(folder / MANIFEST, manifest.encode())
    for rank, file in enumerate(manifest.files):
        _receipt(folder, rank).unlink()
        _check_length(folder, rank, file)
    sync_folder(folder)


def _check_length(folder: Path, rank: int, file: RankFile) -> None:
    written = (folder / file.name).stat().st_size
    if written != file.size:
        raise OSError(f"{file.name} of rank {rank} has {written} bytes instead of {file.size}")


def _await_receipt(
    folder: Path, rank: int, deadline: float, abandoned: threading.Event, beat: Callable[[], None]
) -> RankFile:
    pause = _POLL_SECONDS
    while True:
        try:
            file = read_rank_file(_receipt(folder, rank).read_bytes())
        except FileNotFoundError:
            if time.monotonic() > deadline:
                raise TimeoutError(f"rank {rank} did not finish writing its file in time") from None
            if abandoned.wait(pause):
                raise Abandoned from None
            beat()
            pause = min(2 * pause, _SLOWEST_POLL_SECONDS)
            continue
        _check_length(folder, rank, file)
        return file


def _receipt(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.json"
