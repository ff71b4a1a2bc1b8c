"""DeepSpeed's universal checkpoints: a folder for each parameter, with its whole values and moments in files."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from thinwire.engine.checkpoint.deepspeed.fields import Entry
from thinwire.engine.checkpoint.deepspeed.model_files import ModelFiles
from thinwire.engine.checkpoint.deepspeed.optimizer_state import OptimizerState, scalars_of, weight_kind
from thinwire.engine.checkpoint.errors import CheckpointError
from thinwire.zero import SavedSlice

__all__ = ["read_universal", "universal_files"]

_WEIGHTS = "fp32"
_STEP = "step"
_COMMON = "optimizer_state.pt"
# What a file says of a tensor that was put together from parts; whole ones have a dimension to join them on at most.
_TOLD = frozenset({"param", "cat_dim"})


def universal_files(model: ModelFiles, folder: Path) -> dict[tuple[str, str], Path]:
    """(parameter, kind of value) -> file, and ("", "") -> what is common to all, where there is such a file.

    Raises CheckpointError for a parameter without weights.
    """
    files: dict[tuple[str, str], Path] = {}
    for group in model.groups or ():
        for name in group:
            own = folder / name
            if "/" in name or not (own / f"{_WEIGHTS}.pt").is_file():
                raise CheckpointError(f"{own / _WEIGHTS}.pt is missing: the universal checkpoint is not whole")
            files |= {(name, path.stem): path for path in sorted(own.glob("*.pt"))}
    if (folder / _COMMON).is_file():
        files["", ""] = folder / _COMMON
    return files


def read_universal(model: ModelFiles, files: Mapping[tuple[str, str], Path], contents: Sequence[Any]) -> OptimizerState:
    """What the files of `universal_files` hold, given the content of each. Raises CheckpointError for another model."""
    values: dict[str, dict[str, Any]] = defaultdict(dict)
    for (name, kind), content in zip(files, contents, strict=True):
        values[name][kind] = content
    common = Entry(files["", ""], values[""][""]) if "" in values else None
    settings: list[Mapping[str, Any]] = [{} for _ in model.groups or () if not model.sharded]
    if common is not None:
        settings = [Entry(common.path, one).values for one in common.take("param_groups", list)]
    step = _common_step(common)
    slices: list[SavedSlice] = []
    for number, group in enumerate(model.groups or ()):
        for name, shape in group.items():
            own = {kind: _whole(content, math.prod(shape), files[name, kind]) for kind, content in values[name].items()}
            kind = weight_kind(model.module[name].dtype if name in model.module else own[_WEIGHTS].dtype)
            state = {_STEP: own.get(_STEP, step)}
            of_group = settings[number] if not model.sharded and number < len(settings) else {}
            tensors = {kind: own[_WEIGHTS], **{key: one for key, one in own.items() if key not in (_WEIGHTS, _STEP)}}
            slices += [SavedSlice(key, name, 0, one) for key, one in tensors.items() if one.numel()]
            slices += scalars_of(state, of_group, name, f"{files[name, _WEIGHTS].parent}")
    return OptimizerState(slices, settings, None if common is None else common.get("loss_scaler"))


def _whole(content: Any, numel: int, path: Path) -> Any:
    """The values in a parameter's file, flat; a step count as it is."""
    if path.stem == _STEP:
        return content
    if isinstance(content, Mapping):
        if strange := content.keys() - _TOLD:
            raise CheckpointError(
                f"{path} was put together from parts of tensors ({sorted(map(str, strange))[0]}), as tensor "
                "parallelism leaves them: only data-parallel checkpoints are imported"
            )
        content = content.get("param")
    if not isinstance(content, Tensor) or content.numel() != numel or not content.is_floating_point():
        given = tuple(content.shape) if isinstance(content, Tensor) else type(content).__name__
        raise CheckpointError(f"{path} holds {given}, a tensor of {numel} values was expected: it is of another model")
    return content.reshape(-1)


def _common_step(common: Entry | None) -> Any:
    """The step count that all parameters share: stage 3's universal checkpoints have none for each."""
    if common is None:
        return None
    for state in _states(common.get("optimizer_state_dict")):
        if _STEP in state:
            return state[_STEP]
    return None


def _states(packed: Any) -> Iterator[Mapping[str, Any]]:
    held = packed.get("state") if isinstance(packed, Mapping) else None
    for state in held.values() if isinstance(held, Mapping) else ():
        if isinstance(state, Mapping):
            yield state
