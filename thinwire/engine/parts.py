"""Ranks that hold a model together: a mesh of them, layers that are cut among some, stages of a pipeline on others."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroupGloo
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from thinwire.comm import Communicator, LoggedCommunicator, TorchCommunicator
from thinwire.comm.agreement import on_every_rank
from thinwire.comm.torch_backend import group_timeout
from thinwire.engine.config import EngineConfig
from thinwire.parallel import Pipeline, parallelize
from thinwire.zero.fsdp import join_process_group
from thinwire.zero.initial_values import InitialValues

Loss = Callable[[Any, Any], Tensor]
Span = Callable[[str], AbstractContextManager[Any]]
_UNFIT = (ValueError, TypeError, OSError)


@dataclass(frozen=True)
class ModelPart:
    """What a rank holds of a model, beside others.

    `model`: the part that is here. `replicas`: the ranks that hold the same. `moved`: by the ids of the parameters that
    the whole model had, those of them that are here now. `mesh`: of dimensions "pp", "dp" and "tp", where ranks hold
    different parts, else None. `pipeline`: None for one stage.
    """

    model: nn.Module
    replicas: Communicator
    moved: Mapping[int, Tensor] = field(default_factory=dict)
    mesh: DeviceMesh | None = None
    pipeline: Pipeline | None = None


def part_of(
    model: nn.Module, settings: EngineConfig, comm: Communicator, device: torch.device, loss_fn: Loss | None
) -> ModelPart:
    """Cut a model, which is the same on all ranks of `comm`, as the configuration says, in place. Collective.

    Raises ValueError, on every rank, for ranks that cannot, or a model that cannot be cut.
    """
    stages, cut = settings.pipeline.stages, max(1, settings.tensor_parallel.autotp_size)
    instead = 'leave out "pipeline" and "tensor_parallel"'
    joined = join_process_group(comm, device, "a model that several ranks hold together", instead)
    sizes = (stages, joined.size // (stages * cut), cut)
    mesh = _mesh(device, sizes, comm.timeout)
    replicas = Communicator.of(mesh["dp"], comm.timeout)
    replicas.speaks = comm.speaks
    if isinstance(comm, LoggedCommunicator):
        replicas = LoggedCommunicator(replicas, comm.log)
    whole = dict(model.named_parameters())
    if cut > 1:
        on_every_rank(comm, lambda: parallelize(model, mesh["tp"]), "cut the model's layers", _UNFIT)
    pipeline, part = None, model
    if stages > 1:
        section = settings.pipeline
        pipeline = on_every_rank(
            comm,
            lambda: Pipeline(
                model,
                settings.gradient_accumulation_steps,
                mesh=mesh,
                schedule=section.schedule,
                split=section.split,
                loss_fn=loss_fn,
                activations=section.activations,
                gradients=section.gradients,
                weights=settings.initial_weights,
            ),
            "split the model into stages",
            _UNFIT,
        )
        part = pipeline.modules
    else:
        give = partial(InitialValues.of(model, [joined]).give, model, weights=settings.initial_weights)
        on_every_rank(comm, give, "give the model its values", _UNFIT)
    here = {id(one) for one in part.parameters()}
    after = dict(model.named_parameters(remove_duplicate=False))
    moved = {id(one): after[name] for name, one in whole.items() if id(after[name]) in here}
    trains = any(one.requires_grad for one in part.parameters())

    def check() -> None:
        if not trains:
            raise ValueError("nothing of the stage that is here requires a gradient: cut the model elsewhere")

    on_every_rank(comm, check, "train its stage", (ValueError,))
    return ModelPart(part, replicas, moved, mesh, pipeline)


def spans_of_parts(span: Span, mesh: DeviceMesh | None) -> Span:
    """`span`, or where layers are cut one in which errors of torch's own transfers tell which ranks are lost."""
    if mesh is None or mesh["tp"].size() == 1:
        return span
    comm = TorchCommunicator(mesh["tp"])
    comm.attend()

    @contextmanager
    def named(name: str) -> Iterator[None]:
        with span(name), comm.transfers(f"a model's {name}"):
            yield

    return named


def _mesh(device: torch.device, sizes: tuple[int, int, int], timeout: float) -> DeviceMesh:
    """Make the mesh; under Gloo its groups wait for as long as the job does, where torch would for half an hour."""
    names = ("pp", "dp", "tp")
    backends: dict[int | str, Any] = {}
    if device.type == "cpu":
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = group_timeout(timeout)
        backends = {name: ("gloo", options) for name in names}
    return init_device_mesh(device.type, sizes, mesh_dim_names=names, backend_override=backends)
