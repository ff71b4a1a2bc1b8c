"""The command line of `experiments.ethernet`: who races, on how many hosts, at which rates, for how long."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from experiments.common.command_line import Parser, fraction, freeze_step, positive, rate
from experiments.common.errors import InputError
from experiments.common.launching import refuse_launchers
from experiments.common.results import OUTPUT, check_writable
from experiments.ethernet.race.contenders import BASELINE, CONTENDERS, FAIR_BASELINE
from experiments.tasks.sizes import SIZES

__all__ = ["parse"]

_RATES = (50, 100, 200, 500, 1000, 2000, 5000, 10000)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Reads and checks the command line; raises `InputError` for what cannot be used."""
    parser = Parser("experiments.ethernet", "Races DDP, PowerSGD and thinwire over slow links.", "about half an hour")
    parser.add_argument("--hosts", type=positive, default=4, metavar="N", help="network namespaces to make")
    parser.add_argument("--ranks-a-host", type=positive, default=1, metavar="N", help="processes on each")
    parser.add_argument("--model", choices=tuple(SIZES), default="mini", help="which BERT")
    parser.add_argument("--batch-size", type=positive, default=8, metavar="N", help="sequences a rank")
    parser.add_argument("--contenders", nargs="+", choices=tuple(CONTENDERS), help="who races; else all that differ")
    parser.add_argument("--rates", nargs="+", type=positive, default=_RATES, metavar="N", help="of the links, in Mb/s")
    parser.add_argument(
        "--waiting", type=fraction, default=0.94, help="also race where fp32 waits this fraction of its step"
    )
    parser.add_argument("--seconds", type=positive, default=20, metavar="N", help="for each rate")
    races = ("steps", "overlap", "losses")
    parser.add_argument("--races", nargs="+", choices=races, default=races, help="which")
    parser.add_argument("--probe-seconds", type=positive, default=20, metavar="N", help="of thinwire probe, a rate")
    parser.add_argument("--overlap-model", choices=tuple(SIZES), default="small", help="which BERT overlaps")
    parser.add_argument("--loss-model", choices=tuple(SIZES), default="tiny", help="which BERT races to a loss")
    parser.add_argument("--loss-rate", type=positive, metavar="N", help="of its links, in Mb/s; else as --waiting says")
    parser.add_argument("--steps", type=positive, default=1500, metavar="N", help="of the race to a loss")
    parser.add_argument("--learning-rate", type=rate, default=1e-3, metavar="X", help="its peak")
    parser.add_argument("--freeze-step", type=freeze_step, default="auto", metavar="N", help='of 1-bit Adam, or "auto"')
    parser.add_argument(
        "--timed-every", type=positive, default=20, metavar="N", help="steps, of which 4 go over the slow links"
    )
    parser.add_argument(
        "--add", action="store_true", help="race to a loss again with these --contenders, the others' runs staying"
    )
    parser.add_argument("--added-steps", type=positive, metavar="N", help="of what --add races; else as many as theirs")
    parser.add_argument(
        "--retime",
        nargs="+",
        type=positive,
        metavar="N",
        help="take the losses of the race that was run, and time the steps of these --contenders at N Mb/s",
    )
    parser.add_argument("--timed-steps", type=positive, default=240, metavar="N", help="of each contender, by --retime")
    parser.add_argument("--limit", type=positive, default=3600, metavar="N", help="seconds after which a job is ended")
    parser.add_argument("--output", type=Path, default=OUTPUT, metavar="DIR", help="for the pictures and the JSON")
    options = parser.parse_args(arguments)
    _check_retiming(options)
    shared_hosts = options.ranks_a_host > 1
    options.contenders = options.contenders or [
        name for name, one in CONTENDERS.items() if shared_hosts or not one.needs_shared_hosts
    ]
    if options.timed_every < 2:
        raise InputError("--timed-every must be at least 2: the first step of a stretch only settles")
    if options.add and (list(options.races) != ["losses"] or options.loss_rate is None):
        raise InputError("--add goes with --races losses and the --loss-rate of the race that it adds to")
    if options.added_steps and not options.add:
        raise InputError("--added-steps goes with --add: all others of a race take as many --steps")
    if not (options.add or options.retime) and (absent := {BASELINE, FAIR_BASELINE} - set(options.contenders)):
        raise InputError(f"--contenders must name what others are compared with: add {', '.join(sorted(absent))}")
    if options.hosts * options.ranks_a_host < 2:
        raise InputError("a single rank sends nothing: give more --hosts or more --ranks-a-host")
    if options.hosts > 250:
        raise InputError(f"--hosts must be at most 250, got {options.hosts}")
    refuse_launchers()
    check_writable(options.output, "--output")
    return options


def _check_retiming(options: argparse.Namespace) -> None:
    """Refuses `--retime` with what it does not do."""
    if not options.retime:
        return
    if options.add or list(options.races) != ["losses"] or not options.contenders:
        raise InputError("--retime goes with --races losses and the --contenders to time, and without --add")
    if alike := [name for name in options.contenders if not CONTENDERS[name].trains]:
        raise InputError(f"--retime: {', '.join(alike)} does not race to a loss")
    if options.timed_steps < 40:
        raise InputError("--timed-steps must be at least 40: all kinds of steps have to come, and more than once")
