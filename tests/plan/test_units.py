"""Numbers as people write them, and what is no number."""

from __future__ import annotations

import pytest

from thinwire.plan import PlanError, units


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        ("rate", "1Gb/s", 125e6),
        ("rate", "1 Gb/s", 125e6),
        ("rate", "1Gbps", 125e6),
        ("rate", "10GbE", 1.25e9),
        ("rate", "100Mbit/s", 12.5e6),
        ("rate", "56kbps", 7e3),
        ("rate", "125MB/s", 125e6),
        ("rate", "1.25GB/s", 1.25e9),
        ("rate", "1GiB/s", 2**30),
        ("rate", "2TB/s", 2e12),
        ("rate", "2.5e2Mb/s", 31.25e6),
        ("time", "25ms", 0.025),
        ("time", "50us", 50e-6),
        ("time", "50 µs", 50e-6),
        ("time", "1.5s", 1.5),
        ("time", "0s", 0),
        ("time", "2min", 120),
        ("size", "80GB", 80e9),
        ("size", "16MiB", 16 * 2**20),
        ("count", "340M", 340_000_000),
        ("count", "1.3B", 1_300_000_000),
        ("count", "7b", 7_000_000_000),
        ("count", "124_439_808", 124_439_808),
        ("count", "340e6", 340_000_000),
        ("part", "15%", 0.15),
        ("part", "0.15", 0.15),
    ],
)
def test_units(kind: units.Kind, text: str, value: float) -> None:
    assert units.read(kind, "--it", text) == pytest.approx(value)


@pytest.mark.parametrize(
    ("kind", "text", "told"),
    [
        ("rate", "1", "a rate, as in 1Gb/s"),  # bits or bytes?
        ("rate", "1 lightyear", "a rate"),
        ("rate", "0Gb/s", "a rate"),
        ("rate", "-1Gb/s", "a rate"),
        ("rate", "", "a rate"),
        ("rate", "nan", "a rate"),
        ("rate", "1e999Gb/s", "a rate"),
        ("rate", "1gb/s", "a rate"),
        ("time", "25", "a time, as in 25ms"),
        ("time", "-25ms", "a time"),
        ("size", "80", "a size, as in 80GB"),
        ("size", "80Gb", "a size"),
        ("count", "1.5", "a whole number above 0"),
        ("count", "0", "a whole number above 0"),
        ("count", "340X", "a whole number"),
        ("count", "1e999", "a whole number"),
        ("part", "150%", "a part from 0 to 1"),
        ("part", "-1", "a part from 0 to 1"),
    ],
)
def test_what_is_refused(kind: units.Kind, text: str, told: str) -> None:
    with pytest.raises(PlanError, match=f"--it must be {told}") as caught:
        units.read(kind, "--it", text)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize(
    ("in_words", "value", "text"),
    [
        *((units.rate_in_words, *one) for one in ((125e6, "1 Gb/s"), (9e6, "72 Mb/s"), (1.25e11, "1 Tb/s"))),
        *((units.rate_in_words, *one) for one in ((124.99e6, "1 Gb/s"), (1, "8 b/s"))),
        *((units.size_in_words, *one) for one in ((22.02e9, "22 GB"), (999.9e6, "1 GB"), (3.3e6, "3.3 MB"))),
        (units.size_in_words, 40, "0.04 kB"),
        *((units.seconds_in_words, *one) for one in ((2.104, "2.1 s"), (0.0364, "36.4 ms"), (0.9996, "1 s"))),
        *((units.seconds_in_words, *one) for one in ((50e-6, "50 us"), (1234.5, "1234 s"), (0.0, "0 us"))),
    ],
)
def test_in_words(in_words, value: float, text: str) -> None:
    assert in_words(value) == text
