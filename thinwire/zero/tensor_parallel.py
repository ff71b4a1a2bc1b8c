"""Parameters that torch's tensor parallelism has cut: the part that a rank holds, and the ranks that hold the others;
and what tells whether two ranks hold the same."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn

from thinwire.comm import Communicator
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


class TensorParallel:
    """The ranks over which tensor parallelism has cut an optimizer's parameters: all step alike, and what they add up
    over parameters, they add up over their parts. Those that are whole on all of them, DTensors or not, count once.

    `comm`: these ranks. `place`: this one's number among so many.
    """

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm
        self.place = [comm.rank, comm.size]

    @classmethod
    def among(cls, comm: Communicator, parameters: Sequence[Tensor]) -> TensorParallel | None:
        """Find the ranks with which `comm`'s replicas share parameters; None if there are none. Collective.

        Raises ValueError where parameters are cut over different ranks, or over those that average gradients.
        """
        meshes = [one.whole.device_mesh for one in parameters if isinstance(one, LocalPart)]
        if not meshes:
            return None
        ranks = [mesh.mesh.tolist() for mesh in meshes]
        if any(one != ranks[0] for one in ranks):
            raise ValueError(f"parameters are cut over different meshes, {ranks[0]} and others: use one for the model")
        if shared := set(ranks[0]) & set(comm.global_ranks) - {comm.global_ranks[comm.rank]}:
            raise ValueError(
                f"parameters are cut over ranks {ranks[0]}, and gradients would be averaged over "
                f"{list(comm.global_ranks)}: ranks {sorted(shared)} hold other elements than this one. Say which hold "
                'the same: mesh=mesh["dp"], of a mesh of dimensions "dp" and "tp"'
            )
        return cls(Communicator.of(meshes[0], comm.timeout))

    def check_whole(self, parameters: Sequence[Tensor], names: Sequence[str]) -> None:
        """Raise ValueError, on all of them, unless they hold the same of what is whole. Collective."""
        comm = self.comm
        whole = [(name, one) for name, one in zip(names, parameters, strict=True) if not is_cut(one)]
        mine = json.dumps([[name, list(one.shape), checksum(one)] for name, one in whole])
        of_rank = [json.loads(one) for one in comm.all_gather_bytes(mine.encode(), "compare what is not cut")]
        for rank, theirs in zip(comm.global_ranks, of_rank, strict=True):
            if theirs != of_rank[0]:
                other = next((one for one, first in zip(theirs, of_rank[0], strict=False) if one != first), ["", []])
                raise ValueError(
                    f"rank {rank} and rank {comm.global_ranks[0]}, over which parameters are cut, differ in "
                    f"parameter {other[0]!r}, shape {tuple(other[1])}, which is whole: make the model from one seed, "
                    "or load the same weights, before it is parallelised"
                )

    def share(self, parameter: Tensor) -> float:
        """The part of a sum over a parameter's elements that this rank counts."""
        return 1.0 if is_cut(parameter) else 1.0 / self.comm.size

    def add_up(self, sums: Tensor, device: torch.device, op: Literal["sum", "max"] = "sum") -> Tensor:
        """Add `sums` up over the ranks, which parameters on `device` let travel. Collective."""
        there = sums.contiguous().to(device, copy=True)
        self.comm.all_reduce(there, op)
        return there.to(sums.device)

    def everywhere(self, holds: bool, device: torch.device) -> bool:
        """Whether it holds on all of them. Collective."""
        return not bool(self.add_up(torch.tensor(float(not holds)), device))


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
