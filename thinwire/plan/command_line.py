"""`thinwire plan` and `thinwire probe`: what a job will cost, before it runs."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

from thinwire import comm as communication
from thinwire.comm.agreement import raise_together
from thinwire.plan.calibration import Calibration, load_calibration, save_calibration
from thinwire.plan.cluster import Cluster, Link, Processor
from thinwire.plan.errors import PlanError
from thinwire.plan.methods import ALGORITHMS, methods_for
from thinwire.plan.probe import probe
from thinwire.plan.recommendation import plan
from thinwire.plan.report import as_json, as_text
from thinwire.plan.schedule import Schedule
from thinwire.plan.workload import MODELS, Activations, Transformer, Workload, named_model, plain_model

__all__ = ["add_plan_arguments", "add_probe_arguments"]

_LINK_HINT = "give it, or a --calibration that thinwire probe has made on the cluster"


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
    calibration = None if arguments.calibration is None else load_calibration(arguments.calibration)
    cluster = _cluster(arguments, calibration)
    workload = _workload(arguments)
    schedule = Schedule(
        steps=arguments.steps,
        warmup=arguments.warmup,
        warmup_wire=arguments.warmup_wire,
        var_freeze_step=arguments.var_freeze_step,
        var_update_scaler=arguments.var_update_scaler,
        local_step_scaler=arguments.local_step_scaler,
        local_step_clipper=arguments.local_step_clipper,
        bucket_bytes=None if arguments.bucket_mib is None else round(arguments.bucket_mib * 2**20),
    )
    methods = methods_for(cluster, arguments.methods, arguments.powersgd_ranks)
    limit = None if arguments.memory_gb is None else 1e9 * arguments.memory_gb
    planned = plan(workload, cluster, methods, schedule, limit)
    if arguments.json:
        print(json.dumps(as_json(planned, workload, cluster), indent=1))
    else:
        print(as_text(planned, workload, cluster))
    return 0


def _workload(arguments: argparse.Namespace) -> Workload:
    return Workload(
        _model(arguments),
        arguments.forward_ms / 1e3,
        arguments.backward_ms / 1e3,
        arguments.accumulation,
        None if arguments.update_ms is None else arguments.update_ms / 1e3,
        arguments.dtype,
        _activations(arguments),
    )


def _model(arguments: argparse.Namespace) -> Transformer:
    if (arguments.model is None) == (arguments.parameters is None):
        raise PlanError("give either --model or --parameters")
    if arguments.model is not None:
        return named_model(arguments.model)
    if not arguments.parameters.is_integer():
        raise PlanError(f"--parameters must be a whole number, got {arguments.parameters}")
    return plain_model(int(arguments.parameters), arguments.hidden)


def _activations(arguments: argparse.Namespace) -> Activations | None:
    names = ("layers", "heads", "sequence")
    given = [name for name in names if getattr(arguments, name) is not None]
    if not given:
        return None
    if len(given) < len(names) or arguments.hidden is None:
        raise PlanError("activations need all of --layers, --hidden, --heads and --sequence, or none of the others")
    return Activations(arguments.layers, arguments.hidden, arguments.heads, arguments.sequence, arguments.micro_batch)


def _cluster(arguments: argparse.Namespace, calibration: Calibration | None) -> Cluster:
    nodes = arguments.nodes if arguments.nodes is not None else calibration.nodes if calibration else None
    ranks = arguments.ranks_per_node
    if ranks is None:
        ranks = calibration.ranks_per_node if calibration else None
    if nodes is None or ranks is None:
        raise PlanError("give --nodes and --ranks-per-node, or a --calibration")
    between = _link(
        "link",
        calibration.link("between") if calibration else None,
        arguments.link_gbps,
        arguments.latency_us,
        arguments.message_us,
        (50.0, 5.0),
        needed=nodes > 1,
    )
    inside = _link(
        "inside",
        calibration.link("inside") if calibration else None,
        arguments.inside_gbps,
        arguments.inside_latency_us,
        arguments.inside_message_us,
        (10.0, 1.0),
        needed=ranks > 1,
    )
    return Cluster(nodes, ranks, between, inside, _processor(arguments, calibration))


def _link(
    name: str,
    measured: Link | None,
    gbps: float | None,
    latency_us: float | None,
    message_us: float | None,
    defaults: tuple[float, float],
    *,
    needed: bool,
) -> Link:
    """The measured link, at another rate if one is given; else one of that rate. Unless `needed`, nobody uses it."""
    if measured is not None:
        if latency_us is not None or message_us is not None:
            raise PlanError(f"the calibration has the latencies of the {name} already: leave them out, or leave it out")
        return measured if gbps is None else measured.with_rate(gbps * 1e9 / 8)
    if gbps is None:
        if needed:
            raise PlanError(f"the rate of the {name} is not known, --{name}-gbps: {_LINK_HINT}")
        gbps = 1.0
    latency = defaults[0] if latency_us is None else latency_us
    message = defaults[1] if message_us is None else message_us
    return Link.of(gbps * 1e9 / 8, latency / 1e6, message / 1e6)


def _processor(arguments: argparse.Namespace, calibration: Calibration | None) -> Processor:
    if arguments.memory_bandwidth is not None:
        overlap = 1.0 if arguments.overlap is None else arguments.overlap
        return Processor.of_memory(arguments.memory_bandwidth * 1e9, overlap)
    if calibration is None:
        raise PlanError(f"how fast a rank compresses is not known, --memory-bandwidth in GB/s: {_LINK_HINT}")
    return calibration.make_processor(arguments.overlap)


def _probe(arguments: argparse.Namespace) -> int:
    world = communication.init(arguments.backend, timeout=arguments.timeout)
    raise_together(world, _refusal(arguments, world.rank), "write the calibration")
    calibration = probe(world, arguments.seconds, torch.device(arguments.device))
    if world.rank == 0:
        save_calibration(calibration, arguments.output)
        print(_in_words(calibration, arguments.output))
    return 0


def _refusal(arguments: argparse.Namespace, rank: int) -> PlanError | None:
    """What would waste the probe's time, told before it begins."""
    if arguments.device == "cuda" and not torch.cuda.is_available():
        return PlanError("--device cuda, and this rank sees no GPU")
    if rank == 0 and not arguments.output.absolute().parent.is_dir():
        return PlanError(f"the folder of {arguments.output} does not exist")
    return None


def _in_words(calibration: Calibration, path: Path) -> str:
    lines = [f"{path}: {calibration.nodes} nodes of {calibration.ranks_per_node}, backend {calibration.backend}"]
    for name, link in (("between nodes", calibration.between), ("inside nodes", calibration.inside)):
        for collective, fit in link.collectives.items() if link is not None else ():
            lines.append(
                f"{name}, {collective}: {8 * fit.bytes_per_second / 1e9:.3g} Gb/s, {1e6 * fit.intercept:.0f} us, "
                f"fits to {100 * fit.error:.0f}%"
            )
    rates = calibration.processor
    lines.append(
        f"encode {rates.encode / 1e9:.2f}, decode {rates.decode / 1e9:.2f}, average {rates.average / 1e9:.2f}, AdamW "
        f"{rates.adam / 1e9:.2f} billion elements a second; {100 * rates.overlap:.0f}% of a transfer goes on beside "
        "computation"
    )
    return "\n".join(lines)
