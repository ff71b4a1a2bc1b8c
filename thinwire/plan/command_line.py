"""`thinwire plan` and `thinwire probe`: what a job will cost, before it runs.

Only the arguments, so that `--help` is there at once: what a command needs is imported when it runs. Numbers are read
as people write them, by `thinwire.plan.units`, when the command runs.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from thinwire.plan.methods import ALGORITHMS, CODECS, Schedule
from thinwire.plan.workload import DEFAULT_DEVICE, DEVICES

__all__ = ["add_plan_arguments", "add_probe_arguments"]


def add_plan_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe `thinwire plan`; sets `run`, a function of the arguments that returns the exit code."""
    parser.description = "What to train with on a network, and how long a step takes. Needed: a model and a link."
    _add_model(parser.add_argument_group("the model and what it computes"))
    _add_cluster(parser.add_argument_group("the cluster"))
    _add_run(parser.add_argument_group("the run"))
    shown = parser.add_argument_group("what is shown")
    shown.add_argument("--verbose", action="store_true", help="all methods, with the phases of each")
    shown.add_argument("--json", action="store_true", help="for other programs, in seconds and bytes")
    shown.add_argument("--plot", type=Path, metavar="FILE", help="draw step time against link rate")
    shown.add_argument("--speed-only", action="store_true", help="recommend the fastest, whatever it costs in loss")
    parser.set_defaults(run=_plan)


def _add_model(model: argparse._ArgumentGroup) -> None:
    model.add_argument("--model", metavar="NAME", help="as bert-large or meta-llama/Llama-3.1-8B, or a config.json")
    model.add_argument("--parameters", metavar="N", help="or its size, as 340M")
    model.add_argument("--hidden", type=int, help="with --parameters, its width; matrices are taken for square")
    model.add_argument("--layers", type=int, help="with --parameters, --hidden and --heads: activations are counted")
    model.add_argument("--heads", type=int)
    model.add_argument("--sequence", type=int, metavar="TOKENS", help="of one sequence; by default the model's, or 512")
    model.add_argument("--micro-batch", type=int, metavar="N", help="sequences that a rank computes at once; else 8")
    model.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32", help="of the weights; by default fp32")
    devices = ", ".join(DEVICES)
    model.add_argument("--device", metavar="NAME", help=f"of a rank: {devices}; by default {DEFAULT_DEVICE}")
    model.add_argument("--forward", metavar="TIME", help="of one micro-batch on one rank, as 36ms; else estimated")
    model.add_argument("--backward", metavar="TIME", help="the same")
    model.add_argument("--update", metavar="TIME", help="of AdamW; by default from the processor's rate")
    model.add_argument("--accumulation", type=int, default=1, help="micro-batches a step")
    model.add_argument("--measure", type=Path, metavar="SCRIPT", help="run this training on one rank: take its times")
    model.add_argument("--measure-steps", type=int, default=10, metavar="N", help="steps that are timed; by default 10")
    model.add_argument("--measure-limit", default="10min", metavar="TIME", help="after which the script is ended")


def _add_cluster(cluster: argparse._ArgumentGroup) -> None:
    cluster.add_argument("--link", metavar="RATE", help="of one node's link to the others, as 1Gb/s or 10GbE")
    cluster.add_argument("--nodes", type=int, help="by default 4, or the calibration's")
    cluster.add_argument("--ranks-per-node", type=int, help="by default 1, or the calibration's")
    cluster.add_argument("--cores-per-node", type=float, help="for ranks on CPUs: those that they share, a thread each")
    cluster.add_argument("--calibration", type=Path, metavar="FILE", help="what thinwire probe wrote on the cluster")
    cluster.add_argument("--latency", metavar="TIME", help="of a message between nodes; by default 50us")
    cluster.add_argument("--message", metavar="TIME", help="that each further message costs; by default 5us")
    cluster.add_argument("--inside", metavar="RATE", help="of one rank's link inside its node; else the device's")
    cluster.add_argument("--inside-latency", metavar="TIME", help="by default 10us")
    cluster.add_argument("--inside-message", metavar="TIME", help="by default 1us")
    cluster.add_argument("--memory-bandwidth", metavar="RATE", help="that a rank reads and writes, as 900GB/s")
    cluster.add_argument("--overlap", metavar="PART", help="of a transfer that goes on beside computing; by default 1")
    cluster.add_argument("--memory", metavar="SIZE", help="that a rank may hold, as 80GB")


def _add_run(run: argparse._ArgumentGroup) -> None:
    defaults = Schedule()
    run.add_argument("--methods", nargs="+", choices=ALGORITHMS, default=ALGORITHMS, help="by default all")
    run.add_argument("--powersgd-ranks", nargs="+", type=int, default=[1, 4])
    run.add_argument("--steps", type=int, help=f"of the run; by default {defaults.steps}")
    run.add_argument(
        "--warmup", metavar="PART", default=f"{defaults.warmup:.0%}", help="of the steps, until the freeze"
    )
    run.add_argument("--warmup-wire", choices=("fp32", "bf16"), default="bf16", help="by default bf16")
    run.add_argument("--var-freeze-step", type=int, help="0/1 Adam's; by default the warmup's end")
    run.add_argument("--var-update-scaler", type=int, default=defaults.var_update_scaler)
    run.add_argument("--local-step-scaler", type=int, default=defaults.local_step_scaler)
    run.add_argument("--local-step-clipper", type=int, default=defaults.local_step_clipper)
    outer = defaults.outer
    run.add_argument("--every", type=int, default=outer.every, help=f"DiLoCo's local steps; by default {outer.every}")
    run.add_argument("--fragments", type=int, help="DiLoCo's; by default one for every three layers")
    run.add_argument("--outer-overlap", type=int, default=outer.overlap, help="steps that a fragment is under way")
    run.add_argument("--outer-codec", choices=CODECS, default=outer.codec, help=f"by default {outer.codec}")
    run.add_argument("--bucket", metavar="SIZE", help="of thinwire's optimizers, as 16MiB; else as they have them")


def add_probe_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe `thinwire probe`; sets `run`, a function of the arguments that returns the exit code."""
    parser.add_argument("output", type=Path, metavar="FILE", help="the JSON file that rank 0 writes")
    parser.add_argument("--seconds", type=float, default=45.0, help="about how long; by default 45")
    parser.add_argument("--backend", choices=("gloo", "nccl", "mpi"), help="by default what a training job would take")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where tensors lie")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds of each collective")
    parser.set_defaults(run=_probe)


def _plan(arguments: argparse.Namespace) -> int:
    from thinwire.plan.plan_command import run_plan

    return run_plan(arguments)


def _probe(arguments: argparse.Namespace) -> int:
    from thinwire.plan.probing import run_probe

    return run_probe(arguments)
