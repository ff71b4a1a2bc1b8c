"""The seconds of a race are those of the steps of each kind, at the rate of the race and at any other."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

from experiments.common.results import RESULTS, read_json
from experiments.ethernet.race.kinds import Clock, Kind, counts_along, from_records, records, retime


def test_the_clock_adds_what_steps_of_each_kind_take() -> None:
    exact, packed, silent = Kind("warmup", 32), Kind("1-bit", 1), Kind("1-bit", 0)
    done = Counter({exact: 10, packed: 4, silent: 6})
    clock = Clock({exact: [1.0, 3.0], packed: [0.5], silent: [0.25]}, done)
    assert clock.seconds(done) == 23.5
    assert clock.by_stage() == {"warmup": 2.0, "1-bit": pytest.approx(0.35)}


def recorded(
    kinds: list[Kind], timed: dict[Kind, list[float]], every: int
) -> tuple[dict[str, Any], list[Counter[Kind]]]:
    """What a race records of steps of these kinds, and what it does not: how many there were until each point."""
    counts = [Counter(kinds[:steps]) for steps in (*range(every, len(kinds), every), len(kinds))]
    clock = Clock(timed, counts[-1])
    run = {
        "steps": [one.total() for one in counts],
        "bytes_sent": [sum(kind.bytes_sent * count for kind, count in one.items()) for one in counts],
        "seconds": [clock.seconds(one) for one in counts],
        "kinds": records(clock),
    }
    return run, counts


@pytest.mark.parametrize("seed", range(5))
def test_counts_of_kinds_follow_from_what_a_race_records(seed: int) -> None:
    draws = random.Random(seed)
    # Twice what one of them sends is what two others send: only the seconds tell these apart.
    warmup = [Kind("warmup", nbytes) for nbytes in (5000, 5003, 700)]
    frozen = [Kind("1-bit", nbytes) for nbytes in (700, 350, 0)]
    timed = {kind: [draws.uniform(0.1, 1) for _ in range(3)] for kind in (*warmup, *frozen)}
    run, counts = recorded(draws.choices(warmup, k=40) + draws.choices(frozen, k=81), timed, every=17)
    assert counts_along(run) == counts


def test_bytes_that_no_kinds_send_are_refused() -> None:
    run, _ = recorded([Kind("exact", 8)] * 6, {Kind("exact", 8): [1.0]}, every=3)
    run["bytes_sent"][0] += 1
    with pytest.raises(ValueError, match=r"25 bytes sent by step 3 .* race it again"):
        counts_along(run)


def test_a_run_has_the_seconds_of_another_rate() -> None:
    exact, packed = Kind("warmup", 32), Kind("1-bit", 1)
    run, _ = recorded([exact, exact, packed, packed, packed], {exact: [2.0], packed: [1.0]}, every=2)
    faster = records(Clock({exact: [0.5, 0.25], packed: [0.125]}, Counter({exact: 3, packed: 1})))
    again = retime(run, faster)
    assert again["seconds"] == [0.75, 1.0, 1.125]
    assert again["seconds_a_step"] == {"warmup": 0.375, "1-bit": 0.125}
    assert again["steps"] == run["steps"]


def test_the_recorded_race_is_told_apart_and_put_together_again() -> None:
    runs = read_json(RESULTS / "ethernet_losses.json")["runs"]
    for run in runs.values():
        again = retime(run, run["kinds"])
        assert again["seconds"] == pytest.approx(run["seconds"], rel=1e-12)
        assert from_records(run["kinds"]).done == counts_along(run)[-1]
