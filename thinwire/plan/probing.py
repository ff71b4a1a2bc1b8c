"""Measures the cluster that it runs on, in about the time it is given: links, compression, and what of a transfer goes
on while the processor computes."""

from __future__ import annotations

import math
import socket
from dataclasses import dataclass

import torch

from thinwire.comm import Communicator
from thinwire.plan.calibration import Calibration, LinkFit, ProcessorRates
from thinwire.plan.errors import PlanError, require_positive
from thinwire.plan.probe_link import Stopwatch, fit_link, hidden_part
from thinwire.plan.probe_processor import processor_rates

__all__ = ["probe"]

# Parts of the time given: the overlap's, and of the rest the one of the link between nodes, where there are both.
_OVERLAP = 0.15
_BETWEEN = 0.65


@dataclass(frozen=True)
class _Place:
    """Where a rank lies: its node, by the order in which ranks name them, and its index there."""

    node: int
    index: int
    nodes: int
    ranks_per_node: int


def probe(comm: Communicator, seconds: float = 45.0, device: torch.device | str = "cpu") -> Calibration:
    """Measure links for about `seconds`, then the processor for a few more, with tensors on `device`. Collective; the
    result is the same on every rank.

    All nodes have to hold equally many ranks. On one rank there are no links to measure. Links between nodes are
    measured by one rank a node, those inside by all nodes at once.

    Raises PlanError on every rank where nodes differ, or `seconds` is not positive; CommunicationError where a rank
    fails.
    """
    require_positive("the seconds of a probe", seconds)
    place = _find_place(comm)
    device = torch.device(device)
    rates = processor_rates(Stopwatch(comm, device))
    between = comm.split(0 if place.index == 0 else None) if place.nodes > 1 else None
    inside = comm.split(place.node) if place.ranks_per_node > 1 else None
    for_links = (1 - _OVERLAP) * seconds
    for_between = for_links * (1.0 if place.ranks_per_node == 1 else _BETWEEN)
    for_inside = for_links * (1.0 if place.nodes == 1 else 1 - _BETWEEN)
    between_fit = _on_every_rank(comm, None if between is None else fit_link(Stopwatch(between, device), for_between))
    inside_fit = _on_every_rank(comm, None if inside is None else fit_link(Stopwatch(inside, device), for_inside))
    group, fit = (between, between_fit) if place.nodes > 1 else (inside, inside_fit)
    hidden = 1.0
    if fit is not None:
        mine = None if group is None else hidden_part(Stopwatch(group, device), fit, _OVERLAP * seconds)
        hidden = min(float(one) for one in comm.all_gather_bytes(b"" if mine is None else repr(mine).encode()) if one)
    return Calibration(
        backend=comm.backend,
        nodes=place.nodes,
        ranks_per_node=place.ranks_per_node,
        between=between_fit,
        inside=inside_fit,
        processor=ProcessorRates(**rates, overlap=hidden),
    )


def _find_place(comm: Communicator) -> _Place:
    hosts = [name.decode() for name in comm.all_gather_bytes(socket.gethostname().encode())]
    order = list(dict.fromkeys(hosts))
    counts = {host: hosts.count(host) for host in order}
    if len(set(counts.values())) > 1:
        listed = ", ".join(f"{host} {count}" for host, count in counts.items())
        raise PlanError(f"a probe needs equally many ranks on every node, got {listed}: start it on an even set")
    mine = hosts[comm.rank]
    return _Place(order.index(mine), hosts[: comm.rank].count(mine), len(order), counts[mine])


def _on_every_rank(comm: Communicator, fit: LinkFit | None) -> LinkFit | None:
    """The slowest of the fits that some ranks made, on all of them; None where none did."""
    raw = comm.all_gather_bytes(b"" if fit is None else fit.model_dump_json().encode())
    fits = [LinkFit.model_validate_json(one) for one in raw if one]
    return min(fits, key=_rate, default=None)


def _rate(fit: LinkFit) -> float:
    return math.prod(one.bytes_per_second for one in fit.collectives.values())
