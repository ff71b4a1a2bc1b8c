"""`thinwire checkpoint`: look at checkpoints, check them, take the weights out and DeepSpeed's in, with no job running.

Only the arguments, so that `--help` is there at once: what a command needs is imported when it runs.
"""

from __future__ import annotations

import argparse
from pathlib import Path

__all__ = ["add_commands"]


def add_commands(parser: argparse.ArgumentParser) -> None:
    """Add verify, inspect, export and import; each sets `run`, a function of the arguments that returns the exit
    code."""
    commands = parser.add_subparsers(required=True, metavar="verify|inspect|export|import")
    verify = commands.add_parser("verify", help="read every byte; exit code 0 whole, 1 damaged, 2 no checkpoint")
    verify.set_defaults(run=_verify)
    inspect = commands.add_parser("inspect", help="say what a checkpoint holds")
    inspect.add_argument("--json", action="store_true", help="for other programs")
    inspect.set_defaults(run=_inspect)
    export = commands.add_parser("export", help="write model.safetensors for Hugging Face and plain torch")
    for command, without_tag in ((verify, "all of them"), (inspect, "the newest"), (export, "the newest whole one")):
        command.add_argument("folder", metavar="DIR", type=Path, help="the folder that holds the checkpoints")
        command.add_argument("--tag", help=f"which checkpoint; by default {without_tag}")
    export.add_argument("output", metavar="OUTPUT", type=Path, help="the folder to write to")
    export.add_argument(
        "--dtype",
        choices=("bf16", "fp16", "fp32"),
        help="convert floating-point values; by default master weights, if any",
    )
    export.add_argument("--config", type=Path, help="a file to copy to OUTPUT/config.json, for from_pretrained")
    export.add_argument("--tied", action="store_true", help="write tied parameters under each of their names")
    export.add_argument(
        "--format",
        choices=("safetensors", "deepspeed-fp32"),
        default="safetensors",
        help="deepspeed-fp32: what DeepSpeed's zero_to_fp32.py writes, pytorch_model.bin with every name in fp32",
    )
    fp32 = export.add_argument_group("with --format deepspeed-fp32")
    fp32.add_argument("--max-shard-size", default="5GB", help="above it, several files and an index; by default 5GB")
    fp32.add_argument("--safe-serialization", action="store_true", help="write model.safetensors instead")
    fp32.add_argument("--exclude-frozen-parameters", action="store_true", help="leave out what was not trained")
    export.set_defaults(run=_export)
    _add_import(commands.add_parser("import", help="turn a checkpoint of DeepSpeed's into one that an engine loads"))


def _add_import(command: argparse.ArgumentParser) -> None:
    command.add_argument("folder", metavar="DIR", type=Path, help="what DeepSpeed's save_checkpoint was given")
    command.add_argument("--tag", help="which checkpoint; by default the one that DIR/latest names")
    command.add_argument("--output", metavar="NEWDIR", type=Path, help="by default DIR-thinwire")
    command.add_argument("--optimizer", metavar="CLASS", help="whose state it is, where DeepSpeed's files do not say")
    command.add_argument("--scheduler", metavar="CLASS", help="whose state it is, where DeepSpeed's files do not say")
    command.add_argument("--weights-only", action="store_true", help="leave the optimizer's state out")
    command.set_defaults(run=_import)


def _verify(arguments: argparse.Namespace) -> int:
    from thinwire.engine.checkpoint.commands import verify

    return verify(arguments)


def _inspect(arguments: argparse.Namespace) -> int:
    from thinwire.engine.checkpoint.commands import inspect

    return inspect(arguments)


def _export(arguments: argparse.Namespace) -> int:
    from thinwire.engine.checkpoint.commands import export

    return export(arguments)


def _import(arguments: argparse.Namespace) -> int:
    from thinwire.engine.checkpoint.import_command import import_deepspeed

    return import_deepspeed(arguments)
