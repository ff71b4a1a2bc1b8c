"""The systems compute attention, and what measured times and memory say of it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from experiments.long_sequences import bert_memory, memory
from experiments.long_sequences.__main__ import main
from experiments.long_sequences.bert_memory import grow
from experiments.long_sequences.findings import times_faster
from experiments.long_sequences.systems import (
    BLOCK,
    DENSE,
    GATHERED,
    LAYOUTS,
    MATERIALISED,
    SYSTEMS,
    input_bytes,
    inputs,
)
from experiments.long_sequences.timing import Times
from experiments.tasks.attention_peers import materialised_attention
from thinwire.sparse_attn import reference_attention


def test_times_faster_pairs_rounds() -> None:
    times = Times(seconds={"training": {64: {DENSE: [2.0, 40.0, 6.0], "BigBird": [1.0, 10.0, 2.0]}}})
    assert times_faster(times, "training", 64, "BigBird", DENSE) == 3
    assert times_faster(times, "training", 64, "Fixed", DENSE) is None


@pytest.mark.parametrize("name", [DENSE, *LAYOUTS])
def test_systems_compute_attention_on_their_own_inputs(name: str) -> None:
    length = 4 * BLOCK
    q, k, v = inputs(length, gradients=False)
    found = SYSTEMS[name].build(length)(q, k, v)
    expected = materialised_attention(q, k, v) if name == DENSE else reference_attention(q, k, v, LAYOUTS[name])
    torch.testing.assert_close(found, expected)
    assert input_bytes(length) == sum(x.nbytes for x in (q, k, v))


@pytest.mark.parametrize(("coefficients", "degree"), [((1800.0, 6e5, 2e9), 2), ((7e5, 2e9), 1)])
def test_growth_finds_the_longest_sequence(coefficients: tuple[float, ...], degree: int) -> None:
    def needs(length: int) -> int:
        return round(np.polyval(coefficients, length))

    growth = grow({length: needs(length) for length in (512, 1024, 2048, 4096)[: degree + 2]}, degree)
    np.testing.assert_allclose(growth.coefficients, coefficients, rtol=1e-4)
    assert growth.held_out_error == pytest.approx(0, abs=1e-6)
    longest = growth.longest(24e9)
    assert longest % BLOCK == 0
    assert needs(longest) <= 24e9 < needs(longest + BLOCK)
    assert growth.longest(1e9) == 0


linux = pytest.mark.skipif(sys.platform != "linux", reason="peak memory is read from /proc")


@linux
def test_a_run_writes_numbers_and_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In this process, which has held more before: what its peaks would say of BERT is made up."""

    def measure_here(work: Callable[..., Any], *arguments: Any, imported_before: object) -> Any:
        if work.__module__ == memory.__name__:
            return work(*arguments)
        attention, length = arguments[1:3]
        _ = length > 512 or work(*arguments)
        return 10**9 + (2000 * length**2 if attention == "dense" else 10**5 * length)

    for module in (memory, bert_memory):
        monkeypatch.setattr(module, "measure_alone", measure_here)
    limits = ["--dense-limit", "256", "--materialised-limit", "256"]
    sizes = ["--lengths", "256", "512", "--memory-lengths", "256", *limits]
    systems = ["--systems", DENSE, MATERIALISED, "BigBird", GATHERED]  # the peer that compiles has no test of its own
    bert = ["--model", "tiny", "--bert-length", "512", "--gigabytes", "2"]
    assert main([*sizes, *systems, *bert, "--rounds", "1", "--threads", "1", "--output", str(tmp_path)]) == 0
    assert (tmp_path / "long_sequences.png").read_bytes().startswith(b"\x89PNG")
    found = json.loads((tmp_path / "long_sequences.json").read_text())
    assert found["skipped_from_length"] == {DENSE: 512, MATERIALISED: 512}
    for mode in ("forward", "training"):
        assert set(found["time"][mode]["256"]) == {DENSE, MATERIALISED, "BigBird", GATHERED}
        assert set(found["time"][mode]["512"]) == {"BigBird", GATHERED}
    assert found["bigbird"]["training_times_faster_than_dense"]["512"] is None
    assert found["bigbird"]["training_times_faster_than_gather"]["512"] > 0
    assert set(found["memory"]["extra_peak_bytes"]["256"]) == {DENSE, MATERIALISED, "BigBird", GATHERED}
    for rows in found["longest_sequence"]["tokens"].values():
        assert rows["2 GB"]["sparse"] > rows["2 GB"]["dense"] > 0
    assert found["findings"][0] in capsys.readouterr().out
