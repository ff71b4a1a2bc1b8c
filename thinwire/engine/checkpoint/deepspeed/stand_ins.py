"""What stands in for the classes that DeepSpeed's files name: records that keep what they were given and do nothing.

torch's weights_only loader builds these instead, so that no code of DeepSpeed's, numpy's or a user's runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["Array", "Record", "stand_ins"]

# Classes whose fields or arguments may be read, and which are otherwise inert.
_RECORDS = (
    "argparse.Namespace",
    "deepspeed.checkpoint.universal_checkpoint.SubparamShape",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.runtime.fp16.loss_scaler.LossScaleConfig",
    "deepspeed.runtime.fp16.loss_scaler.LossScaleProfile",
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.runtime.zero.offload_config.OffloadDeviceEnum",
    "deepspeed.utils.tensor_fragment.fragment_address",
    "pathlib.PosixPath",
    "types.SimpleNamespace",
)

_NUMPY = ("numpy.core.multiarray", "numpy._core.multiarray")  # before numpy 2, and since

_NUMBERS = {
    "b1": torch.bool,
    "i1": torch.int8,
    "i2": torch.int16,
    "i4": torch.int32,
    "i8": torch.int64,
    "u1": torch.uint8,
    "u2": torch.uint16,
    "u4": torch.uint32,
    "u8": torch.uint64,
    "f2": torch.float16,
    "f4": torch.float32,
    "f8": torch.float64,
}


class Record:
    """An object of any allowed class: the `args` that it was made with, the `fields` that it was given."""

    args: tuple[Any, ...]
    fields: dict[str, Any]

    def __new__(cls, *args: Any) -> Record:
        """Whatever the arguments are."""
        made = super().__new__(cls)
        made.args, made.fields = args, {}
        return made

    def __setstate__(self, state: Any) -> None:
        """Keep the attributes that a pickle gives an object; its slots come as a second dict."""
        for part in state if isinstance(state, tuple) else (state,):
            self.fields.update(part or {})


class NumpyType:
    """numpy's dtype: "f8", say, little-endian or of one byte."""

    def __init__(self, code: str, *flags: Any) -> None:
        self.code = code
        self.swapped = False

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        """The second value is the byte order."""
        self.swapped = state[1] == ">"

    def read(self, content: bytes, shape: tuple[int, ...]) -> Tensor:
        """The values that these bytes are. Raises ValueError for what are no plain numbers."""
        dtype = _NUMBERS.get(self.code)
        if dtype is None or self.swapped:
            raise ValueError(f"numpy values of type {self.code!r} are not read, only plain numbers, little-endian")
        if len(content) != math.prod(shape) * dtype.itemsize:
            raise ValueError(f"a numpy array of shape {shape} has {len(content)} bytes")
        if not content:
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(bytearray(content), dtype=dtype).view(shape)


class Array:
    """numpy's ndarray: `value` is the tensor that it holds, once it has been given its state."""

    value: Tensor

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        """Version, shape, type, whether columns come first, bytes."""
        _, shape, kind, columns_first, content = state
        if not columns_first:
            self.value = kind.read(content, tuple(shape))
            return
        flipped: Tensor = kind.read(content, tuple(reversed(shape)))
        self.value = flipped.permute(*reversed(range(len(shape)))).contiguous()


def _new_array(*_: Any) -> Array:
    return Array()


def _number(kind: NumpyType, content: bytes) -> float:
    number: float = kind.read(content, ()).item()
    return number


def stand_ins() -> list[Callable[..., Any] | tuple[Callable[..., Any], str]]:
    """What torch.serialization.safe_globals takes: each stand-in with the name that it is found under in files."""
    pairs: list[tuple[Callable[..., Any], str]] = [(Record, name) for name in _RECORDS]
    pairs += [(NumpyType, "numpy.dtype"), (Array, "numpy.ndarray")]
    for module in _NUMPY:
        pairs += [(_number, f"{module}.scalar"), (_new_array, f"{module}._reconstruct")]
    return list(pairs)
