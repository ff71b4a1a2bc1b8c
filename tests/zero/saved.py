"""What the ranks of one job saved, joined in memory: a checkpoint for tests, without files."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from thinwire.comm import Communicator
from thinwire.zero import Piece, ShardedOptimizer


class Saved:
    """Every rank's pieces, checked to hold each element once."""

    def __init__(
        self, pieces: list[list[Piece]], rank_tensors: list[dict[str, Tensor]], counters: list[dict[str, Any]]
    ) -> None:
        assert all(other == counters[0] for other in counters)
        self.world_size = len(pieces)
        self._counters = counters[0]
        self._rank_tensors = rank_tensors
        self._tensors: dict[tuple[str, str], list[Piece]] = {}
        for piece in (one for of_rank in pieces for one in of_rank):
            self._tensors.setdefault((piece.kind, piece.name), []).append(piece)
        for key, runs in self._tensors.items():
            runs.sort(key=lambda piece: piece.start)
            ends = [0] + [piece.start + piece.tensor.numel() for piece in runs]
            assert [piece.start for piece in runs] == ends[:-1], f"{key} has gaps or overlaps"

    def counters(self) -> dict[str, Any]:
        return self._counters

    def kinds(self) -> set[str]:
        return {kind for kind, _ in self._tensors}

    def read(self, kind: str, name: str, start: int, numel: int) -> Tensor:
        whole = torch.cat([piece.tensor for piece in self._tensors[kind, name]])
        assert start + numel <= whole.numel()
        return whole[start : start + numel]

    def read_rank(self, key: str, rank: int) -> Tensor:
        return self._rank_tensors[rank][key]

    def names(self, kind: str) -> set[str]:
        return {name for one, name in self._tensors if one == kind}


def save(comm: Communicator, optimizer: ShardedOptimizer) -> tuple[list[Piece], dict[str, Tensor], dict[str, Any]]:
    """What this rank saves, copied."""
    pieces = [Piece(one.kind, one.name, one.start, one.tensor.detach().clone()) for one in optimizer.pieces()]
    own = {key: tensor.detach().clone() for key, tensor in optimizer.rank_tensors().items()}
    return pieces, own, optimizer.counters()


def join(parts: list[tuple[list[Piece], dict[str, Tensor], dict[str, Any]]]) -> Saved:
    """What `save` gave on every rank."""
    pieces, own, counters = zip(*parts, strict=True)
    return Saved(list(pieces), list(own), list(counters))


__all__ = ["Saved", "join", "save"]
