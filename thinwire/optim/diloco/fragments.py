"""Fragments, the weights that leave together: whole layers, strided over the depth of the model, filled up to equal
sizes with what lies in no layer; and the timetable by which they leave and come back, the same on every rank."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

_LAYERS_TO_A_FRAGMENT = 3
_NUMBERED = re.compile(r"^(.*?\.)?(\d+)(?=\.)")


@dataclass(frozen=True)
class Piece:
    """Elements `start` to `start + numel` of a flattened parameter, by its number; `offset`: where in the fragment."""

    parameter: int
    start: int
    numel: int
    offset: int


@dataclass(frozen=True)
class Fragment:
    """Weights that are synchronised together, laid end to end; or of these the inner optimizer's state of a `kind`."""

    pieces: tuple[Piece, ...]
    kind: str = ""

    @property
    def numel(self) -> int:
        """Elements in all."""
        return sum(piece.numel for piece in self.pieces)

    def overlaps(self, own: slice) -> Iterator[tuple[Piece, slice]]:
        """The pieces in its elements `own`, and where."""
        for piece in self.pieces:
            first, last = max(piece.offset, own.start), min(piece.offset + piece.numel, own.stop)
            if first < last:
                yield piece, slice(first, last)


def layers_of(names: Sequence[str]) -> list[list[int]]:
    """The numbers of the parameters of each layer, in the order of the names.

    A layer is an entry of the numbered list that holds most parameters: "encoder.layer.3." of
    "encoder.layer.3.attention.weight". What lies in no such list is in none.
    """
    lists: dict[str, dict[int, list[int]]] = {}
    for number, name in enumerate(names):
        if (found := _NUMBERED.match(name)) is not None:
            lists.setdefault(found[1] or "", {}).setdefault(int(found[2]), []).append(number)
    if not lists:
        return []
    of_most = max(lists.values(), key=lambda entries: sum(map(len, entries.values())))
    return [of_most[entry] for entry in sorted(of_most)]


def auto_fragments(names: Sequence[str]) -> int:
    """How many fragments a model should have: one for every three layers."""
    return max(1, len(layers_of(names)) // _LAYERS_TO_A_FRAGMENT)


def cut_fragments(names: Sequence[str], numels: Mapping[int, int], count: int) -> list[Fragment]:
    """Cut the parameters `numels`, elements by number in `names`, into `count` fragments.

    Layer i is in fragment i modulo `count`. What lies in no layer, embeddings above all, fills the smaller ones up to
    the size of the others, cut anywhere: an outer step is elementwise. Raises ValueError where there are more fragments
    than layers.
    """
    layers = [[number for number in layer if number in numels] for layer in layers_of(names)]
    layers = [layer for layer in layers if layer]
    if count > 1 and count > len(layers):
        raise ValueError(
            f"fragments={count} for {len(layers)} layers, as the names of the parameters show: a fragment is one layer "
            "at least. Pass fewer, fragments='auto', or named_parameters=model.named_parameters()"
        )
    pieces: list[list[Piece]] = [[] for _ in range(count)]
    sizes = [0] * count

    def put(fragment: int, number: int, start: int, numel: int) -> None:
        pieces[fragment].append(Piece(number, start, numel, sizes[fragment]))
        sizes[fragment] += numel

    for place, layer in enumerate(layers):
        for number in layer:
            put(place % count, number, 0, numels[number])
    in_layers = {number for layer in layers for number in layer}
    rest = {number: numel for number, numel in numels.items() if number not in in_layers}
    level, fragment = _level(sizes, sum(rest.values())), 0
    for number, numel in rest.items():
        start = 0
        while start < numel:
            room = max(0, level - sizes[fragment]) if fragment < count - 1 else numel
            if taken := min(numel - start, room):
                put(fragment, number, start, taken)
                start += taken
            if start < numel:
                fragment += 1
    return [Fragment(tuple(one)) for one in pieces]


def _level(sizes: Sequence[int], more: int) -> int:
    """The height to which `more` fills up what has these `sizes`."""
    ordered = sorted(sizes)
    below = 0
    for count, size in enumerate(ordered, start=1):
        below += size
        level = -(-(below + more) // count)
        if count == len(ordered) or level <= ordered[count]:
            return level
    raise AssertionError("there is at least one fragment")


@dataclass(frozen=True)
class Timetable:
    """Each fragment leaves once in `every` steps and comes back `overlap` steps later (Streaming DiLoCo, arXiv
    2501.18512, Algorithm 2). Fragments are spread evenly over the steps between; the last one leaves at multiples of
    `every`, and so does a single one.
    """

    every: int
    overlap: int
    fragments: int

    def leaving(self, step: int) -> Sequence[int]:
        """The fragments that leave after this step; steps count from 1."""
        return [one for one in range(self.fragments) if (step - self._offset(one)) % self.every == 0]

    def times(self, fragment: int, step: int) -> int:
        """How many times a fragment has left by the end of this step."""
        return max(0, step - self._offset(fragment) + self.every) // self.every

    def count(self, step: int) -> int:
        """How many times any fragment has left by the end of this step. Number n, from 0 up, is fragment n modulo
        `fragments`."""
        return sum(self.times(one, step) for one in range(self.fragments))

    def _offset(self, fragment: int) -> int:
        # Rounded up, so that no fragment leaves before the first step.
        return -(-(fragment + 1) * self.every // self.fragments)
