"""The engine by DeepSpeed's names: `thinwire.initialize` returns the one, `thinwire.deepspeed.initialize` the other,
which refuses what DeepSpeed's asserts against too."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch

from thinwire.comm import detect
from thinwire.deepspeed.errors import DeepSpeedUsageError, NotOfferedError
from thinwire.deepspeed.getters import LossScaleConfig, refuse_unscaled, why_foreign, with_getters
from thinwire.deepspeed.monitors import ThroughputTimer
from thinwire.deepspeed.optimizers import show_adam
from thinwire.deepspeed.parameters.gathering import GatheredParameters
from thinwire.deepspeed.parameters.sharded import PREPARED, get_z3_leaf_modules
from thinwire.deepspeed.ranks import note_logged
from thinwire.deepspeed.sections import OffloadDeviceEnum, OffloadStateTypeEnum
from thinwire.deepspeed.utilities import logger
from thinwire.engine import Engine, EngineConfig
from thinwire.engine.batches import GlobalBatches
from thinwire.engine.checkpoint.manifest import rank_file
from thinwire.engine.config.loading import resized
from thinwire.engine.data import ResumableLoader, make_loader, refuse_elastic_data
from thinwire.engine.job import Job
from thinwire.engine.job_checkpoints import JobCheckpoints
from thinwire.engine.optimizers import CallError
from thinwire.engine.reports import JobReports
from thinwire.zero.fsdp import free_gathered


@with_getters
class TrainingEngine(Engine):
    """The engine that `thinwire.initialize` returns, with DeepSpeed's names for it, its ranks and its configuration."""

    prepared = PREPARED

    def __init__(self, job: Job, checkpoints: JobCheckpoints, reports: JobReports) -> None:
        super().__init__(job, checkpoints, reports)
        note_logged(self.comm)
        logger.setLevel(self.settings.log_level or logger.level)
        if self.optimizer is not None:
            LossScaleConfig(job.loss_scale).show_on(self.optimizer)
            if not job.given_optimizer:
                show_adam(getattr(self.optimizer, "optimizer", None), self.zero_cpu_offload())
            if self.settings.zero_optimization.stage == 3:
                leaves = {one: list(one.parameters()) for one in get_z3_leaf_modules(self._module)}
                vars(self.optimizer)["leaf_parameters"] = leaves
        self._global_batches = GlobalBatches(job, self, self._backwards)
        self.tput_timer = ThroughputTimer(batch_size=self.settings.train_batch_size)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError as error:
            why = why_foreign(name) or error
            raise AttributeError(
                f"{type(self).__name__!r} object has no attribute {name!r}: {why}", name=name, obj=self
            ) from None

    @property
    def sparse_tensor_module_names(self) -> frozenset[str]:
        """Modules whose gradients travel as indices and rows: none, all gradients travel dense."""
        return frozenset()

    def empty_partition_cache(self) -> None:
        """At stage 3, free what layers have gathered and not used up, as after a forward without backward."""
        free_gathered(self._module)

    @property
    def local_rank(self) -> int:
        """This rank among those of its host, by the launcher. Raises AttributeError where the launcher does not say."""
        if (rank := detect(os.environ).local_rank) is None:
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

    def get_mom(self) -> list[Any]:
        """Of every parameter group its momentum, or its betas; 0.0 where it has neither."""
        return [group.get("momentum", group.get("betas", 0.0)) for group in self._optimizer.param_groups]

    def get_type(self) -> list[Any]:
        """Of every parameter group what it holds as "type"; 0.0 where it holds nothing by that name."""
        return [group.get("type", 0.0) for group in self._optimizer.param_groups]

    def get_pld_theta(self) -> float | None:
        """Layer drop's θ of the last step; None where it is off."""
        return None if self._job.layer_drop is None else self._job.layer_drop.theta

    # Batches and data

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Change the samples of a step by its micro-batches, between steps and alike on every rank.

        Raises ValueError for what is no multiple of a micro-batch on every rank, CallError in mid-step.
        """
        self._resize(resized(self.settings, self.comm.size, train_batch_size=train_batch_size))

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Change the samples of a micro-batch, and so of a step, between steps and alike on every rank.

        A data loader goes on with the size that it was built with: `deepspeed_io` builds another. Raises ValueError for
        what is no size, CallError in mid-step.
        """
        self._resize(resized(self.settings, self.comm.size, micro_batch_size=micro_batch_size))

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
        if self._optimizer.comes_and_goes:
            refuse_elastic_data()
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

    def set_dataiterator(self, iterator: Iterator[Any]) -> None:
        """Have `train_batch` and `eval_batch` take micro-batches from here where they are given none."""
        self._global_batches.given = iterator

    def set_dataloader(self, loader: Any) -> None:
        """Have `training_dataloader` be another one. A checkpoint has the place in one that `deepspeed_io` made, and in
        no other."""
        self.training_dataloader, self._global_batches.given = loader, None
        self._job.loader = loader if isinstance(loader, ResumableLoader) else None
        self._data_position = self._position_of_data()

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> torch.Tensor:
        """Train on the next `gradient_accumulation_steps` micro-batches, take the step, and return the mean loss of the
        global batch, fp32, on every rank. Collective.

        `data_iter` gives a micro-batch a time: names and tensors for a Hugging Face model, or, where there is a
        `loss_fn`, inputs, one tensor or a tuple of several, and targets; ranks of one model get the same. None: the
        engine's own loader, again and again.

        Raises StopIteration where no micro-batch is left; ValueError, on every rank, where one is amiss, or there is no
        loader; and what `step` raises.
        """
        return self._global_batches.train(data_iter)

    def eval_batch(
        self,
        data_iter: Iterator[Any] | None = None,
        return_logits: bool = False,
        compute_loss: bool = True,
        reduce_output: str | None = "avg",
        bcast_loss: bool = True,
        num_micro_batches: int | None = None,
    ) -> torch.Tensor:
        """Evaluate the next `gradient_accumulation_steps` micro-batches, in evaluation mode, and return their mean loss
        on every rank, so that `bcast_loss` changes nothing. Collective.

        Raises NotOfferedError, a NotImplementedError, for outputs, or another number of micro-batches; RuntimeError for
        schedules in a V, whose evaluation torch lacks; and what `train_batch` raises for batches.
        """
        own = self.settings.gradient_accumulation_steps
        if return_logits or not compute_loss or reduce_output != "avg" or num_micro_batches not in (None, own):
            raise NotOfferedError(f"eval_batch() gives the mean loss of {own} micro-batches: leave its options out")
        return self._global_batches.evaluate(data_iter)

    # Weights and other state

    def module_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Any]:
        """The model's state_dict(), at stage 3 of shards, without parameters that do not train if asked:
        `whole_state_dict()` has all at every stage."""
        every = self.module.named_parameters(remove_duplicate=False)
        left_out = {name for name, one in every if exclude_frozen_parameters and not one.requires_grad}
        return {name: one for name, one in self.module.state_dict().items() if name not in left_out}

    def load_module_state_dict(
        self,
        checkpoint: Mapping[str, Any],
        strict: bool = True,
        custom_load_fn: Callable[..., object] | None = None,
        fetch_z3_params: bool = False,
    ) -> None:
        """Give the model, and master weights with it, `checkpoint["module"]`, whole at every stage; rank 0's values
        count. Collective.

        `custom_load_fn(src=..., dst=model)` does it in load_state_dict's place. At stage 3 parameters are always
        gathered for it, so that `fetch_z3_params` changes nothing. Raises, on every rank, what load_state_dict raises.
        """
        if not isinstance(checkpoint, Mapping) or "module" not in checkpoint:
            raise ValueError('load_module_state_dict() takes {"module": the model\'s state_dict()}')
        module = self.module
        free_gathered(module)  # so that parameters are the shards
        with GatheredParameters(list(module.parameters()), modifier_rank=0):
            if custom_load_fn is not None:
                custom_load_fn(src=checkpoint["module"], dst=module)
            else:
                module.load_state_dict(checkpoint["module"], strict=strict)

    def offload_states(
        self,
        include: Iterable[OffloadStateTypeEnum] | None = None,
        device: OffloadDeviceEnum = OffloadDeviceEnum.cpu,
        pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> None:
        """Move state to CPU memory: nothing, for a model on a CPU.

        Raises DeepSpeedUsageError, an AssertionError, at stage 0, as DeepSpeed does, and ValueError for another device
        or kind of state; NotOfferedError, a NotImplementedError, on a GPU.
        """
        if not self.zero_optimization_stage():
            raise DeepSpeedUsageError("offload_states() is for ZeRO stages 1, 2 and 3, and this engine is at stage 0")
        kinds = list(OffloadStateTypeEnum)
        if device != OffloadDeviceEnum.cpu or not all(one in kinds for one in include or ()):
            raise ValueError(f"offload_states() moves {', '.join(kinds)} to the cpu, not {include} to {device}")
        if self.device.type != "cpu":
            raise NotOfferedError(
                "state rests where zero_optimization has it: give its offload_optimizer or, at stage 3, offload_param "
                'the "device" "cpu"'
            )

    def reload_states(self, non_blocking: bool = False) -> None:
        """Move what `offload_states` has moved back: nothing."""

    def save_16bit_model(
        self,
        save_dir: str | os.PathLike[str],
        save_filename: str = "pytorch_model.bin",
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Write the whole model in 16 bits, fp32 values as bf16, to one file. Collective.

        A name that ends with .safetensors is written in that format, for safetensors.torch.load_model; any other by
        torch.save, for load_state_dict. Hugging Face's from_pretrained reads both. Above 50 GB there are several files
        and an index.

        Returns whether it is written: where the disk is full, say, rank 0 warns, and a file of that name that was there
        before stays.
        """
        return self._checkpoints.export(save_dir, save_filename, exclude_frozen_parameters)

    def _resize(self, settings: EngineConfig) -> None:
        if self._job.pipeline is not None:
            raise CallError("a pipeline's micro-batches are as initialize made them: their size and number are fixed")
        if self._in_mid_step:
            raise CallError(
                "the batch size was changed in mid-step, after a backward(): change it after a step() at a gradient "
                "accumulation boundary, or call zero_grad() first"
            )
        self.settings = settings
        self._accumulation.set_steps(settings.gradient_accumulation_steps)
        self._seen_batch = False

    # The second is what scripts call after one backward through several of DeepSpeed's engines.
    allreduce_gradients = _backward_epilogue = Engine.end_backward
    save_fp16_model = save_16bit_model
    destroy = Engine.close


class DeepSpeedEngine(TrainingEngine):
    """thinwire's engine, which refuses what DeepSpeed's asserts against, and has the methods that scripts override."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As the engine's. In fp16 a backward that begins with a loss which was not scaled raises RuntimeError."""
        return refuse_unscaled(super().__call__(*args, **kwargs), self._losses, self.loss_scaler)

    forward = __call__

    @property
    def _config(self) -> EngineConfig:
        """The configuration, checked and complete, as scripts reach for it."""
        return self.settings

    def scale(self, loss: torch.Tensor, retain_graph: bool = False) -> torch.Tensor:
        """As the engine's. Raises DeepSpeedUsageError, an AssertionError, for more values than one."""
        if isinstance(loss, torch.Tensor) and loss.numel() != 1:
            raise DeepSpeedUsageError(f"scale() takes a scalar tensor, the loss, got {tuple(loss.shape)}: reduce it")
        return super().scale(loss, retain_graph)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """As the engine's, at stages 0 and 1 and not nested.

        Raises CallError, an AssertionError, inside itself, and from stage 2 on, where every backward's gradients leave.
        """
        stage = self.zero_optimization_stage()
        if stage > 1:
            raise CallError(
                f"no_sync context manager is incompatible with gradients that are sharded, at ZeRO stage {stage}: "
                "leave it out, as gradient_accumulation_steps adds up without it, or use stage 0 or 1"
            )
        if self._accumulation.inside_no_sync:
            raise CallError("no_sync context manager reentry is unsupported: leave the inner one out")
        with super().no_sync():
            yield

    @contextmanager
    def coalesce_grad_reduction(self) -> Iterator[None]:
        """Several backwards inside, and one reduction of their sum when it is left; step() comes after it.

        At stages 2 and 3 gradients leave with every backward, and add up in their owners' shards. Raises
        NotOfferedError, a NotImplementedError, at stage 0, CallError, an AssertionError, inside itself or no_sync().
        """
        if not self.zero_optimization_stage():
            raise NotOfferedError(
                "coalesce_grad_reduction requires ZeRO stage 1, 2 or 3, and this engine is at stage 0: call the "
                "backwards but the last inside no_sync()"
            )
        if not self.settings.managed_gradient_accumulation:
            raise CallError(
                'coalesce_grad_reduction is not needed with "managed_gradient_accumulation" false: backwards add up '
                "until step(). Leave it out"
            )
        if self._accumulation.inside_no_sync:
            raise CallError("coalesce_grad_reduction cannot be nested inside another no_sync context: leave one out")
        with super().no_sync():
            yield
        self._accumulation.end_backward()
        self._optimizer.end_backward()

    def _zero3_consolidated_16bit_state_dict(
        self, exclude_frozen_parameters: bool = False
    ) -> dict[str, torch.Tensor] | None:
        """At stage 3 alone, what save_16bit_model writes, on rank 0's CPU; None on other ranks. Collective."""
        if not self.zero_optimization_partition_weights():
            raise ValueError(
                "_zero3_consolidated_16bit_state_dict() is for stage 3, and this engine is at stage "
                f"{self.zero_optimization_stage()}: engine.whole_state_dict() has the weights at every stage"
            )
        return self._checkpoints.weights_in_16_bits(exclude_frozen_parameters)

    def _get_optimizer_ckpt_name(self, checkpoints_path: str, tag: str, expp_rank: int = 0) -> str:
        """Where this rank's part of a checkpoint lies, weights and optimizer state in one file."""
        return os.path.join(checkpoints_path, str(tag), rank_file(self.global_rank))

    def _change_recovery_script_permissions(self, dst: str) -> None:
        """Let a script that was copied beside checkpoints be run; where the file system has no such thing, say so."""
        try:
            path = Path(dst)
            path.chmod(path.stat().st_mode | 0o100)
        except OSError as error:
            logger.info("%s cannot be made executable: %s", dst, error)
