"""`python -m thinwire meet`: serves the place where elastic workers meet, in a process of its own."""

from __future__ import annotations

import argparse
import signal
import sys

__all__ = ["add_meet_arguments"]


def add_meet_arguments(parser: argparse.ArgumentParser) -> None:
    """Of `python -m thinwire meet`."""
    parser.description = (
        "Serve the place where the workers of elastic jobs meet, until it is ended. It has to outlive the jobs: run it "
        "on a host that stays. Workers are told of it by THINWIRE_MEETING=HOST:PORT in their environment."
    )
    parser.add_argument(
        "address", metavar="HOST:PORT", help="where to listen, and nowhere else: a name or address of this host"
    )
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    from thinwire.comm.meeting_place import serve

    try:
        store = serve(arguments.address)
    except ValueError as error:
        print(f"thinwire: {error}", file=sys.stderr)
        return 2
    print(f"thinwire: workers can meet at {arguments.address}", file=sys.stderr, flush=True)
    signal.sigwait({signal.SIGINT, signal.SIGTERM})
    del store
    return 0
