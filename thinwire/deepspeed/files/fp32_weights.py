"""A checkpoint's weights in fp32, by the calls that users of DeepSpeed's zero_to_fp32 know, and the file that its
script writes. One process does it, with no job running."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

from thinwire.comm import threads
from thinwire.deepspeed.files.model_files import same_objects
from thinwire.engine.checkpoint.exporting import file_size, lazy_weights, open_to_export, say, write_state_dict
from thinwire.engine.checkpoint.files import LazyTensor
from thinwire.engine.checkpoint.loading import LoadedCheckpoint
from thinwire.engine.checkpoint.store import CheckpointStore
from thinwire.engine.errors import CheckpointError, UsageError
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
    for name, given in (("--dtype", arguments.dtype), ("--config", arguments.config), ("--tied", arguments.tied)):
        if given:
            raise UsageError(f"{name} is for --format safetensors: deepspeed-fp32 is fp32, under every name")
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
