"""The account of an elastic job: what each worker says of every outer step that it took, and what is wrong with it.

It has to hold whatever a codec rounds and whoever dies, where losses scatter: over seeds of data alone those of
undisturbed jobs deviate by 0.1 to 0.2% with `int8` and `int4`, 0.7% with `stat2`, 2.4% if moments go through `stat2`.

Of a worker's outer gradient d, its residual e before and after, the owners' momentum v and residual s before and after,
and the outer step q that all take, three random sums are told. By Together's algorithm they are such that

    a = mean (d + e - e'),   v' = μ v + a,   q = η (a + μ v') + s - s',

and what is before an outer step is what was after the last one of that fragment, bit for bit; of an owner that has died
what can be known of its momentum, which all that was rounded blurs.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from thinwire.optim.diloco.elastic_home import ElasticHome
from thinwire.optim.diloco.outer import UnderWay

_ROUNDING = 0.01
"""Residuals are kept in bf16."""
_OF_A_NORM = 4
"""How many times what is summed, with random signs, a sum may be: further off are deviations that do not occur."""


@dataclass
class Entry:
    """What worker `who` says of outer step `number`, which it took as one of `workers`, of a `generation` in which it
    had sent its part. `sizes`: norms of what the sums are of, by leg, and of an owner's residuals alone."""

    who: int
    number: int
    fragment: int
    generation: int
    workers: int
    lr: float
    momentum: float
    gradient: list[float]
    before: list[list[float]]
    after: list[list[float]]
    update: list[float]
    sizes: list[float]

    def tell(self) -> bytes:
        return f"outer {json.dumps(asdict(self), separators=(',', ':'))}\n".encode()


def keep(ledger: int, who: int) -> None:
    """Have this process, if it speaks for a worker, write its entries to the ledger."""
    leave, count = ElasticHome._leave, ElasticHome._count
    sent: dict[int, tuple[int, Tensor, list[tuple[Tensor, int]]]] = {}

    def leave_and_note(home: ElasticHome, fragment: int) -> None:
        generation = home.membership.generation
        assert generation is not None
        gradient = home.weights.outer(fragment) - home.weights.replica(fragment)
        sent[fragment] = generation.number, gradient, kept(home, fragment)
        leave(home, fragment)

    def count_and_note(home: ElasticHome, one: UnderWay, update: Tensor | None) -> None:
        number = home._taken
        count(home, one, update)
        if update is not None and home._relay.leads:
            generation, gradient, before = sent[one.fragment]
            after = kept(home, one.fragment)
            owed = [before[2][0], after[2][0]]
            legs = [[gradient, before[0][0], after[0][0], before[1][0], after[1][0]], [update, *owed], owed]
            entry = Entry(
                *(who, number, one.fragment, generation, home.workers, one.settings.lr, one.settings.momentum),
                gradient=sums(gradient),
                before=[sums(*pair) for pair in before],
                after=[sums(*pair) for pair in after],
                update=sums(update),
                sizes=[sum(float(part.double().norm()) for part in leg) for leg in legs],
            )
            os.write(ledger, entry.tell())

    setattr(ElasticHome, "_leave", leave_and_note)  # noqa: B010
    setattr(ElasticHome, "_count", count_and_note)  # noqa: B010


def kept(home: ElasticHome, fragment: int) -> list[tuple[Tensor, int]]:
    """The worker's residual, and of what it owns momentum and residual, each with where it begins."""
    state, numel = home.outer_steps[fragment].state, home.fragments[fragment].numel
    none = torch.zeros(0)
    residual = none if state.worker_residual is None else state.worker_residual[:numel]
    own = slice(0, max(0, numel - state.own.start))
    owners = none if state.owner_residual is None else state.owner_residual[own]
    return [(residual.clone(), 0), (state.momentum[own].clone(), state.own.start), (owners.clone(), state.own.start)]


def sums(values: Tensor, start: int = 0) -> list[float]:
    """Three, with signs that are the same wherever the values lie."""
    signs = torch.randint(0, 2, (1 << 10, 3), generator=torch.Generator().manual_seed(5)).double() * 2 - 1
    found: list[float] = (values.double() @ signs[start : start + values.numel()]).tolist()
    return found


def faults(entries: list[dict[str, Any]]) -> list[str]:
    """What is wrong in an account."""
    by_number: dict[int, list[Entry]] = defaultdict(list)
    by_worker: dict[int, list[Entry]] = defaultdict(list)
    for entry in (Entry(**one) for one in entries):
        by_number[entry.number].append(entry)
        by_worker[entry.who].append(entry)
    found = [fault for number, told in sorted(by_number.items()) for fault in _of_step(number, told)]
    found += [fault for who, told in by_worker.items() for fault in _of_worker(who, told)]
    return found + _of_momentum([told for _, told in sorted(by_number.items())])


def _of_step(number: int, told: list[Entry]) -> list[str]:
    first = told[0]
    if any(one.update != first.update or one.fragment != first.fragment for one in told):
        return [f"outer step {number} is not the same on workers {[one.who for one in told]}"]
    if len(told) > first.workers:
        return [f"outer step {number} was taken by {len(told)} workers, and {first.workers} took part"]
    if len(told) < first.workers:  # one has died since it sent its part
        return []

    changes = [total([one.before[part] for one in told]) - total([one.after[part] for one in told]) for part in (0, 2)]
    average = (total([one.gradient for one in told]) + changes[0]) / len(told)
    velocity = total([one.after[1] for one in told])
    wanted = first.momentum * total([one.before[1] for one in told]) + average
    update = first.lr * (average + first.momentum * velocity) + changes[1]
    gaps = {
        "momentum": (velocity - wanted, max(one.sizes[0] for one in told)),
        "update": (update - torch.tensor(first.update, dtype=torch.float64), sum(sum(one.sizes[:2]) for one in told)),
    }
    return [
        f"outer step {number} of fragment {first.fragment}, by {len(told)}: its {what} is off by {gap.tolist()}"
        for what, (gap, size) in gaps.items()
        if gap.abs().max() > _ROUNDING * size
    ]


def _of_momentum(steps: list[list[Entry]]) -> list[str]:
    found, last, blur = [], dict[int, Tensor](), defaultdict[int, float](float)
    for told in steps:
        first = told[0]
        if len(told) < first.workers:  # nor is its end known
            last.pop(first.fragment, None)
            continue
        before = total([one.before[1] for one in told])
        size = _ROUNDING * sum(one.sizes[0] for one in told) + blur[first.fragment]
        if first.momentum and first.fragment in last and (before - last[first.fragment]).abs().max() > size:
            found.append(
                f"outer step {first.number} begins with a momentum of {before.tolist()}, not {last[first.fragment]}"
            )
        last[first.fragment] = total([one.after[1] for one in told])
        # What follows from an outer step is off by what its owner owes, and by half of what it was off before.
        owed = _OF_A_NORM * sum(one.sizes[2] for one in told) / first.lr / (1 + first.momentum)
        blur[first.fragment] = owed + 0.5 * blur[first.fragment]
    return found


def total(which: list[list[float]]) -> Tensor:
    return torch.tensor(which, dtype=torch.float64).sum(0)


def _of_worker(who: int, told: list[Entry]) -> list[str]:
    found, last = [], dict[int, Entry]()
    for before, one in zip([None, *told], told, strict=False):
        if before is not None and one.number != before.number + 1 and one.generation < before.generation + 2:
            found.append(f"worker {who} takes outer step {one.number} after {before.number}")
        earlier = last.get(one.fragment)
        last[one.fragment] = one
        if earlier is None or min(one.workers, earlier.workers) == 1:  # who is alone owes nothing
            continue
        alike = {0: one.generation < earlier.generation + 2, 2: one.generation == earlier.generation}
        found += [
            f"worker {who} begins outer step {one.number} with other residuals than it ended the last one"
            for part, same in alike.items()
            if same and one.before[part] != earlier.after[part]
        ]
    return found
