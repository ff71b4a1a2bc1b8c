"""What `thinwire checkpoint import` does; it returns the exit code."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from thinwire.engine.checkpoint.deepspeed.importing import import_checkpoint
from thinwire.engine.checkpoint.errors import UsageError
from thinwire.engine.checkpoint.printing import printable

__all__ = ["import_deepspeed"]


def import_deepspeed(arguments: argparse.Namespace) -> int:
    """Turn a checkpoint of DeepSpeed's into one of this engine's, and say what could not be taken over."""
    folder: Path = arguments.folder
    if not folder.is_dir():
        raise UsageError(f"{folder} is no folder: give the one that DeepSpeed's save_checkpoint was given")
    output = arguments.output or folder.absolute().with_name(f"{folder.absolute().name}-thinwire")
    imported = import_checkpoint(
        folder,
        output,
        arguments.tag,
        optimizer=arguments.optimizer,
        scheduler=arguments.scheduler,
        weights_only=arguments.weights_only,
    )
    for note in imported.notes:
        print(printable(f"thinwire: {note}"), file=sys.stderr)
    state = f"the state of {imported.optimizer}" if imported.optimizer else "no optimizer's state"
    print(printable(f"{imported.path}: {imported.parameters} parameters, {state}"))
    return 0
