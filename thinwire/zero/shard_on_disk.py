"""A torch optimizer whose state rests in files of a disk, so that memory has but a few pieces of it at a time."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from thinwire.zero.disk import Buffer, Disk, SwapFile
from thinwire.zero.home import Fragment
from thinwire.zero.master_weights import FlatBucket, Run
from thinwire.zero.saved_state import SavedSlice, SliceSource, group_settings, read_weight, state_slices
from thinwire.zero.shard_optimizer import OptimizerClass, ShardOptimizer, is_of_elements
from thinwire.zero.tensor_on_disk import PIECE_NUMEL, TensorOnDisk, on_cpu

MASTER = "master"
"""The kind of fp32 weights that rest with the state of what steps them."""

_ALIGNMENT = 64


class ShardOptimizerOnDisk(ShardOptimizer):
    """The same with its state, and the fp32 weights of `views` in 16 bits, in files of `disk`.

    `views` may be on any device, or on the disk themselves; steps are on the CPU, a piece at a time, by a torch
    optimizer for each. Nothing is there before `begin`.
    """

    def __init__(
        self,
        runs: Sequence[Run],
        views: Sequence[Tensor],
        groups: Sequence[Mapping[str, Any]],
        group_of: Sequence[int],
        optimizer_class: OptimizerClass,
        bucket: FlatBucket | None = None,
        *,
        disk: Disk,
        names: Sequence[str],
    ) -> None:
        self._disk, self._pieces = disk, list[_Piece]()
        super().__init__([], [], groups, group_of, optimizer_class, bucket)
        members = {group_of[run.parameter] for run in runs}
        widths = {one: _state_widths(optimizer_class, groups[one], self._shape_of is not None) for one in members}
        alone = {number for number, view in enumerate(views) if isinstance(view, TensorOnDisk)}
        for cuts in _cut(runs, PIECE_NUMEL if self._shape_of is None else None, alone):
            parts = [Run(runs[number].parameter, runs[number].start + cut.start, cut) for number, cut in cuts]
            shown = [views[number][cut] for number, cut in cuts]
            nbytes = sum(
                _aligned(run.numel * width)
                for run, one in zip(parts, shown, strict=True)
                for width in (*widths[group_of[run.parameter]], *((4,) if one.dtype != torch.float32 else ()))
            )
            file = disk.plan(names[parts[0].parameter], nbytes)
            build = partial(ShardOptimizer, parts, groups=groups, group_of=group_of, optimizer_class=optimizer_class)
            self._pieces.append(_Piece(cuts, parts, shown, partial(build, bucket=bucket), disk, file))
        self.files = [piece.file for piece in self._pieces]

    def begin(self, exact: Sequence[Tensor] | None = None) -> None:
        """Write fp32 weights to the files: `exact`, or what the views show. Raises SwapFileError."""
        for piece in self._pieces:
            piece.begin(exact)

    @override
    def reset(self) -> None:
        super().reset()
        for piece in self._pieces:
            with piece.held():
                piece.optimizer.reset()

    @override
    def step(self, gradients: Sequence[Tensor | None]) -> None:
        """Step every view; what a file has against it is in the ring's `error`, and weights after it stay."""
        for piece in self._pieces:
            if self._disk.ring.error is not None:
                return
            with self._disk.ring.noting_errors():
                piece.step(gradients)

    @override
    def fragments(self, parameter: int, kind: str) -> list[Fragment]:
        found = [
            (piece, number) for piece in self._pieces for number in piece.of(parameter) if kind in piece.kinds(number)
        ]
        return [Fragment(piece.runs[number].start, piece.read(number, kind)) for piece, number in found]

    @override
    def kinds(self) -> set[str]:
        return {kind for piece in self._pieces for kind in piece.optimizer.kinds()}

    @override
    def state_bytes(self) -> int:
        """In memory there are but step counts."""
        return 0

    @override
    def saved_slices(self, names: Sequence[str], cuts: Iterable[tuple[int, slice]]) -> list[SavedSlice]:
        own = dict(cuts)
        return [one for piece in self._pieces for one in piece.saved_slices(names, own)]

    @override
    def load(self, source: SliceSource, names: Sequence[str]) -> None:
        for piece in self._pieces:
            with piece.held():
                piece.optimizer.load(source, names)

    def load_weights(self, source: SliceSource, names: Sequence[str]) -> None:
        """Take over fp32 weights; the views show theirs already."""
        for piece in self._pieces:
            with piece.held():
                for run, weights in piece.master_weights:
                    name = names[run.parameter]
                    weights.copy_(read_weight(source, torch.float32, name, run.start, run.numel))

    def take_over(self, parameters: Collection[int]) -> None:
        """Have the values that the views of these show, when they are read next."""
        for piece in self._pieces:
            piece.outdated.update(number for one in parameters for number in piece.of(one))

    def write_weights(self, parameter: int, values: Tensor) -> None:
        """Have these fp32 weights, [elements] of the whole parameter; the views follow."""
        for piece in self._pieces:
            if piece.of(parameter):
                with piece.held():
                    for run, weights in piece.master_weights:
                        if run.parameter == parameter:
                            weights.copy_(values[run.start : run.start + run.numel])


def on_disk(
    disk: Disk,
    names: Sequence[str],
    runs: Sequence[Run],
    views: Sequence[Tensor],
    groups: Sequence[Mapping[str, Any]],
    group_of: Sequence[int],
    optimizer_class: OptimizerClass,
) -> ShardOptimizerOnDisk:
    """One that has begun, alone on its disk. Collective; raises ValueError, on every rank, where there is no room."""
    optimizer = ShardOptimizerOnDisk(runs, views, groups, group_of, optimizer_class, disk=disk, names=names)
    disk.begin()
    optimizer.begin()
    disk.finish()
    return optimizer


def check_in_memory(disk: Disk | None, kind: str) -> None:
    """Raise RuntimeError where optimizer state is not in memory, where it could be written to."""
    if disk is not None:
        raise RuntimeError(
            f"{kind} cannot be set, as optimizer state rests in files of {disk.folder}: load it from a checkpoint, or "
            "leave out the disk"
        )


class _Piece:
    """What is read, stepped and written together: `runs`, parts of parameters, the elements `cuts` of others by number.

    `shown`: where their weights are shown. `outdated`: the numbers of those whose fp32 weights have to follow that.
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
    ) -> None:
        self.runs, self.file, self.outdated = runs, file, set(range(len(runs)))
        self._cuts, self._shown, self._build, self._disk = cuts, shown, build, disk
        self._apart = [one.dtype != torch.float32 for one in shown]
        self._views = [
            torch.empty(0) if apart or one.device.type != "cpu" or isinstance(one, TensorOnDisk) else one
            for one, apart in zip(shown, self._apart, strict=True)
        ]
        self._parked = [view for view, one in zip(self._views, shown, strict=True) if view is not one]
        self._resting: list[tuple[Tensor, slice]] = []  # what the file has, each with its bytes in it

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
                if view is not shown:
                    shown.copy_(view)

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
    def held(self, changes: bool = True) -> Iterator[None]:
        """Have all in memory inside; with `changes` it is written afterwards."""
        ring = self._disk.ring
        buffer = ring.take(self.file)
        for tensor, place in self._resting:
            tensor.data = buffer.values[place].view(tensor.dtype)
        for number, (view, shown) in enumerate(zip(self._views, self._shown, strict=True)):
            if view is not shown and (number in self.outdated if self._apart[number] else changes):
                view.data = on_cpu(shown).float()
        nbytes = None
        try:
            yield
        finally:
            if changes:
                self.outdated.clear()
                buffer, nbytes = self._lay_out(buffer)
            for tensor in (*(one for one, _ in self._resting), *self._parked):
                tensor.data = torch.empty(0, dtype=tensor.dtype)
            ring.give_back(self.file, buffer, nbytes)

    def _lay_out(self, buffer: Buffer) -> tuple[Buffer, int]:
        """Move into the buffer, or a larger one, what is not at its place there; how many bytes it then has."""
        states = [value for state in self.optimizer.states for value in state.values() if is_of_elements(value)]
        self._resting, end = [], 0
        for one in [*(weights for _, weights in self.master_weights), *states]:
            self._resting.append((one, slice(end, end + one.nbytes)))
            end += _aligned(one.nbytes)
        if end > buffer.values.numel():
            buffer = Buffer(end)
        first = buffer.values.data_ptr()
        moved = [(one, place) for one, place in self._resting if one.data_ptr() != first + place.start]
        # Copies of all before any is written: one may lie where another goes.
        for values, place in [(one.detach().clone(), place) for one, place in moved]:
            buffer.values[place].view(values.dtype).copy_(values)
        return buffer, end


def _cut(runs: Sequence[Run], most: int | None, alone: Collection[int]) -> list[list[tuple[int, slice]]]:
    """The runs by number, cut into pieces of `most` elements; None leaves them whole, each a piece. The runs `alone`,
    which come last, share no piece with another."""
    pieces: list[list[tuple[int, slice]]] = []
    room = 0
    for number, run in sorted(enumerate(runs), key=lambda one: one[0] in alone):
        start, room = 0, 0 if number in alone else room
        while start < run.numel:
            if not room:
                pieces.append([])
                room = most or run.numel
            stop = min(run.numel, start + room)
            pieces[-1].append((number, slice(start, stop)))
            room, start = room - (stop - start), stop
    return pieces


def _state_widths(optimizer_class: OptimizerClass, group: Mapping[str, Any], whole: bool) -> list[int]:
    """Bytes an element of each kind of state that the optimizer keeps for parameters of a group, by trial."""
    tried = torch.zeros(4)
    tried.grad = torch.zeros(4)
    shapes = {"shapes": [torch.Size((2, 2))]} if whole else {}
    optimizer = optimizer_class([{**group_settings(group), **shapes, "params": [tried]}])
    optimizer.step()
    return [value.itemsize for value in optimizer.state[tried].values() if is_of_elements(value)]


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
