"""The optimizer's part of a Trainer's checkpoint: one file a rank with a manifest of checksums, in a folder of its own
beside what the Trainer writes."""

from __future__ import annotations

import os

from thinwire.engine.checkpoint import store
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
    store.save_optimizer(optimizer, checkpoint, TAG)


def load_optimizer(optimizer: SynchronizedOptimizer, checkpoint: str | os.PathLike[str]) -> None:
    """Load what `save_optimizer` wrote, on any number of ranks. Collective.

    Raises CheckpointError, on every rank, where it is missing or damaged, and ValueError where it is another
    optimizer's.
    """
    store.load_optimizer(optimizer, checkpoint, TAG, NOTHING_TO_GO_ON_FROM)
