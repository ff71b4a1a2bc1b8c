"""The optimizer's part of a Trainer's checkpoint: one file a rank with a manifest of checksums, in a folder of its own
beside what the Trainer writes."""

from __future__ import annotations

import os

from thinwire.engine.checkpoint import CheckpointError, CheckpointStore, ModelDescription, Snapshot
from thinwire.zero.synchronized_optimizer import SynchronizedOptimizer

__all__ = ["NOTHING_TO_GO_ON_FROM", "TAG", "load_optimizer", "save_optimizer"]

TAG = "thinwire"
"""The folder's name."""

NOTHING_TO_GO_ON_FROM = (
    "A checkpoint of a Trainer without TrainerMixin, or with save_only_model=True, holds no state to go on from: load "
    "its weights with from_pretrained(), and train without resume_from_checkpoint"
)
"""What to do where it is missing."""


def save_optimizer(optimizer: SynchronizedOptimizer, checkpoint: str | os.PathLike[str]) -> None:
    """Save weights, state and every rank's residuals to `checkpoint`/thinwire. Collective.

    Raises CheckpointError, on every rank, where it could not be written, as on a full disk.
    """
    snapshot = Snapshot(
        slices=optimizer.saved_slices(),
        model=ModelDescription.of(optimizer.saved_parameters()),
        rank_tensors=optimizer.rank_tensors(),
        shared={"optimizer": optimizer.counters(), "tied": {}},
    )
    if not CheckpointStore(checkpoint, optimizer.comm).save(TAG, snapshot):
        raise CheckpointError(f"the optimizer's state was not saved to {checkpoint}: rank 0 has warned of what failed")


def load_optimizer(optimizer: SynchronizedOptimizer, checkpoint: str | os.PathLike[str]) -> None:
    """Load what `save_optimizer` wrote, on any number of ranks. Collective.

    Raises CheckpointError, on every rank, where it is missing or damaged, and ValueError where it is another
    optimizer's.
    """
    description = ModelDescription.of(optimizer.saved_parameters())
    try:
        found = CheckpointStore(checkpoint, optimizer.comm).load(TAG, description)
    except CheckpointError as error:
        raise CheckpointError(f"{error}. {NOTHING_TO_GO_ON_FROM}") from error
    assert found is not None, "a tag was given"
    with found:
        optimizer.load(found)
