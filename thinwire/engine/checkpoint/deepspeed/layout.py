"""Which of DeepSpeed's files make a checkpoint: by their names, every rank once, and nothing that is not offered."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from thinwire.engine.checkpoint.errors import CheckpointError, UsageError
from thinwire.engine.checkpoint.regular_files import read_file

__all__ = ["DeepSpeedFiles", "find_files", "find_tag", "looks_like_deepspeed"]

_LATEST = ("latest", "latest_universal")
_LONGEST_POINTER = 4096
_MODEL = re.compile(r"mp_rank_(?P<model>\d+)_model_states\.pt")
_SHARDED_MODEL = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(?P<rank>\d+)_mp_rank_(?P<model>\d+)_model_states\.pt")
_OPTIMIZER = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(?P<rank>\d+)_mp_rank_(?P<model>\d+)_optim_states\.pt")
_STATE_OF_A_PARAMETER = "zero"


@dataclass(frozen=True)
class DeepSpeedFiles:
    """The files of one checkpoint. `models`: one, or at stage 3 each rank's. `optimizers`: each rank's, none where the
    model's file has all. `universal`: the folder with a folder for each parameter, or None."""

    folder: Path
    models: list[Path]
    optimizers: list[Path]
    universal: Path | None


def looks_like_deepspeed(folder: Path) -> bool:
    """Whether there are files of DeepSpeed's in a folder, or right below it."""
    try:
        return any(_is_one(path) for path in [*folder.glob("*_states.pt"), *folder.glob("*/*_states.pt")])
    except OSError:
        return False


def find_tag(folder: Path, tag: str | None) -> Path:
    """The folder of one checkpoint: that of `tag`, or the one that `latest` names.

    Raises UsageError where there is none, or `folder` is one itself.
    """
    if any(_is_one(path) for path in folder.glob("*_states.pt")):
        raise UsageError(f"{folder} is one checkpoint: give {folder.absolute().parent} --tag {folder.absolute().name}")
    tags = sorted({path.parent.name for path in folder.glob("*/*_states.pt") if _is_one(path)})
    if not tags:
        raise UsageError(f"there is no checkpoint of DeepSpeed's in {folder}: no *_model_states.pt right below it")
    if tag is None:
        tag = _latest(folder, tags)
    if tag not in tags:
        raise UsageError(f"there is no checkpoint {tag!r} of DeepSpeed's in {folder}, only {', '.join(tags)}")
    return folder / tag


def find_files(folder: Path) -> DeepSpeedFiles:
    """The files of the checkpoint in `folder`. Raises CheckpointError, naming a file, where they make none."""
    names = sorted(path.name for path in folder.iterdir())
    _refuse_other_parallelism(folder, names)
    models = _by_rank(folder, names, _SHARDED_MODEL)
    optimizers = _by_rank(folder, names, _OPTIMIZER)
    whole = [folder / name for name in names if _MODEL.fullmatch(name)]
    if whole and models:
        raise CheckpointError(
            f"{folder} holds {whole[0].name} and {models[0].name}: the first is of stages 0 to 2, the second of "
            "stage 3. Two checkpoints were saved there; remove the older one's files"
        )
    if not whole and not models:
        raise CheckpointError(f"{folder} holds no mp_rank_00_model_states.pt, nor stage 3's zero_pp_rank_0_...")
    universal = folder / _STATE_OF_A_PARAMETER
    is_universal = universal.is_dir() and not optimizers
    return DeepSpeedFiles(folder, whole or models, optimizers, universal if is_universal else None)


def _is_one(path: Path) -> bool:
    return any(pattern.fullmatch(path.name) for pattern in (_MODEL, _SHARDED_MODEL, _OPTIMIZER))


def _latest(folder: Path, tags: list[str]) -> str:
    for name in _LATEST:
        try:
            return read_file(folder / name, _LONGEST_POINTER).decode(errors="backslashreplace").strip()
        except OSError:
            continue
    raise UsageError(f"{folder / _LATEST[0]} cannot be read: say which with --tag, of {', '.join(tags)}")


def _refuse_other_parallelism(folder: Path, names: list[str]) -> None:
    for name in names:
        reason = None
        if re.fullmatch(r"layer_.*model_states\.pt", name):
            reason = "of pipeline parallelism, or of experts, where every layer has a file"
        elif "expert" in name or name.startswith("expp_rank"):
            reason = "of a mixture of experts, whose parameters are not the same on every rank"
        else:
            for pattern in (_MODEL, _SHARDED_MODEL, _OPTIMIZER):
                match = pattern.fullmatch(name)
                if match and int(match["model"]):
                    reason = "of tensor or pipeline parallelism, where a rank holds parts of tensors"
        if reason:
            raise CheckpointError(
                f"{folder / name} is {reason}: only data-parallel checkpoints are imported. Merge it with DeepSpeed's "
                "tools first, or load its exported weights into the model"
            )


def _by_rank(folder: Path, names: list[str], pattern: re.Pattern[str]) -> list[Path]:
    """Each rank's file, in the order of ranks."""
    found: dict[int, str] = {}
    for name in names:
        if not (match := pattern.fullmatch(name)):
            continue
        rank = int(match["rank"])
        if rank in found:
            raise CheckpointError(
                f"{folder} holds {found[rank]} and {name}, both of rank {rank}: two checkpoints were saved there; "
                "remove the older one's files"
            )
        found[rank] = name
    for rank in range(max(found, default=-1)):
        if rank not in found:
            one = next(iter(found.values()))
            raise CheckpointError(
                f"{folder} holds files of {len(found)} ranks and none of rank {rank}: "
                f"{re.sub('rank_[0-9]+', f'rank_{rank}', one, count=1)} is missing"
            )
    return [folder / found[rank] for rank in sorted(found)]
