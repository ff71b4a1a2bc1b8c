"""Names in DeepSpeed's own checkpoint files, and the copy that stands for a conversion to its universal form."""

from __future__ import annotations

import argparse
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from thinwire.deepspeed.files.model_files import looks_like_deepspeed
from thinwire.engine.checkpoint.manifest import MANIFEST
from thinwire.engine.errors import CheckpointError

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
