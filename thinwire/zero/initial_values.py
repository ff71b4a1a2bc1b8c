"""Values for a model that was built on the meta device, of which a rank holds a part: what files have, and what its
modules begin with."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from thinwire.comm import Communicator

_INDEX = "model.safetensors.index.json"


class WeightFiles:
    """Tensors by name, in a safetensors file or a folder of them as Transformers writes it, read one at a time.

    Raises OSError where there is none, ValueError for an index that cannot be read.
    """

    def __init__(self, path: str | Path) -> None:
        path = Path(path)
        if (path / _INDEX).is_file():
            try:
                found = json.loads((path / _INDEX).read_text())["weight_map"]
                self._file_of = {name: path / file for name, file in found.items()}
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise ValueError(f"{path / _INDEX} is no index of safetensors files: {error!r}") from error
            return
        file = path / "model.safetensors" if path.is_dir() else path
        if not file.is_file():
            raise FileNotFoundError(f"there is no {file}: give a safetensors file, or a folder with model.safetensors")
        with safe_open(file, framework="pt") as opened:
            self._file_of = dict.fromkeys(opened.keys(), file)

    def read(self, names: Iterable[str], shape: torch.Size) -> Tensor | None:
        """What is stored under the first of these names that is known; None if there is none.

        Raises ValueError for another shape.
        """
        for name in names:
            if name in self._file_of:
                with safe_open(self._file_of[name], framework="pt") as opened:
                    found: Tensor = opened.get_tensor(name)
                if found.shape != shape:
                    raise ValueError(f"{name!r} is {tuple(found.shape)} in {self._file_of[name]}, not {tuple(shape)}")
                return found
        return None


@dataclass(frozen=True)
class InitialValues:
    """Those of a model that is the same on all ranks, and may be on the meta device, without values.

    `device`: where they are to be. `seed`: of random numbers, common to all ranks.
    """

    model: nn.Module
    device: torch.device
    seed: int

    @classmethod
    def of(cls, model: nn.Module, comms: Iterable[Communicator], device: torch.device | None = None) -> InitialValues:
        """Of a model whose ranks `comms` connect, one dimension of their mesh after the other; on `device`, or where it
        is, or should be. Collective."""
        device, seed = device or next((one.device for one in model.parameters()), None), torch.randint(1 << 60, ())
        if device is None:
            raise ValueError(f"{type(model).__name__} has no parameters: give a model that has some")
        for comm in comms:
            seed = seed.to(comm.control_device)
            comm.broadcast(seed, root=0)
            if device.type == "meta":
                device = values_device(comm)
        return cls(model, device, int(seed))

    @torch.no_grad()
    def give(self, part: nn.Module, number: int = 0, weights: str | Path | None = None, *, same: bool = True) -> None:
        """Give what of a part of the model is on the meta device its values; if `same`, parameters stay as objects.

        They begin as `initialize_weights` makes them, Transformers', of the part or for each of its modules the model,
        or the `reset_parameters` of its modules, from random numbers that its `number` determines; then come those that
        `weights` has, a safetensors file or a folder of them. DTensors keep their rank's part.

        Raises ValueError for what is left without values, OSError where files cannot be read.
        """
        places: dict[int, list[tuple[dict[str, Tensor | None], str]]] = {}
        without: dict[int, Tensor] = {}
        for module in part.modules():
            for table in (cast("dict[str, Tensor | None]", module._parameters), module._buffers):
                for name, one in table.items():
                    if one is not None and one.is_meta:
                        without[id(one)] = one
                        places.setdefault(id(one), []).append((table, name))
        if not without:
            return
        files = None if weights is None else WeightFiles(weights)
        names: dict[int, list[str]] = {}
        buffers = {id(one): name for inside in (part, self.model) for name, one in inside.named_buffers()}
        for name, one in self.model.named_parameters(remove_duplicate=False):
            names.setdefault(id(one), []).append(name)
        given = {key: _empty(one, self.device) for key, one in without.items()}
        for key, one in given.items():
            _put(places[key], one)
        # What has values, as what an earlier part shares with this one, keeps them.
        empty = {id(one) for one in given.values()}
        kept = [(one, one.clone()) for one in _tensors(part) if id(one) not in empty]
        with torch.random.fork_rng([self.device] if self.device.type == "cuda" else []), self.device:
            torch.manual_seed(self.seed + number)
            _initialize(part, self.model, empty)
        for one, values in kept:
            one.copy_(values)
        for key, one in given.items():
            called = names.get(key) or [buffers[key]]
            if files is not None and (read := files.read(called, one.shape)) is not None:
                one.copy_(read)
            elif _is_empty(one):
                raise ValueError(
                    f"{called[0]!r} is on the meta device, and nothing says what it begins with: give its module a "
                    "reset_parameters() that sets it, or weights with it"
                )
        for key, meta in without.items():
            if isinstance(meta, nn.Parameter):
                values = _own_part(meta, given[key])
                if same:
                    torch.utils.swap_tensors(meta, values)  # type: ignore[no-untyped-call]
                _put(places[key], meta if same else values)


def values_device(comm: Communicator) -> torch.device:
    """Where a model is to be whose ranks `comm` connects: on this rank's GPU under NCCL."""
    return torch.device("cuda", torch.cuda.current_device()) if comm.backend == "nccl" else torch.device("cpu")


def _put(places: Iterable[tuple[dict[str, Tensor | None], str]], tensor: Tensor) -> None:
    for table, name in places:
        table[name] = tensor


def _empty(meta: Tensor, device: torch.device) -> Tensor:
    """Of its shape, the whole one if it is a DTensor, and full of what nothing begins with."""
    nothing = torch.nan if meta.is_floating_point() else meta.dtype is torch.bool or torch.iinfo(meta.dtype).min
    full = torch.full(meta.shape, nothing, dtype=meta.dtype, device=device)
    return nn.Parameter(full, meta.requires_grad) if isinstance(meta, nn.Parameter) else full


def _is_empty(tensor: Tensor) -> bool:
    if tensor.dtype is torch.bool or not tensor.numel():
        return False
    nothing = tensor.isnan() if tensor.is_floating_point() else tensor == torch.iinfo(tensor.dtype).min
    return bool(nothing.any())


def _initialize(part: Any, model: Any, empty: set[int]) -> None:
    if hasattr(part, "initialize_weights"):
        part.initialize_weights()
    elif hasattr(model, "_initialize_weights"):  # which marks what it has seen
        part.apply(model._initialize_weights)
    else:
        for module in part.modules():
            if any(id(one) in empty for one in _tensors(module, recurse=False)) and hasattr(module, "reset_parameters"):
                module.reset_parameters()


def _tensors(module: nn.Module, recurse: bool = True) -> Iterator[Tensor]:
    yield from module.parameters(recurse)
    yield from module.buffers(recurse)


def _own_part(meta: nn.Parameter, values: Tensor) -> Tensor:
    """Of a parameter's values, this rank's if it is a DTensor, as a parameter with its hooks."""
    if isinstance(meta, DTensor):
        part = distribute_tensor(values.detach(), meta.device_mesh, meta.placements, src_data_rank=None)
        # The mesh is of GPUs, and shards that are offloaded in CPU memory.
        values = nn.Parameter(part.to(values.device), meta.requires_grad)
    for hook in (meta._backward_hooks or {}).values():
        values.register_hook(hook)  # type: ignore[no-untyped-call]
    return values
