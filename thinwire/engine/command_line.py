"""`thinwire checkpoint` and `thinwire config`: look at checkpoints, check them and take the weights out, and say what a
configuration will do, with no job running.

Only the arguments, so that `--help` is there at once: a command's own imports come as it runs.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]


def add_checkpoint_commands(parser: argparse.ArgumentParser) -> Commands:
    """Add verify, inspect and export; each sets `run`, a function of the arguments that returns the exit code.

    Returns what further commands, and further arguments of these, are added to.
    """
    commands = parser.add_subparsers(required=True)
    verify = commands.add_parser("verify", help="read every byte; exit code 0 whole, 1 damaged, 2 no checkpoint")
    inspect = commands.add_parser("inspect", help="say what a checkpoint holds")
    inspect.add_argument("--json", action="store_true", help="for other programs")
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
    for name in ("verify", "inspect", "export"):
        commands.choices[name].set_defaults(run=_run_on_checkpoint, command=name)
    return commands


def add_config_commands(parser: argparse.ArgumentParser) -> None:
    """Add check; it sets `run`, a function of the arguments that returns the exit code."""
    commands = parser.add_subparsers(required=True, metavar="check")
    check = commands.add_parser("check", help="say what a file will do; exit code 0 it can train, 1 it cannot")
    check.add_argument("file", metavar="FILE", type=Path, help="a configuration, a JSON file")
    check.add_argument(
        "--world-size",
        metavar="N",
        type=int,
        help="ranks of the job; by default those that the three batch sizes ask for, or 1",
    )
    check.set_defaults(run=_check)


def _run_on_checkpoint(arguments: argparse.Namespace) -> int:
    from thinwire.engine.checkpoint import exporting

    return int(getattr(exporting, arguments.command)(arguments))


def _check(arguments: argparse.Namespace) -> int:
    from thinwire.engine.config.checking import check_file

    return check_file(arguments.file, arguments.world_size)
