"""What the ranks of one job saved, joined in memory: a checkpoint for tests, without files."""

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from thinwire.comm import Communicator
from thinwire.zero import SavedSlice, ShardedOptimizer


class Saved:
    """Every rank's slices, checked to hold each element once."""

    def __init__(
        self, slices: list[list[SavedSlice]], rank_tensors: list[dict[str, Tensor]], counters: list[dict[str, Any]]
    ) -> None:
        assert all(other == counters[0] for other in counters)
        self.world_size = len(slices)
        self._counters = counters[0]
        self._rank_tensors = rank_tensors
        self._tensors: dict[tuple[str, str], list[SavedSlice]] = {}
        for saved_slice in (one for of_rank in slices for one in of_rank):
            self._tensors.setdefault((saved_slice.kind, saved_slice.name), []).append(saved_slice)
        for key, runs in self._tensors.items():
            runs.sort(key=lambda saved_slice: saved_slice.start)
            ends = [0] + [saved_slice.start + saved_slice.tensor.numel() for saved_slice in runs]
            assert [saved_slice.start for saved_slice in runs] == ends[:-1], f"{key} has gaps or overlaps"

    def counters(self) -> dict[str, Any]:
        return self._counters

    def kinds(self) -> set[str]:
        return {kind for kind, _ in self._tensors}

    def dtype_of(self, kind: str, name: str) -> torch.dtype | None:
        found = self._tensors.get((kind, name))
        return found[0].tensor.dtype if found else None

    def rank_keys(self, rank: int) -> Collection[str]:
        return self._rank_tensors[rank].keys()

    def read(self, kind: str, name: str, start: int, numel: int) -> Tensor:
        whole = torch.cat([saved_slice.tensor for saved_slice in self._tensors[kind, name]])
        assert start + numel <= whole.numel()
        return whole[start : start + numel]

    def read_rank(self, key: str, rank: int) -> Tensor:
        return self._rank_tensors[rank][key]

    def names(self, kind: str) -> set[str]:
        return {name for one, name in self._tensors if one == kind}


def save(comm: Communicator, optimizer: ShardedOptimizer) -> tuple[list[SavedSlice], dict[str, Tensor], dict[str, Any]]:
    """What this rank saves, copied."""
    slices = [
        SavedSlice(one.kind, one.name, one.start, one.values().detach().clone()) for one in optimizer.saved_slices()
    ]
    own = {key: tensor.detach().clone() for key, tensor in optimizer.rank_tensors().items()}
    return slices, own, optimizer.counters()


def join(parts: list[tuple[list[SavedSlice], dict[str, Tensor], dict[str, Any]]]) -> Saved:
    """What `save` gave on every rank."""
    slices, own, counters = zip(*parts, strict=True)
    return Saved(list(slices), list(own), list(counters))


__all__ = ["Saved", "join", "save"]
