"""A checkpoint as a rank reads it that holds a part of a model, or all of one that several ranks held: whichever saved
it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Annotated, Any

import torch
from pydantic import Strict, TypeAdapter, ValidationError
from torch import Tensor
from typing_extensions import TypedDict

from thinwire.comm import Communicator
from thinwire.comm.errors import first_fault
from thinwire.engine.checkpoint.loading import LoadedCheckpoint
from thinwire.engine.checkpoint.regions import ONE_VALUE, Regions
from thinwire.zero.saved_state import DamagedStateError, merged_scalars

_KEY = "part"


class _Part(TypedDict):
    names: list[Annotated[str, Strict()]]
    optimizer: dict[str, Any]


_PART = TypeAdapter(_Part)


def part_values(here: Regions, counters: dict[str, Any]) -> dict[str, Any]:
    """What a rank's values in a manifest say of the part that it holds, and of what its optimizer counts for it."""
    return {_KEY: {"names": sorted(here.held), "optimizer": counters}} if here.place["dp"] == 0 else {}


class PartSource:
    """A SliceSource: what `here` holds, for the ranks `comm` that hold the same.

    `counted`: what the optimizer that reads counts now. What belongs to ranks, residuals above all, is there where the
    same parts were saved, by any number of ranks each; else it begins anew, as rules do that look at the variance.

    Raises DamagedStateError for ranks' values that are not what `part_values` gives.
    """

    def __init__(self, found: LoadedCheckpoint, here: Regions, comm: Communicator, counted: Mapping[str, Any]) -> None:
        self._found, self._here, self._counted = found, here, counted
        self._sizes: dict[str, int] = {"pp": 1, "dp": found.world_size, "tp": 1} | found.shared.get("mesh", {})
        self._last: tuple[tuple[str, str], Tensor] | None = None
        self._parts = {rank: _checked(rank, found.rank_values(rank)) for rank in range(found.world_size)}
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
            every = [part["optimizer"] for part in self._parts.values() if part] or [merged]
            try:
                of_all = zip(merged["freeze_groups"], *(one["freeze_groups"] for one in every), strict=True)
                merged["freeze_groups"] = [
                    {**first, "buckets": None, "rule": {}, "scalars": merged_scalars(others)}
                    for first, *others in of_all
                ]
            except (AttributeError, KeyError, TypeError, ValueError) as error:
                raise DamagedStateError(f"ranks' freeze groups are not those of one optimizer: {error!r}") from error
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
        return self._parts.get(rank, {})


def _checked(rank: int, values: Mapping[str, Any]) -> dict[str, Any]:
    """The part among a rank's values; empty where there is none."""
    if _KEY not in values:
        return {}
    try:
        part: Any = _PART.validate_python(values[_KEY])
    except ValidationError as error:
        raise DamagedStateError(f"{_KEY} of rank {rank}: {first_fault(error, _KEY)}") from None
    return dict(part)
