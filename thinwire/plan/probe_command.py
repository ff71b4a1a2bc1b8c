"""What `thinwire plan` and `thinwire probe` do; each returns the exit code."""

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
from thinwire.plan.methods import methods_for
from thinwire.plan.probing import probe
from thinwire.plan.recommendation import plan
from thinwire.plan.report import as_json, as_text
from thinwire.plan.schedule import Schedule
from thinwire.plan.workload import Activations, Transformer, Workload, named_model, plain_model

__all__ = ["run_plan", "run_probe"]

_LINK_HINT = "give it, or a --calibration that thinwire probe has made on the cluster"


def run_plan(arguments: argparse.Namespace) -> int:
    """Print what each method will cost, and which one to take, as a table or as JSON."""
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


def run_probe(arguments: argparse.Namespace) -> int:
    """Measure the cluster this runs on, and write the calibration on rank 0. Collective."""
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
