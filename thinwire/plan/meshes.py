"""Meshes for models that fit no rank: pipeline stages, replicas and tensor parallelism, searched by what a step takes
and what a rank holds; with what travels between stages and between replicas.

Ranks are numbered as `init_device_mesh(device, (pp, dp, tp))` numbers them, tp fastest. Stages run 1F1B
or Eager1F1B.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

from thinwire.comm.traffic import sent_bytes
from thinwire.compress.packet_layout import activation_packet_bytes
from thinwire.plan.cluster import Cluster
from thinwire.plan.methods import SHARDED_ADAM, Method, Schedule
from thinwire.plan.prediction import predict
from thinwire.plan.recommendation import keeps_the_loss
from thinwire.plan.units import (
    PlanError,
    require_positive,
    require_whole,
    size_in_words,
)
from thinwire.plan.workload import Blocks, Device, Transformer, Workload, forward_operations, forward_seconds

StageWire = Literal["none", "int8", "int4"]
_SIZE = 2  # bytes of a weight, of a gradient and of an activation: bf16, with fp32 master weights
_MICRO_BATCHES = (1, 2, 4, 8)
_EXACT = Method("ddp-fp32")  # of a model in bf16: averages travel so
_ALIKE = 0.01  # the part of a step that a simpler mesh may cost


@dataclass(frozen=True)
class Mesh:
    """`pp` stages of `dp` replicas, each cut over `tp` ranks; and how it trains.

    method: of the replicas. wire: the codec of activations and gradients between stages. micro_batch: sequences.
    recompute: forward runs again in backward, and a micro-batch in flight keeps the inputs of its layers alone.
    eager: stages run Eager1F1B in place of 1F1B, which hides what travels and holds up to thrice the micro-batches.
    """

    pp: int
    dp: int
    tp: int
    method: Method = _EXACT
    wire: StageWire = "none"
    micro_batch: int = 1
    recompute: bool = False
    eager: bool = False

    def __str__(self) -> str:
        return f"pp {self.pp} x dp {self.dp} x tp {self.tp}"

    @property
    def schedule(self) -> str:
        """By its name in a configuration."""
        return "Eager1F1B" if self.eager else "1F1B"

    @property
    def simplicity(self) -> tuple[int, int, bool, bool, bool]:
        """Less of it is better, where steps take as long."""
        return self.pp * self.tp, self.pp, self.wire != "none", self.eager, self.method.entry is not None


@dataclass(frozen=True)
class MeshJob:
    """What is trained where: `batch` sequences of `length` tokens a step, in bf16.

    Raises PlanError for a model whose layers are not known.
    """

    model: Transformer
    cluster: Cluster
    device: Device
    batch: int
    length: int

    def __post_init__(self) -> None:
        require_whole("the batch", self.batch)
        require_whole("a sequence's length", self.length)
        if self.model.blocks is None:
            raise PlanError(
                f"the layers of {self.model.name} are not known, which stages are made of: give --model, or --layers, "
                "--hidden and --heads beside --parameters"
            )

    @property
    def blocks(self) -> Blocks:
        """The model's layers."""
        assert self.model.blocks is not None
        return self.model.blocks

    def operations(self, mesh: Mesh) -> float:
        """Of a step on one rank, a second forward included if there is one."""
        passes = 4 if mesh.recompute else 3
        return passes * forward_operations(self.model, self.batch, self.length) / self.cluster.ranks


@dataclass(frozen=True)
class MeshPrediction:
    """A step on `mesh`, in seconds by what it goes to, and bytes that a rank of the fullest stage holds.

    `seconds`: compute; bubble, of the pipeline's filling and draining; tensor, all-reduces inside layers; stages, what
    they wait for activations and gradients; replicas, the optimizer and what of averages nothing hides. `bytes_sent`:
    to average over replicas, in an average step, by the mean of the ranks of one; a clipped model's norm aside.
    """

    mesh: Mesh
    micro_batches: int
    seconds: Mapping[str, float]
    memory: Mapping[str, float]
    operations: float
    bytes_sent: float

    @property
    def step_seconds(self) -> float:
        """Of one step."""
        return sum(self.seconds.values())

    @property
    def memory_bytes(self) -> float:
        """Of one rank."""
        return sum(self.memory.values())

    @property
    def bubble(self) -> float:
        """The part of slots that are idle: (p - 1) / (m + p - 1)."""
        return bubble_share(self.mesh.pp, self.micro_batches)

    @property
    def operations_a_second(self) -> float:
        """Of one rank."""
        return self.operations / self.step_seconds


def bubble_share(stages: int, micro_batches: int) -> float:
    """The part of its time for which a stage of GPipe, 1F1B or Eager1F1B has nothing to do."""
    return (stages - 1) / (micro_batches + stages - 1)


def in_flight(mesh: Mesh) -> int:
    """Micro-batches on their way from the first stage to the last and back, if there are as many."""
    return 3 * (mesh.pp - 1) + 1 if mesh.eager else mesh.pp


def predict_mesh(job: MeshJob, mesh: Mesh, schedule: Schedule | None = None) -> MeshPrediction:
    """Predict a step. Raises PlanError, by name, for a mesh that the job or thinwire cannot have."""
    _check(job, mesh)
    return _predict(job, mesh, *_replicas(job, mesh, schedule or Schedule()))


def _check(job: MeshJob, mesh: Mesh) -> None:
    ranks, inside, heads = job.cluster.ranks, job.cluster.ranks_per_node, job.blocks.heads
    if mesh.pp * mesh.dp * mesh.tp != ranks:
        raise PlanError(f"{mesh} is {mesh.pp * mesh.dp * mesh.tp} ranks, and the cluster has {ranks}")
    if inside % mesh.tp:
        raise PlanError(
            f"tp {mesh.tp} would lie on several nodes, of {inside} ranks each: tensor parallelism sends activations "
            "four times a layer, and stays inside a node. Take a tp that divides its ranks, and more stages"
        )
    if heads % mesh.tp:
        raise PlanError(f"{heads} attention heads cannot be shared equally by tp {mesh.tp}")
    if mesh.pp > job.blocks.layers:
        raise PlanError(f"{job.model.name} has {job.blocks.layers} layers, too few for {mesh.pp} stages")
    if job.batch % (mesh.dp * mesh.micro_batch):
        raise PlanError(
            f"a batch of {job.batch} sequences is no whole number of micro-batches of {mesh.micro_batch} on each of "
            f"{mesh.dp} replicas"
        )


def _predict(
    job: MeshJob, mesh: Mesh, replicas: float, state: Mapping[str, float], bytes_sent: float
) -> MeshPrediction:
    blocks, cluster = job.blocks, job.cluster
    count = job.batch // (mesh.dp * mesh.micro_batch)
    layers, again = -(-blocks.layers // mesh.pp), int(mesh.recompute)
    forward = _forward(job, mesh)
    compute = (3 + again) * forward
    numbers = mesh.micro_batch * job.length * blocks.hidden
    reduced = sent_bytes("all_reduce", numbers * _SIZE, mesh.tp)
    tensor = layers * (4 + 2 * again) * cluster.inside.seconds("all_reduce", mesh.tp, reduced) if mesh.tp > 1 else 0.0
    codec, travel, wire = _hop(job, mesh, numbers)
    hop = codec + travel
    ahead = min(in_flight(mesh), count)
    # A micro-batch's way there and back is shared by all that are on it. Both directions of the wire are busy at once.
    period = max(compute + tensor + 2 * hop * (mesh.pp - 1) / mesh.pp, wire)
    if mesh.eager:
        way = mesh.pp * (compute + tensor) + 2 * hop * (mesh.pp - 1)
        # With all of them on it, none comes back while others go.
        period = max(compute + tensor + 2 * codec, *((way / ahead, wire) if count > ahead else (2 * wire,)))
    alone = (mesh.pp - 1) * (compute + tensor)
    seconds = {
        "compute": count * compute,
        "bubble": alone,
        "tensor": count * tensor,
        "stages": count * (period - compute - tensor) + (mesh.pp - 1) * 2 * hop,
        "replicas": replicas,
    }
    held = {**state, "activations": ahead * _activations(job, mesh, layers)}
    if mesh.recompute:  # of the layer that backward is in
        held["recomputed layer"] = _activations(job, replace(mesh, recompute=False), 1)
    return MeshPrediction(mesh, count, seconds, held, job.operations(mesh), bytes_sent)


def _forward(job: MeshJob, mesh: Mesh) -> float:
    """Of a micro-batch on one rank of the largest stage."""
    whole = forward_seconds(job.model, mesh.micro_batch, job.length, job.device)
    return whole * -(-job.blocks.layers // mesh.pp) / job.blocks.layers / mesh.tp


def _hop(job: MeshJob, mesh: Mesh, numbers: int) -> tuple[float, float, float]:
    """Seconds that encoding and decoding take, those that what one stage sends then travels to the next one, and those
    for which a node's link is busy with it."""
    if mesh.pp == 1:
        return 0.0, 0.0, 0.0
    cluster, codec, nbytes = job.cluster, 0.0, float(numbers * _SIZE)
    if mesh.wire != "none":
        nbytes = activation_packet_bytes(mesh.wire, numbers // job.blocks.hidden, job.blocks.hidden)
        codec = numbers / cluster.processor.encode + numbers / cluster.processor.decode
    link, sending = cluster.between, min(cluster.ranks_per_node, mesh.dp * mesh.tp)
    if cluster.nodes == 1:
        link, sending = cluster.inside, 1
    wire = sending * nbytes / link.speed.bytes_per_second
    return codec, link.speed.latency + wire, wire


def _activations(job: MeshJob, mesh: Mesh, layers: int) -> float:
    """Bytes that `layers` keep of a micro-batch (Korthikanti et al. 2022, equation 2), recomputed their inputs."""
    blocks = job.blocks
    places = job.length * mesh.micro_batch * blocks.hidden * layers
    if mesh.recompute:
        return _SIZE * places
    return places * (10 + (24 + 5 * blocks.heads * job.length / blocks.hidden) / mesh.tp)


def _replicas(job: MeshJob, mesh: Mesh, schedule: Schedule) -> tuple[float, Mapping[str, float], float]:
    """Seconds that optimizer and averages of replicas add to a step, bytes of their state, bytes that a rank sends."""
    cluster = job.cluster
    neighbours = math.gcd(mesh.dp, cluster.ranks_per_node // mesh.tp)
    # A node's link is shared by all that have replicas elsewhere.
    between = cluster.between.with_rate(cluster.between.speed.bytes_per_second * neighbours / cluster.ranks_per_node)
    part = replace(cluster, nodes=mesh.dp // neighbours, ranks_per_node=neighbours, between=between)
    embedding = job.model.last_elements  # whole on each rank of a stage
    of_layers = (job.model.parameters - embedding) * -(-job.blocks.layers // mesh.pp) / job.blocks.layers
    held = round(of_layers / mesh.tp) + embedding
    forward = 0.0 if mesh.pp > 1 else _forward(job, mesh)  # a pipeline's gradients leave once it is done
    workload = Workload(Transformer(job.model.name, held, (), blocks=job.blocks), forward, 2 * forward, dtype="bf16")
    method = mesh.method if part.has_hierarchy else replace(mesh.method, hierarchical=False)
    found = predict(workload, part, method, schedule)
    memory = {name: held for name, held in found.memory.items() if mesh.dp > 1 or name != "buckets"}
    sent = found.average.bytes_sent * _elements_of_ranks(job, mesh) / (mesh.pp * mesh.tp * held)
    return found.average.step - 3 * forward, memory, sent


def _elements_of_ranks(job: MeshJob, mesh: Mesh) -> int:
    """What the ranks of one replica hold together: tensor parallelism cuts the matrices of layers, and a head that is
    the embedding lies on another stage."""
    model, layers = job.model, job.blocks.layers
    cut = sum(one.rows * one.columns * (one.count // layers * layers) for one in model.matrices)
    tied = model.last is not None and model.matrices.count(model.last) == 1
    again = model.last_elements if tied and mesh.pp > 1 else 0
    return cut + mesh.tp * (model.parameters - cut + again)


# Search


def methods_of_replicas(pp: int, tp: int) -> Iterator[Method]:
    """What keeps the loss and steps replicas of stages, or of models that are cut."""
    yield _EXACT
    yield Method(SHARDED_ADAM, 1)
    if pp == 1:
        yield Method(SHARDED_ADAM, 2)
    if pp == tp == 1:
        yield Method(SHARDED_ADAM, 3)
    for stage in (0, 1):
        for hierarchical in (False, True):
            yield Method("onebit-adam", stage, hierarchical=hierarchical)


def search_meshes(
    job: MeshJob,
    memory: float = 1e18,
    schedule: Schedule | None = None,
    *,
    shape: tuple[int, int, int] | None = None,
    micro_batches: Sequence[int] = _MICRO_BATCHES,
    speed_only: bool = False,
) -> list[MeshPrediction]:
    """The fastest way to train on each mesh whose ranks hold no more than `memory` bytes, fastest mesh first, or on the
    one of `shape`, (pp, dp, tp).

    Of ways that are as fast to a hundredth the simplest. `int4` between stages, which costs some loss, is for
    `speed_only`. Raises PlanError for a shape that cannot be, and where nothing fits, saying what needs least.
    """
    require_positive("the memory", memory)
    if shape is not None:
        _check(job, Mesh(*shape))
    schedule = schedule or Schedule()
    wires: tuple[StageWire, ...] = ("none", "int8", "int4") if speed_only else ("none", "int8")
    several: list[tuple[StageWire, bool]] = [*itertools.product(wires, (False, True))]
    replicas = cache(lambda mesh: _replicas(job, mesh, schedule))
    best: dict[tuple[int, int], list[MeshPrediction]] = {}
    least: MeshPrediction | None = None
    for one in _shapes(job) if shape is None else [Mesh(*shape)]:
        for method in methods_of_replicas(one.pp, one.tp):
            if not (speed_only or keeps_the_loss(method)):
                continue
            for size in micro_batches:
                if job.batch % (one.dp * size):
                    continue
                plain = replace(one, method=method, micro_batch=size)
                cost = replicas(plain)
                for recompute in (False, True):
                    for wire, eager in several[: None if one.pp > 1 else 1]:
                        found = _predict(job, replace(plain, recompute=recompute, wire=wire, eager=eager), *cost)
                        if least is None or found.memory_bytes < least.memory_bytes:
                            least = found
                        if found.memory_bytes <= memory:
                            best.setdefault((one.pp, one.tp), []).append(found)
    if least is None:
        raise PlanError(
            f"no mesh of {job.cluster.ranks} ranks divides {job.blocks.heads} heads and a batch of {job.batch} "
            "sequences: give another --batch"
        )
    if not best:
        raise PlanError(
            f"nothing fits into {size_in_words(memory)} a rank: {least.mesh} needs least, "
            f"{size_in_words(least.memory_bytes)}"
        )
    return sorted((_simplest(ways) for ways in best.values()), key=lambda one: one.step_seconds)


def _simplest(ways: Sequence[MeshPrediction]) -> MeshPrediction:
    fastest = min(one.step_seconds for one in ways)
    alike = [one for one in ways if one.step_seconds <= (1 + _ALIKE) * fastest]
    return min(alike, key=lambda one: (one.mesh.simplicity, one.step_seconds))


def _shapes(job: MeshJob) -> Iterator[Mesh]:
    ranks, inside = job.cluster.ranks, job.cluster.ranks_per_node
    for tp in _divisors(math.gcd(inside, job.blocks.heads)):
        for pp in _divisors(ranks // tp):
            if pp <= job.blocks.layers:
                yield Mesh(pp, ranks // tp // pp, tp)


def _divisors(number: int) -> list[int]:
    return [one for one in range(1, number + 1) if number % one == 0]
