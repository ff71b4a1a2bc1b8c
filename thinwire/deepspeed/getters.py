"""Names by which DeepSpeed's engine says what it is configured as and which rank it runs on, what its optimizer says of
its loss scale, and names of its that have nothing to say here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any, TypeVar

import torch
from torch.utils._pytree import tree_leaves

from thinwire.engine import Engine, EngineConfig
from thinwire.engine.backwards import StepLosses
from thinwire.engine.config.models import OffloadConfig
from thinwire.engine.loss_scale import DynamicLossScale, LossScale
from thinwire.zero.synchronized_optimizer import SynchronizedOptimizer

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_Engine = TypeVar("_Engine", bound=Engine)
_Read = Callable[[EngineConfig], Any]


def _communication_data_type(settings: EngineConfig) -> torch.dtype:
    if settings.communication_data_type is not None:
        return _DTYPES[settings.communication_data_type]
    if settings.zero_optimization.stage == 3:
        return torch.float32
    if settings.fp16.enabled:
        return torch.float16
    return torch.bfloat16 if settings.bf16.enabled else torch.float32


def _dynamic_loss_scale_args(settings: EngineConfig) -> dict[str, float]:
    fp16 = settings.fp16
    of_stage = 2 if settings.zero_optimization.stage else 1
    return {
        "init_scale": 2.0**fp16.initial_scale_power,
        "scale_window": fp16.loss_scale_window,
        "min_scale": fp16.min_loss_scale,
        "delayed_shift": of_stage if fp16.hysteresis is None else fp16.hysteresis,
        "consecutive_hysteresis": fp16.consecutive_hysteresis,
    }


def _pld_params(settings: EngineConfig) -> dict[str, Any] | bool:
    section = settings.progressive_layer_drop
    return {"theta": section.theta, "gamma": section.gamma} if section.enabled else False


def _offload(section: OffloadConfig) -> OffloadConfig | None:
    return None if section.device == "none" else section


# Of the configuration as it is now, where it stands or how it is made of it: methods without arguments, and properties.
_METHODS: Mapping[str, tuple[str | _Read, str]] = {
    "train_batch_size": ("train_batch_size", "Samples of a step, over all ranks."),
    "train_micro_batch_size_per_gpu": ("train_micro_batch_size_per_gpu", "Samples of one forward on one rank."),
    "managed_gradient_accumulation": (
        "managed_gradient_accumulation",
        "Whether gradient_accumulation_steps says when a step is complete, or each step() does.",
    ),
    "gradient_accumulation_steps": ("gradient_accumulation_steps", "Micro-batches of a step."),
    "get_batch_info": (
        lambda s: (s.train_batch_size, s.train_micro_batch_size_per_gpu, s.gradient_accumulation_steps),
        "(train_batch_size, train_micro_batch_size_per_gpu, gradient_accumulation_steps), as numbers.",
    ),
    "dataloader_drop_last": ("dataloader_drop_last", "Whether loaders leave out what does not fill a batch."),
    "gradient_clipping": ("gradient_clipping", "What the averaged gradient's norm is clipped to; 0 for no clipping."),
    # Precision
    "fp16_enabled": ("fp16.enabled", "Whether the model computes in fp16."),
    "bfloat16_enabled": ("bf16.enabled", "Whether the model computes in bf16."),
    "amp_enabled": (lambda _: False, "Whether apex casts: never."),
    "loss_scale": ("fp16.loss_scale", "fp16's as configured; 0 if dynamic: `optimizer.cur_scale` is what it is now."),
    "dynamic_loss_scale": (lambda s: s.fp16.loss_scale == 0, "Whether fp16's loss scale follows from overflows."),
    "initial_dynamic_scale": (lambda s: 2.0**s.fp16.initial_scale_power, "The loss scale that fp16 begins with."),
    "dynamic_loss_scale_args": (_dynamic_loss_scale_args, "How fp16's loss scale follows from overflows."),
    "postscale_gradients": (lambda s: not s.prescale_gradients, "Whether the sum of gradients is divided by ranks."),
    "gradient_predivide_factor": ("gradient_predivide_factor", "What gradients are divided by before they are summed."),
    "sparse_gradients_enabled": (lambda _: False, "Whether embeddings' gradients leave as their rows: never."),
    # ZeRO
    "zero_optimization": (lambda s: s.zero_optimization.stage > 0, "Whether anything is sharded."),
    "zero_optimization_stage": ("zero_optimization.stage", "0 to 3."),
    "zero_optimization_partition_gradients": (lambda s: s.zero_optimization.stage > 1, "Whether gradients are shards."),
    "zero_optimization_partition_weights": (lambda s: s.zero_optimization.stage > 2, "Whether parameters are shards."),
    "zero_overlap_comm": ("zero_optimization.overlap_comm", "Whether step() returns before new weights are there."),
    "zero_reduce_bucket_size": ("zero_optimization.reduce_bucket_size", "Elements of gradients that leave together."),
    "zero_offload_optimizer": (lambda s: _offload(s.zero_optimization.offload_optimizer), "Its section; None if off."),
    "zero_offload_param": (lambda s: _offload(s.zero_optimization.offload_param), "Its section; None if off."),
    "zero_cpu_offload": (lambda s: _offload(s.zero_optimization.offload_optimizer) is not None, "Whether it is on."),
    "zero_hpz_partition_size": ("zero_optimization.node_size", "Ranks of a node, which hold a copy of the weights."),
    "zero_quantized_gradients": (
        lambda s: s.zero_optimization.gradients_codec is not None,
        "Whether a codec has them.",
    ),
    "zero_quantized_weights": (lambda s: s.zero_optimization.weights_codec is not None, "Whether a codec has them."),
    "zero_gather_16bit_weights_on_model_save": (lambda _: True, "Whether `save_16bit_model` writes all of it: always."),
    # Layer drop
    "pld_enabled": ("progressive_layer_drop.enabled", "Whether layers are dropped while the model trains."),
    "pld_params": (_pld_params, "Layer drop's `theta` and `gamma`; False if it is off."),
    "pld_theta": ("progressive_layer_drop.theta", "What layer drop's θ falls to."),
    "pld_gamma": ("progressive_layer_drop.gamma", "How fast layer drop's θ falls."),
    # Checkpoints and reports
    "checkpoint_tag_validation_enabled": (
        lambda s: s.checkpoint.tag_validation != "Ignore",
        "Whether ranks compare.",
    ),
    "checkpoint_tag_validation_fail": (lambda s: s.checkpoint.tag_validation == "Fail", "Whether two are an error."),
    "flops_profiler_enabled": ("flops_profiler.enabled", "Whether one step is profiled."),
    "flops_profiler_profile_step": ("flops_profiler.profile_step", "The step that is."),
    "steps_per_print": ("steps_per_print", "Steps between two lines of rank 0; None if it prints none."),
    "wall_clock_breakdown": ("wall_clock_breakdown", "Whether a step's times are printed."),
    "memory_breakdown": ("memory_breakdown", "Whether memory is printed."),
    "log_level": ("log_level", "The logger's level as configured; None if it is left."),
}
_PROPERTIES: Mapping[str, tuple[str | _Read, str]] = {
    "config": (lambda s: s.describe(), "The configuration with its defaults, by DeepSpeed's keys; a copy."),
    "communication_data_type": (_communication_data_type, "In which gradients leave; stage 3 sums them in fp32."),
    "micro_batches": ("gradient_accumulation_steps", "Micro-batches of a step."),
    "micro_batch_size": ("train_micro_batch_size_per_gpu", "Samples of one."),
    "gradient_average": (lambda s: s.gradient_allreduce_op != "sum", "Whether gradients are averaged over the ranks."),
}


def _at(engine: Any, dimension: str) -> int:
    """This rank's place in a dimension of the engine's mesh."""
    return 0 if engine.mesh is None else int(engine.mesh.get_local_rank(dimension))


def _size(engine: Any, dimension: str) -> int:
    return 1 if engine.mesh is None else int(engine.mesh[dimension].size())


_RANK_METHODS: Mapping[str, tuple[Callable[[Any], int], str]] = {
    "get_data_parallel_rank": (lambda one: one.comm.rank, "This rank among those that take different data."),
    "get_data_parallel_world_size": (lambda one: one.comm.size, "Ranks that take different data."),
    "get_model_parallel_rank": (lambda one: _at(one, "tp"), "This rank among those that share a stage's layers."),
    "get_model_parallel_world_size": (lambda one: _size(one, "tp"), "Ranks that share a stage's layers."),
    "get_tensor_parallel_rank": (lambda one: _at(one, "tp"), "This rank among those that share a layer."),
    "get_tensor_parallel_world_size": (lambda one: _size(one, "tp"), "Ranks that share a layer."),
    "get_pipeline_parallel_rank": (lambda one: _at(one, "pp"), "This rank's stage."),
    "get_pipeline_parallel_world_size": (lambda one: _size(one, "pp"), "Stages of the pipeline; 1 without one."),
    "get_sequence_parallel_rank": (lambda _: 0, "This rank among those that share a sequence: there is one."),
    "get_sequence_parallel_world_size": (lambda _: 1, "Ranks that share a sequence: one."),
    "is_first_stage": (lambda one: _at(one, "pp") == 0, "Whether this rank's stage is the first of a pipeline."),
    "is_last_stage": (lambda one: _at(one, "pp") + 1 == _size(one, "pp"), "Whether it is the last one."),
}


class Grid:
    """A rank's place among stages, replicas and parts of layers, by the names of the grid of DeepSpeed's pipelines."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.is_first_stage, self.is_last_stage = engine.is_first_stage(), engine.is_last_stage()
        self.get_stage_id = self.get_pipe_parallel_rank = engine.get_pipeline_parallel_rank
        self.get_data_parallel_id = self.get_data_parallel_rank = engine.get_data_parallel_rank
        self.get_model_parallel_rank = self.get_slice_parallel_rank = engine.get_tensor_parallel_rank
        self.get_pipe_parallel_world_size = engine.get_pipeline_parallel_world_size
        self.get_data_parallel_world_size = engine.get_data_parallel_world_size
        self.get_model_parallel_world_size = self.get_slice_parallel_world_size = engine.get_tensor_parallel_world_size
        self.pipe_parallel_size, self.data_parallel_size = engine.num_stages, engine.dp_world_size
        self.model_parallel_size = self.slice_parallel_size = engine.mp_world_size

    def get_global_rank(self) -> int:
        """This rank among all."""
        return int(self._engine.global_rank)

    def stage_to_global(self, stage_id: int) -> int:
        """The rank of that stage of this rank's replica and part."""
        mesh = self._engine.mesh
        if mesh is None:
            return self.get_global_rank()
        place = {name: mesh.get_local_rank(name) for name in mesh.mesh_dim_names} | {"pp": stage_id}
        return int(mesh.mesh[tuple(place[name] for name in mesh.mesh_dim_names)])

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"the engine's grid has no {name!r}: engine.mesh[NAME].get_group() has a dimension's ranks"
        )


_RANK_PROPERTIES: Mapping[str, tuple[Callable[[Any], Any], str]] = {
    "world_size": (lambda one: one._job.world.size, "Ranks that train together."),
    "dp_world_size": (lambda one: one.comm.size, "Ranks that take different data."),
    "mp_world_size": (lambda one: _size(one, "tp"), "Ranks that share a stage's layers between them."),
    "num_stages": (lambda one: _size(one, "pp"), "Stages of the pipeline; 1 without one."),
    "stage_id": (lambda one: _at(one, "pp"), "This rank's stage."),
    "global_rank": (lambda one: one._job.world.rank, "This rank among all."),
    "is_pipe_parallel": (lambda one: _size(one, "pp") > 1, "Whether there are stages."),
    "is_data_parallel": (lambda one: one.comm.size > 1, "Whether there are replicas."),
    "is_model_parallel": (lambda one: _size(one, "tp") > 1, "Whether layers are cut."),
    "grid": (Grid, "This rank's place along each dimension."),
    "set_batch_fn": (
        lambda one: one._global_batches.set_batch_fn,
        "Call it with a function, of which `train_batch` and `eval_batch` take what it makes of a micro-batch.",
    ),
}


def with_getters(kind: type[_Engine]) -> type[_Engine]:
    """Give a class of engines the getters."""
    methods = {name: (_of_settings(read), text) for name, (read, text) in _METHODS.items()}
    for name, (read, text) in (methods | dict(_RANK_METHODS)).items():
        setattr(kind, name, _method(name, read, text))
    properties = {name: (_of_settings(read), text) for name, (read, text) in _PROPERTIES.items()}
    for name, (read, text) in (properties | dict(_RANK_PROPERTIES)).items():
        setattr(kind, name, property(read, doc=text))
    return kind


def _of_settings(read: str | _Read) -> Callable[[Any], Any]:
    of_settings = attrgetter(read) if isinstance(read, str) else read
    return lambda engine: of_settings(engine.settings)


def _method(name: str, read: Callable[[Any], Any], text: str) -> Callable[[Any], Any]:
    def getter(self: Any) -> Any:
        return read(self)

    getter.__name__, getter.__doc__ = name, text
    return getter


_NO_OTHER_PARALLELISM = "thinwire has data, tensor and pipeline parallelism: engine.comm and engine.mesh have the ranks"
_NO_GROUP = "thinwire's ranks need no torch process group: engine.comm has them"

# DeepSpeed's attributes of an engine that would have nothing to say here -> what to use, or why there is none.
_FOREIGN = {
    "amp_params": "apex is not used; bf16 and fp16 are",
    "autotuning_enabled": "`thinwire plan` says what suits a cluster, without trial runs",
    "data_parallel_group": _NO_GROUP,
    "expert_data_parallel_group": _NO_OTHER_PARALLELISM,
    "expert_parallel_group": _NO_OTHER_PARALLELISM,
    "get_sequence_parallel_group": _NO_OTHER_PARALLELISM,
    "mpu": _NO_OTHER_PARALLELISM,
    "seq_data_parallel_group": _NO_GROUP,
    "zero_max_live_parameters": "stage 3 gathers a layer at a time, and no number limits it",
    "zero_max_reuse_distance": "stage 3 gathers a layer at a time, and no number limits it",
    "zero_model_persistence_threshold": "stage 3 shards every parameter",
    "zero_param_persistence_threshold": "stage 3 shards every parameter",
    "zero_prefetch_bucket_size": "stage 3 gathers a layer at a time, the next one while it computes",
    "zero_sub_group_size": "each bucket is stepped by itself; zero_reduce_bucket_size() is its size",
}


def why_foreign(name: str) -> str | None:
    """Why an engine has no such attribute although DeepSpeed's has it; None for any other name."""
    return _FOREIGN.get(name)


class LossScaleConfig:
    """`optimizer.loss_scale_config` and `.loss_scaler` of an engine: its loss scale as it is now, read only. Without
    fp16 it is always 1.

    What only a dynamic scale has is an AttributeError of others.
    """

    def __init__(self, loss_scale: LossScale | None) -> None:
        self._loss_scale = loss_scale

    def show_on(self, optimizer: SynchronizedOptimizer) -> None:
        """Have an engine's optimizer answer for its loss scale."""
        optimizer.loss_scale_config = optimizer.loss_scaler = self
        optimizer.dynamic_loss_scale = self.dynamic_loss_scale
        optimizer.needs_scaler = self.needs_scaler  # type: ignore[attr-defined]

    def needs_scaler(self) -> bool:
        """Whether losses have to be scaled before their backward: in fp16."""
        return self._loss_scale is not None

    @property
    def dynamic_loss_scale(self) -> bool:
        """Whether it follows from overflows."""
        return isinstance(self._loss_scale, DynamicLossScale)

    @property
    def cur_scale(self) -> float:
        """The scale of the step to come."""
        return 1.0 if self._loss_scale is None else self._loss_scale.value

    loss_scale = cur_scale

    @property
    def cur_iter(self) -> int:
        """Steps that were noted, skipped ones included; 0 without fp16."""
        return 0 if self._loss_scale is None else self._loss_scale.iterations

    def __getattr__(self, name: str) -> float:
        """`scale_factor`, `scale_window` and `min_loss_scale`."""
        scale, read = vars(self).get("_loss_scale"), _OF_DYNAMIC.get(name)
        if not isinstance(scale, DynamicLossScale) or read is None:
            raise AttributeError(f"a loss scale that is {'' if read is None else 'not '}dynamic has no {name}")
        return read(scale)


def refuse_unscaled(outputs: Any, losses: StepLosses, loss_scale: LossScale | None) -> Any:
    """`outputs` of a forward, through which a backward raises RuntimeError before it reaches a parameter, where
    `loss_scale` is fp16's and no loss of the step was scaled by the engine."""

    def check(_: torch.Tensor) -> None:
        if not losses.count:
            raise RuntimeError(
                "Loss scaling is required in fp16, and backward() was called on a loss that is not scaled: call "
                "engine.backward(loss), or engine.scale(loss).backward()"
            )

    for one in [] if loss_scale is None else tree_leaves(outputs):
        if isinstance(one, torch.Tensor) and one.requires_grad:
            one.register_hook(check)  # type: ignore[no-untyped-call]
    return outputs


_OF_DYNAMIC: Mapping[str, Callable[[DynamicLossScale], float]] = {
    "scale_factor": lambda _: 2.0,
    "scale_window": lambda scale: scale.window,
    "min_loss_scale": lambda scale: scale.minimum,
}
