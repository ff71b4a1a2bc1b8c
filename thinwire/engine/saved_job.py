"""The engine's part of a manifest, checked before anything is loaded; states of schedules and random generators in it.

A checkpoint whose values are of other types is refused on all ranks before any weight has moved. A resumed job draws
the random numbers that it would have drawn, if its ranks are the same."""

from __future__ import annotations

import json
import random
from collections.abc import Collection, Mapping
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from thinwire.comm.errors import first_fault
from thinwire.engine.checkpoint.client_state import SpecialValue
from thinwire.engine.checkpoint.manifest import Manifest
from thinwire.zero.saved_state import Count, unlike


class _Part(BaseModel):
    """Values as they are, of no other type; what is not named here is let be."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)


class _Progress(_Part):
    global_steps: Count
    global_samples: Count
    skipped_steps: Count


class _Step(_Part):
    last_epoch: Count = 0


class _Schedule(_Part):
    type: str
    state: _Step


class _LossScale(_Part):
    value: Annotated[float, Field(gt=0)] = 1.0
    forbearance: Count = 0
    steps_without_overflow: Count = 0
    iterations: Count = 0


class _Data(_Part):
    epoch: Count
    consumed: Count
    samples: Count
    shuffle: bool
    seed: int


class SavedJob(_Part):
    """Values of a whole job, the same on every rank, as an engine writes them into a manifest and reads them."""

    progress: _Progress
    optimizer: dict[str, Any]
    schedule: _Schedule | None
    loss_scale: _LossScale | None
    data: _Data | None
    client_state: dict[str, Any]
    # Checkpoints of earlier versions have none.
    client_values: list[SpecialValue] = []
    tied: dict[str, str] = {}
    frozen: list[str] = []
    left_out: list[str] = []

    @classmethod
    def plain(cls, **values: Any) -> dict[str, Any]:
        """These values, checked as a reader will check them, for a snapshot's `shared`.

        Raises ValueError for what could not be read back.
        """
        values["client_values"] = [one.model_dump() for one in values["client_values"]]
        plain: dict[str, Any] = json.loads(json.dumps(values))  # keys are strings there
        cls.model_validate(plain)
        return plain


_LOSS_SCALE = TypeAdapter(_LossScale | None)


def fault_of_saved_job(manifest: Manifest, used: Collection[str], schedule: Mapping[str, Any] | None) -> str | None:
    """Why a job cannot take up the parts `used` of what a manifest says, but for what its optimizer counts; None where
    it can.

    `schedule`: this job's schedule as a checkpoint holds it.
    """
    for name in used:
        if name not in manifest.shared and SavedJob.model_fields[name].is_required():
            return f"shared.{name} is missing"
    try:
        SavedJob.model_validate(manifest.shared)
    except ValidationError as error:
        if fault := first_fault(error, "shared", used):
            return fault
    shared = manifest.shared
    saved = shared["schedule"] if "schedule" in used else None
    if schedule and saved and saved["type"] == schedule["type"]:
        for fault in unlike(schedule["state"], saved["state"], ".state"):
            return f"shared.schedule{fault}"
    for file in manifest.files if "progress" in used else ():
        if "random" in file.values and (fault := _fault_of_random_values(file.values["random"])):
            return f"values.random of {file.name}: {fault}"
        try:
            _LOSS_SCALE.validate_python(file.values.get("loss_scale"))
        except ValidationError as error:
            return first_fault(error, f"values.loss_scale of {file.name}")
    return None


def schedule_state(schedule: LRScheduler) -> dict[str, Any]:
    """The part of `schedule.state_dict()` that JSON keeps as it is; the rest follows from how it was built."""
    return dict(json_part(schedule.state_dict()))


def load_schedule_state(schedule: LRScheduler, state: dict[str, Any]) -> None:
    """Continue from `schedule_state`, the optimizer's rates included: some of torch's schedules start from those.

    What `state` lacks stays as it is; with nothing in it, only the optimizer's rates are the schedule's again.
    """
    schedule.load_state_dict({**schedule.state_dict(), **state})
    for group, rate in zip(schedule.optimizer.param_groups, schedule.get_last_lr(), strict=True):
        group["lr"] = rate


def json_part(value: Any) -> Any:
    """`value` without the entries of dicts, however deep, that JSON would change."""
    if isinstance(value, dict):
        return {name: json_part(one) for name, one in value.items() if isinstance(name, str) and _holds_something(one)}
    return [json_part(one) for one in value] if isinstance(value, list) else value


def _holds_something(value: Any) -> bool:
    """Whether JSON keeps `value`, or entries of the dicts in it."""
    if isinstance(value, dict):
        return all(isinstance(name, str) for name in value)
    if isinstance(value, list):
        return all(_holds_something(one) for one in value)
    try:
        return bool(json.loads(json.dumps(value, allow_nan=False)) == value)
    except (TypeError, ValueError):
        return False


_CPU = "random.cpu"
_CUDA = "random.cuda"

RANDOM_TENSORS = frozenset({_CPU, _CUDA})
"""The keys of `random_tensors`, on any device."""


def random_tensors(device: torch.device) -> dict[str, Tensor]:
    """The states of torch's generators, of the CPU and of `device`."""
    tensors = {_CPU: torch.get_rng_state()}
    if device.type == "cuda":
        tensors[_CUDA] = torch.cuda.get_rng_state(device)
    return tensors


def random_values() -> dict[str, Any]:
    """The states of Python's and numpy's generators, as plain values."""
    kind, keys, position, has_gauss, cached_gaussian = np.random.get_state()
    assert not isinstance(keys, int | str)
    return {"python": random.getstate(), "numpy": [kind, keys.tolist(), position, has_gauss, cached_gaussian]}


def load_random_state(tensors: dict[str, Tensor], values: dict[str, Any], device: torch.device) -> None:
    """Go on with what `random_tensors` and `random_values` gave; a GPU's generator only where both jobs have one."""
    torch.set_rng_state(tensors[_CPU])
    if device.type == "cuda" and _CUDA in tensors:
        torch.cuda.set_rng_state(tensors[_CUDA], device)
    _set_random_values(values, random, np.random)


def _set_random_values(values: Any, python: Any, numpy: Any) -> None:
    version, numbers, gauss = values["python"]
    python.setstate((version, tuple(numbers), gauss))
    kind, keys, position, has_gauss, cached_gaussian = values["numpy"]
    numpy.set_state((kind, np.array(keys, dtype=np.uint32), position, has_gauss, cached_gaussian))


def _fault_of_random_values(values: Any) -> str | None:
    """Why `load_random_state` could not take these, tried on generators of their own; None where it can."""
    try:
        _set_random_values(values, random.Random(), np.random.RandomState())
    except (TypeError, ValueError, KeyError, IndexError, OverflowError) as error:
        return f"these are no states of Python's and numpy's generators: {error}"
    return None


def reseed(*entropy: int) -> None:
    """Seed every generator with what follows from these numbers alone."""
    seed = int(np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0])
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)
