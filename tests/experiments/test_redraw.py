"""Recorded results are drawn again from their JSON alone, and what cannot be drawn is refused."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from experiments.common.results import RESULTS
from experiments.redraw import drawing_of, main
from experiments.training import plotting
from tests.experiments.helpers import REPOSITORY

PICTURES = sorted(path.stem for path in RESULTS.glob("*.png") if not path.stem.endswith("_details"))


def is_changed(path: Path) -> bool:
    """Whether a file is another one than was committed; where there is no git, none is."""
    try:
        compared = subprocess.run(["git", "diff", "--quiet", "HEAD", "--", path], cwd=REPOSITORY, timeout=60)
    except FileNotFoundError:
        return False
    return compared.returncode == 1


def test_every_committed_picture_is_drawn_from_its_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what its title says, the documentation says too, unless the run is one's own."""
    titles: list[str] = []

    def note_title(figure: Figure, title: str, subtitle: str) -> float:
        titles.append(title)
        return write_head(figure, title, subtitle)

    write_head = plotting.write_head
    monkeypatch.setattr(plotting, "write_head", note_title)
    before = {path: path.read_bytes() for path in RESULTS.iterdir() if path.is_file()}
    changed = [name for name in PICTURES if is_changed(RESULTS / f"{name}.json")]
    assert main([*(name for name in PICTURES if name not in changed), "--output", str(tmp_path)]) == 0
    figures = {figure for title in titles for figure in re.findall(r"\d[\d.,]*[x%]|\d+\.\d+", title)}
    assert not changed or main([*changed, "--output", str(tmp_path)]) == 0
    drawn = {path.stem for path in tmp_path.iterdir() if not path.stem.endswith("_details")}
    assert drawn == set(PICTURES)
    documents = [REPOSITORY / "README.md", *(REPOSITORY / "docs").rglob("*.md")]
    told = "\n".join(document.read_text() for document in documents)
    assert {"6.1x", "4.4x", "19x", "0.6%"} <= figures
    assert not {figure for figure in figures if figure not in told}
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in tmp_path.iterdir())
    assert {path: path.read_bytes() for path in RESULTS.iterdir() if path.is_file()} == before


def test_variants_of_an_experiment_are_drawn_by_it() -> None:
    assert drawing_of("ethernet_2_ranks_a_host") is drawing_of("ethernet")
    assert drawing_of("ethernet_losses") is not drawing_of("ethernet")
    assert drawing_of("ethernet_overlap") is None
    assert drawing_of("unknown") is None


@pytest.mark.parametrize(
    ("names", "complaint"),
    [
        (["chaos"], "chaos has no picture; there are pictures of"),
        (["lion"], "lion.json does not exist: run the experiment first"),
        ([], "holds no results that have a picture"),
        (["stages"], "stages.json does not hold what its picture shows"),
    ],
)
def test_what_cannot_be_drawn_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], names: list[str], complaint: str
) -> None:
    if names == ["stages"]:
        (tmp_path / "stages.json").write_text(json.dumps({"finding": {}}))
    assert main([*names, "--results", str(tmp_path)]) == 2
    assert complaint in capsys.readouterr().err
