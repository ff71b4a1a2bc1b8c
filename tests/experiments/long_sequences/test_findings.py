"""What measured times and memory say."""

from __future__ import annotations

from experiments.long_sequences.bert_memory import Growth
from experiments.long_sequences.findings import longest_sequences, times_faster
from experiments.long_sequences.systems import DENSE
from experiments.long_sequences.timing import Times


def test_times_faster_pairs_rounds() -> None:
    times = Times(seconds={"training": {64: {DENSE: [2.0, 40.0, 6.0], "BigBird": [1.0, 10.0, 2.0]}}})
    assert times_faster(times, "training", 64, "BigBird", DENSE) == 3
    assert times_faster(times, "training", 64, "Fixed", DENSE) is None


def test_no_dense_sequence_gives_no_ratio() -> None:
    growth = Growth({}, [1.0, 2e9], 1, 0.0)
    found = longest_sequences({"kept": {"dense": growth, "sparse": growth}}, [1, 3])
    assert found["kept"]["1 GB"] == {"dense": 0, "sparse": 0, "ratio": None}
    assert found["kept"]["3 GB"]["ratio"] == 1
