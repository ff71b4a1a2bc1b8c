"""The user's client_state in a checkpoint: JSON keeps what it can of it, and a list beside it says what the other
values were."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from thinwire.engine.checkpoint.files import CODES, dtype_name

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


def unpack_client_state(shared: Mapping[str, Any], read: Callable[[str], Tensor]) -> dict[str, Any]:
    """The inverse of `pack_client_state`, of what a checkpoint has of all ranks; `read` gives the tensor of a key.

    Raises KeyError, IndexError, TypeError or ValueError for what it did not pack.
    """
    special = [SpecialValue.model_validate(one) for one in shared.get("client_values", ())]
    root: dict[str, Any] = {"": deepcopy(shared.get("client_state", {}))}  # to be filled in
    if special and special[0].kind == "pairs" and not special[0].path:
        root = root[""]
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
