"""What an engine offers beside its training loop: its model, what it says of its ranks and optimizer, and loaders."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import nn

from thinwire.comm import Communicator, detect
from thinwire.engine.data import ResumableLoader, make_loader
from thinwire.engine.job import Job
from thinwire.engine.optimizers import EngineOptimizer, NoOptimizer, steps_alone
from thinwire.engine.refused_names import CHANGES_A_MODEL, why_foreign
from thinwire.engine.settings_getters import SettingsGetters
from thinwire.zero.fsdp import free_gathered

__all__ = ["EngineSurface"]


class EngineSurface(SettingsGetters):
    """Reads a job, and what the loop has left: `optimizer`, None where the engine evaluates only, and the last step's
    outcome. Takes no step, and changes nothing of where one stands."""

    comm: Communicator
    device: torch.device
    optimizer: EngineOptimizer | None
    _job: Job
    _module: nn.Module
    _optimizer: EngineOptimizer | NoOptimizer
    _applied: bool
    _grad_norm: float | None

    # The model

    def __getattr__(self, name: str) -> Any:
        if name == "_module":  # not there yet: do not look for it in itself
            raise AttributeError(name)
        only_evaluates = self.optimizer is None and not self.zero_optimization_partition_weights()
        if name in CHANGES_A_MODEL and not (name == "load_state_dict" and only_evaluates):
            raise AttributeError(
                f"an engine has no {name}(): its optimizer holds the weights too, and would not follow. Call it on the "
                "model before thinwire.initialize, or load a checkpoint"
            )
        try:
            return getattr(self.module, name)
        except AttributeError as error:
            raise AttributeError(why_foreign(name) or str(error)) from None

    @property
    def module(self) -> nn.Module:
        """The model, all its weights there: with `overlap_comm` reach them through this, or through forward."""
        self._optimizer.wait_for_weights()
        return self._module

    def train(self, mode: bool = True) -> nn.Module:
        """Put the model into training mode, or, on all ranks at the same step, into evaluation mode: see `eval`."""
        if steps_alone(self._optimizer):
            (self._optimizer.train if mode else self._optimizer.eval)()
        elif not mode:
            self._optimizer.synchronize_weights()
        return self.module.train(mode)

    def eval(self) -> nn.Module:
        """Put the model into evaluation mode, with the same weights on every rank.

        Collective with ZeroOneAdam between two of its syncs, and then a sync more. With DiLoCo the model has the outer
        weights until `train`, and nothing is sent. Returns the model.
        """
        return self.train(False)

    @property
    def sparse_tensor_module_names(self) -> frozenset[str]:
        """Modules whose gradients travel as indices and rows: none, all gradients travel dense."""
        return frozenset()

    def empty_partition_cache(self) -> None:
        """At stage 3, free what layers have gathered and not used up, as after a forward without backward."""
        free_gathered(self._module)

    # Ranks: all of them hold the same model

    @property
    def world_size(self) -> int:
        """Ranks that train together."""
        return self.comm.size

    @property
    def dp_world_size(self) -> int:
        """Ranks that take different data: all."""
        return self.comm.size

    @property
    def mp_world_size(self) -> int:
        """Ranks that share one model between them: 1."""
        return 1

    @property
    def global_rank(self) -> int:
        """This rank among all."""
        return self.comm.rank

    def get_data_parallel_rank(self) -> int:
        """This rank among those that take different data."""
        return self.comm.rank

    def get_model_parallel_rank(self) -> int:
        """This rank among those that share one model: 0."""
        return 0

    def get_tensor_parallel_rank(self) -> int:
        """This rank among those that share one layer: 0."""
        return 0

    @property
    def local_rank(self) -> int:
        """This rank among those of its host, by the launcher. Raises AttributeError where the launcher does not say."""
        rank = detect(os.environ).local_rank
        if rank is None:
            raise AttributeError("the launcher does not say which ranks share a host: engine.local_rank is not known")
        return rank

    # The optimizer and its schedule

    def optimizer_name(self) -> str | None:
        """The optimizer's type as the configuration names it, or the class of what was passed; None for none."""
        if self.optimizer is None:
            return None
        section = None if self._job.given_optimizer else self.settings.optimizer
        name: str = self.optimizer.counters()["optimizer"] if section is None else section.type
        return name

    def optimizer_params(self) -> dict[str, Any] | None:
        """The optimizer's arguments in the configuration, defaults included; None where it is not named there."""
        section = None if self._job.given_optimizer else self.settings.optimizer
        return None if section is None else dict(section.params)

    def scheduler_name(self) -> str | None:
        """The schedule's type as the configuration names it, or the class of the one that was passed; None for none."""
        if self._job.schedule is None:
            return None
        section = None if self._job.given_schedule else self.settings.scheduler
        return type(self._job.schedule).__name__ if section is None else section.type

    def scheduler_params(self) -> dict[str, Any] | None:
        """The schedule's arguments in the configuration; None where it is not named there."""
        section = None if self._job.given_schedule else self.settings.scheduler
        return None if section is None else dict(section.params)

    def get_lr(self) -> list[float]:
        """The learning rate of every parameter group."""
        return [float(group["lr"]) for group in self._optimizer.param_groups]

    def get_mom(self) -> list[Any]:
        """Of every parameter group its momentum, or its betas; 0.0 where it has neither."""
        return [group.get("momentum", group.get("betas", 0.0)) for group in self._optimizer.param_groups]

    def get_type(self) -> list[Any]:
        """Of every parameter group what it holds as "type"; 0.0 where it holds nothing by that name."""
        return [group.get("type", 0.0) for group in self._optimizer.param_groups]

    def get_pld_theta(self) -> float | None:
        """Layer drop's θ of the last step; None where it is off."""
        return None if self._job.layer_drop is None else self._job.layer_drop.theta

    def get_global_grad_norm(self) -> float | None:
        """2-norm of the last step's averaged gradient before clipping; None where it is not known.

        That is before the first step, without clipping once 1-bit Adam is frozen, since nobody sees the whole average,
        and with 0/1 Adam. With DiLoCo it is of this rank's worker.
        """
        return self._grad_norm

    def was_step_applied(self) -> bool:
        """Whether the last step() moved the weights."""
        return self._applied

    # Data

    def deepspeed_io(
        self,
        dataset: Any,
        batch_size: int | None = None,
        route: Literal["train", "eval", "predict"] = "train",
        pin_memory: bool = True,
        data_sampler: None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_local_io_workers: int | None = None,
    ) -> ResumableLoader:
        """A loader of this engine's ranks over `dataset`; construction is collective.

        Args:
            dataset: a map-style data set.
            batch_size: of a rank; by default train_micro_batch_size_per_gpu.
            route: "train" shuffles, "eval" and "predict" keep the data's order.
            pin_memory: on GPUs, for faster copies.
            data_sampler: none: the loader deals samples to ranks by itself.
            collate_fn: by default the one that `initialize` was given.
            num_local_io_workers: processes that fetch ahead, by default none.

        Raises ValueError for a sampler or another route, and what ResumableLoader raises.
        """
        if data_sampler is not None:
            raise ValueError(
                "deepspeed_io() got a data_sampler, and its loader deals samples to the ranks by itself: leave it out, "
                "or build a torch DataLoader with your sampler and loop over that"
            )
        if route not in ("train", "eval", "predict"):
            raise ValueError(f'route is "train", "eval" or "predict", not {route!r}')
        return make_loader(
            dataset,
            self.settings,
            self.comm,
            self.device,
            batch_size=batch_size,
            shuffle=route == "train",
            collate_fn=collate_fn or self._job.collate_fn,
            num_workers=num_local_io_workers or 0,
            pin_memory=pin_memory,
        )
