"""Small things that scripts take from DeepSpeed: logs, norms, clipping, memory, partitions, and names for profilers."""

from __future__ import annotations

import gc
import logging
import math
import os
import random
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import cache, wraps
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.torch_version import TorchVersion

from thinwire.deepspeed import ranks as comm
from thinwire.deepspeed.devices import get_accelerator

_GIB = 1 << 30


def call_to_str(base: str, *args: object, **kwargs: object) -> str:
    """A call as it would be written, of a name and the arguments: step(3, mode='fast')."""
    given = [repr(one) for one in args] + [f"{name}={value!r}" for name, value in kwargs.items()]
    return f"{base}({', '.join(given)})"


def prefix_sum_inc(weights: Iterable[float]) -> list[float]:
    """The sum of the first weight, of the first two, and so on."""
    return list(accumulate(weights))


def get_global_norm(norm_list: Sequence[float | Tensor]) -> float:
    """The 2-norm of tensors whose 2-norms are given: infinite where one is negative or not finite."""
    norms = [float(norm) for norm in norm_list]
    return math.hypot(*norms) if all(0 <= norm < math.inf for norm in norms) else math.inf


def combine_grad_norm_groups(norm_groups: Sequence[Tensor]) -> Tensor:
    """`get_global_norm` of norms on a device, where it stays."""
    norms = torch.stack([*norm_groups])
    combined: Tensor = torch.linalg.vector_norm(torch.where(norms >= 0, norms, math.inf))
    return combined


def see_memory_usage(message: str, force: bool = False) -> None:
    """Print on rank 0, where `force`, what the device and the process hold, in GiB."""
    if not force or comm.get_rank() != 0:
        return
    gc.collect()
    device = get_accelerator()
    now, most = device.memory_allocated() / _GIB, device.max_memory_allocated() / _GIB
    print(f"{message}\nallocated {now:.2f} GiB, at most {most:.2f} GiB on {device.device_name()}", flush=True)


def split_half_float_double(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """The dense tensors by dtype: those in fp16, fp32, fp64 and bf16, without the dtypes that none has."""
    dense = [one for one in tensors if one.layout == torch.strided]
    kinds = (torch.float16, torch.float32, torch.float64, torch.bfloat16)
    return [of_kind for kind in kinds if (of_kind := [one for one in dense if one.dtype == kind])]


def mask_nan_or_inf_with_val_inplace(tensor: Tensor, device: Any = None, val: float = -1.0) -> None:
    """Write `val` where a tensor is not finite, on whatever device it is."""
    tensor.masked_fill_(tensor.isfinite().logical_not_(), val)


def check_internal_apis_for_count_used_parameters() -> bool:
    """Whether this torch says which nodes the running backward will reach."""
    return hasattr(torch.autograd.graph, "_get_grad_fn_or_grad_acc") and all(
        hasattr(torch._C, name) for name in ("_current_graph_task_id", "_will_engine_execute_node")
    )


def count_used_parameters_in_backward(parameters: Iterable[Any]) -> int:
    """How many of the parameters the running backward will reach; all that want a gradient, where torch cannot say.

    Raises RuntimeError outside of a backward.
    """
    wanted = [one for one in parameters if isinstance(one, Tensor) and one.requires_grad]
    if not check_internal_apis_for_count_used_parameters():
        return len(wanted)
    if torch._C._current_graph_task_id() == -1:
        raise RuntimeError(
            "count_used_parameters_in_backward() must be called during backward execution, in a hook say"
        )
    with torch.enable_grad():  # without it a leaf has no node
        nodes = [torch.autograd.graph._get_grad_fn_or_grad_acc(one) for one in wanted]
    return sum(torch._C._will_engine_execute_node(node) for node in nodes)


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


def split_params_into_different_moe_groups_for_optimizer(
    param_groups: dict[str, Any] | Sequence[dict[str, Any]], max_group_size: float | None = None
) -> list[dict[str, Any]]:
    """The parameter groups, as a list: no group has experts to be split from."""
    return [param_groups] if isinstance(param_groups, dict) else list(param_groups)


def is_moe_param(param: Any) -> bool:
    """Never."""
    return False


def has_moe_layers(module: Any) -> tuple[bool, int]:
    """(False, 0)."""
    return False, 0


class OnDevice:
    """Parameters made inside are of `dtype`, and on `device`: "meta" for a model that has shapes only."""

    def __init__(self, dtype: torch.dtype, device: str | torch.device = "meta", enabled: bool = True) -> None:
        self.dtype = dtype
        self.device = torch.device(device)
        self.enabled = enabled
        self._before = torch.get_default_dtype()

    def __enter__(self) -> None:
        if self.enabled:
            self._before = torch.get_default_dtype()
            torch.set_default_dtype(self.dtype)
            self.device.__enter__()

    def __exit__(self, *error: object) -> None:
        if self.enabled:
            self.device.__exit__(*error)
            torch.set_default_dtype(self._before)


def instrument_w_nvtx(func: Callable[..., Any]) -> Callable[..., Any]:
    """Name the calls of a function for NVIDIA's profilers."""

    @wraps(func)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        get_accelerator().range_push(func.__qualname__)
        try:
            return func(*args, **kwargs)
        finally:
            get_accelerator().range_pop()

    return wrapped


def required_torch_version(min_version: str | float | None = None, max_version: str | float | None = None) -> bool:
    """Whether torch is not older than the one and not newer than the other, "2.4" or 2.4."""
    installed = TorchVersion(torch.__version__.partition("+")[0])
    return str(min_version or 0) <= installed <= str(max_version or installed)


# Logging by rank, as deepspeed.utils.logging has it

# To standard output from INFO on, as DeepSpeed's, and not to the root logger too.
logger = logging.getLogger("DeepSpeed")
if not logger.handlers:
    _handler = logging.StreamHandler(sys.stdout)
    _handler.setFormatter(logging.Formatter("[%(asctime)s] [%(levelname)s] %(message)s"))
    logger.addHandler(_handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False


def log_dist(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """Log on these ranks, [-1] for all; without ranks, only where none have met."""
    if (text := _of_rank(message, ranks)) is not None:
        logger.log(level, text)


def print_dist(message: str, ranks: Sequence[int] | None = None) -> None:
    """Print as `log_dist` logs."""
    if (text := _of_rank(message, ranks)) is not None:
        print(text, flush=True)


_log_once = cache(log_dist)


def log_dist_once(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """`log_dist` the first time only."""
    _log_once(message, None if ranks is None else tuple(ranks), level)


def set_log_level_from_string(log_level_str: str, custom_logger: logging.Logger | None = None) -> None:
    """Log from "debug", "info", "warning", "error" or "critical" on.

    Raises ValueError for another name.
    """
    known = logging.getLevelNamesMapping()
    if log_level_str.upper() not in known:
        raise ValueError(f"{log_level_str!r} is not a log level: give one of {', '.join(known).lower()}")
    (custom_logger or logger).setLevel(known[log_level_str.upper()])


def _of_rank(message: str, ranks: Sequence[int] | None) -> str | None:
    if not comm.is_initialized():
        return f"[Rank -1] {message}"
    rank = comm.get_rank()
    return f"[Rank {rank}] {message}" if ranks and (ranks[0] == -1 or rank in ranks) else None
