"""Agreements of all ranks: on one outcome, so that an error that only some of them can see is raised by every one and
none goes on alone into a collective that the others never join; on parameters and settings; and on nodes, inside
which sending is cheap."""

from __future__ import annotations

import hashlib
import json
import operator
import os
import socket
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor
from typing_extensions import override

from thinwire.comm.collectives import Work
from thinwire.comm.communicator import Communicator

Result = TypeVar("Result")
Nodes = Literal["auto", "flat"] | Sequence[int]
"""Which ranks share a node: as launcher and hosts say, none do, or the node's number for each rank."""


def raise_together(comm: Communicator, error: Exception | None, doing: str) -> None:
    """Raise `error` where there is one, and on other ranks a ValueError that says which rank had which. Collective.

    `doing` completes "rank 3 could not ...".
    """
    mine = "" if error is None else f"{type(error).__name__}: {error}"
    # Names that it quotes, of files above all, may hold what is no text.
    messages = comm.all_gather_bytes(mine.encode(errors="backslashreplace"), doing)
    if error is not None:
        raise error
    for rank, message in zip(comm.global_ranks, messages, strict=True):
        if message:
            raise ValueError(f"rank {rank} could not {doing}: {message.decode()}")


def on_every_rank(
    comm: Communicator, action: Callable[[], Result], doing: str, errors: tuple[type[Exception], ...]
) -> Result:
    """Call `action()` on every rank; where it raises one of `errors` on some rank, raise on all. Collective."""
    try:
        result = action()
    except errors as error:
        raise_together(comm, error, doing)
        raise
    raise_together(comm, None, doing)
    return result


def gather(comm: Communicator, value: object, doing: str) -> list[Any]:
    """What each rank gives, by rank: small, and what JSON can hold. Collective. `doing`: see `raise_together`."""
    return [json.loads(one) for one in comm.all_gather_bytes(json.dumps(value).encode(), doing)]


def first_difference(comm: Communicator, mine: Mapping[str, Any], doing: str) -> tuple[int, str, Any, Any] | None:
    """(Rank, name, value there, value on rank 0) of the first of `mine` that some rank has otherwise than rank 0, the
    same on every rank; None where there is none. Collective."""
    everyone = gather(comm, mine, doing)
    for rank, theirs in enumerate(everyone):
        for name in {**everyone[0], **theirs}:
            if repr(there := theirs.get(name)) != repr(first := everyone[0].get(name)):  # NaN is NaN
                return rank, name, there, first
    return None


def check_same_on_every_rank(
    comm: Communicator, parameters: Sequence[Tensor], groups: Sequence[Mapping[str, Any]], settings: Mapping[str, Any]
) -> None:
    """Raise ValueError on every rank, naming the first difference, unless all hold the same parameters and settings.

    Learning rates are compared too, and which parameters of the groups are trained: ranks that step differently drift
    apart without an error.
    """
    mine = {"number of parameters is": str(len(parameters))}
    mine |= {f"parameter {n} has": f"shape {tuple(one.shape)}, {one.dtype}" for n, one in enumerate(parameters)}
    trained = [one.requires_grad for group in groups for one in group.get("params", ())]
    for name, given in {**settings, "requires_grad": trained}.items():
        value = json.loads(json.dumps(given))  # where a tuple is a list
        several = {f"{name}[{n}]": one for n, one in enumerate(value)} if isinstance(value, list) else {name: value}
        mine |= {f"{name} is": repr(one) for name, one in several.items()}
    compared = [{name: _comparable(one) for name, one in group.items() if name not in _NAMES} for group in groups]
    mine["parameter groups are"] = repr(json.loads(json.dumps(compared)))
    if (found := first_difference(comm, mine, "compare parameters and settings")) is not None:
        rank, what, theirs, first = found
        raise ValueError(
            f"rank {comm.global_ranks[rank]} and rank {comm.global_ranks[0]} differ: {what} {theirs} against {first} "
            f"on rank {comm.global_ranks[0]}. Every rank must have the same model and the same settings"
        )


_NAMES = ("params", "param_names")


def _comparable(value: Any) -> Any:
    if isinstance(value, Tensor):
        if value.numel() == 1:
            return float(value)
        return [list(value.shape), hashlib.sha256(value.cpu().contiguous().numpy().tobytes()).hexdigest()]
    return value if isinstance(value, int | float | str | list | tuple | None) else type(value).__name__


@dataclass(frozen=True)
class NodeGroups:
    """`node_of[rank]`: the number of the node that a rank runs on; nodes are numbered by their lowest rank."""

    node_of: tuple[int, ...]

    @classmethod
    def of(cls, names: Sequence[object]) -> NodeGroups:
        """From a name of its node for each rank, alike where ranks share a node."""
        numbers: dict[object, int] = {}
        return cls(tuple(numbers.setdefault(name, len(numbers)) for name in names))

    @property
    def members(self) -> list[list[int]]:
        """The ranks of each node."""
        ranks: list[list[int]] = [[] for _ in range(max(self.node_of) + 1)]
        for rank, node in enumerate(self.node_of):
            ranks[node].append(rank)
        return ranks

    @property
    def lanes(self) -> int:
        """How many ranks of every node can speak for it: as many as the smallest node has."""
        return min(map(len, self.members))

    @property
    def hierarchical(self) -> bool:
        """Whether there are several nodes, and a node of several ranks."""
        return 1 < len(self.members) < len(self.node_of)

    def part_between(self, rank: int) -> float:
        """The part of this rank's peers that are on other nodes."""
        elsewhere = sum(node != self.node_of[rank] for node in self.node_of)
        return elsewhere / max(1, len(self.node_of) - 1)


def check_nodes(nodes: object) -> None:
    """Raise ValueError unless `nodes` is "auto", "flat" or has whole numbers."""
    given: Any = nodes
    try:
        known = given in ("auto", "flat") if isinstance(given, str) else [operator.index(node) for node in given]
    except TypeError:
        known = False
    if known is False:
        raise ValueError(f"nodes must be 'auto', 'flat' or the node's number for each rank, got {nodes!r}")


def agree_on_nodes(
    comm: Communicator, node_of: Sequence[int] | None = None, environ: Mapping[str, str] | None = None
) -> NodeGroups:
    """The nodes of `comm`'s ranks: as given, or by host name and, under torchrun, the agent that started them.

    Collective. Raises ValueError, on every rank, unless each gives the same, with a node for every rank.
    """
    environ = os.environ if environ is None else environ
    agent = environ.get("GROUP_RANK", "") if "TORCHELASTIC_RUN_ID" in environ else ""
    own = None if node_of is None else [operator.index(node) for node in node_of]
    answers = gather(comm, {"name": f"{socket.gethostname()} {agent}", "given": own}, "find nodes")
    given = answers[0]["given"]
    for rank, answer in enumerate(answers):
        if answer["given"] != given:
            raise ValueError(
                f"rank {comm.global_ranks[rank]} has nodes={answer['given']} and rank {comm.global_ranks[0]} {given}: "
                "every rank must group them alike"
            )
    if given is not None and len(given) != comm.size:
        raise ValueError(f"nodes must name the node of each of the {comm.size} ranks, got {len(given)} numbers")
    return NodeGroups.of([answer["name"] for answer in answers] if given is None else given)


class _Shared(Work):
    """What `first` brings from other nodes, and `share` then gives to the ranks of this one."""

    def __init__(self, first: Work, share: Callable[[], Work]) -> None:
        super().__init__()
        self._first, self._share = first, share

    @override
    def is_completed(self) -> bool:
        return False

    @override
    def wait(self, timeout: float | None = None) -> None:
        self._first.wait(timeout)
        self._share()


class NodeLinks:
    """A rank's communicators by node. Collective to make.

    `inside`: the ranks of this node. `between`: the ranks that have the same place, `lane`, in their nodes, in the
    nodes' order; both None where the smallest node has no such place.
    """

    def __init__(self, comm: Communicator, groups: NodeGroups) -> None:
        self.groups = groups
        self.node = groups.node_of[comm.rank]
        self.num_nodes = len(groups.members)
        self.lanes = groups.lanes
        self.size, self.global_ranks = comm.size, comm.global_ranks
        place = groups.members[self.node].index(comm.rank)
        self.lane = place if place < self.lanes else None
        inside = comm.split(self.node)
        assert inside is not None
        self.inside = inside
        self.between = comm.split(self.lane, key=self.node)

    def number_by_lane(self, comm: Communicator) -> Communicator:
        """Make a copy of `comm` in which ranks of one lane follow each other, in the order of their nodes, which have
        equal numbers of ranks. Collective."""
        assert self.lane is not None, "nodes are alike"
        numbered = comm.split(0, key=self.lane * self.num_nodes + self.node)
        assert numbered is not None
        return numbered

    def add_up(self, vector: Tensor, out: Tensor | None = None) -> Tensor:
        """Return this rank's lane of the sum of its node's vectors, fp32, each with an equal part for each lane; empty
        on a rank without one. It is times nodes / ranks: the mean over nodes is then that of ranks."""
        parts = vector.view(self.lanes, vector.numel() // self.lanes)
        if self.inside.size > self.lanes:
            idle = parts.new_zeros(self.inside.size - self.lanes, parts.shape[1])
            parts = torch.cat([parts, idle])
        received = torch.empty_like(parts)
        self.inside.all_to_all(received, parts)
        total = torch.empty_like(received[0], dtype=torch.float32) if out is None else out
        total.copy_(received[0])
        for other in received[1:]:
            total.add_(other)
        return total.mul_(self.num_nodes / self.size)

    def all_gather(self, output: Tensor, input: Tensor, *, async_op: bool = False) -> Work:
        """Gather as the Communicator of `number_by_lane` does: what comes from other nodes comes to a node once, and is
        shared there when it is waited for, which every rank does in the same order."""
        assert self.between is not None, "nodes are alike"
        lane = input.new_empty(self.num_nodes * input.numel())
        first = self.between.all_gather(lane, input.view(-1), async_op=True)
        work = _Shared(first, partial(self.inside.all_gather, output, lane))
        if not async_op:
            work.wait()
        return work

    @property
    def bytes_inside(self) -> int:
        """Bytes this rank has sent to ranks of its node."""
        return self.inside.traffic.bytes_sent

    @property
    def bytes_between(self) -> int:
        """Bytes this rank has sent to other nodes."""
        return self.between.traffic.bytes_sent if self.between is not None else 0

    def close(self) -> None:
        """Release both. Collective."""
        self.inside.close()
        if self.between is not None:
            self.between.close()


def link_nodes(comm: Communicator, nodes: Nodes, *, alike: bool = False) -> tuple[NodeGroups, NodeLinks | None]:
    """The nodes of `comm`'s ranks, and communicators by node if some have several ranks and `nodes` is not "flat".

    `alike`: nodes must have equal numbers of ranks; if hosts have not, rank 0 warns and nothing goes by node.
    Collective. Raises ValueError, on every rank, for nodes that cannot be.
    """
    groups = agree_on_nodes(comm, None if isinstance(nodes, str) else nodes)
    if nodes == "flat" or not groups.hierarchical:
        return groups, None
    sizes = list(map(len, groups.members))
    if alike and len(set(sizes)) > 1:
        told = f"nodes have {sizes} ranks, and every rank owns a shard: they go by node only if all have equally many"
        if nodes != "auto":
            raise ValueError(f"{told}. Group ranks so, use nodes='flat', or OneBitAdam at stage 0, which takes any")
        if comm.rank == 0:
            warnings.warn(f"{told}. Every rank sends for itself, as with nodes='flat'", RuntimeWarning, stacklevel=2)
        return groups, None
    return groups, NodeLinks(comm, groups)
