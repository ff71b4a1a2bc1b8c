"""How much of the communication hides behind backward, when buckets leave as their gradients complete."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from thinwire.plan.costs import Cost

__all__ = ["NO_BUCKETS", "Buckets", "cut", "seconds_beside"]


@dataclass(frozen=True)
class Buckets:
    """`count` equal buckets, what `each` costs, and what the `last` does: one more, of the parameter whose gradient is
    complete at backward's end only."""

    count: int
    each: Cost
    last: Cost

    @property
    def total(self) -> Cost:
        """What all of them cost."""
        return self.each * self.count + self.last

    def __add__(self, other: Buckets) -> Buckets:
        if self.count != other.count:
            raise ValueError(f"{self.count} and {other.count} buckets do not add up: cut both alike")
        return Buckets(self.count, self.each + other.each, self.last + other.last)


NO_BUCKETS = Buckets(1, Cost(), Cost())


def cut(elements: int, last: int, bucket_elements: int, cost: Callable[[int], Cost]) -> Buckets:
    """Cut `elements`, the `last` of which make a bucket of their own, into buckets of about `bucket_elements`."""
    rest = elements - last
    count = max(1, round(rest / bucket_elements))
    return Buckets(count, cost(-(-rest // count)) if rest else Cost(), cost(last) if last else Cost())


def seconds_beside(computation: float, buckets: Buckets, overlap: float) -> float:
    """Seconds of `computation`, at equal intervals of which buckets become ready and leave, and of what is left of
    their way when it ends.

    Buckets are jobs in a pipeline of three machines: processor (computation and compression), the link between nodes,
    the link inside. With equal jobs, the first one's way and then the busiest machine decide; the last bucket follows.
    `overlap` is the part of a transfer that goes on while the processor computes: 0 gives the sum of everything.
    """
    each, last = buckets.each, buckets.last
    arrival = computation / buckets.count
    busiest = max(arrival + each.codec, each.between, each.inside)
    links_free = arrival + each.total + (buckets.count - 1) * busiest
    processor_free = computation + buckets.count * each.codec + last.codec
    pipelined = max(links_free, processor_free) + last.wire
    in_turn = computation + buckets.total.total
    return overlap * pipelined + (1 - overlap) * in_turn
