"""A replica of the model that lies on several ranks: the part that a rank holds of what torch's tensor parallelism has
cut, the ranks that hold the rest, and what tells whether two ranks hold the same."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn

from thinwire.comm import Communicator, TorchCommunicator
from thinwire.comm.agreement import check_same_on_every_rank, gather
from thinwire.zero.gradient_seal import SentGradient


class LocalPart(nn.Parameter):
    """What this rank holds of a DTensor, `whole`, for an optimizer that moves it as any other parameter.

    Both have one memory, wherever it is moved, and one gradient: `grad` is the local tensor of `whole.grad`, which is
    placed as the parameter is; that of sums over the ranks of the mesh is added up when it is first read, in backward,
    where these come to it in one order. `is_cut`: whether other ranks hold other elements.
    """

    whole: Any  # DTensor, whose module takes a second to import
    is_cut: bool
    _sent: SentGradient

    @staticmethod
    def __new__(cls, whole: Any) -> Self:
        """Take the place of the tensor that `whole` holds."""
        made: Self = nn.Parameter.__new__(cls, whole._local_tensor, requires_grad=False)
        made.whole, made.is_cut = whole, not whole.placements[0].is_replicate()
        whole._local_tensor = made
        return made

    def __init__(self, whole: Any) -> None:
        pass

    @property
    def grad(self) -> Tensor | None:
        """What its rank has of the gradient."""
        shown = self.whole.grad
        if shown is None or type(shown) is SentGradient:
            return None if shown is None else self._sent
        if shown.placements != self.whole.placements:
            self.whole.grad = shown = shown.redistribute(placements=self.whole.placements)
        local: Tensor = shown._local_tensor
        if getattr(shown, "_seen", shown._version) != shown._version:  # writes do not count in a DTensor's part
            torch.autograd.graph.increment_version(local)
        shown._seen = shown._version
        return local

    @grad.setter
    def grad(self, gradient: Tensor | None) -> None:
        if type(gradient) is SentGradient:
            shown = SentGradient(self.whole, gradient._name)
            shown.__dict__ = gradient.__dict__  # what is done to one is done to the other
            self._sent, self.whole.grad = gradient, shown
        else:
            of_whole = type(self.whole)
            self.whole.grad = None if gradient is None else of_whole(gradient, self.whole._spec, requires_grad=False)

    @property
    def requires_grad(self) -> bool:  # type: ignore[override]
        """Whether the parameter is trained."""
        return bool(self.whole.requires_grad)

    @property
    def _version(self) -> int:  # type: ignore[override]
        """Counts writes of both."""
        return int(Tensor._version.__get__(self) + self.whole._version)  # type: ignore[attr-defined]


def is_cut(parameter: Tensor) -> bool:
    """Whether other ranks hold other parts of it."""
    return isinstance(parameter, LocalPart) and parameter.is_cut


def local_part(parameter: Tensor) -> Tensor:
    """What an optimizer that was given a parameter holds of it: of a DTensor the part that is here, else all of it."""
    local = getattr(parameter, "_local_tensor", None)
    return local if isinstance(local, LocalPart) else parameter


def _part_of(parameter: Tensor) -> Tensor:
    """The same, for an optimizer that is given it.

    Raises ValueError for a DTensor that is not simply cut or replicated over one group of ranks.
    """
    mesh, held = getattr(parameter, "device_mesh", None), local_part(parameter)
    if mesh is None or isinstance(held, LocalPart):
        return held
    (placement, *others), shape = parameter.placements, tuple(parameter.shape)  # type: ignore[attr-defined]
    if others:
        raise ValueError(
            f"a parameter of shape {shape} is a DTensor over a mesh of {mesh.ndim} dimensions, {mesh}: this optimizer "
            'takes what is parallelised over one, as by parallelize_module(model, mesh["tp"], plan)'
        )
    if not (placement.is_replicate() or type(placement).__name__ in ("Shard", "_StridedShard")):
        raise ValueError(f"a parameter of shape {shape} is placed as {placement}, where Shard or Replicate can be")
    if not placement.is_replicate() and shape[placement.dim] < mesh.size():
        raise ValueError(
            f"dimension {placement.dim} of a parameter of shape {shape} is cut over {mesh.size()} ranks, some of which "
            "hold nothing of it: leave it whole"
        )
    return LocalPart(parameter)


def local_parts(group: dict[str, Any]) -> dict[str, Any]:
    """A parameter group as an optimizer holds it, a `LocalPart` in place of each DTensor; the same if it has none.

    Raises ValueError for a DTensor that is not simply cut or replicated over one group of ranks.
    """
    given = group["params"]
    if isinstance(given, set):  # torch refuses it
        return group
    listed = [given] if isinstance(given, Tensor) else list(given)
    parts = [(*one[:-1], _part_of(one[-1])) if isinstance(one, tuple) else _part_of(one) for one in listed]
    held = [one[-1] if isinstance(one, tuple) else one for one in parts]
    if any(isinstance(one, LocalPart) for one in held):
        return {**group, "params": parts}
    group["params"] = listed
    return group


def fsdp_parts(parameters: Sequence[Tensor]) -> list[Any]:
    """What FSDP2 has of these parts of parameters, which it gathers.

    Raises ValueError for one that is cut unevenly, as FSDP2 goes on from a padded copy of it, or that is gathered.
    """
    states = sys.modules.get("torch.distributed._composable_state")
    found = [] if states is None else [state() for state in list(states._module_state_mapping.values())]
    groups = [getattr(state, "_fsdp_param_group", None) for state in found]
    held = [*chain.from_iterable(group.fsdp_params for group in groups if group is not None)]
    given = {id(_whole(one)) for one in parameters}
    if any(id(getattr(one, "_unsharded_param", None)) in given for one in held):
        raise ValueError(
            "FSDP2 has gathered some of these parameters for a forward, and will free them: call model.reshard() "
            "before you give model.parameters() to an optimizer"
        )
    parts = [one for one in held if id(one.sharded_param) in given]
    for whole in (one.sharded_param for one in parts):
        (placement,), ranks = whole.placements, whole.device_mesh.size()
        if whole.shape[placement.dim] % ranks:
            raise ValueError(
                f"fully_shard has cut a parameter of shape {tuple(whole.shape)} along dimension {placement.dim}, which "
                f"{ranks} ranks do not divide, and goes on from a padded copy: cut another by shard_placement_fn, or "
                "pad the model, as resize_token_embeddings(pad_to_multiple_of=...) does"
            )
    return parts


class Stages:
    """The ranks of a pipeline, over whose stages the parameters that are noted here lie, while this lives.

    `comm`: these ranks. `ties`: by a parameter's id, the number of those that several of them hold, alike on all of
    them; `counted`: the ids of those among them that this rank counts where all stages are added up.
    """

    def __init__(self, comm: Communicator, ties: dict[int, int], counted: set[int]) -> None:
        self.comm, self.ties, self.counted = comm, ties, counted

    def note(self, parameters: Iterable[Tensor]) -> None:
        """Note on each that it lies on a stage."""
        for one in parameters:
            setattr(one, _ATTRIBUTE, _Noted(self))


class _Noted:
    """On a parameter: the stages. It is not saved."""

    def __init__(self, stages: Stages) -> None:
        self.stages = weakref.ref(stages)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


_ATTRIBUTE = "_thinwire_stages"


def stages_of(parameter: Tensor) -> Stages | None:
    """The pipeline on a stage of which a parameter lies; None if it lies on none."""
    noted: _Noted | None = getattr(_whole(parameter), _ATTRIBUTE, None)
    return None if noted is None else noted.stages()


def _whole(parameter: Tensor) -> Any:
    return parameter.whole if isinstance(parameter, LocalPart) else parameter


def kind_of(parameter: Tensor) -> tuple[bool, int]:
    """What the parameters of a bucket have in common, so that all ranks that hold the same elements round them alike:
    whether they are cut; and the number of one that several stages hold, which lies alone, else -1."""
    stages = stages_of(parameter)
    return is_cut(parameter), -1 if stages is None else stages.ties.get(id(_whole(parameter)), -1)


class Replica:
    """The ranks that together hold one replica of the model, of which an optimizer has the parameters that are here:
    all step alike, and what they add up over all elements, they add up over their own, counting each element once.

    `parts`: those over which tensor parallelism has cut parameters; others are whole on all of them, DTensors or not.
    `stages`: those over which a pipeline lies. `place`: this rank's number among so many. `part`: of all elements that
    they hold, those of what is whole on several counted on each, the part that is here.
    """

    part: float
    _elements: int = 0

    def __init__(self, parts: Communicator | None, stages: Stages | None) -> None:
        self.parts, self._stages = parts, stages
        self._comms = [one for one in (parts, None if stages is None else stages.comm) if one is not None]
        self.place = [0, 1]
        for comm in reversed(self._comms):
            self.place = [self.place[0] * comm.size + comm.rank, self.place[1] * comm.size]

    @classmethod
    def among(cls, comm: Communicator, parameters: Sequence[Tensor]) -> Replica | None:
        """Find the ranks with which `comm`'s replicas share a model; None if there are none.

        Raises ValueError where parameters lie over different ranks, or over those that average gradients.
        """
        meshes = [one.whole.device_mesh for one in parameters if isinstance(one, LocalPart)]
        stages = {id(one): one for one in map(stages_of, parameters)}
        if not meshes and {*stages} <= {id(None)}:
            return None
        if len(stages) > 1:
            raise ValueError(
                "parameters lie on stages of different pipelines, or some on none: give an optimizer "
                "pipeline.parameters(), of one pipeline"
            )
        ranks = [mesh.mesh.tolist() for mesh in meshes]
        if any(one != ranks[0] for one in ranks):
            raise ValueError(f"parameters are cut over different meshes, {ranks[0]} and others: use one for the model")
        (found,) = stages.values()
        over = {"parameters are cut over": ranks[0] if ranks else []}
        over["stages of a pipeline lie on"] = [] if found is None else list(found.comm.global_ranks)
        for what, others in over.items():
            if shared := set(others) & set(comm.global_ranks) - {comm.global_ranks[comm.rank]}:
                raise ValueError(
                    f"{what} ranks {others}, and gradients would be averaged over {list(comm.global_ranks)}: ranks "
                    f"{sorted(shared)} hold other elements than this one. Say which hold the same: "
                    'mesh=mesh["dp"], of a mesh of dimensions "pp", "dp" and "tp", as many of them as there are'
                )
        parts = TorchCommunicator(meshes[0], comm.timeout) if meshes else None
        if parts is not None:
            parts.attend()
        return cls(parts, found)

    def check(self, parameters: Sequence[Tensor], names: Sequence[str], settings: Mapping[str, Any]) -> None:
        """Raise ValueError, on all ranks that hold the same parameters, unless they hold the same of what is whole; and
        on all stages unless they have the same settings, but for names and the length of blocks, which follow from
        their parameters. Finds `part`. Collective."""
        if self.parts is not None:
            self._check_whole(self.parts, parameters, names)
        if self._stages is not None:
            check_same_on_every_rank(self._stages.comm, [], [], {**settings, "names": None, "block_size": None})
        self._elements += sum(one.numel() for one in parameters)
        total = torch.tensor(float(self._elements), dtype=torch.float64, device=parameters[0].device)
        self.all_reduce(total)
        self.part = self._elements / max(1.0, float(total))

    def _check_whole(self, comm: Communicator, parameters: Sequence[Tensor], names: Sequence[str]) -> None:
        whole = [(name, one) for name, one in zip(names, parameters, strict=True) if not is_cut(one)]
        mine = [[name, list(one.shape), checksum(one)] for name, one in whole]
        of_rank = gather(comm, mine, "compare what is not cut")
        for rank, theirs in zip(comm.global_ranks, of_rank, strict=True):
            if theirs != of_rank[0]:
                other = next((one for one, first in zip(theirs, of_rank[0], strict=False) if one != first), ["", []])
                raise ValueError(
                    f"rank {rank} and rank {comm.global_ranks[0]}, over which parameters are cut, differ in "
                    f"parameter {other[0]!r}, shape {tuple(other[1])}, which is whole: make the model from one seed, "
                    "or load the same weights, before it is parallelised"
                )

    def share_of_parts(self, parameter: Tensor) -> float:
        """The part of a sum over a parameter's elements, over `parts`, that this rank counts."""
        return 1.0 if self.parts is None or is_cut(parameter) else 1.0 / self.parts.size

    def share(self, parameter: Tensor) -> float:
        """The part of a sum over the replica's elements that this rank counts of a parameter's."""
        one, stages = id(_whole(parameter)), self._stages
        elsewhere = stages is not None and one in stages.ties and one not in stages.counted
        return 0.0 if elsewhere else self.share_of_parts(parameter)

    def add_parts(self, sums: Tensor, device: torch.device, op: Literal["sum", "max"] = "sum") -> Tensor:
        """Add up over `parts` what is of parameters one by one; parameters on `device` let it travel. Collective."""
        if self.parts is None:
            return sums
        there = sums.contiguous().to(device, copy=True)
        self.parts.all_reduce(there, op)
        return there.to(sums.device)

    def all_reduce(self, sums: Tensor) -> None:
        """Add `sums`, where parameters are, up over the replica, in place. Collective."""
        for comm in self._comms:
            comm.all_reduce(sums)

    def everywhere(self, holds: bool, device: torch.device) -> bool:
        """Whether it holds on all of them. Collective."""
        failing = torch.tensor(float(not holds), device=device)
        self.all_reduce(failing)
        return not bool(failing)

    def of_all(self, sums: Tensor, parameters: Sequence[Tensor]) -> list[float]:
        """What each parameter with elements of the whole model has, once, of `sums`, fp64 [parameters], over the
        elements that are here: the same on every rank. Collective."""
        shares = sums.new_tensor([self.share_of_parts(one) for one in parameters])
        numbers = self.add_parts(sums * shares, sums.device).tolist()
        mine = [number for number, one in zip(numbers, parameters, strict=True) if one.numel() and self.share(one)]
        if self._stages is None:
            return mine
        return [*chain.from_iterable(gather(self._stages.comm, mine, "look at all stages' parameters"))]

    def add_votes(self, votes: Tensor, ranks: int) -> int:
        """Add up over the replica, in place, what `norm_of_averages` has of so many `ranks`; of how many ranks digests
        are then. Stages' differ: of those there is left whether any stage's ranks had others. Collective."""
        if self.parts is not None:
            self.parts.all_reduce(votes)
            ranks *= self.parts.size
        if self._stages is not None:
            votes[2] = ranks * votes[3] != votes[2] ** 2
            votes[3].zero_()
            self._stages.comm.all_reduce(votes)
        return ranks

    def refuse(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Raise ValueError: hyperparameters of some ranks differ."""
        if self.parts is not None:
            check_same_on_every_rank(self.parts, [], groups, {})
        raise ValueError("hyperparameters differ between the ranks that have another stage of the pipeline")


_AT_ONCE = 1 << 20
_ODD = 0x5851F42D4C957F2D


@torch.no_grad()
def checksum(weights: Tensor) -> int:
    """A number that differs, but for chance, where a single bit does."""
    bits = weights.detach().reshape(-1).view(torch.int32 if weights.dtype == torch.float32 else torch.int16)
    total = 0
    for first in range(0, bits.numel(), _AT_ONCE):
        run = bits[first : first + _AT_ONCE].to(torch.int64)
        places = torch.arange(first + 1, first + 1 + run.numel(), device=run.device)
        total += int((run * (places * _ODD)).sum())
    return total % (1 << 64)
