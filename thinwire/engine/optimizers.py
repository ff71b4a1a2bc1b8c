"""Build the optimizer that the engine steps, sharded as the configuration says, over the communicator that it names; or
what stands in its place if a model is only evaluated."""

from __future__ import annotations

import os
import sys
import weakref
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.comm import Communicator, LoggedCommunicator
from thinwire.comm.agreement import on_every_rank
from thinwire.comm.elastic import Elastic
from thinwire.comm.launch import Backend, join_job
from thinwire.comm.launchers import detect
from thinwire.compress import FsdpHooks
from thinwire.engine.config import EngineConfig
from thinwire.engine.config.models import ZeroConfig
from thinwire.engine.model import Precision
from thinwire.engine.recipe import LocalUpdates, Recipe, groups_of
from thinwire.optim import DiLoCo
from thinwire.optim.registry import OptimizerEntry
from thinwire.zero import ShardedOptimizer
from thinwire.zero import fsdp as stage3
from thinwire.zero.fsdp_optimizer import FullyShardedOptimizer
from thinwire.zero.home import NOT_STEPPED
from thinwire.zero.initial_values import InitialValues
from thinwire.zero.placement import PLAIN_AVERAGING, Averaging
from thinwire.zero.rank_checks import broadcast_from_rank_0
from thinwire.zero.saved_state import SavedSlice
from thinwire.zero.shard_optimizer import OptimizerClass
from thinwire.zero.synchronized_optimizer import SynchronizedOptimizer


def communicator_of(backend: Backend | None, comm: Communicator, device: torch.device) -> Communicator:
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
    joined = join_job(backend, comm.timeout, quiet=True)
    if (joined.rank, joined.size) != (comm.rank, comm.size):
        raise ValueError(
            f'"optimizer.params.comm_backend_name" "{backend}" joins all {joined.size} ranks of the job, and the '
            f"engine's communicator has {comm.size}: leave it out"
        )
    return LoggedCommunicator(joined, comm.log) if isinstance(comm, LoggedCommunicator) else joined


def _lack(backend: Backend, comm: Communicator, device: torch.device) -> str | None:
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


@dataclass(frozen=True)
class OptimizerBuilder:
    """Builds what steps `model`, sharded as `config` says, at stage 3 the model with it, in place.

    Methods are collective, and raise ValueError or TypeError, on every rank, for what cannot be sharded.
    """

    model: nn.Module
    comm: Communicator
    device: torch.device
    config: EngineConfig
    precision: Precision
    prepared: stage3.Preparation

    def build(self, recipe: Recipe) -> SynchronizedOptimizer:
        """The recipe's optimizer."""
        config, options, what = self.config, dict(recipe.options), recipe.optimizer
        clipping = {"max_norm": config.gradient_clipping}
        offload = config.zero_optimization.offload_optimizer
        offloading = {
            "offload": _disk(config.zero_optimization) or offload.device == "cpu",
            "pin_memory": offload.pin_memory,
        }
        if isinstance(what, LocalUpdates | OptimizerEntry):
            comm = communicator_of(options.pop("comm_backend_name", None), self.comm, self.device)
            options |= {"comm": comm, **self._common_options(comm), **clipping}
        if recipe.elastic:
            options["elastic"] = Elastic(**options["elastic"])
        if isinstance(what, LocalUpdates):
            options["inside"] = {name: options.pop(name) for name in ("bucket_bytes", "averaging")}
            return DiLoCo(recipe.parameters, what.inner, **options, **what.inner_options)
        if isinstance(what, OptimizerEntry):
            options |= {"resync_interval": config.thinwire.resync_interval, **(offloading if what.offloads else {})}
            make: Any = what.load()
        elif config.zero_optimization.stage == 3:
            return self._build_stage_3(recipe, what)
        else:
            options |= {"comm": self.comm, **self._common_options(self.comm), **clipping, **offloading}
            options["codec"] = config.communication_codec
            make = partial(ShardedOptimizer, optimizer_class=what)
        if recipe.elastic and options.pop("comm").size > 1:
            raise ValueError("an elastic worker is one process: start each by itself")
        optimizer: SynchronizedOptimizer = make(recipe.parameters, **options)
        if config.zero_optimization.overlap_comm:
            optimizer.gather_during_forward(self.model)
        return optimizer

    def shard_for_evaluation(self) -> FsdpHooks | None:
        """At stage 3, shard a model that no optimizer trains; what counts the bytes that it sends."""
        if self.config.zero_optimization.stage < 3:
            return None

        def find_dtype() -> torch.dtype:
            if any(parameter.requires_grad for parameter in self.model.parameters()):
                return stage3.computing_dtype(self.model, self.precision.dtype)
            return self.precision.dtype or next(self.model.parameters()).dtype

        dtype = on_every_rank(self.comm, find_dtype, "shard its model", (ValueError,))
        joined = stage3.join_process_group(self.comm, self.device)
        return self._shard(dtype, PLAIN_AVERAGING, joined)

    def _shard(self, dtype: torch.dtype, averaging: Averaging, joined: Communicator) -> FsdpHooks:
        zero = self.config.zero_optimization
        offload = zero.offload_param
        options: dict[str, Any] = {"offload": offload.device == "cpu", "pin": offload.pin_memory}
        if joined.size % zero.node_size:
            raise ValueError(
                f'"zero_optimization.node_size" is {zero.node_size}, and the job has {joined.size} ranks: give a '
                "divisor"
            )
        if offload.device == "nvme":
            options["disk"] = Path(offload.nvme_path or ""), joined
        options["codecs"] = (zero.weights_codec, zero.gradients_codec, zero.node_size)
        before: dict[str, weakref.ref[Tensor]] = {name: weakref.ref(one) for name, one in self.model.named_parameters()}
        again = stage3.is_sharded_here(self.model)
        if any(one.is_meta for one in self.model.parameters()) and not again:
            device = torch.device("cpu") if options["offload"] else self.device
            initial = InitialValues.of(self.model, [joined], device)
            options["begin"] = partial(initial.give, weights=self.config.initial_weights, same=False)
        hooks = stage3.shard_model(self.model, dtype, self.device, averaging, self.prepared, **options)
        if not again:
            self.prepared.describe(self.model, joined, before)
        return hooks

    def _common_options(self, comm: Communicator) -> dict[str, Any]:
        dtype, zero = self.precision.dtype, self.config.zero_optimization
        return {
            "stage": zero.stage,
            "named_parameters": self.model.named_parameters(),
            "param_dtype": dtype,
            "bucket_bytes": max(
                _BYTES_OF_FP32, zero.reduce_bucket_size * (_BYTES_OF_FP32 if dtype is None else dtype.itemsize)
            ),
            "averaging": self._averaging(comm),
        }

    def _averaging(self, comm: Communicator) -> Averaging:
        config = self.config
        return Averaging(
            wire_dtype=_DTYPES[config.communication_data_type],
            divide_first=float(comm.size) if config.prescale_gradients else config.gradient_predivide_factor,
            accumulate_dtype=_DTYPES[config.data_types.grad_accum_dtype],
            op="sum" if config.gradient_allreduce_op == "sum" else "mean",
        )

    def _build_stage_3(self, recipe: Recipe, optimizer_class: OptimizerClass) -> FullyShardedOptimizer:
        model, comm, prepared, zero = self.model, self.comm, self.prepared, self.config.zero_optimization
        groups = groups_of(recipe.parameters)
        held = [parameter for group in groups for parameter in group["params"] if parameter.requires_grad]
        whole = [one for one in held if not (prepared.is_placeholder(one) or stage3.is_sharded(one) or one.is_meta)]
        broadcast_from_rank_0(comm, whole)
        averaging = self._averaging(comm)

        def plan() -> tuple[torch.dtype, list[list[str]]]:
            dtype = stage3.computing_dtype(model, self.precision.dtype)
            if not held:
                raise ValueError("no parameter of the optimizer requires a gradient: there is nothing to optimize")
            averaging.check_parameters(held, dtype)
            name_of = {id(parameter): name for name, parameter in model.named_parameters()}
            foreign = sum(id(parameter) not in name_of for group in groups for parameter in group["params"])
            if foreign:
                raise ValueError(f"{foreign} of the optimizer's parameters are not in the model: pass the model's own")
            return dtype, [[name_of[id(parameter)] for parameter in group["params"]] for group in groups]

        dtype, names = on_every_rank(comm, plan, "shard its model", (ValueError, TypeError))
        joined = stage3.join_process_group(comm, self.device)
        hooks = self._shard(dtype, averaging, joined)
        sharded = dict(model.named_parameters())
        for group, names_in_group in zip(groups, names, strict=True):
            group["params"] = [sharded[name] for name in names_in_group]
        return FullyShardedOptimizer(
            model,
            groups,
            optimizer_class,
            comm=joined,
            hooks=hooks,
            names={id(parameter): name for name, parameter in sharded.items()},
            dtype=dtype,
            device=self.device,
            max_norm=self.config.gradient_clipping,
            times_mean=averaging.times_mean(comm.size),
            stepped_on=_stepped_on(zero, self.device),
            pin=zero.offload_optimizer.pin_memory,
            disk=_disk(zero),
            **recipe.options,
        )


def _stepped_on(zero: ZeroConfig, device: torch.device) -> torch.device | None:
    """Where optimizer state lies at stage 3, if not beside the shards of the parameters."""
    state, shards = zero.offload_optimizer.device, zero.offload_param.device
    if device.type == "cpu" or state in (shards, "nvme"):
        return None
    return torch.device("cpu") if state == "cpu" else device


def _disk(zero: ZeroConfig) -> Path | None:
    offload = zero.offload_optimizer
    return Path(offload.nvme_path) if offload.device == "nvme" and offload.nvme_path else None


class CallError(RuntimeError, AssertionError):
    """A call that cannot come here, as step() before backward(). An AssertionError too, as scripts written for
    other engines catch. Nothing has changed."""


class NoOptimizer:
    """An optimizer's surface, as far as engine and checkpoints reach it without a step: it holds no parameter, so that
    all of a model's weights are among those that no optimizer holds.

    `hooks`: of a model that gathers its own weights.
    """

    last_step = NOT_STEPPED
    steps_alone = comes_and_goes = False
    steps = 0
    in_training = True

    def __init__(self, hooks: FsdpHooks | None) -> None:
        self.param_groups: list[dict[str, Any]] = []
        self.loss_scale, self.summed = 1.0, 1
        self._hooks = hooks

    @property
    def bytes_sent(self) -> int:
        """Bytes this rank has sent to gather parameters."""
        return 0 if self._hooks is None else self._hooks.bytes_sent

    def model_state_bytes(self) -> dict[str, float]:
        """Nothing: there are no gradients, master weights or moments."""
        return {}

    def refuse(self, call: str) -> None:
        """Raise CallError: there is nothing to call `call` on."""
        raise CallError(
            f"{call}() was called on an engine without an optimizer, which evaluates only: to train, pass one to "
            'thinwire.initialize, or give the configuration an "optimizer" section, for example {"type": "AdamW", '
            '"params": {"lr": 1e-4}}'
        )

    def step(self) -> None:
        """Raise CallError."""
        self.refuse("step")

    def end_backward(self) -> None:
        """Raise CallError."""
        self.refuse("end_backward")

    def nothing(self, *_: object) -> None:
        """Do nothing: no gradient leaves, no rank's weights move, no state is there."""

    train = eval = leave_out = zero_grad = synchronize_weights = wait_for_weights = close = nothing
    check = load = load_weights = reset_state = nothing

    def no_sync(self) -> AbstractContextManager[None]:
        """Nothing leaves inside, nor outside."""
        return nullcontext()

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
