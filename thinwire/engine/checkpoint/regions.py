"""A rank's place in a model that several hold together, so that their checkpoint is one of the whole model, for any
others: parameters under the names that the whole model has, of those that are cut the parts one after the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from itertools import islice
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from thinwire.comm import Communicator
from thinwire.comm.agreement import gather
from thinwire.zero import SavedSlice
from thinwire.zero.replica import stages_of

ONE_VALUE = "scalar."
"""Kinds of which a parameter has one value begin so."""


@dataclass(frozen=True)
class Cut:
    """A parameter that is cut in `dim`, as torch's chunk cuts it, into `parts`, or each of the `matrices` in it."""

    dim: int
    parts: int
    matrices: int = 1

    def fault(self, shape: Sequence[int]) -> str | None:
        """Why a parameter of this shape cannot be cut so; None if it can."""
        holds = 0 <= self.dim < len(shape) and self.parts >= 1 and self.matrices >= 1
        if holds and shape[self.dim] >= self.parts * self.matrices and not shape[self.dim] % self.matrices:
            return None
        return f"shape {tuple(shape)} cannot be cut in dimension {self.dim} into {self.parts} x {self.matrices}"

    def rows(self, size: int) -> list[Tensor]:
        """Of each part, the indices in the cut dimension of `size`."""
        chunks = [one.chunk(self.parts) for one in torch.arange(size).chunk(self.matrices)]
        return [torch.cat(of_part) for of_part in zip(*chunks, strict=True)]

    def put_together(self, parts: Tensor, shape: Sequence[int]) -> Tensor:
        """All values of a parameter of this shape, given its parts' one after the other; both one-dimensional."""
        whole, rows = parts.new_empty(shape), self.rows(shape[self.dim])
        lengths = [len(one) * (parts.numel() // shape[self.dim]) for one in rows]
        for part, places in zip(torch.split(parts, lengths), rows, strict=True):
            form = [*shape[: self.dim], len(places), *shape[self.dim + 1 :]]
            whole.index_copy_(self.dim, places, part.view(form))
        return whole.view(-1)


def fault_of_regions(shared: Mapping[str, Any], shapes: Mapping[str, tuple[Any, ...]], ranks: int) -> str | None:
    """Why a manifest of so many ranks cannot say of parameters, whose shapes come first in `shapes`, where they lie as
    it does; None if it can."""
    sizes = shared.get("mesh", {})
    if sizes and prod(sizes.values()) != ranks:
        return f"shared.mesh is {sizes}, and there are files of {ranks} ranks"
    for name, cut in shared.get("cuts", {}).items():
        if fault := Cut(*cut).fault(shapes[name][0]) if name in shapes else "no parameter has that name":
            return f"shared.cuts of {name!r}: {fault}"
    return None


def cut_of(parameter: Tensor) -> Cut | None:
    """How tensor parallelism has cut it; None if this rank has all of it."""
    placement = parameter.placements[0] if hasattr(parameter, "placements") else None
    if placement is None or placement.is_replicate():
        return None
    of_each = getattr(placement, "split_factor", 1)
    return Cut(placement.dim, parameter.device_mesh.size(), of_each)  # type: ignore[attr-defined]


class Regions:
    """What this rank holds, beside others, of a model.

    world: the job's ranks. mesh: of all of them, whose dimensions "pp", "dp" and "tp" are in this order; None if each
        holds the model. held: the parameters that are here, by the names that the whole model has.

    Collective over `world`, where there is a mesh.
    """

    def __init__(self, world: Communicator, mesh: DeviceMesh | None, held: Mapping[str, Tensor]) -> None:
        sizes = dict(zip(mesh.mesh_dim_names or (), mesh.mesh.shape, strict=True)) if mesh is not None else {}
        self.world, self.held = world, held
        self.sizes = {"pp": 1, "dp": world.size if mesh is None else 1, "tp": 1} | sizes
        of_all = self.sizes["dp"] * self.sizes["tp"]
        self.place = {
            "pp": world.rank // of_all,
            "dp": world.rank // self.sizes["tp"] % self.sizes["dp"],
            "tp": world.rank % self.sizes["tp"],
        }
        found = {name: cut_of(one) for name, one in held.items()}
        self.cuts = {name: cut for name, cut in found.items() if cut is not None}
        mine: list[Any] = [[*held], {name: list(astuple(cut)) for name, cut in self.cuts.items()}]
        of_rank = [mine] if mesh is None else gather(world, mine, "see who holds what of the model")
        self.all_cuts: dict[str, list[int]] = {name: cut for _, cuts in of_rank for name, cut in cuts.items()}
        self.first_with = {name: rank for rank, (names, _) in reversed([*enumerate(of_rank)]) for name in names}

    def shared(self) -> dict[str, Any]:
        """What a manifest says of where things lie."""
        return {"mesh": self.sizes, "cuts": self.all_cuts}

    def saves(self, name: str) -> bool:
        """Whether this rank, or one with which it averages gradients, saves what it holds of a parameter."""
        stages = stages_of(self.held[name])
        tied = stages is not None and id(self.held[name]) in stages.ties.keys() - stages.counted
        return not tied and (name in self.cuts or self.place["tp"] == 0)

    def of_whole(self, slices: Sequence[SavedSlice]) -> list[SavedSlice]:
        """Those of `slices`, of what is here, that this rank saves: as slices of the whole model."""
        found = []
        for one in filter(lambda one: self.saves(one.name), slices):
            if one.name not in self.cuts:
                found.append(one)
            elif not one.kind.startswith(ONE_VALUE):
                found.append(replace(one, start=one.start + self.first_element(one.name)))
            elif self.place["tp"] == 0:
                found.append(one)
        return found

    def first_element(self, name: str) -> int:
        """Where the part that is here begins in what is saved of a parameter that is cut."""
        shape, cut = tuple(self.held[name].shape), self.cuts[name]
        before = islice(cut.rows(shape[cut.dim]), self.place["tp"])
        return sum(map(len, before)) * (prod(shape) // shape[cut.dim])

    def part_of(self, name: str, whole: Tensor) -> Tensor:
        """The part that is here of all of a parameter's values, both one-dimensional."""
        shape, cut = tuple(self.held[name].shape), self.cuts[name]
        rows = cut.rows(shape[cut.dim])[self.place["tp"]]
        return whole.view(shape).index_select(cut.dim, rows).reshape(-1)
