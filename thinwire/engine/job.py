"""What a training job is made of, for those that work on all of it: the engine, its checkpoints, its reports."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from thinwire.comm import Communicator
from thinwire.engine.config import EngineConfig
from thinwire.engine.data.loader import ResumableLoader
from thinwire.engine.loss_scale import LossScale
from thinwire.engine.model.activation_checkpointing import ActivationCheckpoints
from thinwire.engine.model.plugs import LayerDropping
from thinwire.engine.model.precision import Precision
from thinwire.engine.no_optimizer import NoOptimizer
from thinwire.engine.optimizers import EngineOptimizer

__all__ = ["Job"]


@dataclass(frozen=True)
class Job:
    """`schedule`, `loader`, `loss_scale`, `recomputed`, `layer_drop`: None where there is none.

    `device`: of model and inputs. `collate_fn`: of further loaders; None for torch's.
    """

    model: nn.Module
    optimizer: EngineOptimizer | NoOptimizer
    schedule: LRScheduler | None
    loader: ResumableLoader | None
    loss_scale: LossScale | None
    precision: Precision
    config: EngineConfig
    comm: Communicator
    device: torch.device
    recomputed: ActivationCheckpoints | None
    layer_drop: LayerDropping | None
    collate_fn: Callable[[list[Any]], Any] | None
