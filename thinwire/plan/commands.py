"""`thinwire plan` and `thinwire probe`: what a job will cost, before it runs.

A plan needs no torch unless a model is built or a script measured, and no pydantic unless it reads a calibration.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thinwire.compress.packet_layout import CODE_BITS
from thinwire.plan.answer import as_answer, as_json, as_table, draw_plan
from thinwire.plan.cluster import Cluster, Link, Processor
from thinwire.plan.measure import measure_script
from thinwire.plan.meshes import MeshJob, MeshPrediction, mesh_answer, mesh_json, search_meshes
from thinwire.plan.methods import ALGORITHMS, CODECS, INNER, WARMUP_WIRES, OuterSchedule, Schedule, methods_for
from thinwire.plan.models import named_model
from thinwire.plan.recommendation import Plan, plan
from thinwire.plan.units import Kind, PlanError, rate_in_words, read, require_positive, require_whole
from thinwire.plan.workload import (
    DEFAULT_DEVICE,
    DEVICES,
    EFFICIENCY,
    Activations,
    Blocks,
    Device,
    Transformer,
    Workload,
    forward_seconds,
    named_device,
    plain_model,
)

if TYPE_CHECKING:
    from thinwire.plan.calibration import Calibration


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


# What a plan is made of


def _shared(given: Sequence[str]) -> dict[str, int]:
    """Kinds of state, and after how many outer steps each is averaged, of words like "exp_avg=1"."""
    parted = [one.partition("=") for one in given]
    for kind, _, times in parted:
        if not times.isdecimal():
            raise PlanError(f"--share takes words like exp_avg=1, got {kind!r} with {times or 'no number'}")
    return {kind: int(times) for kind, _, times in parted}


_NODES = 4
_SEQUENCES, _SEQUENCE = 8, 512
_TOKENS = 1 << 22
_LATENCIES = {"link": (50e-6, 5e-6), "inside": (10e-6, 1e-6)}
# Options that are given with a unit.
_KINDS: dict[str, Kind] = {
    **dict.fromkeys(("link", "inside", "memory_bandwidth"), "rate"),
    **dict.fromkeys(("forward", "backward", "update", "latency", "message"), "time"),
    **dict.fromkeys(("inside_latency", "inside_message", "measure_limit"), "time"),
    **dict.fromkeys(("memory", "bucket"), "size"),
    **dict.fromkeys(("warmup", "overlap", "efficiency"), "part"),
    "parameters": "count",
}


def _run_plan(arguments: argparse.Namespace) -> int:
    """Print what to take, as an answer, a table or JSON, and draw it where asked to; returns the exit code."""
    if arguments.json and arguments.verbose:
        raise PlanError("--json has everything that --verbose shows: give one of them")
    for name, kind in _KINDS.items():
        text = getattr(arguments, name)
        if text is not None:
            setattr(arguments, name, read(kind, f"--{name.replace('_', '-')}", text))
    request = _Request(arguments)
    if arguments.mesh is not None:
        job, meshes = request.meshes()
        described = {**mesh_json(job, meshes), "assumed": request.assumed}
        print(json.dumps(described, indent=1) if arguments.json else mesh_answer(job, meshes, request.assumed))
        return 0
    planned = request.plan()
    if arguments.plot is not None:
        draw_plan(planned, arguments.plot)
    if arguments.json:
        print(json.dumps({**as_json(planned), "assumed": request.assumed}, indent=1))
        return 0
    print(as_answer(planned, request.assumed, steps_given=arguments.steps is not None))
    if arguments.verbose:
        print("\n" + as_table(planned))
    return 0


@dataclass
class _Request:
    """What was typed, and in `assumed` what was taken for what was not."""

    arguments: argparse.Namespace
    assumed: list[str] = field(default_factory=list)

    def _schedule(self) -> Schedule:
        typed = self.arguments
        return Schedule(
            steps=Schedule().steps if typed.steps is None else typed.steps,
            warmup=typed.warmup,
            warmup_wire=typed.warmup_wire,
            var_freeze_step=typed.var_freeze_step,
            var_update_scaler=typed.var_update_scaler,
            local_step_scaler=typed.local_step_scaler,
            local_step_clipper=typed.local_step_clipper,
            bucket_bytes=None if typed.bucket is None else max(1, round(typed.bucket)),
            muon_codec=typed.muon_codec,
            outer=OuterSchedule(
                typed.every,
                typed.fragments,
                typed.outer_overlap,
                typed.outer_codec,
                typed.inner,
                _shared(typed.share),
            ),
        )

    def plan(self) -> Plan:
        """Compare the methods asked for."""
        typed, device, schedule = self.arguments, self._device(), self._schedule()
        if typed.batch is not None:
            raise PlanError("--batch goes with --mesh; without it give --micro-batch and --accumulation")
        cluster = self._cluster(device)
        workload = self._workload(device)
        methods = methods_for(cluster, typed.methods, typed.powersgd_ranks)
        return plan(workload, cluster, methods, schedule, typed.memory, speed_only=typed.speed_only)

    def meshes(self) -> tuple[MeshJob, list[MeshPrediction]]:
        """Search meshes, or predict the one that was given."""
        typed, device = self.arguments, self._device()
        for name in ("forward", "backward", "update", "measure", "plot", "verbose"):
            if getattr(typed, name):
                raise PlanError(f"--{name} is of one rank that holds the model: leave it out, or --mesh")
        if typed.dtype == "fp32" or typed.accumulation != 1:
            raise PlanError(
                "meshes are planned in bf16, and find their micro-batches: leave --dtype, --accumulation out"
            )
        cluster, model = self._cluster(device), self._model()
        length: int = typed.sequence or (model.blocks.sequence if model.blocks else _SEQUENCE)
        if (batch := typed.batch) is None:
            batch = cluster.ranks * -(-_TOKENS // (cluster.ranks * length))
            self.assumed.append(f"{batch} sequences a step")
        self._assume_efficiency("", device)
        job = MeshJob(model, cluster, device, batch, length)
        options: dict[str, Any] = {"schedule": self._schedule(), "speed_only": typed.speed_only}
        options |= {} if typed.micro_batch is None else {"micro_batches": (typed.micro_batch,)}
        options |= {} if typed.memory is None else {"memory": typed.memory}
        if typed.mesh != "search":
            if not re.fullmatch(r"[1-9]\d*x[1-9]\d*x[1-9]\d*", typed.mesh):
                raise PlanError(f"--mesh must be as 8x16x4, stages x replicas x tensor parallel, got {typed.mesh!r}")
            options["shape"] = tuple(map(int, typed.mesh.split("x")))
        elif typed.memory is None:
            raise PlanError("what a rank may hold is not known: give --memory 80GB")
        return job, search_meshes(job, **options)

    def _device(self) -> Device:
        typed = self.arguments
        reached = EFFICIENCY if typed.efficiency is None else typed.efficiency
        require_positive("--efficiency", reached)
        device = named_device(typed.device or DEFAULT_DEVICE)
        return replace(device, flops=device.flops * reached / EFFICIENCY)

    def _assume_efficiency(self, before: str, device: Device) -> None:
        given = self.arguments.efficiency
        self.assumed.append(f"{before}{device.name} at {EFFICIENCY if given is None else given:.0%} of its peak")

    def _workload(self, device: Device) -> Workload:
        typed = self.arguments
        if typed.measure is not None:
            workload = self._measured()
            return replace(workload, dtype=typed.dtype or workload.dtype)
        model = self._model()
        blocks = model.blocks
        length: int = typed.sequence
        if length is None:
            length = _SEQUENCE if blocks is None else blocks.sequence
        sequences: int = _SEQUENCES if typed.micro_batch is None else typed.micro_batch
        require_whole("the micro-batch", sequences)
        require_whole("a sequence's length", length)
        if (typed.forward is None) != (typed.backward is None):
            raise PlanError("give both --forward and --backward, or neither: they are then estimated together")
        forward, backward = typed.forward, typed.backward
        if forward is None:
            forward = forward_seconds(model, sequences, length, device)
            backward = 2 * forward
            several = "s" if sequences > 1 else ""
            self._assume_efficiency(f"{sequences} sequence{several} of {length} tokens a rank, ", device)
        activations = None
        if blocks is not None:
            activations = Activations(blocks.layers, blocks.hidden, blocks.heads, length, sequences)
        found = Workload(model, forward, backward, typed.accumulation, typed.update, typed.dtype or "fp32", activations)
        return replace(found, tokens=sequences * length)

    def _measured(self) -> Workload:
        typed = self.arguments
        options = ("forward", "backward", "update", "micro_batch", "sequence")
        given = [f"--{one.replace('_', '-')}" for one in options if getattr(typed, one) is not None]
        if given or typed.accumulation != 1:
            raise PlanError(f"--measure finds out itself: leave out {', '.join(given or ['--accumulation'])}")
        require_whole("--measure-steps", typed.measure_steps)
        model = self._model() if typed.model or typed.parameters else None
        return measure_script(typed.measure, typed.measure_steps, typed.measure_limit, model)

    def _model(self) -> Transformer:
        typed = self.arguments
        if (typed.model is None) == (typed.parameters is None):
            raise PlanError("give one of --model and --parameters, as in --model bert-large or --parameters 340M")
        shape = (typed.hidden, typed.layers, typed.heads)
        if typed.model is not None:
            if any(one is not None for one in shape):
                raise PlanError("--hidden, --layers and --heads go with --parameters: a --model has its own")
            return named_model(typed.model)
        model = plain_model(typed.parameters, typed.hidden)
        if typed.layers is None and typed.heads is None:
            return model
        if None in shape:
            raise PlanError("activations need all of --layers, --hidden and --heads, or neither --layers nor --heads")
        return replace(model, blocks=Blocks(typed.layers, typed.hidden, typed.heads, typed.sequence or _SEQUENCE))

    def _cluster(self, device: Device) -> Cluster:
        typed = self.arguments
        calibration = None
        if typed.calibration is not None:
            from thinwire.plan.calibration import load_calibration

            calibration = load_calibration(typed.calibration)
        nodes: int = typed.nodes
        if nodes is None:
            nodes = calibration.nodes if calibration else _NODES
            self.assumed += [] if calibration else [f"{_NODES} nodes"]
        ranks: int = typed.ranks_per_node
        if ranks is None:
            ranks = calibration.ranks_per_node if calibration else 1
        require_whole("--nodes", nodes)
        require_whole("--ranks-per-node", ranks)
        between = self._link("link", calibration.link("between") if calibration else None, None, needed=nodes > 1)
        inside = self._link("inside", calibration.link("inside") if calibration else None, device, needed=ranks > 1)
        processor = self._processor(calibration, device)
        return Cluster(nodes, ranks, between, inside, processor, typed.cores_per_node)

    def _link(self, name: str, measured: Link | None, device: Device | None, *, needed: bool) -> Link:
        """The measured link, at another rate if one is given, else one of that rate; it is `needed`, or not used."""
        typed = self.arguments
        before = "" if name == "link" else f"{name}_"
        rate = getattr(typed, name)
        latency, message = (getattr(typed, f"{before}{one}") for one in ("latency", "message"))
        if measured is not None:
            if latency is not None or message is not None:
                raise PlanError(
                    f"the calibration has the latencies of --{name} already: leave them out, or leave it out"
                )
            return measured if rate is None else measured.with_rate(rate)
        if rate is None:
            if needed and device is None:
                raise PlanError(
                    "the rate of a node's link is not known: give --link 1Gb/s, or a --calibration that thinwire probe "
                    "has made on the cluster"
                )
            rate = 1e9 / 8 if device is None else device.inside
            if needed and device is not None:
                self.assumed.append(f"{rate_in_words(rate)} between the ranks of a node")
        usual = _LATENCIES[name]
        return Link.of(rate, usual[0] if latency is None else latency, usual[1] if message is None else message)

    def _processor(self, calibration: Calibration | None, device: Device) -> Processor:
        typed = self.arguments
        memory = typed.memory_bandwidth
        if memory is None and calibration is not None:
            processor = calibration.processor.slower(1 / calibration.ranks_a_core(typed.cores_per_node))
            return processor if typed.overlap is None else replace(processor, overlap=typed.overlap)
        if memory is None:
            memory = device.memory_rate
            if typed.device is None and (typed.forward is not None or typed.measure is not None):
                self.assumed.append(f"compression at the speed of an {device.name}'s memory")
        return Processor.of_memory(memory, 1.0 if typed.overlap is None else typed.overlap)


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
