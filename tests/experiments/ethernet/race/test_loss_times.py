"""The seconds of a race are those of the steps of each kind."""

from __future__ import annotations

from collections import Counter

import pytest

from experiments.ethernet.race.loss_times import Clock, Kind


def test_the_clock_adds_what_steps_of_each_kind_take() -> None:
    exact, packed, silent = Kind("warmup", 32), Kind("1-bit", 1), Kind("1-bit", 0)
    done = Counter({exact: 10, packed: 4, silent: 6})
    clock = Clock({exact: [1.0, 3.0], packed: [0.5], silent: [0.25]}, done)
    assert clock.seconds(done) == 23.5
    assert clock.by_stage() == {"warmup": 2.0, "1-bit": pytest.approx(0.35)}


def test_steps_too_rare_to_be_timed_take_what_the_nearest_in_bytes_do() -> None:
    clock = Clock({Kind("warmup", 32): [4.0], Kind("warmup", 1): [1.0], Kind("1-bit", 1): [0.5]})
    assert clock.seconds(Counter({Kind("warmup", 30): 2})) == 8
    assert clock.seconds(Counter({Kind("1-bit", 2): 2})) == 1
