"""A program that refuses its input at a chosen moment; `test_launching` starts it on real ranks."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from experiments.common.errors import InputError, on_every_rank
from experiments.common.launching import launch
from thinwire.comm import Communicator


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("moment")
    parser.add_argument("--ranks", type=int)
    options = parser.parse_args(arguments)
    if options.moment == "parse" and "RANK" in os.environ:
        raise InputError("this cannot be used")
    return options


def work(comm: Communicator, options: argparse.Namespace) -> None:
    def action() -> None:
        if options.moment == "work" or (options.moment == "work-on-last" and comm.rank == comm.size - 1):
            raise InputError("this cannot be used")

    on_every_rank(comm, action)


if __name__ == "__main__":
    sys.exit(launch("tests.experiments.common.refusing", parse, work, sys.argv[1:], default_ranks=2))
