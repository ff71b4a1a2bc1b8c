"""The outer weights, which all ranks have in common, beside the worker's own, and which of the two parameters show; and
an outer momentum kept whole by every worker, so that no owner takes any along when it dies."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from thinwire.optim.diloco.fragments import Fragment, Piece
from thinwire.optim.diloco.outer import OuterSettings, OuterState, WeightPair
from thinwire.optim.diloco.worker import Worker

_IN_CACHE = 1 << 16


class OuterWeights:
    """fp32 outer weights by fragment, [elements], and a worker's replica of them.

    `shown`: parameters show the outer weights. fp32 parameters then have changed places with them, so that no further
    copy is held; 16-bit parameters are rounded from them, and the worker's master weights stay as they are.
    """

    def __init__(self, worker: Worker, fragments: Sequence[Fragment]) -> None:
        self.shown = False
        self._worker = worker
        self._fragments = fragments
        self._versions: list[int] = []
        device = worker.parameters[0].device
        self._kept = [torch.zeros(one.numel, device=device) for one in fragments]
        self._follow_replica()

    def outer(self, fragment: int) -> Tensor:
        """The outer weights of a fragment, to be read."""
        return torch.cat([pair.outer for pair in self.pairs(fragment)]) if self.shown else self._kept[fragment]

    def replica(self, fragment: int) -> Tensor:
        """The worker's own, to be read."""
        return torch.cat([pair.own for pair in self.pairs(fragment)])

    def pairs(self, fragment: int) -> list[WeightPair]:
        """Both, piece by piece, which lie end to end; to be read."""
        kept, found = self._kept[fragment], list[WeightPair]()
        for piece in self._fragments[fragment].pieces:
            here, there = kept[piece.offset : piece.offset + piece.numel], self._of_worker(piece)
            have_changed_places = self.shown and self._single(piece)
            found.append(WeightPair(there, here) if have_changed_places else WeightPair(here, there))
        return found

    def subtract(self, fragment: int, update: Tensor, mix: float) -> None:
        """Take an outer step: w° -= update, and w = mix · w + (1 - mix) · w°; rounded once where `update` is fp64."""
        shown = self.shown
        self.show(False)
        kept = self._kept[fragment]
        for piece, first, last in self._portions(fragment):
            place = slice(piece.offset + first, piece.offset + last)
            outer = kept[place]
            if update.dtype == outer.dtype:
                outer.sub_(update[place])
            else:
                outer.copy_(outer - update[place])
            replica = outer if mix == 0.0 else torch.lerp(outer, self._of_worker(piece)[first:last], mix)
            self._worker.write(piece.parameter, piece.start + first, replica)
        self.show(shown)

    def set(self, fragment: int, outer: Tensor, replica: Tensor) -> None:
        """Write both."""
        shown = self.shown
        self.show(False)
        self._kept[fragment].copy_(outer)
        for piece in self._fragments[fragment].pieces:
            self._worker.write(piece.parameter, piece.start, replica[piece.offset : piece.offset + piece.numel])
        self.show(shown)

    def note_met(self) -> None:
        """Note that all workers' weights are the outer ones now."""
        self._met = self._versions_now()

    def take_over_written(self) -> None:
        """If parameters were written since `note_met`, on every rank alike: have the outer weights
        follow."""
        if not self.shown and self._versions_now() != self._met:
            self._follow_replica()

    def show(self, outer: bool) -> None:
        """Let parameters show the outer weights, or the worker's own.

        Raises RuntimeError where parameters were changed while they showed the outer weights.
        """
        if outer == self.shown:
            return
        if not outer and self._versions_now() != self._versions:
            raise RuntimeError(
                "parameters were changed after eval() and before train(), while they showed the weights that all "
                "workers have in common: what one rank writes there others do not have. Change weights in training, "
                "after optimizer.synchronize_weights() on every rank"
            )
        for kept, fragment in zip(self._kept, self._fragments, strict=True):
            for piece in fragment.pieces:
                here, single = kept[piece.offset : piece.offset + piece.numel], self._single(piece)
                own = self._of_worker(piece).clone() if single or self.shown else here
                self._worker.show(piece.parameter, piece.start, here if single else own)
                if single:
                    here.copy_(own)
        self.shown = outer
        self._versions = self._versions_now()

    def _versions_now(self) -> list[int]:
        return [one._version for one in self._worker.parameters]

    def _follow_replica(self) -> None:
        for number, kept in enumerate(self._kept):
            kept.copy_(self.replica(number))
        self.note_met()

    def _single(self, piece: Piece) -> bool:
        return self._worker.parameters[piece.parameter].dtype == torch.float32

    def _of_worker(self, piece: Piece) -> Tensor:
        return self._worker.weights(piece.parameter)[piece.start : piece.start + piece.numel]

    def _portions(self, fragment: int) -> Iterator[tuple[Piece, int, int]]:
        """(Piece, first element, last) of as many elements as caches hold on a CPU, where new memory for a whole piece
        costs more than what is done with it; of whole pieces where the worker can write no less at once."""
        for piece in self._fragments[fragment].pieces:
            parameter = self._worker.parameters[piece.parameter]
            cut = parameter.device.type == "cpu" and self._single(piece) and parameter.is_contiguous()
            most = _IN_CACHE if cut else max(1, piece.numel)
            for first in range(0, piece.numel, most):
                yield piece, first, min(first + most, piece.numel)


class KeptMomentum:
    """fp32 momentum by fragment, [elements]: exact where this worker is the owner, else what outer steps tell of it.

    An owner sends u = η (a + μ v) with v = μ v' + a (see OuterStep), so that v = (u / η + μ v') / (1 + μ). What the
    codec loses of u fades by a factor of μ / (1 + μ) with each outer step.
    """

    def __init__(self, numels: Sequence[int], device: torch.device) -> None:
        self._values = [torch.zeros(numel, device=device) for numel in numels]

    def of(self, fragment: int) -> Tensor:
        """A fragment's, to be read and written."""
        return self._values[fragment]

    @property
    def nbytes(self) -> int:
        """Of all fragments."""
        return sum(one.nbytes for one in self._values)

    def follow(self, fragment: int, update: Tensor, settings: OuterSettings, owner: OuterState) -> None:
        """Take over what an outer step `update`, [elements], tells; and this owner's own."""
        kept = self._values[fragment]
        if settings.lr > 0:  # else an outer step tells nothing
            kept.mul_(settings.momentum).add_(update.float(), alpha=1 / settings.lr).div_(1 + settings.momentum)
        own = kept[owner.own]
        own.copy_(owner.momentum[: own.numel()])

    def hand_on(self, fragment: int, before: OuterState, after: OuterState, *, with_residuals: bool) -> None:
        """Give new owners their part of the momentum, and `with_residuals` a worker what it owes itself.

        The residual of what this worker sends stays; of what it owns, where it owned it before.
        """
        own = self._values[fragment][after.own]
        after.momentum[: own.numel()].copy_(own)
        if not with_residuals:
            return
        old, new = before.worker_residual, after.worker_residual
        if old is not None and new is not None:
            numel = min(old.numel(), new.numel())
            new[:numel].copy_(old[:numel])
        old, new = before.owner_residual, after.owner_residual
        first, last = max(before.own.start, after.own.start), min(before.own.stop, after.own.stop)
        if old is not None and new is not None and first < last:
            new[first - after.own.start : last - after.own.start].copy_(
                old[first - before.own.start : last - before.own.start]
            )
