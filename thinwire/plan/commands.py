"""`thinwire plan` and `thinwire probe`: what a job will cost, before it runs.

A plan needs no torch unless a model is built or a script measured, and no pydantic unless it reads a calibration.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from thinwire.compress.packet_layout import CODE_BITS
from thinwire.plan.answer import as_answer, as_json, as_table, mesh_answer, mesh_json
from thinwire.plan.methods import ALGORITHMS, CODECS, INNER, WARMUP_WIRES, Schedule
from thinwire.plan.picture import draw_plan
from thinwire.plan.request import Request
from thinwire.plan.units import PlanError
from thinwire.plan.workload import DEFAULT_DEVICE, DEVICES, EFFICIENCY


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
    parser.set_defaults(run=_run_plan)


def _add_model(model: argparse._ArgumentGroup) -> None:
    model.add_argument("--model", metavar="NAME", help="as bert-large or meta-llama/Llama-3.1-8B, or a config.json")
    model.add_argument("--parameters", metavar="N", help="or its size, as 340M")
    model.add_argument("--hidden", type=int, help="with --parameters, its width; matrices are taken for square")
    model.add_argument("--layers", type=int, help="with --parameters, --hidden and --heads: activations are counted")
    model.add_argument("--heads", type=int)
    model.add_argument("--sequence", type=int, metavar="TOKENS", help="of one sequence; by default the model's, or 512")
    model.add_argument("--micro-batch", type=int, metavar="N", help="sequences that a rank computes at once; else 8")
    model.add_argument("--dtype", choices=("fp32", "bf16"), help="of the weights; by default fp32, or as measured")
    devices = ", ".join(DEVICES)
    model.add_argument("--device", metavar="NAME", help=f"of a rank: {devices}; by default {DEFAULT_DEVICE}")
    model.add_argument(
        "--efficiency", metavar="PART", help=f"of its peak that it reaches; by default {EFFICIENCY:.0%}%"
    )
    model.add_argument("--forward", metavar="TIME", help="of one micro-batch on one rank, as 36ms; else estimated")
    model.add_argument("--backward", metavar="TIME", help="the same")
    model.add_argument("--update", metavar="TIME", help="of AdamW; by default from the processor's rate")
    model.add_argument("--accumulation", type=int, default=1, help="micro-batches a step")
    model.add_argument("--recompute", action="store_true", help="layers run forward again in backward")
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
    cluster.add_argument("--host-memory", metavar="SIZE", help="of a node, for what devices do not hold, as 1.5TB")
    cluster.add_argument("--host-rate", metavar="RATE", help="that it reads and writes; by default 150GB/s")
    cluster.add_argument("--host-link", metavar="RATE", help="of a rank's device to it; by default 12GB/s")
    cluster.add_argument("--disk", metavar="SIZE", help="of a node, for master weights and optimizer state, as 28TB")
    cluster.add_argument("--disk-rate", metavar="RATE", help="that it reads and writes, as 3GB/s")
    cluster.add_argument("--failures", metavar="TIME", help="after which a node fails on average, as 30d")


def _add_run(run: argparse._ArgumentGroup) -> None:
    defaults = Schedule()
    run.add_argument("--methods", nargs="+", choices=ALGORITHMS, default=ALGORITHMS, help="by default all")
    run.add_argument(
        "--mesh", nargs="?", const="search", metavar="PPxDPxTP", help="in stages, replicas, tensor parallel"
    )
    run.add_argument(
        "--batch", type=int, metavar="N", help="with --mesh: sequences a step; by default 4M tokens or more"
    )
    run.add_argument("--powersgd-ranks", nargs="+", type=int, default=[1, 4])
    run.add_argument("--steps", type=int, help=f"of the run; by default {defaults.steps}")
    run.add_argument("--warmup", metavar="PART", default=f"{defaults.warmup:.0%}", help="of the steps until the freeze")
    run.add_argument("--warmup-wire", choices=WARMUP_WIRES, default="bf16", help="by default bf16")
    run.add_argument("--var-freeze-step", type=int, help="0/1 Adam's; by default the warmup's end")
    run.add_argument("--var-update-scaler", type=int, default=defaults.var_update_scaler)
    run.add_argument("--local-step-scaler", type=int, default=defaults.local_step_scaler)
    run.add_argument("--local-step-clipper", type=int, default=defaults.local_step_clipper)
    outer = defaults.outer
    run.add_argument("--every", type=int, default=outer.every, help=f"DiLoCo's local steps; by default {outer.every}")
    run.add_argument("--fragments", type=int, help="DiLoCo's; by default one for every three layers")
    run.add_argument("--outer-overlap", type=int, default=outer.overlap, help="steps that a fragment is in flight")
    run.add_argument("--outer-codec", choices=CODECS, default=outer.codec, help=f"by default {outer.codec}")
    run.add_argument("--share", nargs="+", default=(), metavar="STATE=N", help="averaged with every N-th outer step")
    run.add_argument("--inner", choices=INNER, default=outer.inner, help="what steps inside DiLoCo's workers")
    codec = defaults.muon_codec
    run.add_argument("--muon-codec", choices=CODE_BITS, default=codec, help=f"1-bit Muon's, by default {codec}")
    run.add_argument("--bucket", metavar="SIZE", help="of thinwire's optimizers, as 16MiB; else as they have them")


def add_probe_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe `thinwire probe`; sets `run`, a function of the arguments that returns the exit code."""
    parser.add_argument("output", type=Path, metavar="FILE", help="the JSON file that rank 0 writes")
    parser.add_argument("--seconds", type=float, default=45.0, help="about how long; by default 45")
    parser.add_argument("--backend", choices=("gloo", "nccl", "mpi"), help="by default what a training job would take")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where tensors lie")
    parser.add_argument("--disk", type=Path, metavar="FOLDER", help="measure the NVMe disk of this folder too")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds of each collective")
    parser.set_defaults(run=_run_probe)


def _run_plan(arguments: argparse.Namespace) -> int:
    """Print what to take, as an answer, a table or JSON, and draw it where asked to; returns the exit code."""
    if arguments.json and arguments.verbose:
        raise PlanError("--json has everything that --verbose shows: give one of them")
    request = Request.of(arguments)
    if arguments.mesh is not None:
        job, meshes = request.meshes()
        described = {**mesh_json(job, meshes), "assumed": request.assumed}
        print(json.dumps(described, indent=1) if arguments.json else mesh_answer(job, meshes, request.assumed))
        return 0
    planned = request.plan()
    if arguments.plot is not None:
        draw_plan(planned, arguments.plot)
    failures = request.failures(planned)
    if arguments.json:
        lost = None if failures is None else asdict(failures)
        print(json.dumps({**as_json(planned), "failures": lost, "assumed": request.assumed}, indent=1))
        return 0
    print(as_answer(planned, request.assumed, steps_given=arguments.steps is not None, failures=failures))
    if arguments.verbose:
        print("\n" + as_table(planned))
    return 0


# Probe


def _run_probe(arguments: argparse.Namespace) -> int:
    """Measure the cluster this runs on, and write the calibration on rank 0; returns the exit code. Collective."""
    import torch

    from thinwire import comm as communication
    from thinwire.comm.agreement import raise_together
    from thinwire.plan.calibration import in_words, save_calibration
    from thinwire.plan.probing import probe

    world = communication.init(arguments.backend, timeout=arguments.timeout)
    refused = None  # what would waste the probe's time
    if arguments.device == "cuda" and not torch.cuda.is_available():
        refused = PlanError("--device cuda, and this rank sees no GPU")
    elif world.rank == 0 and not arguments.output.absolute().parent.is_dir():
        refused = PlanError(f"the folder of {arguments.output} does not exist")
    raise_together(world, refused, "write the calibration")
    calibration = probe(world, arguments.seconds, torch.device(arguments.device), arguments.disk)
    if world.rank == 0:
        save_calibration(calibration, arguments.output)
        print(in_words(calibration, arguments.output))
    return 0
