"""`thinwire config`: says what a configuration will do, with no job running.

Only the arguments, so that `--help` is there at once: what the command needs is imported when it runs.
"""

from __future__ import annotations

import argparse
from pathlib import Path

__all__ = ["add_config_commands"]


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


def _check(arguments: argparse.Namespace) -> int:
    from thinwire.engine.config.checking import check_file

    return check_file(arguments.file, arguments.world_size)
