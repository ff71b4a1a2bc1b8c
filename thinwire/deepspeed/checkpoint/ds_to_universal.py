"""deepspeed.checkpoint.ds_to_universal: every checkpoint of thinwire loads on any number of ranks, so that there is
nothing to convert; scripts that do so before they load get the folder that they name."""

from __future__ import annotations

import argparse
import os
import shutil
from pathlib import Path

from thinwire.deepspeed.files.model_files import looks_like_deepspeed
from thinwire.engine.checkpoint.errors import CheckpointError
from thinwire.engine.checkpoint.manifest import MANIFEST

__all__ = ["main"]


def main(args: argparse.Namespace) -> None:
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
