"""The random numbers that a resumed job draws next: the same as if it had never stopped, where its ranks are the same;
fresh ones, different on every rank, where they are not."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = ["RANDOM_TENSORS", "check_random_values", "load_random_state", "random_tensors", "random_values", "reseed"]

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
