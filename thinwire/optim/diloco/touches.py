"""A few of the workers' weights, which are averaged after every step, in random blocks by a common seed (SPARTA)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from thinwire.comm import Communicator
from thinwire.compress.codecs import make_codec
from thinwire.compress.exchange import Exchange
from thinwire.compress.packet_layout import CodecName
from thinwire.optim.diloco.fragments import Piece
from thinwire.optim.diloco.outer_weights import OuterWeights

_BLOCK = 256
"""Elements that leave together, so that memory is read in runs, and share their scales."""

_TOO_COARSE = ("stat2", "sign1")
"""Codecs that lose about as much of a weight's way from the outer one as workers differ in."""


class Touches:
    """Averages `part` of the weights over all workers while the next step is computed.

    SPARTA (EXO Labs 2025), both legs through `codec`, or `int4` if that is finer: w += C(mean of C(x) over workers) -
    C(x), with x what the weights were before the step, less the outer weights. What the codec loses of x a worker keeps
    in its weights. Blocks leave in a random order, all once before any leaves again. Steps follow from their number, so
    that nothing is saved: what a checkpoint finds in flight leaves anew. If some worker's values are not finite, none
    is taken.

    `worker_of`: of each rank, whose weights those of its worker have alike.
    """

    def __init__(
        self, part: float, comm: Communicator, worker_of: Sequence[int], weights: OuterWeights, codec: CodecName
    ) -> None:
        self.comm = comm
        self._weights, self._worker = weights, weights.worker
        # Of each piece of the outer weights that blocks are cut from: fragment, piece, and the first block behind it.
        self._pieces = [(number, piece) for number, one in enumerate(weights.fragments) for piece in one.pieces]
        counts = torch.tensor([-(-piece.numel // _BLOCK) for _, piece in self._pieces])
        self._ends = counts.cumsum(0)
        self._blocks = int(self._ends[-1])
        self._count = max(1, round(part * self._blocks))
        self._order: tuple[int, Tensor] | None = None
        device = self._worker.parameters[0].device
        # Never committed: its residuals, which begin with zeros, stay so, and tell after leg 1 what the codec lost.
        fine = make_codec("int4" if codec in _TOO_COARSE else codec, _BLOCK)
        self._exchange = Exchange(comm, self._count * _BLOCK, fine, device=device)
        workers = len(set(worker_of))
        self._exchange.weights = [1 / (worker_of.count(one) * workers) for one in worker_of]
        self._sent: list[tuple[int, Tensor, slice]] = []  # a parameter, its elements, and where they are in the payload
        self._before = torch.zeros(0)

    @torch.no_grad()
    def send(self, step: int) -> None:
        """Send this worker's weights of a step, unless they are in flight. Collective."""
        if self._sent:
            return
        payload, first = self._exchange.payload.zero_(), 0
        for (fragment, piece), elements, blocks in self._chosen(step):
            outer = self._weights.outer(fragment)[piece.offset + elements]
            place = slice(first, first + len(elements))
            payload[place] = self._worker.weights(piece.parameter)[piece.start + elements].sub_(outer)
            self._sent.append((piece.parameter, piece.start + elements, place))
            first += blocks * _BLOCK
        self._before = payload.clone()
        self._exchange.start(step)

    def pass_on(self) -> None:
        """Send the mean of this rank's part to the others, once it has come. Collective."""
        if not self._exchange.brought:
            self._exchange.advance(adjust=lambda average, place: None)  # a mean by `weights`

    @torch.no_grad()
    def take_in(self) -> None:
        """Have the mean of what was sent in the place of what this worker sent of it."""
        change = self._arrived()
        sent, self._sent = self._sent, []
        if change is None:
            return
        for number, elements, place in sent:
            parameter = self._worker.parameters[number]
            if parameter.is_contiguous():
                parameter.view(-1).index_add_(0, elements, change[place])
            else:
                self._worker.write(
                    number, 0, self._worker.weights(number).clone().index_add_(0, elements, change[place])
                )

    def forget(self) -> None:
        """Leave weights as they are, whatever was sent of them before. Collective."""
        if self._sent:
            self.pass_on()
            self._arrived()
            self._sent = []

    def _arrived(self) -> Tensor | None:
        """By how much all that was sent differs from the mean; None if some of it was not finite."""
        self._exchange.wait()
        finite = self._exchange.outcome().finite
        mean = torch.empty_like(self._before)
        self._exchange.read(mean)
        lost = self._exchange.next_residual
        change = mean.sub_(self._before.sub_(lost)) if finite else None
        self._exchange.revert()
        return change

    def _chosen(self, step: int) -> Iterator[tuple[tuple[int, Piece], Tensor, int]]:
        """The pieces that blocks of a step are in, which of their elements these are, and how many blocks."""
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
            yield (fragment, piece), elements[elements < piece.numel].to(device), len(first)


def _runs(sorted_numbers: Tensor) -> tuple[list[int], list[slice]]:
    """Which numbers there are, and where each begins and ends."""
    found, counts = torch.unique_consecutive(sorted_numbers, return_counts=True)
    ends = counts.cumsum(0).tolist()
    return found.tolist(), [slice(end - count, end) for end, count in zip(ends, counts.tolist(), strict=True)]
