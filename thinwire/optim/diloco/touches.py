"""A few of the workers' weights, which are averaged after every step, in random blocks by a common seed (SPARTA)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.comm import Communicator
from thinwire.comm.collectives import Work
from thinwire.optim.diloco.fragments import Piece
from thinwire.optim.diloco.outer_weights import OuterWeights

_BLOCK = 64
"""Elements that leave together, so that memory is read in runs."""


@dataclass(frozen=True)
class _Sent:
    """What has left. `places`: by parameter the elements; `mine`: of all of them end to end, bf16, less the outer
    weights; `received`: of each rank."""

    places: list[tuple[int, Tensor]]
    mine: Tensor
    received: Tensor
    work: Work


class Touches:
    """Averages `part` of the weights over all workers while the next step is computed.

    SPARTA (EXO Labs 2025): w += mean of w over workers - w, each as it was before the step, in blocks that leave in a
    random order, all once before any leaves again. Steps follow from their number, so that nothing is saved: what a
    checkpoint finds in flight leaves anew. Where some worker's values are not finite, none is taken.

    `worker_of`: of each rank, whose weights those of its worker have alike.
    """

    def __init__(self, part: float, comm: Communicator, worker_of: Sequence[int], weights: OuterWeights) -> None:
        self.comm = comm
        self._weights = weights
        self._worker = weights.worker
        self._workers = len(set(worker_of))
        shares = [1 / worker_of.count(one) for one in worker_of]
        self._shares = torch.tensor(shares, device=self._worker.parameters[0].device).unsqueeze(1)
        # Of each piece of the outer weights that blocks are cut from: fragment, piece, and the first block behind it.
        self._pieces = [(number, piece) for number, one in enumerate(weights.fragments) for piece in one.pieces]
        counts = torch.tensor([-(-piece.numel // _BLOCK) for _, piece in self._pieces])
        self._ends = counts.cumsum(0)
        self._blocks = int(self._ends[-1])
        self._count = max(1, round(part * self._blocks))
        self._order: tuple[int, Tensor] | None = None
        self._sent: _Sent | None = None

    @torch.no_grad()
    def send(self, step: int) -> None:
        """Send this worker's weights of a step, unless they are in flight. Collective."""
        if self._sent is not None:
            return
        places, mine = list[tuple[int, Tensor]](), list[Tensor]()
        for (fragment, piece), elements in self._chosen(step):
            outer = self._weights.outer(fragment)[piece.offset + elements]
            own = self._worker.weights(piece.parameter)[piece.start + elements]
            places.append((piece.parameter, piece.start + elements))
            mine.append(own.sub_(outer).bfloat16())
        together = torch.cat(mine)
        received = together.new_empty(self.comm.size, together.numel())
        self._sent = _Sent(places, together, received, self.comm.all_gather(received, together, async_op=True))

    @torch.no_grad()
    def take_in(self) -> None:
        """Have the mean of what was sent in the place of what this worker had of it."""
        assert self._sent is not None, "take_in() follows send()"
        sent, self._sent = self._sent, None
        sent.work.wait()
        change = (sent.received * self._shares).sum(0).div_(self._workers).sub_(sent.mine)
        if not bool(change.isfinite().all()):
            return
        parts = torch.split(change, [len(one) for _, one in sent.places])
        for (number, elements), values in zip(sent.places, parts, strict=True):
            parameter = self._worker.parameters[number]
            if parameter.is_contiguous():
                parameter.view(-1).index_add_(0, elements, values)
            else:
                self._worker.write(number, 0, self._worker.weights(number).clone().index_add_(0, elements, values))

    def forget(self) -> None:
        """Leave weights as they are, whatever was sent of them before."""
        if self._sent is not None:
            self._sent.work.wait()
            self._sent = None

    def _chosen(self, step: int) -> Iterator[tuple[tuple[int, Piece], Tensor]]:
        """The pieces that blocks of a step are in, and which of their elements these are."""
        turns = -(-self._blocks // self._count)
        cycle, turn = divmod(step, turns)
        if self._order is None or self._order[0] != cycle:
            self._order = cycle, torch.randperm(self._blocks, generator=torch.Generator("cpu").manual_seed(cycle))
        blocks = self._order[1][turn * self._count : (turn + 1) * self._count].sort().values
        device = self._worker.parameters[0].device
        for number, inside in zip(*_runs(torch.searchsorted(self._ends, blocks, right=True)), strict=True):
            fragment, piece = self._pieces[number]
            first = blocks[inside] - (self._ends[number - 1] if number else 0)
            elements = (first.unsqueeze(1) * _BLOCK + torch.arange(_BLOCK)).flatten()
            yield (fragment, piece), elements[elements < piece.numel].to(device)


def _runs(sorted_numbers: Tensor) -> tuple[list[int], list[slice]]:
    """Which numbers there are, and where each begins and ends."""
    found, counts = torch.unique_consecutive(sorted_numbers, return_counts=True)
    ends = counts.cumsum(0).tolist()
    return found.tolist(), [slice(end - count, end) for end, count in zip(ends, counts.tolist(), strict=True)]
