"""Error-feedback residuals in checkpoints: by parameter, so that they outlive buckets, homes and numbers of ranks."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence

from torch import Tensor

from thinwire.comm import Communicator
from thinwire.zero import BucketLayout
from thinwire.zero.flat_bucket import Run
from thinwire.zero.home import TRAFFIC
from thinwire.zero.saved_slices import SavedSlice, SliceSource

__all__ = [
    "LEFT_OUT_STEPS",
    "OWNER_RESIDUAL",
    "load_owner_residual",
    "load_worker_residual",
    "mean_over_ranks",
    "owner_residual_slices",
    "ranks_to_resume",
    "read_left_out_steps",
    "runs_in",
    "worker_residual_tensors",
]

OWNER_RESIDUAL = "owner_residual"
_WORKER_RESIDUAL = "worker_residual"


def runs_in(layout: BucketLayout, place: slice) -> Iterator[Run]:
    """The stretches of parameters in elements `place` of a bucket, with places relative to its start."""
    for slot in layout.slots:
        first, last = max(slot.offset, place.start), min(slot.offset + slot.numel, place.stop)
        if first < last:
            yield Run(slot.parameter, first - slot.offset, slice(first - place.start, last - place.start))


def owner_residual_slices(
    layout: BucketLayout, place: slice, residual: Tensor, names: Sequence[str]
) -> Iterator[SavedSlice]:
    """What an owner's residual of elements `place` of a bucket is saved as."""
    for run in runs_in(layout, place):
        yield SavedSlice(OWNER_RESIDUAL, names[run.parameter], run.start, residual[run.place])


def worker_residual_tensors(
    layout: BucketLayout, place: slice, residual: Tensor, names: Sequence[str]
) -> dict[str, Tensor]:
    """What a worker's residual of elements `place` of a bucket is saved as."""
    return {f"{_WORKER_RESIDUAL}.{names[run.parameter]}": residual[run.place] for run in runs_in(layout, place)}


def load_owner_residual(
    layout: BucketLayout, place: slice, residual: Tensor, names: Sequence[str], source: SliceSource
) -> None:
    """Take an owner's residual over; raises KeyError where one was not saved."""
    for run in runs_in(layout, place):
        residual[run.place].copy_(source.read(OWNER_RESIDUAL, names[run.parameter], run.start, run.numel))


def load_worker_residual(
    layout: BucketLayout,
    place: slice,
    residual: Tensor,
    names: Sequence[str],
    source: SliceSource,
    ranks: Sequence[int],
) -> None:
    """Take over the mean of what `ranks` saved as their residuals; raises KeyError where one did not.

    The average over ranks of payload + residual, which is what everybody receives, is then what it would have been.
    """
    for run in runs_in(layout, place):
        mean = mean_over_ranks(source, f"{_WORKER_RESIDUAL}.{names[run.parameter]}", ranks)
        residual[run.place].copy_(mean[run.start : run.start + run.numel] if len(mean) != run.numel else mean)


def mean_over_ranks(source: SliceSource, key: str, ranks: Sequence[int]) -> Tensor:
    """The mean of these ranks' tensors, fp32."""
    total = source.read_rank(key, ranks[0]).float().clone()
    for rank in ranks[1:]:
        total += source.read_rank(key, rank).float()
    return total.div_(len(ranks))


def ranks_to_resume(
    source: SliceSource, comm: Communicator, nodes: Sequence[int] | None, saved_by: str, compresses: bool
) -> list[int] | None:
    """The ranks whose residuals this one goes on with: its own, or of another number of ranks all; None for none.

    `nodes`: the node of each rank, where residuals belong to nodes. Warns where an optimizer that `compresses` has to
    begin without.
    """
    saved_nodes = source.counters()["nodes"]
    same = source.world_size == comm.size and saved_nodes == nodes
    ranks = [comm.rank] if same else list(range(source.world_size))
    if same or (nodes is None and saved_nodes is None):
        try:
            for rank in ranks:
                source.read_rank(TRAFFIC, rank)
        except KeyError:
            pass
        else:
            return ranks
    if compresses:
        warnings.warn(
            f"this state was saved by {saved_by} of {source.world_size} and is loaded by rank {comm.rank} of "
            f"{comm.size}, or on other nodes: error-feedback residuals belong to one rank, so they start from zero "
            "here. To keep them, save and load state_dict() on every rank",
            RuntimeWarning,
            stacklevel=6,
        )
    return None


LEFT_OUT_STEPS = "left_out_steps"
"""The key of local steps to which a rank added nothing, for each freeze group."""


def read_left_out_steps(source: SliceSource, rank: int, count: int) -> list[int]:
    """Those of `rank` for `count` freeze groups; none where it was saved by a home without local steps."""
    try:
        steps: list[int] = source.read_rank(LEFT_OUT_STEPS, rank).tolist()
    except KeyError:
        return [0] * count
    return steps
