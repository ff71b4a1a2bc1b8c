"""The schema of what is taken from DeepSpeed's dictionaries, and states of parameters as this engine's checkpoints have
them.

Nothing is converted but what stands for a number. A value that is missing, or of another type, is an error that names
file and value; what is not named here is not looked at."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Self

import torch
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    ValidationError,
    model_validator,
)
from torch import Tensor

from thinwire.comm.errors import first_fault
from thinwire.deepspeed.files.pickles import Record
from thinwire.engine.errors import CheckpointError
from thinwire.zero import SavedSlice

_NO_LENGTH = 1 << 62
_SHORT = reprlib.Repr()
_STEP = "step"


def _plain_number(value: Any) -> Any:
    """The number that an enumeration's member, or a tensor of one value, stands for; a whole one as a whole number."""
    if isinstance(value, Record) and len(value.args) == 1:
        value = value.args[0]
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _listed(value: Any) -> Any:
    """A tuple as a list, and what stands alone as a list of itself."""
    return list(value) if isinstance(value, list | tuple) else [value]


def _bounded(shape: tuple[int, ...]) -> tuple[int, ...]:
    if math.prod(shape) > _NO_LENGTH:
        raise ValueError("a shape of more elements than there can be")
    return shape


def _flat(tensor: Tensor) -> Tensor:
    if tensor.dim() != 1 or not tensor.is_floating_point():
        raise ValueError(f"{tensor.dtype} of shape {tuple(tensor.shape)}, one-dimensional floating-point was expected")
    return tensor


def _state(values: dict[str, Any]) -> dict[str, Any]:
    for kind, value in values.items():
        if not kind.replace("_", "").isalnum() or kind in ("weight", "master"):
            raise ValueError(f"{kind!r} is no name of an optimizer's state")
        if value is None or (isinstance(value, Tensor) and (value.numel() != 1 or kind != _STEP)):
            continue
        number = _plain_number(value)
        if isinstance(number, bool) or not isinstance(number, int | float) or not -(2.0**63) < number < 2.0**63:
            raise ValueError(f"{kind} is {_SHORT.repr(number)}, no number of a state's")
        if kind == _STEP and not (isinstance(number, int) and 0 <= number < 1 << 63):
            raise ValueError(f"{kind} is {number}, no count")
    return values


def _module(values: dict[str, Any]) -> dict[str, Any]:
    for name, value in values.items():
        # What a module keeps of its own is no tensor as a rule.
        if not isinstance(value, Tensor) and not name.endswith("_extra_state"):
            raise ValueError(f"{name} is {type(value).__name__}, a tensor was expected")
    return values


Number = Annotated[float, BeforeValidator(_plain_number), Field(allow_inf_nan=False)]
Whole = Annotated[int, BeforeValidator(_plain_number), Field(gt=-(1 << 63), lt=1 << 63)]
Count = Annotated[Whole, Field(ge=0)]
Size = Annotated[int, Field(ge=0)]
Shape = Annotated[
    tuple[Size, ...],
    BeforeValidator(lambda one: tuple(one) if isinstance(one, list) else one),
    AfterValidator(_bounded),
]
Flat = Annotated[Tensor, AfterValidator(_flat)]
State = Annotated[dict[str, Any], AfterValidator(_state)]


class Dictionary(BaseModel):
    """A dictionary of a file."""

    model_config = ConfigDict(strict=True, arbitrary_types_allowed=True)


class File(Dictionary):
    """A file's whole `content`, which came from `path`."""

    _path: Path = PrivateAttr()
    _content: Mapping[Any, Any] = PrivateAttr()

    @classmethod
    def of(cls, path: Path, content: object) -> Self:
        """What `content` holds. Raises CheckpointError where it is not what DeepSpeed writes."""
        try:
            file = cls.model_validate(content)
        except ValidationError as error:
            raise CheckpointError(f"{path} does not hold what DeepSpeed's files do: {first_fault(error)}") from None
        file._path, file._content = path, content if isinstance(content, Mapping) else {}
        return file

    @property
    def path(self) -> Path:
        """Where it is."""
        return self._path

    @property
    def content(self) -> Mapping[Any, Any]:
        """All of it, as it is."""
        return self._content


class Group(Dictionary):
    """A parameter group: these where they are there, and whatever else its class has."""

    model_config = ConfigDict(extra="allow")

    params: list[int] = []
    lr: Number = 0.0
    initial_lr: Number = 0.0
    weight_decay: Number = 0.0
    momentum: Number = 0.0
    dampening: Number = 0.0
    betas: Annotated[list[Number], BeforeValidator(_listed)] = []
    eps: Annotated[list[Number | None], BeforeValidator(_listed)] = []
    step: Count = 0
    decoupled_weight_decay: bool = True

    def settings(self) -> Mapping[str, Any]:
        """As the file has them."""
        values = {key: value for key, value in self if key in self.model_fields_set}
        if len(self.eps) == 1:
            values["eps"] = self.eps[0]
        return values


class TorchState(Dictionary):
    """What torch's optimizers write, or of elastic checkpoints the states alone, in a list."""

    state: dict[int, State]
    param_groups: list[Group]

    @model_validator(mode="before")
    @classmethod
    def _numbered(cls, given: Any) -> Any:
        return {"state": dict(enumerate(given)), "param_groups": []} if isinstance(given, list) else given


class LossScale(Dictionary):
    """fp16's loss scale, an object or what is beside an optimizer."""

    dynamic: bool | None = None
    dynamic_loss_scale: bool | None = None
    cur_scale: Number | None = None
    cur_iter: Count = 0
    last_overflow_iter: Whole = 0
    cur_hysteresis: Whole | None = None

    @model_validator(mode="before")
    @classmethod
    def _fields(cls, given: Any) -> Any:
        return given.fields if isinstance(given, Record) else given


class ClassByName(Dictionary):
    """Of DeepSpeed's configuration: a class by name, and its arguments."""

    type: str | None = None
    params: dict[str, Any] | None = None


class Configuration(Dictionary):
    """The part of DeepSpeed's configuration that says of which classes states are."""

    optimizer: ClassByName | None = None
    scheduler: ClassByName | None = None


class ModelFile(File):
    """mp_rank_00_model_states.pt, or stage 3's of a rank. Whatever else there is its user has saved, `client_state`."""

    module: Annotated[dict[str, Any], AfterValidator(_module)]
    buffer_names: list[str]
    param_shapes: Annotated[
        list[dict[str, Shape]] | None, BeforeValidator(lambda one: [one] if isinstance(one, dict) else one)
    ] = None
    shared_params: dict[str, str] | None = None
    frozen_param_shapes: dict[str, Shape] | None = None
    frozen_param_fragments: dict[str, Tensor] | None = None
    optimizer: Any = None
    lr_scheduler: dict[str, Any] | None = None
    global_steps: Count = 0
    global_samples: Count = 0
    skipped_steps: Count = 0
    # A path, where DeepSpeed was given one.
    ds_config: Annotated[
        Configuration | None, BeforeValidator(lambda one: None if isinstance(one, str | Record) else one)
    ] = None
    ds_version: str | None = None


class ScheduleState(Dictionary):
    """One of DeepSpeed's own."""

    last_batch_iteration: Annotated[Whole, Field(ge=-1, lt=(1 << 63) - 1)] = -1


class ScheduleFile(File):
    """A model's file whose schedule is that."""

    lr_scheduler: ScheduleState


class Partition(Dictionary):
    """A rank's runs of flat groups."""

    # The optimizer of bf16 without ZeRO shards as stage 1 does, and names no stage.
    zero_stage: Whole = 1
    partition_count: Annotated[list[Count], BeforeValidator(_listed), Field(min_length=1)]
    base_optimizer_state: TorchState | None = None
    optimizer_state_dict: TorchState | None = None
    fp32_flat_groups: list[Flat] | None = None
    single_partition_of_fp32_groups: list[Flat] | None = None
    loss_scaler: LossScale | None = None


class OptimizerFile(File):
    """zero_pp_rank_0_mp_rank_00_optim_states.pt and the like."""

    optimizer_state_dict: Partition


class States(Dictionary):
    """Of an optimizer whose groups are elsewhere."""

    state: dict[int, State] = {}


class CommonFile(File):
    """optimizer_state.pt of a universal checkpoint."""

    param_groups: list[Group]
    loss_scaler: LossScale | None = None
    optimizer_state_dict: States | None = None


class StateFile(File):
    """A value of a parameter's state in a universal checkpoint, under its name."""

    state: State


class UnshardedOptimizer(File, LossScale):
    """A model's file's "optimizer" at stage 0: torch's, or one over fp32 copies, of which that is a part."""

    optimizer_state_dict: TorchState
    fp32_groups_flat: list[Flat] | None = None
    fp32_groups: list[list[Tensor]] | None = None

    @model_validator(mode="before")
    @classmethod
    def _torchs(cls, given: Any) -> Any:
        whole = isinstance(given, dict) and "optimizer_state_dict" not in given
        return {"optimizer_state_dict": given} if whole else given


@dataclass(frozen=True)
class OptimizerState:
    """`slices`: weights that lie with the optimizer, and its moments and step counts. `groups`: settings of each group,
    as DeepSpeed's files have them. `loss_scale`: fp16's, or None."""

    slices: list[SavedSlice] = field(default_factory=list)
    groups: list[Mapping[str, Any]] = field(default_factory=list)
    loss_scale: LossScale | None = None


_SCALAR = "scalar."


def weight_kind(dtype: torch.dtype) -> str:
    """As what fp32 values of a parameter of this dtype are saved: an fp32 parameter is its own master weight."""
    return "weight" if dtype == torch.float32 else "master"


def moments_of(state: Mapping[str, Any], of_a_scalar: bool = False) -> dict[str, Tensor]:
    """The part of a state that has a value for each element; `of_a_scalar`: of a parameter without dimensions."""
    return {
        kind: one
        for kind, one in state.items()
        if isinstance(one, Tensor) and (one.dim() > 0 or of_a_scalar) and kind != _STEP and one.is_floating_point()
    }


def scalars_of(
    state: Mapping[str, Any], settings: Mapping[str, Any], name: str, where: str, of_a_scalar: bool = False
) -> Iterator[SavedSlice]:
    """The part of a state that has one value for a parameter; a step count may be one of its group's settings."""
    values = {kind: one for kind, one in state.items() if kind not in moments_of(state, of_a_scalar)}
    if _STEP in settings:
        values.setdefault(_STEP, settings[_STEP])
    for kind, value in values.items():
        number = _plain_number(value)
        if number is None:
            continue
        if not isinstance(number, int | float):
            raise CheckpointError(f"{kind} of {where} is no moment and no number")
        yield SavedSlice(_SCALAR + kind, name, 0, torch.tensor([number], dtype=torch.float32))
