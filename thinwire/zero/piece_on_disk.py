"""A part of what a rank steps that comes from a disk, is stepped and goes back together.

Disks are slow, and a step must wait for the norm of all gradients, by which it is clipped or skipped. So pieces are
stepped ahead as gradients arrive, behind backward: what that makes goes to files of its own, and those of before are
the undo. If the step turns out to be the same they change places, else it is done anew: "speculation-then-validation"
of Lian et al. 2025, SuperOffload, arXiv:2509.21271.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from thinwire.zero.disk import Buffer, Disk, SwapFile
from thinwire.zero.master_weights import Run
from thinwire.zero.saved_state import SavedSlice, state_slices
from thinwire.zero.shard_optimizer import ShardOptimizer, is_of_elements
from thinwire.zero.tensor_on_disk import TensorOnDisk, on_cpu

MASTER = "master"
"""The kind of fp32 weights that rest with the state of what steps them."""

_ALIGNMENT = 64

_Resting = list[tuple[Tensor, slice]]
MadeWith = tuple[float, list[dict[str, Any]]]
"""What a step is made with: the factor of gradients, and the groups' settings."""


class Draft(NamedTuple):
    """A step ahead: the state by runs, and where that rests in its file."""

    states: list[dict[str, Any]]
    resting: _Resting
    made_with: MadeWith


class PieceOnDisk:
    """What is read, stepped and written together: `runs`, the elements `cuts` of whole runs, by their numbers.

    `shown`: where their weights are shown. `outdated`: the numbers of those whose fp32 weights have to follow that.
    `draft`: a step ahead, if there is one, of which `shadow` has what will be shown. `of_whole`: those numbers.
    """

    optimizer: ShardOptimizer

    def __init__(
        self,
        cuts: Sequence[tuple[int, slice]],
        runs: Sequence[Run],
        shown: Sequence[Tensor],
        build: Callable[[Sequence[Tensor]], ShardOptimizer],
        disk: Disk,
        file: SwapFile,
        ahead: tuple[SwapFile, SwapFile | None] | None,
    ) -> None:
        self.runs, self.file, self.outdated = runs, file, set(range(len(runs)))
        self._beside, self.shadow = ahead or (file, None)
        self.draft: Draft | None = None
        self.of_whole = [number for number, _ in cuts]
        self._cuts, self._shown, self._build, self._disk = cuts, shown, build, disk
        self._apart = [one.dtype != torch.float32 for one in shown]
        self._views = [torch.empty(0) for _ in shown]
        self._resting: _Resting = []  # what the file has, each with its bytes in it

    @property
    def master_weights(self) -> list[tuple[Run, Tensor]]:
        """The fp32 weights that the file has."""
        return [(run, view) for run, view, apart in zip(self.runs, self._views, self._apart, strict=True) if apart]

    def of(self, parameter: int) -> list[int]:
        """The numbers of the runs of this parameter."""
        return [number for number, run in enumerate(self.runs) if run.parameter == parameter]

    def kinds(self, number: int) -> list[str]:
        """What the file has of a run."""
        state = self.optimizer.state_of(number)
        return [kind for kind, value in state.items() if is_of_elements(value)] + [MASTER] * self._apart[number]

    def begin(self, exact: Sequence[Tensor] | None) -> None:
        """Write fp32 weights, the cuts of `exact` or what is shown."""
        with self.held():
            for number, (cut, view) in enumerate(zip(self._cuts, self._views, strict=True)):
                if exact is not None and self._apart[number]:
                    view.data = exact[cut[0]][cut[1]]
            self.optimizer = self._build(self._views)

    def step(self, gradients: Sequence[Tensor | None]) -> None:
        """Step with what is this piece's of the `gradients` of whole runs."""
        whole = [(gradients[number], cut) for number, cut in self._cuts]
        if all(gradient is None for gradient, _ in whole):
            return
        with self.held():
            self.optimizer.step([None if gradient is None else on_cpu(gradient[cut]) for gradient, cut in whole])
            for shown, view in zip(self._shown, self._views, strict=True):
                if not isinstance(shown, TensorOnDisk):
                    shown.copy_(view)

    def step_ahead(self, gradients: Mapping[int, Tensor], made_with: MadeWith, uses_up: bool) -> None:
        """Have a draft of `gradients`, by the numbers of whole runs, unless weights have to follow others first."""
        if self.outdated or self._disk.ring.error is not None:
            return
        whole = [(gradients[number], cut) for number, cut in self._cuts]
        given = [on_cpu(gradient[cut]).to(torch.float32, copy=not uses_up) for gradient, cut in whole]
        for one in given if made_with[0] != 1.0 else ():
            one.mul_(made_with[0])
        resting, states = self._resting, self.optimizer.copies_of_scalars()
        with self.held(into=self._beside):
            for view, shown in zip(self._views, self._shown, strict=True):
                if not isinstance(shown, TensorOnDisk) and view.data_ptr() == shown.data_ptr():
                    view.data = view.clone()
            self.optimizer.step(given)
            self._write_shadow()
        self.draft = Draft(self.optimizer.exchange_states(states), self._resting, made_with)
        self._resting = resting

    def keep(self) -> None:
        """Have what the draft has, and show it."""
        assert self.draft is not None, "there is no draft to keep"
        ring = self._disk.ring
        if self.shadow is not None:
            buffer = ring.take(self.shadow)
            for number, values in self._parts_of(buffer):
                self._shown[number].copy_(values)
            ring.give_back(self.shadow, buffer, None)
        for shown in self._shown:
            if isinstance(shown, TensorOnDisk):
                shown.rest.keep_ahead(shown.start)
        ring.exchange(self.file, self._beside)
        self.optimizer.exchange_states(self.draft.states)
        self._resting, self.draft = self.draft.resting, None

    def _write_shadow(self) -> None:
        ring = self._disk.ring
        if self.shadow is not None:
            buffer = ring.blank(self.shadow)
            for number, values in self._parts_of(buffer):
                values.copy_(self._views[number])
            ring.give_back(self.shadow, buffer, self.shadow.room)

    def _parts_of(self, shadow: Buffer) -> Iterator[tuple[int, Tensor]]:
        """What it has to show, by number."""
        end = 0
        for number, shown in enumerate(self._shown):
            if not isinstance(shown, TensorOnDisk):
                yield number, shadow.values[end : end + shown.nbytes].view(shown.dtype)
                end += aligned(shown.nbytes)

    def read(self, number: int, kind: str, cut: slice = slice(None)) -> Tensor:
        """A copy of what the file has of a run."""
        with self.held(changes=False):
            values: Tensor = self._views[number] if kind == MASTER else self.optimizer.state_of(number)[kind]
            return values[cut].clone()

    def saved_slices(self, names: Sequence[str], own: Mapping[int, slice]) -> Iterator[SavedSlice]:
        """Of the elements `own` of whole runs those in this piece, read when they are asked for."""
        for number, (run, (whole, cut)) in enumerate(zip(self.runs, self._cuts, strict=True)):
            wanted = own.get(whole, slice(0, 0))
            place = slice(max(cut.start, wanted.start) - cut.start, min(cut.stop, wanted.stop) - cut.start)
            if place.start >= place.stop:
                continue
            state = {
                **self.optimizer.state_of(number),
                **({MASTER: self._views[number]} if self._apart[number] else {}),
            }
            for kind in self.kinds(number):
                state[kind] = torch.empty(run.numel, dtype=state[kind].dtype, device="meta")
            for one in state_slices(state, names[run.parameter], run.start + place.start, place, run.numel):
                yield replace(one, read=partial(self.read, number, one.kind, place)) if one.tensor.is_meta else one

    @contextmanager
    def held(self, changes: bool = True, into: SwapFile | None = None) -> Iterator[None]:
        """Have all in memory inside; with `changes` it is written afterwards, `into` another file if one is given."""
        self.draft = None if changes else self.draft
        ring, nbytes = self._disk.ring, None
        with ExitStack() as in_memory:
            for number, (view, shown) in enumerate(zip(self._views, self._shown, strict=True)):
                if self._apart[number]:
                    view.data = on_cpu(shown).float() if number in self.outdated else view.data
                elif changes and isinstance(shown, TensorOnDisk):
                    view.data = in_memory.enter_context(shown.rest.held(shown.start, beside=into is not None))
                elif changes:
                    view.data = on_cpu(shown)
            buffer = ring.take(self.file)
            for tensor, place in self._resting:
                if tensor.numel() == 0:
                    tensor.data = buffer.values[place].view(tensor.dtype)
            try:
                yield
            finally:
                if changes:
                    self.outdated.clear()
                    buffer, nbytes = self._lay_out(buffer)
                for tensor in (*(one for one, _ in self._resting), *self._views):
                    tensor.data = torch.empty(0, dtype=tensor.dtype)
                ring.give_back(into or self.file, buffer, nbytes)

    def _lay_out(self, buffer: Buffer) -> tuple[Buffer, int]:
        """Move into the buffer, or a larger one, what is not at its place there; how many bytes it then has."""
        states = [value for state in self.optimizer.states for value in state.values() if is_of_elements(value)]
        self._resting, end = [], 0
        for one in [*(weights for _, weights in self.master_weights), *states]:
            self._resting.append((one, slice(end, end + one.nbytes)))
            end += aligned(one.nbytes)
        if end > buffer.values.numel():
            buffer = Buffer(end)
        first = buffer.values.data_ptr()
        moved = [(one, place) for one, place in self._resting if one.data_ptr() != first + place.start]
        # Copies of all before any is written: one may lie where another goes.
        for values, place in [(one.detach().clone(), place) for one, place in moved]:
            buffer.values[place].view(values.dtype).copy_(values)
        return buffer, end


def aligned(nbytes: int) -> int:
    """So many, rounded up to where another tensor may begin."""
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
