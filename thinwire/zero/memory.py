"""Memory of a rank's tensors: every tensor that given objects hold, found and counted once, so that what a ZeRO stage
saves is known on any device, without trusting an allocator's counters."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.dlpack import from_dlpack

from thinwire.comm import Communicator, Work
from thinwire.zero.gradient_seal import SentGradient


def with_subclasses(kinds: Iterable[type]) -> set[type]:
    """These classes and all that derive from them, at any depth."""
    found: set[type] = set()
    waiting = list(kinds)
    while waiting:
        kind = waiting.pop()
        if kind not in found:
            found.add(kind)
            waiting += type.__subclasses__(kind)
    return found


# A storage that is reached in several ways belongs to the first of these that it was reached as.
CATEGORIES = ("weights", "buffers", "master weights", "gradients", "residuals", "optimizer state", "other")

# What the name of an attribute or a key says about the tensors below it.
_HINTS = {
    "master": "master weights",
    "grad": "gradients",
    "residual": "residuals",
    "state": "optimizer state",
    "momentum": "optimizer state",
    "variance": "optimizer state",
    "denominator": "optimizer state",
    "codes": "optimizer state",
    "ranges": "optimizer state",
    "param_groups": "master weights",
}

_LEAVES = (
    type(None),
    str,
    bytes,
    bytearray,
    int,
    float,
    complex,
    type,
    ModuleType,
    FunctionType,
    MethodType,
    BuiltinFunctionType,
    Communicator,
    Work,  # of a collective in flight; where ranks are threads it knows the other ranks' tensors
    torch.dtype,
    torch.device,
    torch.Size,
    torch.Generator,
    SentGradient,
)


def live_tensor_bytes(*roots: Any) -> dict[tuple[str, str], int]:
    """Bytes of the tensors that `roots` hold, by (category, device), as in `("master weights", "cuda:0")`.

    Follows attributes, containers, `.grad`, optimizers' state and the parts of tensor subclasses; not functions,
    classes, communicators or their collectives in flight. Every storage counts once and whole, however many views and
    owners it has, under the first of `CATEGORIES` that fits: parameters are weights; a module's buffers are buffers;
    the rest goes by the names on the way to it. Tensors that only autograd or another library's C++ holds are not seen;
    those on "meta" take no memory.
    """
    storages: dict[tuple[str, int], tuple[int, int]] = {}
    for tensor, category in _held(roots):
        storage = tensor.untyped_storage()
        if storage.nbytes() and storage.device.type != "meta":
            key = (str(storage.device), storage.data_ptr())
            rank, nbytes = storages.get(key, (len(CATEGORIES), 0))
            storages[key] = (min(rank, CATEGORIES.index(category)), max(nbytes, storage.nbytes()))
    spans: list[tuple[str, int, int, int]] = []  # a storage may lie in another
    for (device, begin), (rank, nbytes) in sorted(storages.items()):
        end = begin + nbytes
        if spans and spans[-1][0] == device and begin < spans[-1][2]:
            _, begin, before, other = spans.pop()
            end, rank = max(end, before), min(rank, other)
        spans.append((device, begin, end, rank))
    total: dict[tuple[str, str], int] = {}
    for device, begin, end, rank in spans:
        held = (CATEGORIES[rank], device)
        total[held] = total.get(held, 0) + end - begin
    return total


def _held(roots: Iterable[Any]) -> Iterator[tuple[Tensor, str]]:
    """Every plain tensor below `roots`, with each category that it is reached as."""
    waiting = [(root, "other") for root in roots]
    # Objects are kept along with their ids, which others could get otherwise.
    seen: dict[tuple[int, str], Any] = {}
    while waiting:
        item, category = waiting.pop()
        if isinstance(item, _LEAVES) or (id(item), category) in seen:
            continue
        seen[id(item), category] = item
        if isinstance(item, Tensor):
            parts = _parts(item)
            if isinstance(item, nn.Parameter):
                category = "weights"
            if parts:
                waiting += [(part, category) for part in parts]
            else:
                yield item, category
            if item.is_leaf:
                waiting.append((item.grad, "gradients"))
        else:
            waiting += _children(item, category)


def _parts(tensor: Tensor) -> list[Tensor]:
    """The tensors that a tensor without memory of its own consists of, such as a DTensor's shard."""
    if hasattr(tensor, "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()
        return [getattr(tensor, name) for name in names]
    if tensor.layout == torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return []


def _children(item: Any, category: str) -> list[tuple[Any, str]]:
    if isinstance(item, Mapping):
        named = [(value, _hint(key, category)) for key, value in item.items()]
        return named + [(key, category) for key in item]
    if isinstance(item, list | tuple | Set | deque):
        return [(element, category) for element in item]
    attributes = _attributes(item)
    if isinstance(item, nn.Module):
        buffers = attributes.pop("_buffers")
        return [*_children(attributes, category), *((buffer, "buffers") for buffer in buffers.values())]
    return _children(attributes, category)


def _attributes(item: Any) -> dict[str, Any]:
    slots = [name for kind in type(item).__mro__ for name in getattr(kind, "__slots__", ())]
    found = {name: getattr(item, name) for name in slots if not name.startswith("__") and hasattr(item, name)}
    return {**found, **getattr(item, "__dict__", {})}


def _hint(key: Any, category: str) -> str:
    if isinstance(key, str):
        for word, meant in _HINTS.items():
            if word in key.lower():
                return meant
    return category


@dataclass(frozen=True)
class MemoryReport:
    """Bytes that a rank holds, `held` as `live_tensor_bytes` counts them, beside `formula`, by category."""

    held: Mapping[tuple[str, str], int]
    formula: Mapping[str, float]

    @property
    def measured(self) -> int:
        """Bytes of everything the formula speaks of: all but buffers and what is in no category."""
        return sum(nbytes for (category, _), nbytes in self.held.items() if category not in ("buffers", "other"))

    @property
    def expected(self) -> float:
        """What the formula says `measured` should be."""
        return sum(self.formula.values())

    def table(self) -> str:
        """Rows of categories, columns of devices and the formula, in MB of 10⁶ bytes, and how far apart they are."""
        devices = sorted({device for _, device in self.held})
        lines = [_row("MB", [*devices, "formula"])]
        for category in CATEGORIES:
            held = [self.held.get((category, device), 0) for device in devices]
            if any(held) or self.formula.get(category):
                formula = self.formula.get(category)
                lines.append(_row(category, [*map(_megabytes, held), "" if formula is None else _megabytes(formula)]))
        by_device = [sum(nbytes for (_, where), nbytes in self.held.items() if where == device) for device in devices]
        lines.append(_row("total", [*map(_megabytes, by_device), _megabytes(self.expected)]))
        if self.expected:
            apart = 100 * (self.measured / self.expected - 1)
            lines.append(f"model state {_megabytes(self.measured)} MB, {apart:+.1f}% of the formula")
        return "\n".join(lines)


def _row(name: str, cells: list[str]) -> str:
    return f"{name:<16}" + "".join(f"{cell:>14}" for cell in cells)


def _megabytes(nbytes: float) -> str:
    return f"{nbytes / 1e6:.3f}"


def in_own_storage(view: Tensor) -> Tensor:
    """The same memory with a storage of its own: of tensors in one, Accelerate and safetensors save the first only.

    A view as it is on devices that DLPack has no name for."""
    return from_dlpack(view) if view.numel() and view.device.type in ("cpu", "cuda") else view
