"""How a measurement on emulated hosts runs from its command line to its JSON, whatever it measures."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.common.command_line import Parser, positive
from experiments.common.errors import InputError, refuse
from experiments.common.launching import refuse_launchers
from experiments.common.results import OUTPUT, check_writable, write_json
from experiments.ethernet.cluster.commands import ClusterError

__all__ = ["Study", "add_limit_and_output", "check_hosts", "ready"]

_MOST_HOSTS = 250


@dataclass(frozen=True)
class Study:
    """What `python -m experiments.ethernet.<module>` does.

    Attributes:
        module: its name.
        output: of the JSON file in `--output`, without its ending.
        parse: the options of a command line; raises InputError.
        missing: what this machine lacks for emulated hosts, if anything.
        measure: what goes into the JSON; raises ClusterError.
        show: prints it.
    """

    module: str
    output: str
    parse: Callable[[Sequence[str]], argparse.Namespace]
    missing: Callable[[], str | None]
    measure: Callable[[argparse.Namespace], dict[str, Any]]
    show: Callable[[dict[str, Any]], None]

    def run(self, arguments: Sequence[str] | None) -> int:
        """Measures, prints and writes JSON; the exit code. `arguments`: else the command line's."""
        name = f"experiments.ethernet.{self.module}"
        try:
            options = self.parse(sys.argv[1:] if arguments is None else arguments)
            lack = self.missing()
            if lack is not None:
                raise InputError(f"there are no links to shape: {lack}")
            content = self.measure(options)
        except InputError as error:
            return refuse(name, error)
        except ClusterError as error:
            print(f"{name}: {error}", file=sys.stderr)
            return 1
        write_json(options.output / f"{self.output}.json", content)
        self.show(content)
        print(f"Written: {options.output / self.output}.json", flush=True)
        return 0


def add_limit_and_output(parser: Parser, seconds: int) -> None:
    """Add the options that every study has; `seconds`: its limit of a job, if none is given."""
    parser.add_argument(
        "--limit", type=positive, default=seconds, metavar="N", help="seconds after which a job is ended"
    )
    parser.add_argument("--output", type=Path, default=OUTPUT, metavar="DIR", help="for what it writes")


def check_hosts(hosts: int) -> None:
    """Raise InputError for a number of hosts that cannot be emulated, or sends nothing."""
    if not 2 <= hosts <= _MOST_HOSTS:
        raise InputError(f"--hosts must be from 2 to {_MOST_HOSTS}, got {hosts}")


def ready(options: argparse.Namespace) -> argparse.Namespace:
    """The options, with the machine's `load` before anything ran; raises InputError under a launcher, or where `output`
    cannot be written."""
    options.load = os.getloadavg()[0]
    refuse_launchers()
    check_writable(options.output, "--output")
    return options
