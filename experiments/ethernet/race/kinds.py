"""Kinds of steps: how long each takes, and how many of each a recorded run had done at each of its points."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import mean
from typing import Any, NamedTuple

__all__ = ["Clock", "Kind", "by_kind", "counts_along", "from_records", "records", "retime"]


class Kind(NamedTuple):
    """Steps that take the same time: of one stage, and sending the same bytes."""

    stage: str
    bytes_sent: int


@dataclass
class Clock:
    """How long steps take at the links' rate, by kind, and how many there were of each.

    Attributes:
        timed: seconds of the timed steps, the slowest rank's.
        done: all steps.
    """

    timed: dict[Kind, list[float]] = field(default_factory=dict)
    done: Counter[Kind] = field(default_factory=Counter)

    def seconds(self, done: Counter[Kind]) -> float:
        """What so many steps of each kind take. A kind too rare to be timed takes what the nearest in bytes does."""
        return sum(count * mean(self.timed[self._timed_like(kind)]) for kind, count in done.items())

    def by_stage(self) -> dict[str, float]:
        """Mean seconds of a step, by stage, over all that were done."""
        stages = dict.fromkeys(kind.stage for kind in self.done)
        of_stage = {name: Counter({k: n for k, n in self.done.items() if k.stage == name}) for name in stages}
        return {name: self.seconds(done) / done.total() for name, done in of_stage.items()}

    def _timed_like(self, kind: Kind) -> Kind:
        return min(self.timed, key=lambda one: (abs(one.bytes_sent - kind.bytes_sent), one.stage != kind.stage))


def by_kind(timed: Iterable[tuple[Kind, float]]) -> dict[Kind, list[float]]:
    """Seconds of timed steps, by kind."""
    found: dict[Kind, list[float]] = {}
    for kind, seconds in timed:
        found.setdefault(kind, []).append(seconds)
    return found


def records(clock: Clock) -> list[dict[str, Any]]:
    """A clock as results hold it: a record a kind, in the order in which they first came."""
    return [
        {**kind._asdict(), "steps": steps, "timed_seconds": clock.timed.get(kind, [])}
        for kind, steps in clock.done.items()
    ]


def from_records(kinds: Sequence[Mapping[str, Any]]) -> Clock:
    """The clock that `records` were made of."""
    found = Clock()
    for one in kinds:
        kind = Kind(one["stage"], one["bytes_sent"])
        found.done[kind] = one["steps"]
        if one["timed_seconds"]:
            found.timed[kind] = list(one["timed_seconds"])
    return found


def retime(run: Mapping[str, Any], kinds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A recorded run with the seconds that its steps take by another race's `kinds`, as `records` gave them."""
    counts = counts_along(run)
    clock = Clock(from_records(kinds).timed, counts[-1])
    seconds = [clock.seconds(count) for count in counts]
    return {**run, "seconds": seconds, "seconds_a_step": clock.by_stage()}


def counts_along(run: Mapping[str, Any]) -> list[Counter[Kind]]:
    """How many steps of each kind a recorded run had done at each of its points.

    Recorded are the totals, and of each point its steps, bytes and seconds. Stages follow one another; inside one, the
    counts are those that add up to the steps and the bytes, and where several do, to the seconds.

    Raises:
        ValueError: at some point no counts add up.
    """
    clock = from_records(run["kinds"])
    found = []
    for steps, nbytes, seconds in zip(run["steps"], run["bytes_sent"], run["seconds"], strict=True):
        fitting = list(_fitting_by_stage(clock.done, steps, nbytes))
        if not fitting:
            raise ValueError(
                f"the {nbytes} bytes sent by step {steps} are not what steps of the recorded kinds send: race it again"
            )
        found.append(min(fitting, key=lambda counts: abs(clock.seconds(counts) - seconds)))
    return found


def _fitting_by_stage(totals: Counter[Kind], steps: int, nbytes: int) -> Iterator[Counter[Kind]]:
    """Every way in which the first `steps` steps send so many bytes, with all stages but the last one over."""
    before: Counter[Kind] = Counter()
    for stage in dict.fromkeys(kind.stage for kind in totals):
        own = Counter({kind: count for kind, count in totals.items() if kind.stage == stage})
        if steps <= before.total() + own.total():
            nbytes_before = sum(kind.bytes_sent * count for kind, count in before.items())
            # Rare kinds first: there are few ways to choose among them.
            rarest_first = sorted(own.items(), key=lambda pair: pair[1])
            for counts in _fitting(rarest_first, steps - before.total(), nbytes - nbytes_before):
                yield before + counts
            return
        before += own


def _fitting(kinds: Sequence[tuple[Kind, int]], steps: int, nbytes: int) -> Iterator[Counter[Kind]]:
    """Every way in which so many steps of `kinds`, each at most as often as given, send so many bytes."""
    (kind, most), others = kinds[0], kinds[1:]
    if not others:
        if steps <= most and steps * kind.bytes_sent == nbytes:
            yield Counter({kind: steps})
        return
    for count in range(min(most, steps) + 1):
        for counts in _fitting(others, steps - count, nbytes - count * kind.bytes_sent):
            yield Counter({kind: count}) + counts
