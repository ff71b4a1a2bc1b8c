"""What a probe finds on a network whose every message takes a known time, by a clock that only messages move."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from thinwire.comm import Communicator, threads
from thinwire.comm.traffic import sent_bytes
from thinwire.plan import Calibration, Link, PlanError, Speed, probe, probing
from thinwire.plan.cluster import COLLECTIVES
from thinwire.plan.probing import Stopwatch, fit_line, fit_link

LINK = Link(
    Speed(2e-4, 1e8),
    3e-5,
    {"all_to_all": Speed(1e-4, 1.2e8), "all_gather": Speed(3e-4, 0.9e8), "all_reduce": Speed(2e-4, 1e8)},
)


class SlowNetwork:
    """A communicator's collectives, which move this rank's clock by what `link` says they take."""

    def __init__(self, comm: Communicator, link: Link, disturb: Callable[[int], float]) -> None:
        self.now = 0.0
        self.calls = 0
        for name in COLLECTIVES:
            setattr(comm, name, self._slow(comm, name, getattr(comm, name), link, disturb))

    def clock(self) -> float:
        return self.now

    def _slow(self, comm: Communicator, name: Any, start: Any, link: Link, disturb: Callable[[int], float]) -> Any:
        def slow(*tensors: Tensor, **options: bool) -> Any:
            nbytes = sent_bytes(name, tensors[-1].nbytes, comm.size)
            if tensors[-1].dtype == torch.uint8:  # many at once, of which no one waits for another
                self.now += (comm.size - 1) * link.message
            else:
                self.calls += 1
                self.now += link.seconds(name, comm.size, nbytes) * disturb(self.calls)
            return start(*tensors, **options)

        return slow


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_a_link_is_found(ranks: int) -> None:
    def rank(comm: Communicator) -> Any:
        network = SlowNetwork(comm, LINK, lambda call: 50.0 if call % 5 == 0 and comm.rank == 1 else 1.0)
        return fit_link(Stopwatch(comm, torch.device("cpu"), network.clock), seconds=3.0)

    fits = threads.run(rank, ranks)
    assert all(fit == fits[0] for fit in fits)
    assert fits[0].message == pytest.approx(LINK.message)
    for name in COLLECTIVES:
        found = fits[0].collectives[name]
        assert found.bytes_per_second == pytest.approx(LINK.measured[name].bytes_per_second, rel=1e-6)
        assert found.intercept == pytest.approx(LINK.seconds(name, ranks, 0), rel=1e-6)
        assert found.error < 1e-6
        assert len(found.seconds) > 4


def test_a_thin_wire_is_measured_with_less() -> None:
    """At 1 MB/s a minute is not enough for 64 MiB."""

    def rank(comm: Communicator) -> float:
        network = SlowNetwork(comm, Link.of(1e6, 1e-3, 1e-4), lambda call: 1.0)
        fit = fit_link(Stopwatch(comm, torch.device("cpu"), network.clock), seconds=60.0)
        assert fit.collectives["all_reduce"].bytes_per_second == pytest.approx(1e6)
        return network.now

    assert 10 < threads.run(rank, 4)[0] < 70


class Hosts:
    """Gives each thread the host name of its rank, in the place of the machine's."""

    def __init__(self, names: list[str]) -> None:
        self._names = names
        self._local = threading.local()

    def settle(self, comm: Communicator) -> None:
        self._local.name = self._names[comm.rank]

    def __call__(self) -> str:
        return self._local.name


def probed(monkeypatch: pytest.MonkeyPatch, names: list[str]) -> list[Calibration]:
    hosts = Hosts(names)
    monkeypatch.setattr(socket, "gethostname", hosts)
    monkeypatch.setattr(probing, "_ELEMENTS", 1 << 16)

    def rank(comm: Communicator) -> Calibration:
        hosts.settle(comm)
        return probe(comm, seconds=0.01)

    return threads.run(rank, len(names))


@pytest.mark.parametrize(
    ("names", "nodes", "between", "inside"),
    [
        (["a"], 1, None, None),
        (["a", "a", "a"], 1, None, 3),
        (["a", "b", "c"], 3, 3, None),
        (["a", "b", "a", "b"], 2, 2, 2),
    ],
)
def test_what_is_there_is_measured(monkeypatch, names: list[str], nodes: int, between, inside) -> None:
    found = probed(monkeypatch, names)
    assert all(one == found[0] for one in found)
    assert (found[0].nodes, found[0].ranks_per_node) == (nodes, len(names) // nodes)
    assert (found[0].between and found[0].between.ranks) == between
    assert (found[0].inside and found[0].inside.ranks) == inside
    assert found[0].backend == "threads"
    if len(names) == 1:
        assert found[0].processor.overlap == 1.0


def test_uneven_nodes_are_refused_on_every_rank(monkeypatch) -> None:
    hosts = Hosts(["a", "b", "b"])
    monkeypatch.setattr(socket, "gethostname", hosts)

    def rank(comm: Communicator) -> str:
        hosts.settle(comm)
        with pytest.raises(PlanError) as refusal:
            probe(comm)
        return str(refusal.value)

    told = threads.run(rank, 3)
    assert told == ["a probe needs equally many ranks on every node, got a 1, b 2: start it on an even set"] * 3


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan")])
def test_no_time_is_refused(seconds: float) -> None:
    with pytest.raises(PlanError, match="the seconds of a probe must be a number above 0"):
        probe(threads.single(10.0), seconds)


# Lines through measurements, some of which were disturbed

AMOUNTS = [4.0**power for power in range(3, 11)]


@settings(deadline=None)
@given(st.floats(0, 1), st.floats(1e-9, 1))
def test_an_exact_line_is_found(intercept: float, slope: float) -> None:
    found = fit_line(AMOUNTS, [intercept + slope * amount for amount in AMOUNTS])
    assert found[0] == pytest.approx(intercept, rel=1e-3, abs=1e-3 * slope * AMOUNTS[0])
    assert found[1] == pytest.approx(slope, rel=1e-3, abs=1e-9 * intercept)
    assert found[2] < 1e-6


@settings(deadline=None)
@given(
    st.floats(1e-4, 1e-2),
    st.floats(1e-8, 1e-5),
    st.lists(st.integers(0, 5), min_size=0, max_size=2, unique=True),
    st.floats(3, 100),
)
def test_two_of_eight_may_be_far_too_slow_without_moving_large_transfers(
    intercept: float, slope: float, disturbed: list[int], factor: float
) -> None:
    seconds = [intercept + slope * amount for amount in AMOUNTS]
    for index in disturbed:
        seconds[index] *= factor
    found = fit_line(AMOUNTS, seconds)
    for amount in AMOUNTS[6:]:
        assert found[0] + found[1] * amount == pytest.approx(intercept + slope * amount, rel=0.05)


def test_a_shaper_s_burst_does_not_hide_its_rate() -> None:
    """Half of the sizes pass at once."""
    seconds = [1e-4 + amount * (1e-10 if amount < 20_000 else 1e-7) for amount in AMOUNTS]
    intercept, slope, _ = fit_line(AMOUNTS, seconds)
    assert intercept >= 0
    assert slope == pytest.approx(1e-7, rel=0.1)


@pytest.mark.parametrize(
    ("amounts", "seconds"), [([], []), ([1.0], [1.0]), ([2.0, 2.0], [1.0, 1.0]), ([0.0, 1.0], [1.0, 2.0])]
)
def test_too_little(amounts, seconds) -> None:
    with pytest.raises(ValueError, match="two different amounts"):
        fit_line(amounts, seconds)
