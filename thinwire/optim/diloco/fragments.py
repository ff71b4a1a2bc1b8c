"""Fragments, the weights that leave together: whole layers, strided over the depth of the model, filled up to equal
sizes with what lies in no layer; the timetable by which they leave and come back; and, from outer steps so far, the
rate that fits their correlation, and whose outer gradient is an outlier. All of it is the same on every rank."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress
from typing import NamedTuple

import torch
from torch import Tensor

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
        """How many times any fragment of weights has left by the end of this step. Number n, from 0 up, is fragment n
        modulo `fragments`."""
        return sum(self.times(one, step) for one in range(self.fragments))

    def _offset(self, fragment: int) -> int:
        # Rounded up, so that no fragment leaves before the first step.
        return -(-(fragment + 1) * self.every // self.fragments)


# Outer steps so far


@dataclass(frozen=True)
class OuterSettings:
    """Of an outer step, of SGD with Nesterov's momentum."""

    lr: float
    momentum: float


MEAN = OuterSettings(lr=1.0, momentum=0.0)
"""The outer step of shared state."""

_SAMPLE = 1 << 14
_KEPT = 0.9
_UNKNOWN = 0.5
_GOLDEN = 2654435769  # 2³² over the golden ratio


def evenly_spread(numel: int, most: int) -> Tensor:
    """Places of no more than `most` of so many elements."""
    places = torch.arange(min(numel, most))
    return places if numel <= most else (places * _GOLDEN % 2**32) * numel // 2**32


class Correlation:
    """Correlation of a fragment's outer gradients with those before them, found in what leg 2 brings, so that every
    rank finds the same and nothing is sent for it.

    Of an owner's step u = η (a + μ v), v = μ v' + a, of Together, follow v = (u / η + μ v') / (1 + μ), a = v - μ v'.
    `known`, fp64 [elements + 2]: v, of no more than 16,384 elements, evenly spread, and the sums of ⟨a, v'⟩ and of
    ⟨a, a⟩ over outer steps, of which one counts 0.9 times what the next does. All operations are rounded by themselves,
    so that the bits are the same on every kind of device.

    If an outer gradient's correlation with the last one is rho, and with the one before that rho², ⟨a, v'⟩ / ⟨a, a⟩ is
    rho / (1 - μ rho), which is taken for rho = 0.5 before there are two.
    """

    def __init__(self, numel: int) -> None:
        self._places = evenly_spread(numel, _SAMPLE)
        self.known = torch.zeros(len(self._places) + 2, dtype=torch.float64)

    def gain(self, momentum: float) -> float:
        """By how much outer steps of rate 1 move the weights along an outer gradient, over its length: 1 + μ + μ²
        ⟨a, v'⟩ / ⟨a, a⟩, which is 1 + μ / (1 - μ rho)."""
        before, own = self.known[-2:].tolist()
        return 1 + momentum + momentum**2 * (before / own if own > 0 else _UNKNOWN / (1 - momentum * _UNKNOWN))

    def follow(self, update: Tensor, settings: OuterSettings) -> None:
        """Take in an outer step, [elements of the fragment]."""
        velocity = self.known[:-2]
        faded = velocity * settings.momentum
        told = update[self._places.to(update.device)].cpu().double() / settings.lr
        after = (told + faded) / (1 + settings.momentum)
        gradient = after - faded
        if bool(velocity.any()):
            sums = [math.fsum((gradient * one).tolist()) for one in (velocity, gradient)]
            self.known[-2:].mul_(_KEPT).add_(torch.tensor(sums, dtype=torch.float64))
        velocity.copy_(after)

    def reset(self) -> None:
        """Know of no outer step."""
        self.known.zero_()


@dataclass
class OuterOptimizer:
    """SGD with Nesterov's momentum. `correlations`: of each fragment of weights, where each has a rate of its own, by
    which its outer gradients move the weights in the long run by `lr` times themselves; else all have the rate `lr`."""

    lr: float
    momentum: float
    correlations: list[Correlation] = field(default_factory=list)

    def of(self, number: int, kind: str) -> OuterSettings:
        """Settings for fragment `number`, of weights, or of state of a kind, which is averaged."""
        if kind:
            return MEAN
        gain = self.correlations[number].gain(self.momentum) if self.correlations else 1.0
        return OuterSettings(self.lr / gain, self.momentum)

    def follow(self, number: int, update: Tensor, settings: OuterSettings) -> None:
        """Take in an outer step of a fragment of weights, with the settings that it was made with."""
        if self.correlations:
            self.correlations[number].follow(update, settings)


class Told(NamedTuple):
    """What came of what workers said of their outer gradients, by worker: `norms`, and `shares` of the mean. Number
    `own` is this worker."""

    own: int
    norms: list[float]
    shares: list[float]

    @property
    def left_out(self) -> list[int]:
        """Those that are outliers."""
        return [worker for worker, share in enumerate(self.shares) if not share]

    def tensor(self) -> Tensor:
        """To be saved."""
        return torch.tensor([[self.own] * len(self.norms), self.norms, self.shares], dtype=torch.float64)

    @classmethod
    def read(cls, saved: Tensor) -> Told:
        """What `tensor` gave."""
        own, norms, shares = saved.tolist()
        return cls(int(own[0]), norms, shares)


_SKETCH = 1 << 10
_NEW = 0.2


class Guard:
    """Keeps workers whose outer gradient of a fragment is an outlier out of the mean (EDiT, arXiv 2412.07210), and has
    the others weigh what they should.

    Beside an outer gradient travel its norm, the worker's `weight`, and a sketch: no more than 1024 of its elements. An
    outlier is not finite; or its norm lies more than `deviations` standard deviations above the mean of those so far,
    and beyond twice that mean; or, of three workers or more, beyond three times the middle norm; or it leads away from
    the others: its cosine with the median of their directions, element by element, is negative. The mean's norm then is
    bounded as each one's is. Where all are outliers no outer step is taken, and workers go on from the outer weights.

    `known`, fp64 [2]: mean and variance of norms, of which an outer step makes a fifth; in the first one the middle
    norm counts as the mean, and twice it as the deviation. All numbers are rounded alike on every kind of device.
    """

    def __init__(self, numel: int, deviations: float | None, weight: float) -> None:
        self.known = torch.zeros(2, dtype=torch.float64)
        self._places = evenly_spread(numel, _SKETCH)
        self._deviations = deviations
        self._weight = weight

    def say(self, gradient: Tensor) -> Tensor:
        """What the others have to know of an outer gradient, [elements]: fp32 [2 + elements of the sketch]."""
        sketch = gradient[self._places.to(gradient.device)]
        norm = torch.linalg.vector_norm(gradient)
        return torch.cat([norm[None], torch.full_like(norm, self._weight)[None], sketch]).float()

    def judge(self, own: int, said: Tensor) -> Told:
        """What comes of what workers said, [workers, numbers]; number `own` is this one."""
        norms, weights, *sketches = said.cpu().double().T.tolist()
        if self._deviations is not None:
            most = self._most(norms)
            kept = [math.isfinite(norm) and norm <= most for norm in norms]
            if sum(kept) > 2:
                kept = _with_the_others(kept, list(zip(*sketches, strict=True)))
            weights = [weight if fits else 0.0 for weight, fits in zip(weights, kept, strict=True)]
        total = sum(weights)
        return Told(own, norms, [weight / total if total else 0.0 for weight in weights])

    def follow(self, told: Told) -> None:
        """Take in an outer step.

        Norms of outliers count only where all were, as what is usual changes, and then as the largest that is none.
        """
        most = self._most(told.norms)
        norms = [norm for norm, share in zip(told.norms, told.shares, strict=True) if share]
        norms = norms or [min(norm, most) for norm in told.norms if math.isfinite(norm)]
        mean, variance = self._usual(told.norms)
        if norms:
            square = sum((norm - mean) ** 2 for norm in norms) / len(norms)
            self.known[0] = mean + _NEW * (sum(norms) / len(norms) - mean)
            self.known[1] = variance + _NEW * (square - variance)

    def reset(self) -> None:
        """Know of no outer step."""
        self.known.zero_()

    def _usual(self, norms: Sequence[float]) -> tuple[float, float]:
        mean, variance = self.known.tolist()
        return (mean, variance) if mean else (_middle(norms), (2 * _middle(norms)) ** 2)

    def _most(self, norms: Sequence[float]) -> float:
        mean, variance = self._usual(norms)
        most = mean + max((self._deviations or 0.0) * math.sqrt(variance), mean)
        return most if len(norms) < 3 else min(most, 3 * _middle(norms))


def _middle(norms: Sequence[float]) -> float:
    found = [norm for norm in norms if 0 < norm < math.inf]
    return statistics.median_low(found) if found else 0.0


def _with_the_others(kept: Sequence[bool], sketches: Sequence[Sequence[float]]) -> list[bool]:
    """Which of those that are `kept`, three or more, have no negative cosine with the median of their directions."""
    lengths = [math.sqrt(math.fsum(value * value for value in sketch)) or 1.0 for sketch in sketches]
    units = [[value / length for value in sketch] for sketch, length in zip(sketches, lengths, strict=True)]
    middle = [statistics.median(values) for values in zip(*compress(units, kept), strict=True)]
    return [
        fits and math.fsum(one * other for one, other in zip(unit, middle, strict=True)) >= 0
        for fits, unit in zip(kept, units, strict=True)
    ]
