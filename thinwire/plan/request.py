"""The model, the cluster and the run that words of a command line mean, with what is assumed where none were typed."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from thinwire.plan.cluster import Cluster, Link, Processor
from thinwire.plan.measure import measure_script
from thinwire.plan.meshes import MeshJob, MeshPrediction, search_meshes
from thinwire.plan.methods import OuterSchedule, Schedule, methods_for
from thinwire.plan.models import named_model
from thinwire.plan.recommendation import RESTART, STORAGE_RATE, Failures, Plan, plan
from thinwire.plan.units import Kind, PlanError, rate_in_words, read, require_positive, require_whole
from thinwire.plan.workload import (
    DEFAULT_DEVICE,
    EFFICIENCY,
    Activations,
    Blocks,
    Device,
    Host,
    Transformer,
    Workload,
    forward_seconds,
    named_device,
    plain_model,
)

if TYPE_CHECKING:
    from thinwire.plan.calibration import Calibration

__all__ = ["Request"]


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
    **dict.fromkeys(("link", "inside", "memory_bandwidth", "host_rate", "host_link", "disk_rate"), "rate"),
    **dict.fromkeys(("forward", "backward", "update", "latency", "message", "failures"), "time"),
    **dict.fromkeys(("inside_latency", "inside_message", "measure_limit"), "time"),
    **dict.fromkeys(("memory", "bucket", "host_memory", "disk"), "size"),
    **dict.fromkeys(("warmup", "overlap", "efficiency"), "part"),
    "parameters": "count",
}


@dataclass
class Request:
    """What was typed, and in `assumed` what was taken for what was not."""

    arguments: argparse.Namespace
    assumed: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, arguments: argparse.Namespace) -> Request:
        """The options of a command line, of which those with a unit are read here."""
        for name, kind in _KINDS.items():
            text = getattr(arguments, name)
            if text is not None:
                setattr(arguments, name, read(kind, f"--{name.replace('_', '-')}", text))
        return cls(arguments)

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

    def failures(self, planned: Plan) -> Failures | None:
        """What failing nodes cost, if it was asked."""
        typed = self.arguments
        if typed.failures is None:
            return None
        require_positive("--failures", typed.failures)
        if typed.disk is None:
            self.assumed.append(f"checkpoints at {STORAGE_RATE / 1e9:g} GB/s, {RESTART:g} s to start again")
        return Failures.of(planned, typed.failures)

    def meshes(self) -> tuple[MeshJob, list[MeshPrediction]]:
        """Search meshes, or predict the one that was given."""
        typed, device = self.arguments, self._device()
        for name in ("forward", "backward", "update", "measure", "plot", "verbose", "failures"):
            if getattr(typed, name):
                raise PlanError(f"--{name} is of one rank that holds the model: leave it out, or --mesh")
        if typed.dtype == "fp32" or typed.accumulation != 1 or typed.recompute:
            raise PlanError(
                "meshes are planned in bf16, and find micro-batches and what is recomputed: leave --dtype, "
                "--accumulation and --recompute out"
            )
        cluster, model = self._cluster(device), self._model()
        length = self._length(model)
        if (batch := typed.batch) is None:
            batch = cluster.ranks * -(-_TOKENS // (cluster.ranks * length))
            self.assumed.append(f"{batch} sequences a step")
        self._assume_efficiency("", device)
        job = MeshJob(model, cluster, device, batch, length)
        options: dict[str, Any] = {"schedule": self._schedule(), "speed_only": typed.speed_only}
        if typed.micro_batch is not None:
            require_whole("the micro-batch", typed.micro_batch)
            options["micro_batches"] = (typed.micro_batch,)
        options |= {} if typed.memory is None else {"memory": typed.memory}
        if typed.mesh != "search":
            if not re.fullmatch(r"[1-9]\d*x[1-9]\d*x[1-9]\d*", typed.mesh):
                raise PlanError(f"--mesh must be as 8x16x4, stages x replicas x tensor parallel, got {typed.mesh!r}")
            options["shape"] = tuple(map(int, typed.mesh.split("x")))
        elif typed.memory is None:
            raise PlanError("what a rank may hold is not known: give --memory 80GB")
        return job, search_meshes(job, **options)

    def _length(self, model: Transformer) -> int:
        """Tokens of a sequence."""
        length: int = self.arguments.sequence
        if length is None:
            length = _SEQUENCE if model.blocks is None else model.blocks.sequence
        require_whole("a sequence's length", length)
        return length

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
        length = self._length(model)
        sequences: int = _SEQUENCES if typed.micro_batch is None else typed.micro_batch
        require_whole("the micro-batch", sequences)
        if (typed.forward is None) != (typed.backward is None):
            raise PlanError("give both --forward and --backward, or neither: they are then estimated together")
        forward, backward = typed.forward, typed.backward
        if forward is None:
            forward = forward_seconds(model, sequences, length, device)
            backward = (2 + typed.recompute) * forward
            several = "s" if sequences > 1 else ""
            self._assume_efficiency(f"{sequences} sequence{several} of {length} tokens a rank, ", device)
        activations = None
        if blocks is not None:
            activations = Activations(blocks.layers, blocks.hidden, blocks.heads, length, sequences)
        found = Workload(model, forward, backward, typed.accumulation, typed.update, typed.dtype or "fp32", activations)
        return replace(found, tokens=sequences * length, recompute=typed.recompute)

    def _measured(self) -> Workload:
        typed = self.arguments
        options = ("forward", "backward", "update", "micro_batch", "sequence")
        given = [f"--{one.replace('_', '-')}" for one in options if getattr(typed, one) is not None]
        given += [
            f"--{one}"
            for one, is_given in (("accumulation", typed.accumulation != 1), ("recompute", typed.recompute))
            if is_given
        ]
        if given:
            raise PlanError(f"--measure finds out itself: leave out {', '.join(given)}")
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
        return Cluster(nodes, ranks, between, inside, processor, typed.cores_per_node, self._host(calibration))

    def _host(self, calibration: Calibration | None) -> Host | None:
        """What a node has beside its devices; None where nothing was said of it."""
        typed = self.arguments
        rates = ("host_rate", "host_link", "disk_rate")
        if typed.host_memory is None and typed.disk is None:
            if given := [f"--{name.replace('_', '-')}" for name in rates if getattr(typed, name) is not None]:
                raise PlanError(f"{', '.join(given)} is of nodes that hold something: give --host-memory or --disk")
            return None
        disk_rate = typed.disk_rate
        if disk_rate is None and typed.disk is not None and calibration is not None and calibration.disk is not None:
            disk_rate = calibration.disk.both
        if (typed.disk is None) != (disk_rate is None):
            raise PlanError("give both --disk and --disk-rate, or --disk and what thinwire probe --disk measured")
        host = Host(typed.host_memory or 0.0, disk=typed.disk or 0.0, disk_rate=disk_rate or 1.0)
        for name, words in (("host_rate", "of a node's memory"), ("host_link", "to it for a rank")):
            if (rate := getattr(typed, name)) is not None:
                host = replace(host, **{name.removeprefix("host_"): rate})
            else:
                self.assumed.append(f"{getattr(host, name.removeprefix('host_')) / 1e9:.0f} GB/s {words}")
        return host

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
