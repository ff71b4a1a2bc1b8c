"""A checkpoint as a rank reads it that holds a part of a model, or all of one that several ranks held: whichever saved
it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from thinwire.comm import Communicator
from thinwire.engine.checkpoint.loading import LoadedCheckpoint
from thinwire.engine.checkpoint.regions import ONE_VALUE, Regions

_KEY = "part"


def part_values(here: Regions, counters: dict[str, Any]) -> dict[str, Any]:
    """What a rank's values in a manifest say of the part that it holds, and of what its optimizer counts for it."""
    return {_KEY: {"names": sorted(here.held), "optimizer": counters}} if here.place["dp"] == 0 else {}


class PartSource:
    """A SliceSource: what `here` holds, for the ranks `comm` that hold the same.

    `counted`: what the optimizer that reads counts now. What belongs to ranks, residuals above all, is there where the
    same parts were saved, by any number of ranks each; else it begins anew, as rules do that look at the variance.
    """

    def __init__(self, found: LoadedCheckpoint, here: Regions, comm: Communicator, counted: Mapping[str, Any]) -> None:
        self._found, self._here, self._counted = found, here, counted
        self._sizes: dict[str, int] = {"pp": 1, "dp": found.world_size, "tp": 1} | found.shared.get("mesh", {})
        self._last: tuple[tuple[str, str], Tensor] | None = None
        self.on_this_mesh = self._sizes == here.sizes
        alike = all(self._sizes[name] == here.sizes[name] for name in ("pp", "tp"))
        cuts = {name: cut for name, cut in found.cuts.items() if name in here.held}
        self.same = alike and cuts == here.cuts and self._part(self._rank(0)).get("names") == sorted(here.held)
        self.world_size = self._sizes["dp"] if self.same else comm.size

    def counters(self) -> dict[str, Any]:
        """What the optimizer's `counters` returned, as far as it says something of the part that is here."""
        if self.same:
            own: dict[str, Any] = self._part(self._rank(0))["optimizer"]
            return own
        merged = dict(self._found.counters())
        merged.pop("part", None)
        merged |= {key: self._counted[key] for key in ("part", "names", "nodes") if key in self._counted}
        if "freeze_groups" in merged:
            ranks = range(self._found.world_size)
            every = [part["optimizer"] for part in map(self._part, ranks) if part] or [self._found.counters()]
            merged["freeze_groups"] = [
                {**first, "buckets": None, "rule": {}, "scalars": self._scalars([one["scalars"] for one in of_group])}
                for first, of_group in zip(
                    merged["freeze_groups"], zip(*(one["freeze_groups"] for one in every), strict=True), strict=True
                )
            ]
        return merged

    def _scalars(self, every: list[dict[str, Any]]) -> dict[str, Any]:
        """Those of all parts, by parameter; what is the optimizer's is the same in all."""
        merged: dict[str, Any] = {}
        for one in every:
            for key, value in one.items():
                merged[key] = {**merged.get(key, {}), **value} if isinstance(value, dict) else value
        return merged

    def kinds(self) -> set[str]:
        """The roles that any parameter has values for."""
        return self._found.kinds()

    def dtype_of(self, kind: str, name: str) -> torch.dtype | None:
        """What this parameter's values of this kind were saved in, or None where there are none."""
        return self._found.dtype_of(kind, name)

    def rank_keys(self, rank: int) -> Collection[str]:
        """The keys of what `read_rank` has of that rank."""
        return self._found.rank_keys(self._rank(rank)) if self.same else ()

    def read(self, kind: str, name: str, start: int, numel: int) -> Tensor:
        """These values of the part that is here, [numel] on the CPU; KeyError if no rank saved them."""
        cut, found = self._here.cuts.get(name), self._found
        if cut is None or kind.startswith(ONE_VALUE) or name not in found.model.parameters:
            return found.read(kind, name, start, numel)
        if found.cuts.get(name) == cut:
            return found.read(kind, name, self._here.first_element(name) + start, numel, in_parts=True)
        if self._last is None or self._last[0] != (kind, name):
            whole = found.read(kind, name, 0, found.model.numel(name))
            self._last = (kind, name), self._here.part_of(name, whole)
        return self._last[1][start : start + numel]

    def read_rank(self, key: str, rank: int) -> Tensor:
        """`rank_tensors[key]` of that rank; KeyError where there is none."""
        if not self.same:
            raise KeyError(f"checkpoint {self._found.tag!r} has no {key!r} of the parts that are here")
        return self._found.read_rank(key, self._rank(rank))

    def _rank(self, number: int) -> int:
        """Of the ranks that saved the part that is here, where the same were saved."""
        sizes, place = self._sizes, self._here.place
        return (place["pp"] * sizes["dp"] + number) * sizes["tp"] + place["tp"]

    def _part(self, rank: int) -> dict[str, Any]:
        known = 0 <= rank < self._found.world_size
        part: dict[str, Any] = self._found.rank_values(rank).get(_KEY, {}) if known else {}
        return part
