"""The parts of a training job, for those that work on all of it, and comparisons of them between ranks."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim.lr_scheduler import LRScheduler

from thinwire.comm import Communicator
from thinwire.comm.agreement import first_difference
from thinwire.engine.activation_checkpointing import ActivationCheckpoints
from thinwire.engine.checkpoint.manifest import ModelDescription
from thinwire.engine.config import ConfigError, EngineConfig
from thinwire.engine.config.errors import dotted
from thinwire.engine.data import ResumableLoader
from thinwire.engine.loss_scale import LossScale
from thinwire.engine.model import LayerDropping, Precision
from thinwire.engine.optimizers import NoOptimizer
from thinwire.parallel import Pipeline
from thinwire.zero.synchronized_optimizer import SynchronizedOptimizer


@dataclass(frozen=True)
class ModelNames:
    """What a model is called by, found before it is sharded.

    `tied`: other names of a parameter -> the one in `description`. `buffers`: names of those that are saved.
    """

    description: ModelDescription
    tied: Mapping[str, str]
    buffers: frozenset[str]

    @classmethod
    def of(cls, model: nn.Module, precision: Precision) -> ModelNames:
        """Names, shapes, and the dtypes that `precision` makes of them."""
        first_name = {id(parameter): name for name, parameter in model.named_parameters()}
        every = model.named_parameters(remove_duplicate=False)
        tied = {name: first_name[id(parameter)] for name, parameter in every if first_name[id(parameter)] != name}
        saved = {name for name, _ in model.named_buffers()} & model.state_dict(keep_vars=True).keys()
        parameters = {
            name: (tuple(parameter.shape), precision.dtype_of(parameter))
            for name, parameter in model.named_parameters()
        }
        return cls(ModelDescription(parameters), tied, frozenset(saved))

    def without(self, names: Collection[str]) -> ModelDescription:
        """The description of the other parameters."""
        parameters = self.description.parameters.items()
        return ModelDescription({name: one for name, one in parameters if name not in names})


@dataclass
class Job:
    """`schedule`, `loader`, `loss_scale`, `recomputed`, `layer_drop`: None where there is none.

    `comm`: ranks that hold the same of the model, and take other data. `world`: all ranks. `mesh`, `pipeline`: None
    where every rank holds the whole model, or one stage of it. `loss_fn`: of a model that finds no loss by itself.
    `device`: of model and inputs. `collate_fn`: of further loaders; None for torch's.
    `given_optimizer`, `given_schedule`: whether it was passed, and not named in the configuration.
    """

    model: nn.Module
    optimizer: SynchronizedOptimizer | NoOptimizer
    schedule: LRScheduler | None
    loader: ResumableLoader | None
    loss_scale: LossScale | None
    precision: Precision
    config: EngineConfig
    comm: Communicator
    world: Communicator
    mesh: DeviceMesh | None
    pipeline: Pipeline | None
    loss_fn: Callable[[Any, Any], Tensor] | None
    device: torch.device
    recomputed: ActivationCheckpoints | None
    layer_drop: LayerDropping | None
    collate_fn: Callable[[list[Any]], Any] | None
    given_optimizer: bool
    given_schedule: bool
    names: ModelNames


def agree_on_config(comm: Communicator, config: EngineConfig) -> None:
    """Raise ConfigError on every rank, naming the first key that differs, unless all have the same configuration."""
    difference = _difference(comm, dict(_flat(config.describe(), "")))
    if difference is not None:
        raise ConfigError(f"ranks are configured differently: {difference}; give every rank the same configuration")


def agree_on_model(comm: Communicator, model: nn.Module) -> None:
    """Raise ValueError on every rank, naming the first difference, unless all have parameters and buffers alike."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    mine: dict[str, Any] = {
        name: f"{one.dtype} {tuple(one.shape)} requires_grad={one.requires_grad}{', without values' * one.is_meta}"
        for name, one in tensors
    }
    difference = _difference(comm, {**mine, "order": [*mine]})
    if difference is not None:
        raise ValueError(f"ranks have different models: {difference}; build the same model on every rank")


def _difference(comm: Communicator, mine: Mapping[str, Any]) -> str | None:
    if (found := first_difference(comm, mine, "compare the job's settings")) is None:
        return None
    rank, name, there, here = found
    return f'"{name}" is {json.dumps(here)} on rank 0 and {json.dumps(there)} on rank {rank}'


def _flat(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """(path, value) of all that is no mapping."""
    for key, one in value.items():
        yield from _flat(one, dotted(path, key)) if isinstance(one, Mapping) and one else [(dotted(path, key), one)]
