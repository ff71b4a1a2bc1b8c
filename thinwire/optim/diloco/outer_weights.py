"""The outer weights, which all ranks have in common, beside the worker's own, and which of the two parameters show;
state of inner optimizers that workers share, in fragments of its own that leave behind those of the weights; and an
outer momentum kept whole by every worker, so that no owner takes any along when it dies."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from thinwire.comm import Communicator
from thinwire.comm.agreement import gather
from thinwire.comm.relay import WorkerGroup
from thinwire.optim.diloco.fragments import Fragment, OuterSettings, Piece, Timetable
from thinwire.optim.diloco.outer import OuterState, OuterStep, WeightPair
from thinwire.optim.diloco.worker import Worker

_IN_CACHE = 1 << 16


class OuterWeights:
    """fp32 outer weights by fragment, [elements], and a worker's replica of them. So is what all have in common of an
    inner optimizer's shared state, in fragments of their own, which begin with zeros.

    `shown`: parameters show the outer weights. fp32 parameters then have changed places with them, so that no further
    copy is held; 16-bit parameters are rounded from them, and the worker's master weights stay as they are.
    """

    def __init__(self, worker: Worker, fragments: list[Fragment]) -> None:
        self.shown = False
        self.worker = worker
        self.fragments = fragments
        self._versions: list[int] = []
        device = worker.parameters[0].device
        self._kept = [torch.zeros(one.numel, device=device) for one in fragments]
        self._follow_replica()

    def hold_state(self, made: Sequence[Fragment]) -> None:
        """Hold fragments of state, with nothing in common yet, behind those of weights, in the place of any there."""
        count = sum(not one.kind for one in self.fragments)
        self.fragments[count:] = made
        self._kept[count:] = [torch.zeros(one.numel, device=self._kept[0].device) for one in made]

    def outer(self, fragment: int) -> Tensor:
        """The outer weights of a fragment, to be read."""
        return torch.cat([pair.outer for pair in self.pairs(fragment)]) if self.shown else self._kept[fragment]

    def replica(self, fragment: int) -> Tensor:
        """The worker's own, to be read."""
        return torch.cat([pair.own for pair in self.pairs(fragment)])

    def pairs(self, fragment: int) -> list[WeightPair]:
        """Both, piece by piece, which lie end to end; to be read."""
        kept, found, kind = self._kept[fragment], list[WeightPair](), self.fragments[fragment].kind
        for piece in self.fragments[fragment].pieces:
            here, there = kept[piece.offset : piece.offset + piece.numel], self._of_worker(piece, kind)
            have_changed_places = self.shown and not kind and self._single(piece)
            found.append(WeightPair(there, here) if have_changed_places else WeightPair(here, there))
        return found

    def subtract(
        self, fragment: int, update: Tensor, mix: float, least: float | None = None, departed: Tensor | None = None
    ) -> None:
        """Take an outer step: w° -= update, and w = mix · w + (1 - mix) · w°, or with `departed` w° + (w - departed);
        rounded once where `update` is fp64. No element of w° is then below `least`."""
        shown = self.shown
        self.show(False)
        kept, kind = self._kept[fragment], self.fragments[fragment].kind
        for piece, first, last in self._portions(fragment):
            place = slice(piece.offset + first, piece.offset + last)
            outer = kept[place]
            if update.dtype == outer.dtype:
                outer.sub_(update[place])
            else:
                outer.copy_(outer - update[place])
            if least is not None:
                outer.clamp_(min=least)
            replica = outer if mix == 0.0 else torch.lerp(outer, self._of_worker(piece, kind)[first:last], mix)
            if departed is not None:
                replica = outer + (self._of_worker(piece, kind)[first:last] - departed[place])
            self._write(kind, piece.parameter, piece.start + first, replica)
        self.show(shown)

    def set(self, fragment: int, outer: Tensor, replica: Tensor | None) -> None:
        """Write both, or leave the worker's own as it is."""
        shown = self.shown
        self.show(False)
        self._kept[fragment].copy_(outer)
        kind = self.fragments[fragment].kind
        for piece in () if replica is None else self.fragments[fragment].pieces:
            values = replica[piece.offset : piece.offset + piece.numel]  # type: ignore[index]
            self._write(kind, piece.parameter, piece.start, values)
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
        for kept, fragment in zip(self._kept, self.fragments, strict=True):
            for piece in () if fragment.kind else fragment.pieces:
                here, single = kept[piece.offset : piece.offset + piece.numel], self._single(piece)
                own = self._of_worker(piece).clone() if single or self.shown else here
                self.worker.show(piece.parameter, piece.start, here if single else own)
                if single:
                    here.copy_(own)
        self.shown = outer
        self._versions = self._versions_now()

    def _versions_now(self) -> list[int]:
        return [one._version for one in self.worker.parameters]

    def _follow_replica(self) -> None:
        for number, kept in enumerate(self._kept):
            if not self.fragments[number].kind:
                kept.copy_(self.replica(number))
        self.note_met()

    def _single(self, piece: Piece) -> bool:
        return self.worker.parameters[piece.parameter].dtype == torch.float32

    def _of_worker(self, piece: Piece, kind: str = "") -> Tensor:
        whole = self.worker.state(piece.parameter, kind) if kind else self.worker.weights(piece.parameter)
        return whole[piece.start : piece.start + piece.numel]

    def _write(self, kind: str, number: int, start: int, values: Tensor) -> None:
        if kind:
            self.worker.write_state(number, kind, start, values)
        else:
            self.worker.write(number, start, values)

    def _portions(self, fragment: int) -> Iterator[tuple[Piece, int, int]]:
        """(Piece, first element, last) of as many elements as caches hold on a CPU, where new memory for a whole piece
        costs more than what is done with it; of whole pieces where the worker can write no less at once."""
        for piece in self.fragments[fragment].pieces:
            parameter = self.worker.parameters[piece.parameter]
            cut = parameter.device.type == "cpu" and self._single(piece) and parameter.is_contiguous()
            most = _IN_CACHE if cut else max(1, piece.numel)
            for first in range(0, piece.numel, most):
                yield piece, first, min(first + most, piece.numel)


class KeptMomentum:
    """fp32 momentum by fragment of weights, [elements]: exact where this worker owns it, else what outer steps tell.

    An owner sends u = η (a + μ v) with v = μ v' + a (see OuterStep), so that v = (u / η + μ v') / (1 + μ). What the
    codec loses of u fades by a factor of μ / (1 + μ) with each outer step.
    """

    def __init__(self, numels: Sequence[int], device: torch.device) -> None:
        self._values = [torch.zeros(numel, device=device) for numel in numels]

    def of(self, fragment: int) -> Tensor:
        """A fragment's, to be read and written; of state, which is averaged, no element."""
        return self._values[fragment] if fragment < len(self._values) else self._values[0][:0]

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
        own = self.of(fragment)[after.own]
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


@dataclass
class SharedStates:
    """What is shared and how often.

    `share`: kinds, and each after how many outer steps of a fragment's weights. `worker_of`: of each rank.
    `outer_steps`: all, those of state behind those of weights. `found`: by kind the numbers of the parameters that have
    it, on all workers, and whether none of its values is below 0; empty until the workers have agreed. `make_step`: of
    a fragment, its number and whether nothing is negative. `places`: of each fragment of state, which fragment of
    weights it belongs to. `group`: of workers that come and go, each of all the ranks of `comm`.

    Outer steps are numbered over a run: one of weights, then those of its state that are due with it.
    """

    share: Mapping[str, int]
    comm: Communicator
    worker_of: Sequence[int]
    weights: OuterWeights
    outer_steps: list[OuterStep]
    make_step: Callable[[Fragment, int, bool], OuterStep]
    found: dict[str, tuple[list[int], bool]] = field(default_factory=dict)
    places: list[int] = field(default_factory=list)
    group: WorkerGroup | None = None

    def begin(self) -> None:
        """Agree, and cut what was found, unless that is done. Collective."""
        if self.share and not self.found:
            self.cut(self.agree())

    def cut_saved(self, counters: Mapping[str, Any], timetable: Timetable) -> None:
        """Cut what a run has saved that it shared. Raises ValueError where elastic workers would begin in mid-run."""
        saved = counters.get("shared", {})
        if self.group is not None and timetable.count(counters["step"]) and not set(self.share) <= set(saved):
            raise ValueError(
                f"share is {self.share} here, and the job that saved this state shared {sorted(saved) or 'none'}: pass "
                "what it shared, or begin a new job with its weights"
            )
        self.cut({kind: (one["parameters"], one["positive"]) for kind, one in saved.items()})

    def cut(self, found: Mapping[str, tuple[list[int], bool]]) -> None:
        """Put fragments of the state that was `found`, with nothing in common yet, and their outer steps behind those
        of weights, in the place of any that are there."""
        self.found = {kind: one for kind, one in found.items() if kind in self.share}
        of_weights = [one for one in self.weights.fragments if not one.kind]
        made, count = self._of_state(of_weights), len(of_weights)
        self.weights.hold_state(made)
        steps = [self.make_step(one, number, self.least(one) is not None) for number, one in enumerate(made, count)]
        self.outer_steps[count:] = steps

    def agree(self) -> dict[str, tuple[list[int], bool]]:
        """What all workers have of the parameters that train. Collective.

        Raises ValueError, on every rank, for a kind that there is not, has no value for each element of a parameter, or
        is not there for the same parameters on every worker.
        """
        mine: dict[str, Any] = {"has": {}, "lacks": {}, "negative": []}
        for number in sorted({one.parameter for fragment in self.weights.fragments for one in fragment.pieces}):
            for kind, whole in self.weights.worker.kinds(number).items():
                mine["has" if whole else "lacks"].setdefault(kind, []).append(number)
                if whole and kind in self.share and bool((self.weights.worker.own_state(number, kind) < 0).any()):
                    mine["negative"].append(kind)
        said = gather(self.comm, mine, "share its state")
        worker_of = self.worker_of
        if self.group is not None:
            everyone = self.group.gather(said, "share its state")
            worker_of = [number for number, ranks in enumerate(everyone) for _ in ranks]
            said = [one for ranks in everyone for one in ranks]
        found = {}
        for kind in self.share:
            workers: dict[int, set[int]] = {}
            for worker, one in zip(worker_of, said, strict=True):
                workers.setdefault(worker, set()).update(one["has"].get(kind, ()))
            if any(kind in one["lacks"] for one in said):
                raise ValueError(
                    f"share has {kind!r}, which has no fp32 value for each element of a parameter: an average over "
                    f"workers is of {_listed(said)}"
                )
            if not any(workers.values()):
                raise ValueError(f"share has {kind!r}, and the inner optimizer has {_listed(said)}")
            for worker, numbers in workers.items():
                if numbers != workers[0]:
                    raise ValueError(
                        f"share has {kind!r}, which worker {worker} has of {len(numbers)} parameters and worker 0 of "
                        f"{len(workers[0])}: all have to have stepped the same parameters by the first outer step"
                    )
            found[kind] = sorted(workers[0]), not any(kind in one["negative"] for one in said)
        return found

    def _of_state(self, of_weights: Sequence[Fragment]) -> list[Fragment]:
        """Of each kind the state of each fragment of weights; those without any are left out."""
        made: list[Fragment] = []
        self.places.clear()
        for kind, (numbers, _) in self.found.items():
            for place, fragment in enumerate(of_weights):
                pieces: list[Piece] = []
                for piece in fragment.pieces:
                    if piece.parameter in numbers:
                        offset = sum(one.numel for one in pieces)
                        pieces.append(Piece(piece.parameter, piece.start, piece.numel, offset))
                if pieces:
                    made.append(Fragment(tuple(pieces), kind))
                    self.places.append(place)
        return made

    def count(self, of_weights: int) -> int:
        """Outer steps in all, of which so many are of weights."""
        return of_weights + sum(self._times(place, of_weights) // every for _, place, every in self._of_states())

    def fragment(self, number: int) -> int:
        """Of which fragment an outer step is, by its number."""
        last = bisect_right(range(number + 1), number, key=self.count) - 1
        own = last % self._of_weights
        times = self._times(own, last + 1)
        due = [one for one, place, every in self._of_states() if place == own and times % every == 0]
        return [own, *due][number - self.count(last)]

    @property
    def _of_weights(self) -> int:
        return len(self.weights.fragments) - len(self.places)

    def _times(self, place: int, of_weights: int) -> int:
        return (of_weights - place + self._of_weights - 1) // self._of_weights

    def _of_states(self) -> Iterator[tuple[int, int, int]]:
        """Of each fragment of state its number, whose state it is, and after how many of that one's outer steps."""
        for number, place in enumerate(self.places, self._of_weights):
            yield number, place, self.share[self.weights.fragments[number].kind]

    def least(self, fragment: Fragment) -> float | None:
        """Below which no value of a fragment of state may come."""
        return 0.0 if fragment.kind and self.found[fragment.kind][1] else None

    def lost(self, fragment: Fragment) -> str:
        """A sentence about state of a fragment that this worker has no more; empty where there is all of it."""
        for piece in fragment.pieces:
            if fragment.kind and not self.weights.worker.keeps(piece.parameter, fragment.kind):
                return (
                    f"{fragment.kind!r} is shared, and the inner optimizer of this rank no longer has one of every "
                    "parameter: the names of its state may not change in a run"
                )
        return ""


def _listed(said: Sequence[Mapping[str, Any]]) -> str:
    """The kinds that can be shared."""
    return ", ".join(sorted({kind for one in said for kind in one["has"]})) or "none that could be shared"
