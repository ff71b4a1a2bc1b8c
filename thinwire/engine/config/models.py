"""A loaded configuration: frozen models whose attributes are the keys of a file.

Every key in here has an effect in the engine; any other is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PrivateAttr

from thinwire.compress.packet_layout import BlockCodecName, MemorylessCodec
from thinwire.optim.settings import WholeNumber
from thinwire.parallel.splitting import SCHEDULES, ScheduleName


def _spelled(change: Callable[[str], Any]) -> BeforeValidator:
    """A text is taken for what `change` makes of it."""
    return BeforeValidator(lambda value: change(value) if isinstance(value, str) else value)


# Other libraries write an infinite number of steps for "never".
_FINITE = BeforeValidator(lambda value: None if value == float("inf") else value)
_OTHER_NAMES = {
    **{name: "fp32" for name in ("float", "float32", "torch.float32")},
    **{name: "fp16" for name in ("half", "float16", "torch.float16")},
    **{name: "bf16" for name in ("bfp16", "bfloat16", "torch.bfloat16")},
}

LogLevel = Annotated[Literal["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"], _spelled(str.upper)]
FloatName = Annotated[
    Literal["fp32", "fp16", "bf16"], _spelled(lambda name: _OTHER_NAMES.get(name.lower(), name.lower()))
]

UNCLIPPED = (
    '"gradient_clipping" is not set, so gradients are not clipped (other libraries clip at 1.0 by default since June '
    "2026, never before)"
)
OWN_PEAK = (
    '"scheduler.params.warmup_max_lr" is not set, so the rate rises to that of each parameter group (elsewhere it may '
    "rise to 0.001)"
)

_DEFAULT_BUCKET_ELEMENTS = 4 << 20  # 16 MiB of fp32: large enough for the wire, small enough to overlap with backward


class Section(BaseModel):
    """A frozen object of the configuration: no other keys than its fields, no silent conversion of types."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


@dataclass(frozen=True)
class Remarks:
    """`without_effect`: what happens whatever the value is, by the path of each key that changes nothing.
    `unclipped`: whether nothing is said of clipping. `own_peak`: whether a warmup does not say where it ends."""

    without_effect: Mapping[str, str] = field(default_factory=dict)
    unclipped: bool = False
    own_peak: bool = False

    def line(self) -> str:
        """All of it in one line; empty where there is nothing to say."""
        parts = []
        if self.without_effect:
            parts.append(
                f"without effect on the result are {', '.join(self.without_effect)} (`thinwire config check` says why)"
            )
        if self.unclipped:
            parts.append(UNCLIPPED)
        if self.own_peak:
            parts.append(OWN_PEAK)
        return "configuration: " + "; ".join(parts) if parts else ""


class OptimizerConfig(Section):
    """`type`: "OneBitAdam", "OneBitLamb", "ZeroOneAdam", "DiLoCo", or the name of a class in torch.optim. `params`:
    exactly that class's keyword arguments; DiLoCo's "inner" is such a section itself."""

    type: str
    params: Mapping[str, Any] = Field(default_factory=dict)


class SchedulerConfig(Section):
    """`type`: one of `thinwire.engine.schedules`, or the name of a class in torch.optim.lr_scheduler."""

    type: str
    params: Mapping[str, Any] = Field(default_factory=dict)


class Fp16Config(Section):
    """fp16 with fp32 master weights. `loss_scale` 0 is dynamic: it starts at 2^`initial_scale_power`, doubles after
    `loss_scale_window` steps without an overflow, halves after `hysteresis` overflows (None: 1 at stage 0, else 2),
    down to `min_loss_scale`. `consecutive_hysteresis`: only overflows in a row count."""

    enabled: bool = False
    loss_scale: float = Field(default=0.0, ge=0, le=2.0**64)
    initial_scale_power: WholeNumber = Field(default=16, ge=0, le=64)
    loss_scale_window: WholeNumber = Field(default=1000, ge=1)
    hysteresis: WholeNumber | None = Field(default=None, ge=1)
    consecutive_hysteresis: bool = False
    min_loss_scale: float = Field(default=1.0, gt=0, le=2.0**64)


class Bf16Config(Section):
    """bf16 with fp32 master weights. `check_grad_overflow`: skip steps whose gradients are not finite, as fp16 does,
    where they are an error otherwise."""

    enabled: bool = False
    check_grad_overflow: bool = False


class DataTypesConfig(Section):
    """`grad_accum_dtype`: in which the micro-batches of a step add up, "fp32" or the parameters' own; None is the
    latter, at stage 3 fp32."""

    grad_accum_dtype: FloatName | None = None


class OffloadConfig(Section):
    """Where sharded state rests between steps; `pin_memory` page-locks it for faster copies. With "nvme" it is in files
    below `nvme_path`."""

    device: Literal["none", "cpu", "nvme"] = "none"
    pin_memory: bool = False
    nvme_path: str | None = Field(default=None, min_length=1)


_Names = Annotated[list[str], _spelled(lambda one: [one])]


class LeafModuleConfig(Section):
    """Modules that stage 3 gathers as one, by class, as `Name` or `package.module.Name`, by name, or by how their names
    in `model.named_modules()` end."""

    classes: _Names = Field(default_factory=list)
    names: _Names = Field(default_factory=list)
    name_suffixes: _Names = Field(default_factory=list)


class ZeroConfig(Section):
    """`stage` 1 shards master weights and optimizer state, 2 gradients as well, 3 parameters as well (FSDP2).

    `reduce_bucket_size`: elements of gradients that leave together, stages 0 to 2. `overlap_comm`: step() returns while
    new weights are still on their way, and the next forward waits for them layer by layer (stage 3 always works so).
    `ignore_unused_parameters` false, at stages 1 and 2: parameters without a gradient are an error at the step.
    At stage 3 `weights_codec` and `gradients_codec` carry what leaves a node, of `node_size` ranks, which then keeps a
    copy of the weights; see `thinwire.compress.fsdp_hooks`.
    """

    stage: WholeNumber = Field(default=0, ge=0, le=3)
    reduce_bucket_size: WholeNumber = _DEFAULT_BUCKET_ELEMENTS
    overlap_comm: bool = False
    ignore_unused_parameters: bool = True
    offload_optimizer: OffloadConfig = OffloadConfig()
    offload_param: OffloadConfig = OffloadConfig()
    weights_codec: MemorylessCodec | None = None
    gradients_codec: MemorylessCodec | None = None
    node_size: WholeNumber = Field(default=1, ge=1)
    leaf_module: LeafModuleConfig = Field(default_factory=LeafModuleConfig)


class MonitorConfig(Section):
    """Rank 0 writes `output_path`/`job_name`; an empty path is the working directory."""

    enabled: bool = False
    output_path: str = ""
    job_name: str = Field(default="thinwire", min_length=1)


class WandbConfig(Section):
    """Rank 0 logs to a run of Weights & Biases, in `project` of `team`, beside others of its `group`. `WANDB_MODE` and
    the other variables of that package hold as ever."""

    enabled: bool = False
    group: str | None = None
    team: str | None = None
    project: str = Field(default="thinwire", min_length=1)


class FlopsProfilerConfig(Section):
    """Rank 0 counts operations and times one step, the one after `profile_step` steps, and writes what it found to
    `output_file`, or prints it.

    `module_depth`: of the modules that the summary names, -1 for all; `top_modules` of each depth. `detailed`: every
    module as well. `recompute_fwd_factor`: the share of the forward that backward computes again.
    """

    enabled: bool = False
    profile_step: WholeNumber = Field(default=1, ge=0)
    module_depth: WholeNumber = Field(default=-1, ge=-1)
    top_modules: WholeNumber = Field(default=1, ge=1)
    detailed: bool = True
    output_file: str | None = None
    recompute_fwd_factor: float = Field(default=0.0, ge=0)


class CommsLoggerConfig(Section):
    """Count and time collectives by kind and size: all, or without `prof_all` those named in `prof_ops`.

    `verbose`: rank 0 prints each. `debug`: the kind is told with the function that called it.
    """

    enabled: bool = False
    verbose: bool = False
    prof_all: bool = True
    prof_ops: list[str] = Field(default_factory=list)
    debug: bool = False


class ActivationCheckpointingConfig(Section):
    """Recompute the forward of some modules in backward instead of keeping their activations.

    `modules`: class names, or names as in `model.named_modules()`; empty: nothing is recomputed. `cpu_checkpointing`
    keeps their inputs in CPU memory.
    """

    modules: list[str] = Field(default_factory=list)
    cpu_checkpointing: bool = False


class LayerDropConfig(Section):
    """Progressive layer drop: θ falls from 1 to `theta` as exp(-`gamma` · step); "auto" is 100 / the scheduler's
    `total_num_steps`."""

    enabled: bool = False
    theta: float = Field(default=0.5, ge=0, le=1)
    gamma: Annotated[float, Field(ge=0)] | Literal["auto"] = 0.001


class CheckpointConfig(Section):
    """`keep_last`: whole checkpoints of this job that stay on disk; None keeps all. `async_save`: write while training
    goes on. `tag_validation`, in any case: whether ranks that save under several tags are an error, "Fail", or a
    warning, "Warn", or nothing; where it is no error, rank 0's tag is the checkpoint's."""

    keep_last: WholeNumber | None = Field(default=None, ge=2)
    async_save: bool = False
    tag_validation: Annotated[Literal["Ignore", "Warn", "Fail"], _spelled(str.capitalize)] = "Warn"


class PipelineConfig(Section):
    """Ranks of a model that hold a stage each, by a `schedule` of torch's, a micro-batch at a time, of which a step has
    `gradient_accumulation_steps`; loaders leave out what does not fill one.

    `split`: so that the largest stage has as few "parameters", or by its operations takes as little "time", as can be;
    or the names of the blocks that stages but the first begin with. `activations`, `gradients`: the codecs of those.
    """

    stages: WholeNumber = Field(default=1, ge=1)
    schedule: Annotated[ScheduleName, _spelled(lambda name: SCHEDULES.get(name.lower(), name))] = "1F1B"
    split: Literal["parameters", "time"] | list[str] = "parameters"
    activations: MemorylessCodec = "none"
    gradients: MemorylessCodec = "none"


class TensorParallelConfig(Section):
    """`autotp_size` ranks cut the matrices of each layer among them; 0 is 1 too. In 16 bits, master weights begin
    rounded."""

    autotp_size: WholeNumber = Field(default=1, ge=0)


class ThinwireConfig(Section):
    """Settings of compressed optimizers. `resync_interval`: steps between re-gatherings of 16-bit weights."""

    resync_interval: WholeNumber = Field(default=100, ge=1)


class EngineConfig(Section):
    """A whole configuration, checked and complete; `thinwire.engine.config.load_config` makes it.

    `train_batch_size` = `train_micro_batch_size_per_gpu` · `gradient_accumulation_steps` · replicas, in samples: ranks
    over `ranks_of_a_model`.
    `quantized_training`: linear layers round as `thinwire.inference.convert(engine.module)` has them round then.
    `log_level`: of the logger that scripts share in this process, None to leave it.
    `managed_gradient_accumulation` false: every step() moves the weights, by all backwards since the last one.
    """

    train_batch_size: WholeNumber = Field(ge=1)
    train_micro_batch_size_per_gpu: WholeNumber = Field(ge=1)
    gradient_accumulation_steps: WholeNumber = Field(ge=1)
    managed_gradient_accumulation: bool = True
    optimizer: OptimizerConfig | None = None
    scheduler: SchedulerConfig | None = None
    fp16: Fp16Config = Fp16Config()
    bf16: Bf16Config = Bf16Config()
    zero_optimization: ZeroConfig = ZeroConfig()
    data_types: DataTypesConfig = DataTypesConfig()
    communication_data_type: FloatName | None = None
    communication_codec: BlockCodecName | tuple[BlockCodecName, BlockCodecName] | None = None
    prescale_gradients: bool = False
    gradient_predivide_factor: float = Field(default=1.0, gt=0)
    gradient_allreduce_op: Annotated[Literal["mean", "avg", "sum"], _spelled(str.lower)] = "mean"
    gradient_clipping: float = Field(default=0.0, ge=0)
    initial_weights: str | None = None
    pipeline: PipelineConfig = Field(default_factory=PipelineConfig)
    tensor_parallel: TensorParallelConfig = TensorParallelConfig()
    activation_checkpointing: ActivationCheckpointingConfig = Field(default_factory=ActivationCheckpointingConfig)
    sparse_attention: Mapping[str, Any] | None = None
    fast_encoder: bool = False
    quantized_training: Literal["int8-dynamic", "int8", "int4"] | None = None
    progressive_layer_drop: LayerDropConfig = LayerDropConfig()
    steps_per_print: Annotated[WholeNumber | None, _FINITE] = Field(default=None, ge=1)
    wall_clock_breakdown: bool = False
    memory_breakdown: bool = False
    log_level: LogLevel | None = None
    tensorboard: MonitorConfig = MonitorConfig()
    csv_monitor: MonitorConfig = MonitorConfig()
    wandb: WandbConfig = WandbConfig()
    flops_profiler: FlopsProfilerConfig = FlopsProfilerConfig()
    comms_logger: CommsLoggerConfig = CommsLoggerConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    dataloader_drop_last: bool = False
    seed: WholeNumber = Field(default=0, ge=0, lt=2**63)
    thinwire: ThinwireConfig = ThinwireConfig()
    _remarks: Remarks = PrivateAttr(default_factory=Remarks)

    @property
    def ranks_of_a_model(self) -> int:
        """Ranks that hold a replica of the model together."""
        return self.pipeline.stages * max(1, self.tensor_parallel.autotp_size)

    @property
    def remarks(self) -> Remarks:
        """What to say once of the source that this was loaded from."""
        return self._remarks

    def with_remarks(self, remarks: Remarks) -> EngineConfig:
        """The same configuration with other remarks."""
        copied = self.model_copy()
        copied._remarks = remarks
        return copied

    def __eq__(self, other: object) -> bool:
        """Whether both train alike; what is to be said of their sources is not compared."""
        return isinstance(other, EngineConfig) and self.describe() == other.describe()

    def describe(self) -> dict[str, Any]:
        """The configuration as JSON can hold it, defaults included; `load_config` reads it back as the same."""
        return self.model_dump(mode="json")
