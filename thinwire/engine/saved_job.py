"""What the engine's part of a manifest must be: looked at before anything is loaded, so that a checkpoint whose values
are of other kinds is passed over, on every rank, while all weights are still where they were."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from thinwire.engine.checkpoint.client_state import SpecialValue
from thinwire.engine.checkpoint.manifest import Manifest
from thinwire.engine.checkpoint.random_state import check_random_values
from thinwire.engine.checkpoint.schema import first_fault

__all__ = ["fault_of_saved_job"]

Count = Annotated[int, Field(ge=0, lt=1 << 63)]


class _Part(BaseModel):
    """Values as they are, of no other type; what is not named here is let be."""

    model_config = ConfigDict(strict=True)


class _Progress(_Part):
    global_steps: Count
    global_samples: Count
    skipped_steps: Count


class _Schedule(_Part):
    type: str
    state: dict[str, Any]


class _LossScale(_Part):
    value: Annotated[float, Field(gt=0)] = 1.0
    forbearance: Count = 0
    steps_without_overflow: Count = 0


class _Data(_Part):
    epoch: Count
    consumed: Count
    samples: Count
    shuffle: bool
    seed: int


class _Rule(_Part):
    norms: dict[Annotated[str, Field(pattern=r"^\d{1,18}$")], float | list[float]] | None = None
    previous_rates: list[float] | None = None
    settled_since: Count | None = None


class _Layer(_Part):
    model_config = ConfigDict(strict=True, extra="forbid")

    coefficient: float
    mass: float
    factor: float
    scale: float


class _Scalars(_Part):
    layers: dict[str, _Layer] | None = None
    coefficients: dict[str, float] | None = None
    variance_updates: Count = 0
    progress: dict[Annotated[str, Field(pattern=r"^\d{1,18}$")], float] | None = None


class _FreezeGroup(_Part):
    steps: Count
    frozen_at: Count | None
    rule: _Rule | None
    scalars: _Scalars
    buckets: list[list[str]] | None


class _Counters(_Part):
    """Of any optimizer; those of torch have none from `names` on."""

    optimizer: str
    groups: list[dict[str, Any]]
    skipped_steps: Count = 0
    names: list[str] = []
    settings: dict[str, Any] = {}
    nodes: list[int] | None = None
    step: Count = 0
    loss_scale: Annotated[float, Field(gt=0)] = 1.0
    freeze_groups: list[_FreezeGroup] = []
    resynchronized_at: Count = 0


_PARTS: dict[str, TypeAdapter[Any]] = {
    "progress": TypeAdapter(_Progress),
    "optimizer": TypeAdapter(_Counters),
    "schedule": TypeAdapter(_Schedule | None),
    "loss_scale": TypeAdapter(_LossScale | None),
    "data": TypeAdapter(_Data | None),
    "client_state": TypeAdapter(dict[str, Any]),
    "client_values": TypeAdapter(list[SpecialValue]),
    "frozen": TypeAdapter(list[str]),
    "left_out": TypeAdapter(list[str]),
}

# Without which a checkpoint is of an earlier version, and has nothing to say there.
_MAY_LACK: dict[str, Any] = {"client_values": [], "frozen": [], "left_out": []}


def fault_of_saved_job(
    manifest: Manifest, used: Collection[str], counters: Mapping[str, Any], schedule: Mapping[str, Any] | None
) -> str | None:
    """Why a job cannot take up the parts `used` of what a manifest says; None where it can.

    `counters`: of this job's optimizer. `schedule`: its schedule as a checkpoint holds it.
    """
    for name in used:
        if name not in manifest.shared and name not in _MAY_LACK:
            return f"shared.{name} is missing"
        try:
            _PARTS[name].validate_python(manifest.shared.get(name, _MAY_LACK.get(name)))
        except ValidationError as error:
            return first_fault(error, f"shared.{name}")
    shared = manifest.shared
    if "optimizer" in used and (fault := _fault_of_counters(counters, shared["optimizer"])):
        return f"shared.optimizer{fault}"
    saved = shared["schedule"] if "schedule" in used else None
    if schedule and saved and saved["type"] == schedule["type"]:
        for fault in _unlike(schedule["state"], saved["state"], ".state"):
            return f"shared.schedule{fault}"
    for file in manifest.files if "progress" in used else ():
        if "random" in file.values and (fault := check_random_values(file.values["random"])):
            return f"values.random of {file.name}: {fault}"
        try:
            _PARTS["loss_scale"].validate_python(file.values.get("loss_scale"))
        except ValidationError as error:
            return first_fault(error, f"values.loss_scale of {file.name}")
    return None


def _fault_of_counters(mine: Mapping[str, Any], saved: Mapping[str, Any]) -> str | None:
    """What of an optimizer's counters could not be taken up; where it is another optimizer that says so itself."""
    if saved["optimizer"] != mine["optimizer"] or len(saved["groups"]) != len(mine["groups"]):
        return None
    for number, (group, other) in enumerate(zip(mine["groups"], saved["groups"], strict=True)):
        if "params" in other:
            return f".groups.{number} has parameters, which are no setting"
        for fault in _unlike(group, other, f".groups.{number}"):
            return fault
    if missing := mine.keys() - saved.keys() - {"resynchronized_at", "skipped_steps"}:
        return f".{min(missing)} is missing"
    known = set(mine.get("names", ()))
    for number, group in enumerate(saved.get("freeze_groups", ())):
        if strangers := {name for bucket in group["buckets"] or () for name in bucket} - known:
            return f".freeze_groups.{number}.buckets has {min(strangers)!r}, which is no parameter"
    return None


def _unlike(mine: Any, saved: Any, path: str) -> Iterator[str]:
    """Where `saved` is of another kind than `mine`; a None of this job says nothing of what others have."""
    if isinstance(mine, Mapping) and isinstance(saved, Mapping):
        for key in mine.keys() & saved.keys():
            yield from _unlike(mine[key], saved[key], f"{path}.{key}")
    elif isinstance(mine, list | tuple) and isinstance(saved, list | tuple):
        for number, (one, other) in enumerate(zip(mine, saved, strict=False)):
            yield from _unlike(one, other, f"{path}.{number}")
    elif mine is not None and _kind(mine) != _kind(saved) and not (saved is None and isinstance(mine, bool | str)):
        yield f"{path} is {_kind(saved)}, {_kind(mine)} was expected"


def _kind(value: Any) -> str:
    if isinstance(value, bool):
        return "true or false"
    kinds = {Mapping: "an object", list | tuple: "a list", int | float: "a number", str: "a text"}
    return next((word for kind, word in kinds.items() if isinstance(value, kind)), "null")
