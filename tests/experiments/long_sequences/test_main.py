"""The study of long sequences: what its command line refuses, and a whole run with tiny sizes."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from experiments.long_sequences.__main__ import main
from experiments.long_sequences.systems import DENSE, GATHERED, HEADS, MATERIALISED
from tests.experiments.helpers import run_module

linux = pytest.mark.skipif(sys.platform != "linux", reason="peak memory is read from /proc")


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("--lengths", "100"), "--lengths must be multiples of 64, at least 256; got 100"),
        (("--memory-lengths", "512", "64"), "--memory-lengths must be"),
        (("--lengths", "1024", "--dense-limit", "512"), "--dense-limit 512 must allow"),
        (("--bert-length", "100"), "--bert-length 100 must be a multiple of 512"),
        (("--rounds", "0"), "--rounds"),
        (("--systems", "BigBird"), "--systems must have BigBird, gather + SDPA, dense, SDPA"),
    ],
)
def test_a_command_line_that_cannot_work_is_refused(
    arguments: tuple[str, ...], complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*arguments, "--output", str(tmp_path)]) == 2
    assert complaint in capsys.readouterr().err


@linux
@pytest.mark.launch
def test_a_run_writes_numbers_and_picture(tmp_path: Path) -> None:
    limits = ["--dense-limit", "256", "--materialised-limit", "256"]
    sizes = ["--lengths", "256", "512", "--memory-lengths", "256", *limits]
    systems = ["--systems", DENSE, MATERIALISED, "BigBird", GATHERED]  # the peer that compiles has no test of its own
    bert = ["--model", "tiny", "--bert-length", "512", "--gigabytes", "2"]
    ended = run_module(
        "experiments.long_sequences", *sizes, *systems, *bert, "--rounds", "1", "--threads", "1", "--output", tmp_path
    )
    assert ended.returncode == 0, ended.stderr
    assert (tmp_path / "long_sequences.png").read_bytes().startswith(b"\x89PNG")
    found = json.loads((tmp_path / "long_sequences.json").read_text())
    assert found["skipped_from_length"] == {DENSE: 512, MATERIALISED: 512}
    for mode in ("forward", "training"):
        assert set(found["time"][mode]["256"]) == {DENSE, MATERIALISED, "BigBird", GATHERED}
        assert set(found["time"][mode]["512"]) == {"BigBird", GATHERED}
    assert found["bigbird"]["training_times_faster_than_dense"]["512"] is None
    assert found["bigbird"]["training_times_faster_than_gather"]["512"] > 0
    memory = found["memory"]
    scores = 4 * HEADS * 256**2
    assert memory["extra_peak_bytes"]["256"]["dense, materialised"]["training"] > 2 * scores
    # Output, its gradient and three more: five tensors, of which q, k, v are three.
    assert memory["extra_peak_bytes"]["256"]["BigBird"]["training"] > 4 / 3 * memory["bytes_of_qkv"]["256"]
    for rows in found["longest_sequence"]["tokens"].values():
        assert rows["2 GB"]["sparse"] > rows["2 GB"]["dense"] > 0
    assert found["findings"][0] in ended.stdout
