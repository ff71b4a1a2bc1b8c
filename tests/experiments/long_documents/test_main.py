"""The study of long documents: what its command line refuses, and a whole run with tiny sizes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from experiments.long_documents.__main__ import main
from tests.experiments.helpers import write_text


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("--window", "500"), "--window 500 must divide --document-length 4096"),
        (("--window", "4096"), "--window 4096 must divide"),
        (("--document-length", "128"), "--document-length 128 must be at least 256"),
        (("--minutes", "0"), "--minutes"),
    ],
)
def test_a_command_line_that_cannot_work_is_refused(
    arguments: tuple[str, ...], complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*arguments, "--output", str(tmp_path)]) == 2
    assert complaint in capsys.readouterr().err


def test_a_run_writes_numbers_and_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    corpus = write_text(tmp_path / "shopping.txt", 6000)
    sizes = ["--model", "tiny", "--vocab-size", "120", "--document-length", "256", "--window", "64"]
    times = ["--start-steps", "2", "--minutes", "0.02", "--turns", "2", "--validation-documents", "2"]
    assert main(["--corpus", str(corpus), *sizes, *times, "--output", str(tmp_path)]) == 0
    assert (tmp_path / "long_documents.png").read_bytes().startswith(b"\x89PNG")
    found = json.loads((tmp_path / "long_documents.json").read_text())
    assert str(tmp_path) not in json.dumps(found)
    fewest = min(run["curve"]["steps"][-1] for run in found["runs"].values())
    assert found["equal_steps"]["steps"] == fewest
    for name, run in found["runs"].items():
        assert run["tokens_seen"] == run["documents_seen"] * (64 if name == "truncated" else 256)
        assert found["equal_time"]["losses"][name] == run["curve"]["losses"][-1]
    assert found["findings"][1] in capsys.readouterr().out
