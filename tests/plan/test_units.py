"""Numbers as people write them, and what is no number."""

from __future__ import annotations

import pytest

from thinwire.plan import PlanError, units


@pytest.mark.parametrize(
    ("text", "bytes_per_second"),
    [
        ("1Gb/s", 125e6),
        ("1 Gb/s", 125e6),
        ("1Gbps", 125e6),
        ("10GbE", 1.25e9),
        ("100Mbit/s", 12.5e6),
        ("56kbps", 7e3),
        ("125MB/s", 125e6),
        ("1.25GB/s", 1.25e9),
        ("1GiB/s", 2**30),
        ("2TB/s", 2e12),
        ("2.5e2Mb/s", 31.25e6),
    ],
)
def test_rates(text: str, bytes_per_second: float) -> None:
    assert units.rate("--link", text) == pytest.approx(bytes_per_second)


@pytest.mark.parametrize(
    ("read", "text", "value"),
    [
        (units.seconds, "25ms", 0.025),
        (units.seconds, "50us", 50e-6),
        (units.seconds, "50 µs", 50e-6),
        (units.seconds, "1.5s", 1.5),
        (units.seconds, "0s", 0),
        (units.seconds, "2min", 120),
        (units.size, "80GB", 80e9),
        (units.size, "16MiB", 16 * 2**20),
        (units.count, "340M", 340_000_000),
        (units.count, "1.3B", 1_300_000_000),
        (units.count, "7b", 7_000_000_000),
        (units.count, "124_439_808", 124_439_808),
        (units.count, "340e6", 340_000_000),
        (units.part, "15%", 0.15),
        (units.part, "0.15", 0.15),
    ],
)
def test_other_units(read, text: str, value: float) -> None:
    assert read("--it", text) == pytest.approx(value)


@pytest.mark.parametrize(
    ("read", "text", "told"),
    [
        (units.rate, "1", "a rate, as in 1Gb/s"),  # bits or bytes?
        (units.rate, "1 lightyear", "a rate"),
        (units.rate, "0Gb/s", "a rate"),
        (units.rate, "-1Gb/s", "a rate"),
        (units.rate, "", "a rate"),
        (units.rate, "nan", "a rate"),
        (units.rate, "1e999Gb/s", "a rate"),
        (units.rate, "1gb/s", "a rate"),
        (units.seconds, "25", "a time, as in 25ms"),
        (units.seconds, "-25ms", "a time"),
        (units.size, "80", "a size, as in 80GB"),
        (units.size, "80Gb", "a size"),
        (units.count, "1.5", "a whole number above 0"),
        (units.count, "0", "a whole number above 0"),
        (units.count, "340X", "a whole number"),
        (units.part, "150%", "a part from 0 to 1"),
        (units.part, "-1", "a part from 0 to 1"),
    ],
)
def test_what_is_refused(read, text: str, told: str) -> None:
    with pytest.raises(PlanError, match=f"--it must be {told}") as caught:
        read("--it", text)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize(
    ("value", "text"), [(125e6, "1 Gb/s"), (9e6, "72 Mb/s"), (1.25e11, "1 Tb/s"), (124.99e6, "1 Gb/s"), (1, "8 b/s")]
)
def test_rates_in_words(value: float, text: str) -> None:
    assert units.rate_in_words(value) == text


@pytest.mark.parametrize(("value", "text"), [(22.02e9, "22 GB"), (999.9e6, "1 GB"), (3.3e6, "3.3 MB"), (40, "0.04 kB")])
def test_sizes_in_words(value: float, text: str) -> None:
    assert units.size_in_words(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(2.104, "2.1 s"), (0.0364, "36.4 ms"), (0.9996, "1 s"), (50e-6, "50 us"), (1234.5, "1234 s"), (0.0, "0 us")],
)
def test_seconds_in_words(value: float, text: str) -> None:
    assert units.seconds_in_words(value) == text
