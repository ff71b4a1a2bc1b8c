"""Attention against its peers: they compute the same; memory is counted exactly; and a whole run with tiny sizes."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from experiments.common.peak_memory import PeakMemory, measure_alone
from experiments.long_sequences import __main__ as long_sequences
from experiments.long_sequences import bert_memory
from experiments.long_sequences import systems as attention_systems
from experiments.long_sequences.findings import longest_sequences, times_faster
from experiments.long_sequences.peers import gathered_attention, materialised_attention
from experiments.long_sequences.systems import BLOCK, DENSE, LAYOUTS
from experiments.long_sequences.timing import FEWEST_ROUNDS, Times, rounds_at
from tests.experiments.helpers import run_module
from thinwire.sparse_attn import BigBird, Custom, Fixed, reference_attention

linux = pytest.mark.skipif(sys.platform != "linux", reason="peak memory is read from /proc")


@pytest.mark.parametrize("layout", [BigBird(2, block=16), Fixed(2, block=16), BigBird(1, 16, num_global_blocks=2)])
def test_gathered_attention_is_the_layouts(layout: BigBird | Fixed) -> None:
    q, k, v = (torch.randn(2, 2, 160, 8, requires_grad=True) for _ in range(3))
    d_out = torch.randn(2, 2, 160, 8)
    expected = reference_attention(q, k, v, layout)
    found = gathered_attention(layout.index(160))(q, k, v)
    torch.testing.assert_close(found, expected)
    for ours, theirs in zip(
        torch.autograd.grad(found, (q, k, v), d_out), torch.autograd.grad(expected, (q, k, v), d_out), strict=True
    ):
        torch.testing.assert_close(ours, theirs)


def test_gathered_attention_refuses_heads_that_differ() -> None:
    mask = torch.eye(3, dtype=torch.bool).repeat(2, 1, 1)
    mask[1, 0] = True
    with pytest.raises(ValueError, match="got 2 different"):
        gathered_attention(Custom(mask, 16).index(48))


@pytest.mark.parametrize("name", [DENSE, *LAYOUTS])
def test_systems_compute_attention_on_their_own_inputs(name: str) -> None:
    length = 4 * BLOCK
    q, k, v = attention_systems.inputs(length, gradients=False)
    found = attention_systems.SYSTEMS[name].build(length)(q, k, v)
    expected = materialised_attention(q, k, v) if name == DENSE else reference_attention(q, k, v, LAYOUTS[name])
    torch.testing.assert_close(found, expected)
    assert attention_systems.input_bytes(length) == sum(x.nbytes for x in (q, k, v))


def test_quick_lengths_get_more_rounds() -> None:
    assert rounds_at(4096, 9) == 9
    assert rounds_at(2048, 9) == 18
    assert rounds_at(256, 9) == 40
    assert rounds_at(32768, 9) == FEWEST_ROUNDS


def test_times_faster_pairs_rounds() -> None:
    times = Times(seconds={"training": {64: {DENSE: [2.0, 40.0, 6.0], "BigBird": [1.0, 10.0, 2.0]}}})
    assert times_faster(times, "training", 64, "BigBird", DENSE) == 3
    assert times_faster(times, "training", 64, "Fixed", DENSE) is None


def peaks_of(megabytes: int) -> tuple[int, int]:
    with PeakMemory() as peak:
        np.ones(megabytes * 2**20, dtype=np.uint8)
    with PeakMemory() as nothing:
        pass
    return peak.extra, nothing.extra


@linux
def test_the_peak_counts_what_is_freed_again() -> None:
    megabytes = 64
    # Alone: in this process, memory that earlier tests have left would hide the peak.
    peak, nothing = measure_alone(peaks_of, megabytes)
    assert peak == pytest.approx(megabytes * 2**20, rel=0.1)
    assert nothing < megabytes * 2**20 / 8


@pytest.mark.parametrize(("coefficients", "degree"), [((1800.0, 6e5, 2e9), 2), ((7e5, 2e9), 1)])
def test_growth_finds_the_longest_sequence(coefficients: tuple[float, ...], degree: int) -> None:
    def needs(length: int) -> int:
        return round(np.polyval(coefficients, length))

    growth = bert_memory.grow({length: needs(length) for length in (512, 1024, 2048, 4096)[: degree + 2]}, degree)
    np.testing.assert_allclose(growth.coefficients, coefficients, rtol=1e-4)
    assert growth.held_out_error == pytest.approx(0, abs=1e-6)
    longest = growth.longest(24e9)
    assert longest % BLOCK == 0
    assert needs(longest) <= 24e9 < needs(longest + BLOCK)
    assert growth.longest(1e9) == 0


def test_growth_says_how_wrong_it_was() -> None:
    growth = bert_memory.grow({100: 100, 200: 200, 400: 800}, 1)
    assert growth.held_out_length == 400
    assert growth.held_out_error == pytest.approx(-0.5)
    with pytest.raises(ValueError, match="needs 3 lengths, got 2"):
        bert_memory.grow({100: 100, 200: 200}, 1)


def test_no_dense_sequence_gives_no_ratio() -> None:
    growth = bert_memory.Growth({}, [1.0, 2e9], 1, 0.0)
    found = longest_sequences({"kept": {"dense": growth, "sparse": growth}}, [1, 3])
    assert found["kept"]["1 GB"] == {"dense": 0, "sparse": 0, "ratio": None}
    assert found["kept"]["3 GB"]["ratio"] == 1


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("--lengths", "100"), "--lengths must be multiples of 64, at least 256; got 100"),
        (("--memory-lengths", "512", "64"), "--memory-lengths must be"),
        (("--lengths", "1024", "--dense-limit", "512"), "--dense-limit 512 must allow"),
        (("--bert-length", "100"), "--bert-length 100 must be a multiple of 512"),
        (("--rounds", "0"), "--rounds"),
    ],
)
def test_a_command_line_that_cannot_work_is_refused(
    arguments: tuple[str, ...], complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert long_sequences.main([*arguments, "--output", str(tmp_path)]) == 2
    assert complaint in capsys.readouterr().err


@linux
@pytest.mark.launch
def test_a_run_writes_numbers_and_picture(tmp_path: Path) -> None:
    limits = ["--dense-limit", "256", "--materialised-limit", "256"]
    sizes = ["--lengths", "256", "512", "--memory-lengths", "256", *limits]
    bert = ["--model", "tiny", "--bert-length", "512", "--gigabytes", "2"]
    ended = run_module(
        "experiments.long_sequences", *sizes, *bert, "--rounds", "1", "--threads", "1", "--output", tmp_path
    )
    assert ended.returncode == 0, ended.stderr
    assert (tmp_path / "long_sequences.png").read_bytes().startswith(b"\x89PNG")
    found = json.loads((tmp_path / "long_sequences.json").read_text())
    assert found["skipped_from_length"] == {DENSE: 512, "dense, materialised": 512}
    for mode in ("forward", "training"):
        assert set(found["time"][mode]["256"]) | set(found["unsupported"][mode]) == set(attention_systems.SYSTEMS)
        assert set(LAYOUTS) <= set(found["time"][mode]["512"])
    assert "backward" in found["unsupported"]["training"]["BigBird, FlexAttention"]
    assert found["bigbird"]["training_times_faster_than_dense"]["512"] is None
    assert found["bigbird"]["training_times_faster_than_gather"]["512"] > 0
    memory = found["memory"]
    scores = 4 * attention_systems.HEADS * 256**2
    assert memory["extra_peak_bytes"]["256"]["dense, materialised"]["training"] > 2 * scores
    # Output, its gradient and three more: five tensors, of which q, k, v are three.
    assert memory["extra_peak_bytes"]["256"]["BigBird"]["training"] > 4 / 3 * memory["bytes_of_qkv"]["256"]
    for rows in found["longest_sequence"]["tokens"].values():
        assert rows["2 GB"]["sparse"] > rows["2 GB"]["dense"] > 0
    assert found["findings"][0] in ended.stdout
