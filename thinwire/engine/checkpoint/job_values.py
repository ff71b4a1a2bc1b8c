"""Plain values of a job in a checkpoint: the user's client_state, and random numbers.

JSON keeps what it can of a client_state, and a list beside it says what the other values were. A resumed job draws the
random numbers that it would have drawn, if its ranks are the same."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from thinwire.engine.checkpoint.tensor_file import CODES, dtype_name

__all__ = [
    "RANDOM_TENSORS",
    "ClientState",
    "SpecialValue",
    "check_random_values",
    "load_random_state",
    "pack_client_state",
    "random_tensors",
    "random_values",
    "reseed",
    "unpack_client_state",
]

_KEY = "client_state."
_DEEPEST = 64


class SpecialValue(BaseModel):
    """A value at `path` that JSON does not keep: a tensor, numpy's array or number under `key` among rank 0's tensors,
    a tuple kept as a list, a dict with other keys than strings kept as pairs, a float that is `text`."""

    model_config = ConfigDict(strict=True, extra="forbid")

    path: list[str | Annotated[int, Field(ge=0)]]
    kind: Literal["tensor", "array", "number", "tuple", "pairs", "float"]
    key: str = ""
    text: Literal["", "nan", "inf", "-inf"] = ""


@dataclass
class ClientState:
    """`plain`: what JSON holds. `special`: what else is known of values in it, the outer before the inner. `tensors`:
    theirs."""

    plain: dict[str, Any]
    special: list[SpecialValue] = field(default_factory=list)
    tensors: dict[str, Tensor] = field(default_factory=dict)


def pack_client_state(state: Any) -> ClientState:
    """`state` in parts that a checkpoint holds. Raises TypeError, naming the place, for objects that it cannot."""
    if not isinstance(state, Mapping):
        raise TypeError(f"client_state must be a dict, got {type(state).__name__}")
    packed = ClientState({})
    plain = _pack(state, [], packed)
    packed.plain = {"": plain} if isinstance(plain, list) else plain
    return packed


def unpack_client_state(
    plain: Mapping[str, Any], special: list[SpecialValue], read: Callable[[str], Tensor]
) -> dict[str, Any]:
    """The inverse of `pack_client_state`; `read` gives the tensor of a key.

    Raises KeyError, IndexError, TypeError or ValueError for what it did not pack.
    """
    root: dict[str, Any] = {"": _copied(plain)}
    if special and special[0].kind == "pairs" and not special[0].path:
        root = {"": _copied(plain[""])}
    for one in reversed(special):
        holder: Any = root
        path: list[str | int] = ["", *one.path]
        for part in path[:-1]:
            holder = holder[part]
        holder[path[-1]] = _restored(one, holder[path[-1]], read)
    state: dict[str, Any] = root[""]
    return state


def _pack(value: Any, path: list[str | int], packed: ClientState) -> Any:
    where = "client_state" + "".join(f"[{part!r}]" for part in path)
    if len(path) > _DEEPEST:
        raise TypeError(f"client_state is nested more than {_DEEPEST} deep at {where[:200]}")
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, Mapping):
        return _pack_mapping(value, path, packed, where)
    if isinstance(value, list | tuple):
        if isinstance(value, tuple):
            packed.special.append(SpecialValue(path=path, kind="tuple"))
        return [_pack(one, [*path, index], packed) for index, one in enumerate(value)]
    if isinstance(value, Tensor | np.ndarray | np.generic):
        return _pack_tensor(value, path, packed, where)
    if isinstance(value, int | float):
        if isinstance(value, float) and not math.isfinite(value):
            text: Any = "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
            packed.special.append(SpecialValue(path=path, kind="float", text=text))
            return None
        return value
    raise TypeError(
        f"{where} is a {type(value).__name__}, which a checkpoint cannot keep: give numbers, strings, tensors, numpy's "
        "numbers and arrays, and lists, tuples and dicts of them, for example its state_dict()"
    )


def _pack_mapping(value: Mapping[Any, Any], path: list[str | int], packed: ClientState, where: str) -> Any:
    if all(isinstance(key, str) for key in value):
        return {key: _pack(one, [*path, key], packed) for key, one in value.items()}
    for key in value:
        if key is not None and not isinstance(key, bool | int | float | str | tuple):
            raise TypeError(f"{where} has the key {key!r}: keys must be strings, numbers or tuples of them")
    packed.special.append(SpecialValue(path=path, kind="pairs"))
    return [
        [_pack(key, [*path, number, 0], packed), _pack(one, [*path, number, 1], packed)]
        for number, (key, one) in enumerate(value.items())
    ]


def _pack_tensor(value: Any, path: list[str | int], packed: ClientState, where: str) -> None:
    kind: Literal["tensor", "array", "number"] = "tensor"
    tensor = value
    if not isinstance(value, Tensor):
        kind = "array" if isinstance(value, np.ndarray) else "number"
        try:
            tensor = torch.from_numpy(np.array(value))
        except TypeError as error:
            raise TypeError(f"{where} is of numpy's {value.dtype}, which a checkpoint cannot keep: {error}") from error
    if tensor.layout != torch.strided or tensor.dtype not in CODES:
        raise TypeError(
            f"{where} is a tensor of {dtype_name(tensor.dtype)}, layout {tensor.layout}, which a checkpoint cannot "
            f"hold: give a dense one of {', '.join(map(dtype_name, CODES))}"
        )
    key = f"{_KEY}{len(packed.tensors)}"
    packed.tensors[key] = tensor.detach()
    packed.special.append(SpecialValue(path=path, kind=kind, key=key))


def _restored(one: SpecialValue, value: Any, read: Callable[[str], Tensor]) -> Any:
    if one.kind == "tuple":
        return tuple(value)
    if one.kind == "pairs":
        return dict(value)
    if one.kind == "float":
        return float(one.text)
    tensor = read(one.key)
    if one.kind == "tensor":
        return tensor
    array = tensor.numpy()
    return array if one.kind == "array" else array[()]


def _copied(value: Any) -> Any:
    """Dicts and lists of its own, to be filled in."""
    if isinstance(value, Mapping):
        return {key: _copied(one) for key, one in value.items()}
    return [_copied(one) for one in value] if isinstance(value, list) else value


_CPU = "random.cpu"
_CUDA = "random.cuda"

RANDOM_TENSORS = frozenset({_CPU, _CUDA})
"""The keys of `random_tensors`, on any device."""


def random_tensors(device: torch.device) -> dict[str, Tensor]:
    """The states of torch's generators, of the CPU and of `device`."""
    tensors = {_CPU: torch.get_rng_state()}
    if device.type == "cuda":
        tensors[_CUDA] = torch.cuda.get_rng_state(device)
    return tensors


def random_values() -> dict[str, Any]:
    """The states of Python's and numpy's generators, as plain values."""
    kind, keys, position, has_gauss, cached_gaussian = np.random.get_state()
    assert not isinstance(keys, int | str)
    return {"python": random.getstate(), "numpy": [kind, keys.tolist(), position, has_gauss, cached_gaussian]}


def load_random_state(tensors: dict[str, Tensor], values: dict[str, Any], device: torch.device) -> None:
    """Go on with what `random_tensors` and `random_values` gave; a GPU's generator only where both jobs have one."""
    torch.set_rng_state(tensors[_CPU])
    if device.type == "cuda" and _CUDA in tensors:
        torch.cuda.set_rng_state(tensors[_CUDA], device)
    version, numbers, gauss = values["python"]
    random.setstate((version, tuple(numbers), gauss))
    kind, keys, position, has_gauss, cached_gaussian = values["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), position, has_gauss, cached_gaussian))


def check_random_values(values: Any) -> str | None:
    """Why `load_random_state` could not take these, tried on generators of their own; None where it can."""
    try:
        version, numbers, gauss = values["python"]
        random.Random().setstate((version, tuple(numbers), gauss))
        kind, keys, position, has_gauss, cached_gaussian = values["numpy"]
        generator = np.random.RandomState()
        generator.set_state((kind, np.array(keys, dtype=np.uint32), position, has_gauss, cached_gaussian))
    except (TypeError, ValueError, KeyError, IndexError, OverflowError) as error:
        return f"these are no states of Python's and numpy's generators: {error}"
    return None


def reseed(*entropy: int) -> None:
    """Seed every generator with what follows from these numbers alone."""
    seed = int(np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0])
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)
