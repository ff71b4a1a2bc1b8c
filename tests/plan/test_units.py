"""Numbers as people write them, and what is no number."""

import pytest

from thinwire.plan import PlanError, units


@pytest.mark.parametrize(
    ("kind", "value", "texts"),
    [
        ("rate", 125e6, ("1Gb/s", "1 Gb/s", "1Gbps", "125MB/s")),
        ("rate", 1.25e9, ("10GbE", "1.25GB/s")),
        ("rate", 12.5e6, ("100Mbit/s",)),
        ("rate", 31.25e6, ("2.5e2Mb/s",)),
        ("rate", 7e3, ("56kbps",)),
        ("rate", 2**30, ("1GiB/s",)),
        ("rate", 2e12, ("2TB/s",)),
        ("time", 0.025, ("25ms",)),
        ("time", 50e-6, ("50us", "50 µs")),
        ("time", 1.5, ("1.5s",)),
        ("time", 0, ("0s",)),
        ("time", 120, ("2min",)),
        ("size", 80e9, ("80GB",)),
        ("size", 16 * 2**20, ("16MiB",)),
        ("count", 340_000_000, ("340M", "340e6", "340_000_000")),
        ("count", 7_000_000_000, ("7B", "7b", "7.0b")),
        ("part", 0.15, ("15%", "0.15")),
    ],
)
def test_units(kind: units.Kind, value: float, texts: tuple[str, ...]) -> None:
    assert [units.read(kind, "--it", text) for text in texts] == pytest.approx([value] * len(texts))


@pytest.mark.parametrize(
    ("kind", "told", "texts"),
    [
        # Of the first nobody knows whether it is bits or bytes.
        ("rate", "a rate, as in 1Gb/s", ("1", "1 lightyear", "0Gb/s", "-1Gb/s", "", "nan", "1e999Gb/s", "1gb/s")),
        ("time", "a time, as in 25ms", ("25", "-25ms")),
        ("size", "a size, as in 80GB", ("80", "80Gb")),
        ("count", "a whole number above 0", ("1.5", "0", "340X", "1e999")),
        ("part", "a part from 0 to 1", ("150%", "-1")),
    ],
)
def test_what_is_refused(kind: units.Kind, told: str, texts: tuple[str, ...]) -> None:
    for text in texts:
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
        *((units.count_in_words, *one) for one in ((335_000_000, "335M"), (1_300_000_000, "1.3B"), (10**12, "1T"))),
        *((units.seconds_in_words, *one) for one in ((2.104, "2.1 s"), (0.0364, "36.4 ms"), (0.9996, "1 s"))),
        *((units.seconds_in_words, *one) for one in ((50e-6, "50 us"), (1234.5, "1234 s"), (0.0, "0 us"))),
    ],
)
def test_in_words(in_words, value: float, text: str) -> None:
    assert in_words(value) == text
