"""The `thinwire` command: what can be done about a training job from outside it, before and after it runs."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence

from thinwire.comm import CommunicationError
from thinwire.deepspeed.files import add_deepspeed_commands
from thinwire.engine.command_line import add_checkpoint_commands, add_config_commands
from thinwire.engine.errors import CheckpointError, UsageError, printable
from thinwire.plan.commands import add_plan_arguments, add_probe_arguments
from thinwire.plan.units import PlanError


def make_parser() -> argparse.ArgumentParser:
    """What reads the command's arguments; `run` of what it returns does what they ask for."""
    parser = argparse.ArgumentParser(prog="thinwire", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="checkpoint|compile|config|meet|plan|probe")
    checkpoint = commands.add_parser("checkpoint", help="verify, inspect, export or import checkpoints")
    add_deepspeed_commands(add_checkpoint_commands(checkpoint))
    compiling = commands.add_parser("compile", help="compile the CPU kernels now, as for an image")
    compiling.set_defaults(run=_compile)
    add_config_commands(commands.add_parser("config", help="say what a configuration file will do"))
    _add_meet_arguments(commands.add_parser("meet", help="serve the place where the workers of an elastic job meet"))
    add_plan_arguments(commands.add_parser("plan", help="predict step time and memory, and recommend a method"))
    add_probe_arguments(commands.add_parser("probe", help="measure the network for plan; under torchrun or mpirun"))
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command with these arguments, by default those of the process; returns the exit code."""
    parsed = make_parser().parse_args(arguments)
    try:
        exit_code: int = parsed.run(parsed)
    except (UsageError, PlanError) as error:
        print(printable(f"thinwire: {error}"), file=sys.stderr)
        return 2
    except (CheckpointError, CommunicationError, OSError) as error:
        print(printable(f"thinwire: {error}"), file=sys.stderr)
        return 1
    return exit_code


def _compile(_: argparse.Namespace) -> int:
    from thinwire.compress.kernels.cpu.backend import KERNELS, compile_kernels

    for number, name in enumerate(KERNELS, start=1):
        print(f"thinwire: kernel {number} of {len(KERNELS)}, {name}", file=sys.stderr, flush=True)
        compile_kernels([name])
    return 0


def _add_meet_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Serve the place where the workers of elastic jobs meet, until it is ended. It has to outlive the jobs: run it "
        "on a host that stays. Workers are told of it by THINWIRE_MEETING=HOST:PORT in their environment."
    )
    parser.add_argument(
        "address", metavar="HOST:PORT", help="where to listen, and nowhere else: a name or address of this host"
    )
    parser.set_defaults(run=_meet)


def _meet(arguments: argparse.Namespace) -> int:
    from thinwire.comm.elastic import serve

    try:
        store = serve(arguments.address)
    except ValueError as error:
        print(f"thinwire: {error}", file=sys.stderr)
        return 2
    print(f"thinwire: workers can meet at {arguments.address}", file=sys.stderr, flush=True)
    signal.sigwait({signal.SIGINT, signal.SIGTERM})
    del store
    return 0


if __name__ == "__main__":
    sys.exit(main())
