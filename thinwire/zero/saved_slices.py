"""What a checkpoint of sharded state is made of: runs of one parameter's values under the parameter's own name, so
that any number of ranks, and any stage, can take up what another saved."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

__all__ = ["SCALAR", "OwnPieces", "Piece", "PieceSource"]

SCALAR = "scalar."
"""What the kinds begin with that hold one value a parameter."""


@dataclass(frozen=True)
class Piece:
    """Elements `start` to `start + tensor.numel()` of the flattened parameter `name`, in one of its roles.

    `kind` is the role: "weight", "master", "exp_avg", ... Kinds that begin with "scalar." hold one value a parameter.
    `tensor` is one-dimensional and contiguous.
    """

    kind: str
    name: str
    start: int
    tensor: Tensor


class PieceSource(Protocol):
    """What somebody saved, to be read in whatever runs the reader needs."""

    @property
    def world_size(self) -> int:
        """Ranks of the job that saved."""

    def counters(self) -> dict[str, Any]:
        """What the optimizer's `counters` returned."""

    def kinds(self) -> set[str]:
        """The roles that any parameter has values for."""

    def read(self, kind: str, name: str, start: int, numel: int) -> Tensor:
        """These values, one-dimensional on the CPU; KeyError where nobody saved them."""

    def read_rank(self, key: str, rank: int) -> Tensor:
        """`rank_tensors()[key]` of that rank of the saving job; KeyError where there is none."""


class OwnPieces:
    """The pieces of one rank as a source for the same rank of a job of the same size."""

    def __init__(
        self, world_size: int, counters: dict[str, Any], pieces: Iterable[Piece], rank_tensors: dict[str, Tensor]
    ) -> None:
        self.world_size = world_size
        self._counters = counters
        self._rank_tensors = rank_tensors
        self._pieces: dict[tuple[str, str], list[Piece]] = {}
        for piece in pieces:
            self._pieces.setdefault((piece.kind, piece.name), []).append(piece)

    def counters(self) -> dict[str, Any]:
        """See PieceSource."""
        return self._counters

    def kinds(self) -> set[str]:
        """See PieceSource."""
        return {kind for kind, _ in self._pieces}

    def read(self, kind: str, name: str, start: int, numel: int) -> Tensor:
        """See PieceSource."""
        if not numel:  # of an empty parameter nobody saves a slice
            return torch.empty(0)
        for piece in self._pieces.get((kind, name), []):
            if piece.start <= start and start + numel <= piece.start + piece.tensor.numel():
                return piece.tensor[start - piece.start : start - piece.start + numel].cpu()
        raise KeyError(f"elements {start} to {start + numel} of {kind} of {name} are not in this rank's state")

    def read_rank(self, key: str, rank: int) -> Tensor:
        """See PieceSource."""
        del rank  # there is only this one's
        return self._rank_tensors[key].cpu()
