"""The GPU benchmark of attention: its ratios, and what it says where there is no GPU."""

from __future__ import annotations

import pytest
import torch

from experiments.benchmarks.attention_gpu import Result, main, summarise


def test_ratios() -> None:
    times = {"thinwire": 2.0, "FlexAttention, compiled": 3.0, "dense, flash": 20.0}
    results = [Result(name, "forward", 4096, 128, 64, 0.25, time) for name, time in times.items()]
    results.append(Result("thinwire", "training", 4096, 64, 64, 0.25, 4.0))
    whole, alone = summarise(results)
    assert (whole["times_faster_than_flex"], whole["times_faster_than_dense"]) == (1.5, 10.0)
    assert whole["of_one_over_density"] == 2.5
    assert (alone["mode"], alone["times_faster_than_flex"], alone["of_one_over_density"]) == ("training", None, None)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "no NVIDIA GPU" in capsys.readouterr().err
