"""Build the optimizer that the engine steps, sharded as the configuration says, over the communicator that it names; or
what stands in its place if a model is only evaluated."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, TypeGuard

import torch
from torch import Tensor, nn

from thinwire import comm as communication
from thinwire.comm import Communicator, LoggedCommunicator, Traffic
from thinwire.comm.agreement import on_every_rank
from thinwire.comm.launchers import detect
from thinwire.engine.config import EngineConfig
from thinwire.engine.config.models import ZeroConfig
from thinwire.engine.model import Precision
from thinwire.engine.recipe import LocalUpdates, Recipe
from thinwire.optim import DiLoCo
from thinwire.optim.registry import OptimizerEntry
from thinwire.zero import ShardedOptimizer
from thinwire.zero import fsdp as stage3
from thinwire.zero.fsdp_optimizer import FullyShardedOptimizer
from thinwire.zero.gradients import PLAIN_AVERAGING, Averaging
from thinwire.zero.home import NOT_STEPPED
from thinwire.zero.optimizer import OptimizerClass
from thinwire.zero.rank_checks import broadcast_from_rank_0
from thinwire.zero.saved_state import SavedSlice, SliceSource
from thinwire.zero.synchronized_optimizer import SynchronizedOptimizer

__all__ = [
    "CallError",
    "NoOptimizer",
    "build_optimizer",
    "check_trains",
    "communicator_of",
    "shard_for_evaluation",
    "steps_alone",
]

Named = Literal["gloo", "nccl", "mpi"]


def communicator_of(backend: Named | None, comm: Communicator, device: torch.device) -> Communicator:
    """The ranks of `comm` over `backend`; `comm` itself where this job cannot use that, which rank 0 says.

    What carries the bytes changes no result: files made for clusters with NCCL or MPI train elsewhere as they are.

    Raises ValueError where the backend would join other ranks.
    """
    if backend is None or backend == comm.backend:
        return comm
    if (lack := _lack(backend, comm, device)) is not None:
        if comm.speaks:
            print(
                f'thinwire: "optimizer.params.comm_backend_name" is "{backend}", and {lack}: compressed momentum '
                f"travels over the job's own {comm.backend}",
                file=sys.stderr,
                flush=True,
            )
        return comm
    joined = communication.init(backend, comm.timeout, quiet=True)
    if (joined.rank, joined.size) != (comm.rank, comm.size):
        raise ValueError(
            f'"optimizer.params.comm_backend_name" "{backend}" joins all {joined.size} ranks of the job, and the '
            f"engine's communicator has {comm.size}: leave it out"
        )
    return LoggedCommunicator(joined, comm.log) if isinstance(comm, LoggedCommunicator) else joined


def _lack(backend: Named, comm: Communicator, device: torch.device) -> str | None:
    """Why this job cannot use the backend; None where it can."""
    if comm.backend == "threads":
        return "ranks are threads of one process"
    if backend == "nccl" and device.type != "cuda":
        return "the model is not on a GPU"
    launcher = detect(os.environ).launcher
    if backend == "mpi" and launcher in ("torchrun", "single"):
        return "the job was not started by mpirun or srun"
    return None


_BYTES_OF_FP32 = 4

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, None: None}


def build_optimizer(
    recipe: Recipe,
    model: nn.Module,
    comm: Communicator,
    device: torch.device,
    config: EngineConfig,
    precision: Precision,
    prepared: stage3.Preparation,
) -> SynchronizedOptimizer:
    """The recipe's optimizer, sharded as `config` says; at stage 3 the model with it, in place. Collective.

    Raises ValueError or TypeError, on every rank, for what cannot be sharded.
    """
    zero = config.zero_optimization
    optimizer: SynchronizedOptimizer
    if isinstance(recipe.optimizer, LocalUpdates):
        return _build_local_updates(recipe, recipe.optimizer, model, comm, device, config, precision)
    if isinstance(recipe.optimizer, OptimizerEntry):
        optimizer = _build_own(recipe, recipe.optimizer, model, comm, device, config, precision)
    elif zero.stage == 3:
        return _build_stage_3(recipe, recipe.optimizer, model, comm, device, config, precision, prepared)
    else:
        shared = _common_options(model, config, precision, comm) | _clipping(config) | _offloading(config)
        optimizer = ShardedOptimizer(recipe.parameters, recipe.optimizer, comm=comm, **shared, **recipe.options)
    if zero.overlap_comm:
        optimizer.gather_during_forward(model)
    return optimizer


def steps_alone(optimizer: object) -> TypeGuard[SynchronizedOptimizer]:
    """Whether a worker may skip a step that others take, has a loss scale of its own, and shows at `eval` what all have
    in common without asking them."""
    return isinstance(optimizer, SynchronizedOptimizer) and optimizer.steps_alone


def shard_for_evaluation(
    model: nn.Module,
    comm: Communicator,
    device: torch.device,
    config: EngineConfig,
    precision: Precision,
    prepared: stage3.Preparation,
) -> Traffic | None:
    """At stage 3, shard a model that no optimizer trains, in place; what counts the bytes that it sends. Collective.

    Raises ValueError, on every rank, for what cannot be sharded.
    """
    if config.zero_optimization.stage < 3:
        return None

    def find_dtype() -> torch.dtype:
        if any(parameter.requires_grad for parameter in model.parameters()):
            return stage3.computing_dtype(model, precision.dtype)
        return precision.dtype or next(model.parameters()).dtype

    dtype = on_every_rank(comm, find_dtype, "shard its model", (ValueError,))
    joined = stage3.join_process_group(comm, device)
    offload = config.zero_optimization.offload_param
    traffic = stage3.shard_model(
        model, dtype, device, PLAIN_AVERAGING, prepared, offload=offload.device == "cpu", pin=offload.pin_memory
    )
    prepared.describe(model, joined)
    return traffic


def _build_own(
    recipe: Recipe,
    entry: OptimizerEntry,
    model: nn.Module,
    comm: Communicator,
    device: torch.device,
    config: EngineConfig,
    precision: Precision,
) -> SynchronizedOptimizer:
    options = dict(recipe.options)
    comm = communicator_of(options.pop("comm_backend_name", None), comm, device)
    shared = _common_options(model, config, precision, comm)
    shared["resync_interval"] = config.thinwire.resync_interval
    shared |= _clipping(config)
    if entry.offloads:
        shared |= _offloading(config)
    optimizer: SynchronizedOptimizer = entry.load()(recipe.parameters, comm=comm, **shared, **options)
    return optimizer


def _build_local_updates(
    recipe: Recipe,
    local: LocalUpdates,
    model: nn.Module,
    comm: Communicator,
    device: torch.device,
    config: EngineConfig,
    precision: Precision,
) -> DiLoCo:
    options = dict(recipe.options)
    comm = communicator_of(options.pop("comm_backend_name", None), comm, device)
    shared = _common_options(model, config, precision, comm)
    inside = {name: shared.pop(name) for name in ("bucket_bytes", "averaging")}
    shared |= _clipping(config)
    parameters = recipe.parameters
    return DiLoCo(parameters, local.inner, comm=comm, inside=inside, **shared, **options, **local.inner_options)


def _common_options(model: nn.Module, config: EngineConfig, precision: Precision, comm: Communicator) -> dict[str, Any]:
    width = precision.dtype.itemsize if precision.dtype is not None else _BYTES_OF_FP32
    return {
        "stage": config.zero_optimization.stage,
        "named_parameters": model.named_parameters(),
        "param_dtype": precision.dtype,
        "bucket_bytes": config.zero_optimization.reduce_bucket_size * width,
        "averaging": _averaging(config, comm),
    }


def _averaging(config: EngineConfig, comm: Communicator) -> Averaging:
    return Averaging(
        wire_dtype=_DTYPES[config.communication_data_type],
        divide_first=float(comm.size) if config.prescale_gradients else config.gradient_predivide_factor,
        accumulate_dtype=_DTYPES[config.data_types.grad_accum_dtype],
        op="sum" if config.gradient_allreduce_op == "sum" else "mean",
    )


def _clipping(config: EngineConfig) -> dict[str, Any]:
    return {"max_norm": config.gradient_clipping}


def _offloading(config: EngineConfig) -> dict[str, Any]:
    offload = config.zero_optimization.offload_optimizer
    return {"offload": offload.device == "cpu", "pin_memory": offload.pin_memory}


def _build_stage_3(
    recipe: Recipe,
    optimizer_class: OptimizerClass,
    model: nn.Module,
    comm: Communicator,
    device: torch.device,
    config: EngineConfig,
    precision: Precision,
    prepared: stage3.Preparation,
) -> FullyShardedOptimizer:
    zero = config.zero_optimization
    offload = zero.offload_param
    groups = recipe.groups()
    held = [parameter for group in groups for parameter in group["params"] if parameter.requires_grad]
    broadcast_from_rank_0(comm, [parameter for parameter in held if not prepared.is_placeholder(parameter)])

    averaging = _averaging(config, comm)

    def plan() -> tuple[torch.dtype, list[list[str]]]:
        dtype = stage3.computing_dtype(model, precision.dtype)
        averaging.check_parameters(held, dtype)
        return dtype, _names(groups, model)

    dtype, names = on_every_rank(comm, plan, "shard its model", (ValueError, TypeError))
    joined = stage3.join_process_group(comm, device)
    traffic = stage3.shard_model(
        model, dtype, device, averaging, prepared, offload=offload.device == "cpu", pin=offload.pin_memory
    )
    sharded = dict(model.named_parameters())
    for group, names_in_group in zip(groups, names, strict=True):
        group["params"] = [sharded[name] for name in names_in_group]
    prepared.describe(model, joined)
    return FullyShardedOptimizer(
        model,
        groups,
        optimizer_class,
        comm=joined,
        traffic=traffic,
        names={id(parameter): name for name, parameter in sharded.items()},
        dtype=dtype,
        device=device,
        max_norm=config.gradient_clipping,
        times_mean=averaging.times_mean(comm.size),
        stepped_on=_stepped_on(zero, device),
        pin=zero.offload_optimizer.pin_memory,
        **recipe.options,
    )


def _stepped_on(zero: ZeroConfig, device: torch.device) -> torch.device | None:
    """Where optimizer state lies at stage 3, if not beside the shards of the parameters."""
    state, shards = zero.offload_optimizer.device, zero.offload_param.device
    if device.type == "cpu" or state == shards:
        return None
    return torch.device("cpu") if state == "cpu" else device


def _names(groups: list[dict[str, Any]], model: nn.Module) -> list[list[str]]:
    name_of = {id(parameter): name for name, parameter in model.named_parameters()}
    foreign = sum(id(parameter) not in name_of for group in groups for parameter in group["params"])
    if foreign:
        raise ValueError(f"{foreign} of the optimizer's parameters are not in the model: pass the model's own")
    return [[name_of[id(parameter)] for parameter in group["params"]] for group in groups]


class CallError(RuntimeError, AssertionError):
    """A call that cannot come here, as step() before backward(). An AssertionError too, as scripts written for
    other engines catch. Nothing has changed."""


class NoOptimizer:
    """An optimizer's surface, as far as engine and checkpoints reach it without a step: it holds no parameter, so that
    all of a model's weights are among those that no optimizer holds.

    `traffic`: of a model that gathers its own weights.
    """

    last_step = NOT_STEPPED

    def __init__(self, traffic: Traffic | None) -> None:
        self.param_groups: list[dict[str, Any]] = []
        self.loss_scale = 1.0
        self._traffic = traffic

    @property
    def bytes_sent(self) -> int:
        """Bytes this rank has sent to gather parameters."""
        return 0 if self._traffic is None else self._traffic.bytes_sent

    def model_state_bytes(self) -> dict[str, float]:
        """Nothing: there are no gradients, master weights or moments."""
        return {}

    def step(self) -> None:
        """Raise CallError."""
        check_trains(self, "step")

    def end_backward(self) -> None:
        """Raise CallError."""
        check_trains(self, "end_backward")

    def leave_out(self, parameters: Iterable[Tensor]) -> None:
        """Nothing: no gradient leaves."""

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Nothing leaves inside, nor outside."""
        yield

    def zero_grad(self) -> None:
        """Nothing."""

    def synchronize_weights(self) -> None:
        """Nothing: no rank's weights move."""

    def wait_for_weights(self) -> None:
        """Nothing to wait for."""

    def close(self) -> None:
        """Nothing to release."""

    # Checkpoints

    def saved_slices(self) -> list[SavedSlice]:
        """None."""
        return []

    def rank_tensors(self) -> dict[str, Any]:
        """None."""
        return {}

    def counters(self) -> dict[str, Any]:
        """As those of an optimizer without parameters."""
        return {"optimizer": "none", "groups": []}

    def load(self, source: SliceSource) -> None:
        """Leave the optimizer's state where it is."""

    def load_weights(self, source: SliceSource) -> None:
        """Nothing."""

    def reset_state(self) -> None:
        """Nothing."""


def check_trains(optimizer: object, call: str) -> None:
    """Raise CallError where there is no optimizer to call anything on."""
    if isinstance(optimizer, NoOptimizer):
        raise CallError(
            f"{call}() was called on an engine without an optimizer, which evaluates only: to train, pass one to "
            'thinwire.initialize, or give the configuration an "optimizer" section, for example {"type": "AdamW", '
            '"params": {"lr": 1e-4}}'
        )
