"""DeepSpeed's own checkpoints, read without DeepSpeed, and the commands of `thinwire checkpoint` for them.

Only the arguments, so that `--help` is there at once: a command's own imports come as it runs.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from thinwire.engine.command_line import Commands

__all__ = ["add_deepspeed_commands"]

_FP32, _STATES = "deepspeed-fp32", "deepspeed"


def add_deepspeed_commands(commands: Commands) -> None:
    """Add import, and a format to export, to the commands of `thinwire checkpoint`."""
    export = commands.choices["export"]
    export.add_argument(
        "--format",
        choices=("safetensors", _FP32, _STATES),
        default="safetensors",
        help="deepspeed-fp32: what DeepSpeed's zero_to_fp32.py writes, pytorch_model.bin with every name in fp32; "
        "deepspeed: TAG/mp_rank_00_model_states.pt with weights, counters and client state, and the file latest",
    )
    fp32 = export.add_argument_group("with --format deepspeed-fp32")
    fp32.add_argument("--max-shard-size", default="5GB", help="above it, several files and an index; by default 5GB")
    fp32.add_argument("--safe-serialization", action="store_true", help="write model.safetensors instead")
    fp32.add_argument("--exclude-frozen-parameters", action="store_true", help="leave out what was not trained")
    export.set_defaults(run=_export)
    command = commands.add_parser("import", help="turn a checkpoint of DeepSpeed's into one that an engine loads")
    command.add_argument("folder", metavar="DIR", type=Path, help="what DeepSpeed's save_checkpoint was given")
    command.add_argument("--tag", help="which checkpoint; by default the one that DIR/latest names")
    command.add_argument("--output", metavar="NEWDIR", type=Path, help="by default DIR-thinwire")
    command.add_argument("--optimizer", metavar="CLASS", help="whose state it is, where DeepSpeed's files do not say")
    command.add_argument("--scheduler", metavar="CLASS", help="whose state it is, where DeepSpeed's files do not say")
    command.add_argument("--weights-only", action="store_true", help="leave the optimizer's state out")
    command.set_defaults(run=_import)


def _export(arguments: argparse.Namespace) -> int:
    if arguments.format in (_FP32, _STATES):
        from thinwire.deepspeed.files.exporting import export_fp32, export_states

        return (export_fp32 if arguments.format == _FP32 else export_states)(arguments)
    from thinwire.engine.checkpoint.exporting import export

    return export(arguments)


def _import(arguments: argparse.Namespace) -> int:
    from thinwire.deepspeed.files.importing import import_deepspeed

    return import_deepspeed(arguments)
