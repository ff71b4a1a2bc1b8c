"""thinwire's checkpoints for those who know DeepSpeed's: weights in fp32, by the calls of its zero_to_fp32, the files
that its script writes, the copy that stands for a conversion to its universal form, and names in its files."""

from __future__ import annotations

import argparse
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from thinwire.comm import threads
from thinwire.deepspeed.files.model_files import looks_like_deepspeed, same_objects
from thinwire.engine.checkpoint.client_state import unpack_client_state
from thinwire.engine.checkpoint.exporting import (
    file_size,
    lazy_weights,
    open_to_export,
    replaced,
    save_new,
    say,
    state_dict_of,
    write_state_dict,
)
from thinwire.engine.checkpoint.files import LazyTensor, write_whole
from thinwire.engine.checkpoint.loading import LoadedCheckpoint
from thinwire.engine.checkpoint.manifest import MANIFEST
from thinwire.engine.checkpoint.store import CheckpointStore
from thinwire.engine.errors import CheckpointError, UsageError
from thinwire.version import __version__
from thinwire.zero.fsdp import gathered, is_sharded

_ALONE_SECONDS = 300.0
_BIN, _SAFETENSORS = "pytorch_model.bin", "model.safetensors"

Folder = str | os.PathLike[str]


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: Folder, tag: str | None = None, exclude_frozen_parameters: bool = False, lazy_mode: bool = False
) -> dict[str, Any]:
    """All weights of an engine's checkpoint in fp32, on the CPU, for `load_state_dict`; buffers and tied names too.

    They are the fp32 master weights where there are any. Buffers of whole numbers stay as they are.

    Args:
        checkpoint_dir: what `save_checkpoint` was given.
        tag: by default the newest whole checkpoint.
        exclude_frozen_parameters: leave out what required no gradient.
        lazy_mode: instead of tensors what knows `shape` and `dtype`, and reads the tensor by `contiguous()`.

    Raises CheckpointError where there is none, or none that is whole.
    """
    lazy = _lazy_weights(_load(checkpoint_dir, tag), exclude_frozen_parameters)
    if lazy_mode:
        return dict(lazy)
    tensors = {id(one): one.contiguous() for one in lazy.values()}  # tied ones once
    return {name: tensors[id(one)] for name, one in lazy.items()}


def load_state_dict_from_zero_checkpoint(model: nn.Module, checkpoint_dir: Folder, tag: str | None = None) -> nn.Module:
    """Move `model` to the CPU and load a checkpoint's fp32 weights into it, those that it has; returns it.

    An engine's model at stage 3 stays where it is: inside GatheredParameters the whole parameters take the weights.

    Raises CheckpointError where there is no whole checkpoint, RuntimeError where a shape is another, or a parameter is
    a shard.
    """
    sharded = [one for one in model.parameters() if is_sharded(one)]
    if any(gathered(one) is None for one in sharded):
        raise RuntimeError(
            "the model's parameters are shards of stage 3: load inside "
            "`with GatheredParameters(model.parameters(), modifier_rank=0):`, or engine.load_checkpoint does it"
        )
    if not sharded:
        model = model.cpu()
    model.load_state_dict(get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag), strict=False)
    return model


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: Folder,
    output_dir: Folder,
    max_shard_size: int | str | None = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """Write what `get_fp32_state_dict_from_zero_checkpoint` gives to `output_dir`/pytorch_model.bin.

    Args:
        checkpoint_dir: what `save_checkpoint` was given.
        output_dir: made if need be.
        max_shard_size: where it is larger, there are several files and an index; None for one file.
        safe_serialization: model.safetensors instead.
        tag: by default the newest whole checkpoint.
        exclude_frozen_parameters: leave out what required no gradient.

    Raises CheckpointError, OSError; ValueError or TypeError for what is no size.
    """
    largest = file_size(max_shard_size)
    with _load(checkpoint_dir, tag) as checkpoint:
        write_fp32_weights(checkpoint, Path(output_dir), largest, safe_serialization, exclude_frozen_parameters)


def write_fp32_weights(
    checkpoint: LoadedCheckpoint,
    output: Path,
    largest: int | None = None,
    safetensors: bool = False,
    exclude_frozen: bool = False,
) -> list[Path]:
    """Write the fp32 weights of an open checkpoint; the paths of the files. Raises OSError, CheckpointError."""
    lazy = _lazy_weights(checkpoint, exclude_frozen)
    same = same_objects(lazy)
    tensors = {name: one for name, one in lazy.items() if name not in same}
    return write_state_dict(output, _SAFETENSORS if safetensors else _BIN, tensors, same, largest)


def export_fp32(arguments: argparse.Namespace) -> int:
    """Do what `thinwire checkpoint export --format deepspeed-fp32` says; returns the exit code."""
    _refuse(arguments, "dtype config tied", "is for --format safetensors: deepspeed-fp32 is fp32, under every name")
    try:
        largest = file_size(arguments.max_shard_size)
    except ValueError as error:
        raise UsageError(f"--max-shard-size: {error}") from error
    with open_to_export(arguments) as checkpoint:
        paths = write_fp32_weights(
            checkpoint, arguments.output, largest, arguments.safe_serialization, arguments.exclude_frozen_parameters
        )
    for path in paths:
        say(f"{path}: of the fp32 weights of {checkpoint.tag}, {path.stat().st_size} bytes")
    return 0


def export_states(arguments: argparse.Namespace) -> int:
    """Do what `thinwire checkpoint export --format deepspeed` says; returns the exit code."""
    others = "dtype config tied exclude_frozen_parameters safe_serialization"
    _refuse(arguments, others, "is for another --format: deepspeed has every name, in the dtype it was saved in")
    with open_to_export(arguments) as checkpoint:
        path = write_model_states(checkpoint, arguments.output)
    say(f"{path}: of the weights of {checkpoint.tag}, {path.stat().st_size} bytes")
    return 0


def _refuse(arguments: argparse.Namespace, options: str, why: str) -> None:
    for name in options.split():
        if getattr(arguments, name):
            raise UsageError(f"--{name.replace('_', '-')} {why}")


def write_model_states(checkpoint: LoadedCheckpoint, output: Path) -> Path:
    """Write what scripts open of DeepSpeed's checkpoints: weights, buffers, counters and client state, no optimizer
    state, in `output`/TAG/mp_rank_00_model_states.pt, which `output`/latest names. Raises OSError, CheckpointError."""
    shared, model = checkpoint.shared, checkpoint.model
    states = unpack_client_state(shared, lambda key: checkpoint.read_rank(key, 0)) | {
        "module": state_dict_of(checkpoint),
        BUFFER_NAMES: list(checkpoint.buffers()),
        PARAM_SHAPES: None,  # as without ZeRO
        "shared_params": {alias: name for alias, name in shared.get("tied", {}).items() if name in model.parameters},
        "optimizer": None,
        "lr_scheduler": None,
        **shared.get("progress", {}),
        "dp_world_size": checkpoint.world_size,
        "mp_world_size": 1,
        DS_VERSION: f"thinwire {__version__}",
    }
    path = Path(get_model_ckpt_name_for_rank(str(output / checkpoint.tag), "00"))
    path.parent.mkdir(parents=True, exist_ok=True)
    with replaced(path) as unfinished:
        save_new(unfinished, states)
    write_whole(output / "latest", checkpoint.tag.encode())
    return path


def _load(folder: Folder, tag: str | None) -> LoadedCheckpoint:
    checkpoint = CheckpointStore(folder, threads.single(_ALONE_SECONDS)).load(tag if tag is None else str(tag))
    if checkpoint is None:
        raise CheckpointError(f"there is no checkpoint in {os.fspath(folder)}")
    return checkpoint


def _lazy_weights(checkpoint: LoadedCheckpoint, exclude_frozen: bool) -> dict[str, LazyTensor]:
    """By name, tied ones under each of theirs as the same object."""
    shared = checkpoint.shared
    frozen = set(shared.get("frozen", ())) if exclude_frozen else set()
    if exclude_frozen and "frozen" not in shared:
        raise CheckpointError(
            f"checkpoint {checkpoint.tag!r} does not say which of its parameters were frozen: it was saved by an "
            "earlier thinwire, or by an optimizer alone"
        )
    lazy = {name: one for name, one in lazy_weights(checkpoint, torch.float32).items() if name not in frozen}
    for alias, name in shared.get("tied", {}).items():
        if name in lazy:
            lazy[alias] = lazy[name]
    return lazy


OPTIMIZER_STATE_DICT = "optimizer_state_dict"
FP32_FLAT_GROUPS = "fp32_flat_groups"
SINGLE_PARTITION_OF_FP32_GROUPS = "single_partition_of_fp32_groups"
BASE_OPTIMIZER_STATE = "base_optimizer_state"
PARAM_SHAPES = "param_shapes"
BUFFER_NAMES = "buffer_names"
FROZEN_PARAM_SHAPES = "frozen_param_shapes"
FROZEN_PARAM_FRAGMENTS = "frozen_param_fragments"
PARTITION_COUNT = "partition_count"
ZERO_STAGE = "zero_stage"
DS_VERSION = "ds_version"
UNIVERSAL_CHECKPOINT_INFO = "universal_checkpoint_info"


def copy_universal(args: argparse.Namespace) -> None:
    """Copy the checkpoint `args.input_folder` to `args.output_folder`, which `load_checkpoint` takes as a tag.

    What else DeepSpeed's converter is given, workers and temporary folders, changes nothing. A process of its own does
    it, or one rank.

    Raises CheckpointError for what is no checkpoint of thinwire's, FileExistsError where there is something already.
    """
    source, target = Path(args.input_folder), Path(args.output_folder)
    if looks_like_deepspeed(source):
        raise CheckpointError(
            f"{source} was written by DeepSpeed: `thinwire checkpoint import {source.parent}` makes one that loads on "
            "any number of ranks"
        )
    if not (source / MANIFEST).is_file():
        raise CheckpointError(f"{source} is no checkpoint: give a folder in the one that save_checkpoint was given")
    if target.exists():
        raise FileExistsError(f"{target} exists: give another output_folder, or remove it")
    unfinished = target.with_name(f".{target.name}.copying")
    shutil.rmtree(unfinished, ignore_errors=True)
    shutil.copytree(source, unfinished)
    os.rename(unfinished, target)


def clone_tensors_for_torch_save(item: Any, device: torch.device | str = "cpu") -> Any:
    """A copy of nested lists, tuples and dicts whose tensors have memory of their own, on `device`.

    torch.save writes all memory that a tensor lies in, a whole bucket's where it is a view of one.
    """
    return tree_map_only(torch.Tensor, lambda one: one.detach().clone().to(device), item)


def get_model_ckpt_name_for_rank(base_folder: str, mp_rank_str: str) -> str:
    """Where DeepSpeed's own checkpoint has a model's weights; thinwire's has them in one file a rank."""
    return os.path.join(base_folder, f"mp_rank_{mp_rank_str}_model_states.pt")
