"""`thinwire plan` and `thinwire probe`: what a job will cost, before it runs.

Only the arguments, so that `--help` is there at once: what a command needs is imported when it runs.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from thinwire.plan.methods import ALGORITHMS
from thinwire.plan.schedule import Schedule
from thinwire.plan.workload import MODELS

__all__ = ["add_plan_arguments", "add_probe_arguments"]


def add_plan_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe `thinwire plan`; sets `run`, a function of the arguments that returns the exit code."""
    model = parser.add_argument_group("the model and what it computes")
    model.add_argument("--model", choices=MODELS, help="a model by name")
    model.add_argument("--parameters", type=float, help="or its parameter count, as in 340e6")
    model.add_argument("--hidden", type=int, help="its width; matrices are taken for square")
    model.add_argument("--layers", type=int, help="with --hidden, --heads and --sequence: activations count as memory")
    model.add_argument("--heads", type=int)
    model.add_argument("--sequence", type=int)
    model.add_argument("--micro-batch", type=int, default=1)
    model.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32", help="of the weights; by default fp32")
    model.add_argument("--forward-ms", type=float, required=True, help="of one micro-batch on one rank")
    model.add_argument("--backward-ms", type=float, required=True, help="the same")
    model.add_argument("--update-ms", type=float, help="of AdamW; by default from the processor's rate")
    model.add_argument("--accumulation", type=int, default=1, help="micro-batches a step")
    cluster = parser.add_argument_group("the cluster")
    cluster.add_argument("--calibration", type=Path, metavar="FILE", help="what thinwire probe wrote on it")
    cluster.add_argument("--nodes", type=int, help="by default the calibration's")
    cluster.add_argument("--ranks-per-node", type=int, help="the same")
    cluster.add_argument("--link-gbps", type=float, help="Gb/s of one node's link to the others")
    cluster.add_argument("--latency-us", type=float, help="of a message between nodes; by default 50")
    cluster.add_argument("--message-us", type=float, help="that each further message costs; by default 5")
    cluster.add_argument("--inside-gbps", type=float, help="Gb/s of one rank's link to the others of its node")
    cluster.add_argument("--inside-latency-us", type=float, help="by default 10")
    cluster.add_argument("--inside-message-us", type=float, help="by default 1")
    cluster.add_argument("--memory-bandwidth", type=float, help="GB/s that a rank reads and writes; sets codec rates")
    cluster.add_argument("--overlap", type=float, help="part of a transfer that computing lets go on; by default 1")
    cluster.add_argument("--memory-gb", type=float, help="GB a rank may hold")
    run = parser.add_argument_group("the run")
    defaults = Schedule()
    run.add_argument("--methods", nargs="+", choices=ALGORITHMS, default=ALGORITHMS, help="by default all")
    run.add_argument("--powersgd-ranks", nargs="+", type=int, default=[1, 4])
    run.add_argument("--steps", type=int, default=defaults.steps)
    run.add_argument("--warmup", type=float, default=defaults.warmup, help="part of the steps before the freeze")
    run.add_argument("--warmup-wire", choices=("fp32", "bf16"), default=defaults.warmup_wire)
    run.add_argument("--var-freeze-step", type=int, help="0/1 Adam's; by default the warmup's end")
    run.add_argument("--var-update-scaler", type=int, default=defaults.var_update_scaler)
    run.add_argument("--local-step-scaler", type=int, default=defaults.local_step_scaler)
    run.add_argument("--local-step-clipper", type=int, default=defaults.local_step_clipper)
    run.add_argument("--bucket-mib", type=float, help="of thinwire's optimizers; by default as they have them")
    parser.add_argument("--json", action="store_true", help="for other programs, in seconds and bytes")
    parser.set_defaults(run=_plan)


def add_probe_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe `thinwire probe`; sets `run`, a function of the arguments that returns the exit code."""
    parser.add_argument("output", type=Path, metavar="FILE", help="the JSON file that rank 0 writes")
    parser.add_argument("--seconds", type=float, default=45.0, help="about how long; by default 45")
    parser.add_argument("--backend", choices=("gloo", "nccl", "mpi"), help="by default what a training job would take")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where tensors lie")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds of each collective")
    parser.set_defaults(run=_probe)


def _plan(arguments: argparse.Namespace) -> int:
    from thinwire.plan.commands import run_plan

    return run_plan(arguments)


def _probe(arguments: argparse.Namespace) -> int:
    from thinwire.plan.commands import run_probe

    return run_probe(arguments)
