"""A torch optimizer whose state rests in files of a disk, so that memory has but a few pieces of it at a time."""

from __future__ import annotations

import copy
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from thinwire.zero import tensor_on_disk
from thinwire.zero.disk import Disk, SwapFile
from thinwire.zero.home import Fragment
from thinwire.zero.master_weights import FlatBucket, Run
from thinwire.zero.piece_on_disk import PieceOnDisk, aligned
from thinwire.zero.saved_state import SavedSlice, SliceSource, group_settings, read_weight
from thinwire.zero.shard_optimizer import OptimizerClass, ShardOptimizer, is_of_elements
from thinwire.zero.tensor_on_disk import TensorOnDisk


class ShardOptimizerOnDisk(ShardOptimizer):
    """The same with its state, and the fp32 weights of `views` in 16 bits, in files of `disk`.

    `views` may be on any device, or on the disk themselves; steps are on the CPU, a piece at a time, by a torch
    optimizer for each. Nothing is there before `begin`. `can_go_ahead`: whether all that a step changes is known, as of
    torch's own classes.
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
        self._disk, self._pieces = disk, list[PieceOnDisk]()
        self._pieces_of: list[list[PieceOnDisk]] = [[] for _ in runs]
        super().__init__([], [], groups, group_of, optimizer_class, bucket)
        own = optimizer_class.func if isinstance(optimizer_class, partial) else optimizer_class
        self.can_go_ahead = f"{getattr(own, '__module__', '')}.".startswith("torch.optim.")
        members = {group_of[run.parameter] for run in runs}
        widths = {one: _state_widths(optimizer_class, groups[one], self._shape_of is not None) for one in members}
        alone = {number for number, view in enumerate(views) if isinstance(view, TensorOnDisk)}
        for cuts in _cut(runs, tensor_on_disk.PIECE_NUMEL if self._shape_of is None else None, alone):
            parts = [Run(runs[number].parameter, runs[number].start + cut.start, cut) for number, cut in cuts]
            shown = [views[number][cut] for number, cut in cuts]
            nbytes = sum(
                aligned(run.numel * width)
                for run, one in zip(parts, shown, strict=True)
                for width in (*widths[group_of[run.parameter]], *((4,) if one.dtype != torch.float32 else ()))
            )
            name = names[parts[0].parameter]
            file = disk.plan(name, nbytes)
            shadow = sum(aligned(one.nbytes) for one in shown if not isinstance(one, TensorOnDisk))
            ahead = None
            if self.can_go_ahead:
                ahead = disk.plan(name, nbytes), disk.plan(name, shadow) if shadow else None
            build = partial(ShardOptimizer, parts, groups=groups, group_of=group_of, optimizer_class=optimizer_class)
            self._pieces.append(PieceOnDisk(cuts, parts, shown, partial(build, bucket=bucket), disk, file, ahead))
            for number, _ in cuts:
                self._pieces_of[number].append(self._pieces[-1])

    def begin(self, exact: Sequence[Tensor] | None = None) -> None:
        """Write fp32 weights to the files: `exact`, or what the views show. Raises SwapFileError."""
        for piece in self._pieces:
            piece.begin(exact)

    @property
    @override
    def files(self) -> list[SwapFile]:
        found = [piece.file if piece.draft is None else piece.shadow for piece in self._pieces]
        return [one for one in found if one is not None]

    @override
    def reset(self) -> None:
        super().reset()
        for piece in self._pieces:
            with piece.held():
                piece.optimizer.reset()

    @override
    def step(self, gradients: Sequence[Tensor | None]) -> None:
        """Step every view; what a file has against it is in the ring's `error`, and weights after it stay. Pieces that
        are ahead have their gradients in that."""
        for piece in self._pieces:
            if self._disk.ring.error is not None:
                return
            with self._disk.ring.noting_errors():
                if piece.draft is None:
                    piece.step(gradients)
                else:
                    piece.keep()

    def expect(self, there: Container[int], last: Iterable[int]) -> None:
        """Read ahead what `step_ahead` will need, once gradients of the runs `there` and of `last` have come."""
        self._disk.ring.expect(piece.file for piece in self._completed(there, last))

    def step_ahead(
        self, gradients: Mapping[int, Tensor], coefficient: float, last: Iterable[int], uses_up: bool
    ) -> None:
        """Step those pieces beside that have all their gradients, by run, now that those of the runs `last` have come;
        a step would multiply them by `coefficient`. `uses_up`: they are not needed any more."""
        made_with = coefficient, copy.deepcopy([group_settings(group) for group in self._groups])
        for piece in self._completed(gradients, last):
            with self._disk.ring.noting_errors():
                piece.step_ahead(gradients, made_with, uses_up)

    def _completed(self, there: Container[int], last: Iterable[int]) -> list[PieceOnDisk]:
        found = dict.fromkeys(piece for run in last for piece in self._pieces_of[run])
        return [piece for piece in found if all(run in there for run in piece.of_whole)]

    def is_ahead(self, coefficient: float, absent: Collection[int] = ()) -> bool:
        """Whether the step is known to be what was made ahead; pieces of which it is not forget that."""
        made_with = coefficient, [group_settings(group) for group in self._groups]
        for piece in self._pieces:
            same = piece.draft is not None and piece.draft.made_with == made_with and not piece.outdated
            if not same or any(run.parameter in absent for run in piece.runs):
                piece.draft = None
        return all(piece.draft is not None for piece in self._pieces)

    def forget(self, run: int | None = None) -> None:
        """Be no longer ahead, with this run or with any."""
        for piece in self._pieces if run is None else self._pieces_of[run]:
            piece.draft = None

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


class StepsAhead:
    """Which gradients are likely to be the step's: those that as many backwards have brought as in the step before, if
    that was neither clipped nor skipped. By numbers, of buckets or of runs.

    `following`: after each number the one that came next in that step, and after None the first.
    """

    def __init__(self) -> None:
        self._backwards, self._before = dict[int, int](), dict[int, int]()
        self.following: dict[int | None, int] = {}

    def due(self, number: int) -> bool:
        """Count a backward that brought a gradient; whether it may be stepped now."""
        self._backwards[number] = self._backwards.get(number, 0) + 1
        return self._backwards[number] == self._before.get(number)

    def end_step(self, optimizers: Iterable[ShardOptimizerOnDisk], likely: bool) -> None:
        """Go by this step of theirs from now on; `likely`: it was as it would have been ahead."""
        self._before = self._backwards if likely else {}
        self.following = dict(zip((None, *self._before), self._before, strict=False))
        self.drop(optimizers)

    def drop(self, optimizers: Iterable[ShardOptimizerOnDisk]) -> None:
        """Begin anew to count; what they are ahead is forgotten."""
        self._backwards = {}
        for one in optimizers:
            one.forget()


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
