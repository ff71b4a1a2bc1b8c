"""deepspeed.runtime.utils: norms, clipping and memory, as scripts use them outside the engine."""

from __future__ import annotations

import gc
import math
import os
import random
from collections.abc import Iterable, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from thinwire.deepspeed import comm
from thinwire.deepspeed.accelerator import get_accelerator
from thinwire.deepspeed.lazy_names import not_offered

__all__ = [
    "PartitionedTensor",
    "call_to_str",
    "clip_grad_norm_",
    "empty_cache",
    "ensure_directory_exists",
    "get_global_norm",
    "partition_balanced",
    "partition_uniform",
    "prefix_sum_inc",
    "see_memory_usage",
    "set_random_seed",
]

_GIB = 1 << 30

PartitionedTensor = not_offered(
    "runtime.utils.PartitionedTensor", "it is for pipelines; torch.distributed.tensor.distribute_tensor cuts a tensor"
)


def call_to_str(base: str, *args: object, **kwargs: object) -> str:
    """A call as it would be written, of a name and the arguments: step(3, mode='fast')."""
    given = [repr(one) for one in args] + [f"{name}={value!r}" for name, value in kwargs.items()]
    return f"{base}({', '.join(given)})"


def prefix_sum_inc(weights: Iterable[float]) -> list[float]:
    """The sum of the first weight, of the first two, and so on."""
    return list(accumulate(weights))


def clip_grad_norm_(parameters: Iterable[Tensor] | Tensor, max_norm: float, norm_type: float = 2.0) -> Tensor:
    """torch.nn.utils.clip_grad_norm_, of this rank's gradients. The engine clips by itself: "gradient_clipping"."""
    return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)


def get_global_norm(norm_list: Sequence[float | Tensor]) -> float:
    """The 2-norm of tensors whose 2-norms are given."""
    return math.sqrt(sum(float(norm) ** 2 for norm in norm_list))


def see_memory_usage(message: str, force: bool = False) -> None:
    """Print on rank 0, where `force`, what the device and the process hold, in GiB."""
    if not force or comm.get_rank() != 0:
        return
    gc.collect()
    device = get_accelerator()
    now, most = device.memory_allocated() / _GIB, device.max_memory_allocated() / _GIB
    print(f"{message}\nallocated {now:.2f} GiB, at most {most:.2f} GiB on {device.device_name()}", flush=True)


def set_random_seed(seed: int) -> None:
    """Seed Python and torch, on every device."""
    random.seed(seed)
    torch.manual_seed(seed)


def ensure_directory_exists(filename: str | os.PathLike[str]) -> None:
    """Make the folder that a file is to lie in."""
    os.makedirs(os.path.dirname(os.fspath(filename)) or ".", exist_ok=True)


def empty_cache() -> None:
    """Give memory that no tensor holds back to the device."""
    get_accelerator().empty_cache()


def partition_uniform(num_items: int, num_parts: int) -> list[int]:
    """Bounds of `num_parts` runs of items, as even as can be, the longer ones first: num_parts + 1 numbers from 0."""
    size, more = divmod(num_items, num_parts)
    return [part * size + min(part, more) for part in range(num_parts + 1)]


def partition_balanced(weights: Sequence[float], num_parts: int) -> list[int]:
    """Bounds of `num_parts` runs of items of these weights whose heaviest is as light as can be."""
    prefix = [0.0]
    for weight in weights:
        prefix.append(prefix[-1] + weight)
    # best[part][end]: the heaviest of `part` runs that hold the first `end` items, and where the last begins
    best: list[list[tuple[float, int]]] = [[(0.0 if end == 0 else float("inf"), 0) for end in range(len(prefix))]]
    for _ in range(num_parts):
        before = best[-1]
        best.append(
            [
                min((max(before[start][0], prefix[end] - prefix[start]), start) for start in range(end + 1))
                for end in range(len(prefix))
            ]
        )
    bounds = [len(weights)]
    for part in range(num_parts, 0, -1):
        bounds.append(best[part][bounds[-1]][1])
    return bounds[::-1]
