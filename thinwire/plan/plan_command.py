"""What `thinwire plan` does: from what a user typed to a plan, and what was assumed on the way. Needs no torch unless a
model has to be built or a script measured."""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from thinwire.plan import units
from thinwire.plan.answer import as_answer, as_json, as_table
from thinwire.plan.cluster import Cluster, Link, Processor
from thinwire.plan.measure import MeasuredSteps
from thinwire.plan.methods import OuterSchedule, Schedule, methods_for
from thinwire.plan.models import named_model
from thinwire.plan.plotting import draw_plan
from thinwire.plan.recommendation import Plan, plan
from thinwire.plan.units import PlanError, require_whole
from thinwire.plan.workload import (
    DEFAULT_DEVICE,
    Activations,
    Batch,
    Blocks,
    Device,
    Transformer,
    Workload,
    batch_for,
    estimate,
    named_device,
    plain_model,
)

# Reading a calibration takes pydantic.
if TYPE_CHECKING:
    from thinwire.plan.calibration import Calibration

__all__ = ["run_plan"]

_NODES = 4
_LINK_DEFAULTS = {"link": ("50us", "5us"), "inside": ("10us", "1us")}


def run_plan(arguments: argparse.Namespace) -> int:
    """Print which method to take, as an answer, a table or JSON, and draw it where asked to; returns the exit code."""
    if arguments.json and arguments.verbose:
        raise PlanError("--json has everything that --verbose shows: give one of them")
    request = _Request(arguments)
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

    def plan(self) -> Plan:
        """Compare the methods asked for."""
        typed = self.arguments
        schedule = self._schedule()
        limit = None if typed.memory is None else units.size("--memory", typed.memory)
        device = named_device(typed.device or DEFAULT_DEVICE)
        cluster = self._cluster(device)
        workload = self._workload(device)
        methods = methods_for(cluster, typed.methods, typed.powersgd_ranks)
        return plan(workload, cluster, methods, schedule, limit, speed_only=typed.speed_only)

    def _schedule(self) -> Schedule:
        typed = self.arguments
        bucket = None if typed.bucket is None else max(1, round(units.size("--bucket", typed.bucket)))
        return Schedule(
            steps=Schedule().steps if typed.steps is None else typed.steps,
            warmup=units.part("--warmup", typed.warmup),
            warmup_wire=typed.warmup_wire,
            var_freeze_step=typed.var_freeze_step,
            var_update_scaler=typed.var_update_scaler,
            local_step_scaler=typed.local_step_scaler,
            local_step_clipper=typed.local_step_clipper,
            bucket_bytes=bucket,
            outer=OuterSchedule(typed.every, typed.fragments, typed.outer_overlap, typed.outer_codec),
        )

    # The model and what it computes

    def _workload(self, device: Device) -> Workload:
        typed = self.arguments
        measured = self._measure()
        if measured is not None:
            workload = measured.workload(self._model() if typed.model or typed.parameters else None)
            return workload if typed.dtype == workload.dtype else replace(workload, dtype=typed.dtype)
        model = self._model()
        batch = batch_for(model, typed.micro_batch, typed.sequence)
        forward, backward = self._forward_and_backward(model, batch, device)
        update = None if typed.update is None else units.seconds("--update", typed.update)
        return Workload(model, forward, backward, typed.accumulation, update, typed.dtype, _activations(model, batch))

    def _measure(self) -> MeasuredSteps | None:
        typed = self.arguments
        if typed.measure is None:
            return None
        options = ("forward", "backward", "update", "micro_batch", "sequence")
        given = [f"--{one.replace('_', '-')}" for one in options if getattr(typed, one) is not None]
        if given or typed.accumulation != 1:
            raise PlanError(f"--measure finds out itself: leave out {', '.join(given or ['--accumulation'])}")
        require_whole("--measure-steps", typed.measure_steps)
        limit = units.seconds("--measure-limit", typed.measure_limit)
        from thinwire.plan.measure import measure_script

        return measure_script(typed.measure, typed.measure_steps, limit)

    def _model(self) -> Transformer:
        typed = self.arguments
        if (typed.model is None) == (typed.parameters is None):
            raise PlanError("give one of --model and --parameters, as in --model bert-large or --parameters 340M")
        shape = (typed.hidden, typed.layers, typed.heads)
        if typed.model is not None:
            if any(one is not None for one in shape):
                raise PlanError("--hidden, --layers and --heads go with --parameters: a --model has its own")
            return named_model(typed.model)
        model = plain_model(units.count("--parameters", typed.parameters), typed.hidden)
        if typed.layers is None and typed.heads is None:
            return model
        if None in shape:
            raise PlanError("activations need all of --layers, --hidden and --heads, or neither --layers nor --heads")
        return replace(model, blocks=Blocks(typed.layers, typed.hidden, typed.heads, typed.sequence or 512))

    def _forward_and_backward(self, model: Transformer, batch: Batch, device: Device) -> tuple[float, float]:
        typed = self.arguments
        if (typed.forward is None) != (typed.backward is None):
            raise PlanError("give both --forward and --backward, or neither: they are then estimated together")
        if typed.forward is not None:
            return units.seconds("--forward", typed.forward), units.seconds("--backward", typed.backward)
        estimated = estimate(model, batch, device)
        self.assumed.append(estimated.assumed)
        return estimated.forward, estimated.backward

    # The cluster

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
        before = "" if name == "link" else f"{name}-"
        given = getattr(typed, name)
        latency, message = (getattr(typed, f"{before}{one}".replace("-", "_")) for one in ("latency", "message"))
        rate = None if given is None else units.rate(f"--{name}", given)
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
                self.assumed.append(f"{units.rate_in_words(rate)} between the ranks of a node")
        defaults = _LINK_DEFAULTS[name]
        return Link.of(
            rate,
            units.seconds(f"--{before}latency", defaults[0] if latency is None else latency),
            units.seconds(f"--{before}message", defaults[1] if message is None else message),
        )

    def _processor(self, calibration: Calibration | None, device: Device) -> Processor:
        typed = self.arguments
        overlap = None if typed.overlap is None else units.part("--overlap", typed.overlap)
        if typed.memory_bandwidth is None and calibration is not None:
            return calibration.make_processor(overlap).slower(1 / calibration.ranks_a_core(typed.cores_per_node))
        memory = device.memory_rate
        computed = typed.forward is not None or typed.measure is not None
        if typed.memory_bandwidth is None and typed.device is None and computed:
            self.assumed.append(f"compression at the speed of an {device.name}'s memory")
        if typed.memory_bandwidth is not None:
            memory = units.rate("--memory-bandwidth", typed.memory_bandwidth)
        return Processor.of_memory(memory, 1.0 if overlap is None else overlap)


def _activations(model: Transformer, batch: Batch) -> Activations | None:
    blocks = model.blocks
    if blocks is None:
        return None
    return Activations(blocks.layers, blocks.hidden, blocks.heads, batch.length, batch.sequences)
