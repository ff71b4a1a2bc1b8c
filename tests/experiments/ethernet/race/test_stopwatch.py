"""Sleeping counts as waiting, computing does not; bytes are the kernel's."""

from __future__ import annotations

import socket
import sys
import time

import pytest

from experiments.ethernet.race.stopwatch import Interface, Stopwatch

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the kernel's accounts are Linux's")


def test_sleep_is_waiting() -> None:
    stopwatch = Stopwatch(Interface("lo"))
    time.sleep(0.2)
    reading = stopwatch.stop()
    assert reading.seconds >= 0.2
    assert 0.15 <= reading.waited <= reading.seconds


@linux
def test_computing_is_not_waiting_however_crowded_the_cores() -> None:
    stopwatch = Stopwatch(Interface("lo"))
    end = time.thread_time() + 0.2
    while time.thread_time() < end:
        pass
    reading = stopwatch.stop()
    assert reading.waited < 0.5 * reading.seconds
    assert reading.cpu > 0.1


@linux
def test_bytes_are_the_interfaces() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as receiver:
        receiver.bind(("127.0.0.1", 0))
        stopwatch = Stopwatch(Interface("lo"))
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
            sender.sendto(bytes(5000), receiver.getsockname())
        reading = stopwatch.stop()
    assert reading.sent >= 5000
    assert reading.received >= 5000


def test_an_unknown_interface_counts_nothing() -> None:
    interface = Interface("no-such-device")
    assert (interface.sent(), interface.received()) == (0, 0)
