"""How numbers are shown."""

from __future__ import annotations

import pytest

from experiments.training.reporting import human_bytes


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (121_000, "121 kB"),
        (3.79e6, "3.79 MB"),
        (2.2e9, "2.2 GB"),
        (5e12, "5 TB"),
    ],
)
def test_bytes_come_with_a_unit(count: float, text: str) -> None:
    assert human_bytes(count) == text
