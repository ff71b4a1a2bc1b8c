"""Which parameter an optimizer holds under which number, name and group, and which bucket it goes to: what
buckets, checkpoints and error messages refer to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from thinwire.zero.bucket_layout import BucketLayout, partition, partition_whole

__all__ = ["Placement"]


class Placement:
    """The parameters of some groups that require gradients, numbered in the groups' order.

    `parameters`, `names`, `group_of`: by number. `order`: their numbers in reverse order of use, which is about the
    order in which backward completes their gradients.

    Raises ValueError where nothing requires a gradient, or where `named` lacks a parameter.
    """

    def __init__(self, groups: Sequence[Mapping[str, Any]], named: Iterable[tuple[str, Tensor]] | None) -> None:
        every = [(parameter, number) for number, group in enumerate(groups) for parameter in group["params"]]
        held = [(parameter, number) for parameter, number in every if parameter.requires_grad]
        if not held:
            raise ValueError("no parameter requires a gradient: there is nothing to optimize")
        self._frozen = [parameter for parameter, _ in every if not parameter.requires_grad]
        self.parameters: list[Tensor] = [parameter for parameter, _ in held]
        self.group_of = [number for _, number in held]
        name_of = _names(groups, named)
        unnamed = sum(id(parameter) not in name_of for parameter in self.parameters)
        if unnamed:
            raise ValueError(
                f"{unnamed} of {len(held)} parameters are not in named_parameters: give all of "
                "model.named_parameters(), or leave it out"
            )
        self.names = [name_of[id(parameter)] for parameter in self.parameters]
        self._called: dict[int, str] = {}
        place = {name: position for position, name in enumerate(name_of.values())}
        self.order = sorted(range(len(held)), key=lambda number: -place[self.names[number]])

    def check_none_unfrozen(self) -> None:
        """Raise RuntimeError where a parameter requires a gradient now that did not when buckets were laid out."""
        unfrozen = sum(parameter.requires_grad for parameter in self._frozen)
        if unfrozen:
            raise RuntimeError(
                f"{unfrozen} parameters require gradients now but did not when the optimizer was built, so nobody "
                "would step them: set requires_grad before building it, or build a new one and load the old one's state"
            )

    def partition(
        self,
        world_size: int,
        block_size: int,
        bucket_bytes: int,
        param_dtype: torch.dtype | None,
        whole: bool = False,
    ) -> list[tuple[BucketLayout, torch.dtype]]:
        """Buckets of one dtype each, in the order in which backward completes them; `whole`: no parameter is cut."""
        dtypes = [
            param_dtype or parameter.dtype if parameter.dtype == torch.float32 else parameter.dtype
            for parameter in self.parameters
        ]
        numels = [parameter.numel() for parameter in self.parameters]
        cut = partition_whole if whole else partition
        layouts: list[tuple[BucketLayout, torch.dtype]] = [
            (layout, dtype)
            for dtype in sorted(set(dtypes), key=str)
            for layout in cut(
                numels,
                [number for number in self.order if dtypes[number] == dtype],
                world_size=world_size,
                block_size=block_size,
                bucket_numel=max(1, bucket_bytes // dtype.itemsize),
            )
        ]
        completed = {number: position for position, number in enumerate(self.order)}
        return sorted(layouts, key=lambda one: completed[one[0].slots[-1].parameter])

    def name(self, names: Mapping[int, str]) -> None:
        """Call parameters, by id, as `names` does, in error messages; checkpoints keep the names they had."""
        self._called = {number: names.get(id(one), self.names[number]) for number, one in enumerate(self.parameters)}

    def describe(self, number: int) -> str:
        """How an error message calls a parameter."""
        called = self._called.get(number, self.names[number])
        return f"parameter {called!r}, shape {tuple(self.parameters[number].shape)},"


def _names(groups: Sequence[Mapping[str, Any]], named: Iterable[tuple[str, Tensor]] | None) -> dict[int, str]:
    """Parameter id -> name, in order of use."""
    if named is not None:
        names: dict[int, str] = {}
        for name, parameter in named:
            names.setdefault(id(parameter), name)
        if len(set(names.values())) < len(names):
            twice = next(name for name in names.values() if list(names.values()).count(name) > 1)
            raise ValueError(
                f"two parameters are named {twice!r} in named_parameters: a checkpoint could hold one only"
            )
        return names
    return {
        id(parameter): group["param_names"][index] if "param_names" in group else f"group{number}.{index}"
        for number, group in enumerate(groups)
        for index, parameter in enumerate(group["params"])
    }
