"""The `thinwire` command: what can be done about a training job from outside it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from thinwire.engine.checkpoint import CheckpointError
from thinwire.engine.checkpoint.command_line import UsageError, add_commands

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command with these arguments, by default those of the process; returns the exit code."""
    parser = argparse.ArgumentParser(prog="thinwire", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="checkpoint")
    add_commands(commands.add_parser("checkpoint", help="verify, inspect or export checkpoints"))
    parsed = parser.parse_args(arguments)
    try:
        exit_code: int = parsed.run(parsed)
    except UsageError as error:
        print(f"thinwire: {error}", file=sys.stderr)
        return 2
    except (CheckpointError, OSError) as error:
        print(f"thinwire: {error}", file=sys.stderr)
        return 1
    return exit_code


if __name__ == "__main__":
    sys.exit(main())
