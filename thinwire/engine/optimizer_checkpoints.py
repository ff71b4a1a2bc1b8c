"""Checkpoints of an optimizer and its weights alone, for those whose training loop is not the engine's."""

from __future__ import annotations

import os

from thinwire.engine.checkpoint.manifest import ModelDescription
from thinwire.engine.checkpoint.store import CheckpointStore, Snapshot
from thinwire.engine.errors import CheckpointError
from thinwire.zero.synchronized_optimizer import SynchronizedOptimizer


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


def load_optimizer(optimizer: SynchronizedOptimizer, folder: str | os.PathLike[str], tag: str, advice: str) -> int:
    """Load what `save_optimizer` wrote, on any number of ranks; returns how many had saved it. Collective.

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
        return found.world_size
