from __future__ import annotations

from fractions import Fraction
from math import ceil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thinwire.comm import Traffic
from thinwire.comm.traffic import sent_bytes


@given(nbytes=st.integers(0, 2**40), size=st.integers(1, 1000))
def test_bytes_are_those_of_the_best_algorithm(nbytes, size):
    share = Fraction(size - 1, size)
    assert sent_bytes("all_to_all", nbytes, size) == ceil(share * nbytes)
    assert sent_bytes("broadcast", nbytes, size) == ceil(share * nbytes)
    assert sent_bytes("all_reduce", nbytes, size) == ceil(2 * share * nbytes)
    assert sent_bytes("all_gather", nbytes, size) == (size - 1) * nbytes


@pytest.mark.parametrize("collective", ["all_to_all", "all_gather", "all_reduce", "broadcast", "barrier"])
def test_one_rank_sends_nothing(collective):
    assert sent_bytes(collective, 1000, 1) == 0


def test_what_came_after_a_copy_can_be_counted_again():
    traffic = Traffic()
    traffic.add("all_gather", 3)
    before = traffic.copy()
    traffic.add("all_gather", 4)
    traffic.add("all_to_all", 0)
    once = traffic.since(before)
    traffic.include(once)
    assert (traffic.bytes_sent, traffic.calls) == (11, 5)
    assert (before.bytes_sent, once.bytes_sent, once.calls) == (3, 4, 2)


def test_counts_add_up_and_reset():
    traffic = Traffic()
    traffic.add("all_gather", 3)
    traffic.add("all_gather", 4)
    traffic.add("all_reduce", 5)
    assert traffic.bytes_sent == 12
    assert traffic.calls == 3
    assert traffic.bytes_by_collective == {"all_gather": 7, "all_reduce": 5}
    assert repr(traffic) == "Traffic(12 B sent; all_gather: 7 B, all_reduce: 5 B)"
    traffic.reset()
    assert (traffic.bytes_sent, traffic.calls) == (0, 0)
