"""Every command of the experiments names the option that cannot work before anything runs or is written, and recorded
results are drawn again from their JSON alone."""

import json
import re
import subprocess
from importlib import import_module
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from experiments.common.results import RESULTS
from experiments.redraw import drawing_of, main
from experiments.training import plotting
from tests.experiments.helpers import REPOSITORY

REFUSED = [
    ("benchmarks.frozen_step", "--rounds 0", "--rounds"),
    ("benchmarks.kernels", "--elements 1001", "--elements"),
    ("ethernet.__main__", "--hosts 1", "single rank"),
    ("ethernet.__main__", "--hosts 251", "at most 250"),
    ("ethernet.__main__", "--contenders onebit-adam", "ddp-bf16, ddp-fp32"),
    ("ethernet.__main__", "--rates 0", "at least 1"),
    ("ethernet.__main__", "--add --races losses", "--loss-rate of the race"),
    ("ethernet.__main__", "--retime 100 --races losses", "--contenders to time"),
    ("ethernet.__main__", "--retime 100 --contenders ddp-bf16", "--races losses"),
    ("ethernet.__main__", "--added-steps 100", "goes with --add"),
    ("ethernet.__main__", "--add --races losses --loss-rate 20 --contenders zero-one-adam", "losses.json to add to"),
    ("convergence.__main__", "--seeds 0", "--seeds"),
    ("convergence.__main__", "--corpus absent", "absent"),
    ("ethernet.collectives", "--backends nccl", "invalid choice"),
    ("ethernet.local_steps", "--overlaps 1 15", "less than --every / --fragments, 15, got 15"),
    ("ethernet.shards", "--waits 1", "between 0 and 1, got 1.0"),
    ("ethernet.unseen", "--probe-rate 500", "the plan would have seen it"),
    ("frontier.__main__", "--task images", "images"),
    ("frontier.__main__", "--task mini --contenders lamb", "lamb learns none of --task mini"),
    ("frontier.__main__", "--quick", "no measurement: give another folder"),
    ("layer_drop.__main__", "--sequence-length 7", "--sequence-length 7 must be at least 8"),
    ("layer_drop.__main__", "--higher-lr 0.1 0.1", "--higher-lr takes rates that differ"),
    ("layer_drop.__main__", "--corpus absent", "absent"),
    ("lion.__main__", "--methods lion", "experiments.lion: error: --methods must name adamw"),
    ("lion.__main__", "--methods adamw adamw", "something to compare"),
    ("long_documents.__main__", "--window 500", "--window 500 must divide --document-length 4096"),
    ("long_sequences.__main__", "--lengths 100", "--lengths must be multiples of 64, at least 256; got 100"),
    ("long_sequences.__main__", "--systems BigBird", "--systems must have BigBird, gather + SDPA, dense, SDPA"),
    ("pretrain_bert.__main__", "--optimizer sgd", "sgd"),
    ("pretrain_bert.__main__", "--lr nan", "above 0"),
    ("pretrain_bert.__main__", "--freeze-step soon", "'soon'"),
    ("pretrain_bert.__main__", "--steps 5 --warmup-steps 5", "--warmup-steps 5 must be less"),
    ("pretrain_bert.__main__", "--config absent.json", "absent.json cannot be read"),
    ("pretrain_bert.__main__", "--checkpoints /dev/null", "--checkpoints /dev/null cannot be written"),
    ("pretrain_bert.__main__", "--zero 3 --optimizer onebit-adam", "stage 3"),
    ("text_classification.__main__", "--methods adamw", "something to compare"),
    ("text_classification.__main__", "--corpus absent", "two text files"),
]


@pytest.mark.parametrize(("command", "given", "complaint"), REFUSED, ids=lambda one: one)
def test_what_cannot_work_is_refused(command, given, complaint, tmp_path, capsys) -> None:
    arguments = given.split()
    if "--quick" not in arguments:  # which asks for another folder than the published results'
        arguments += ["--output", str(tmp_path / "results")]
    assert import_module(f"experiments.{command}").main(arguments) == 2
    assert complaint in capsys.readouterr().err
    assert not list(tmp_path.rglob("*.json"))


PICTURES = sorted(path.stem for path in RESULTS.glob("*.png") if not path.stem.endswith("_details"))


def is_changed(path: Path) -> bool:
    """Whether a file is another one than was committed; where there is no git, none is."""
    try:
        compared = subprocess.run(["git", "diff", "--quiet", "HEAD", "--", path], cwd=REPOSITORY, timeout=60)
    except FileNotFoundError:
        return False
    return compared.returncode == 1


@pytest.mark.programs
def test_every_committed_picture_is_drawn_from_its_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what its title says, the documentation says too, unless the run is one's own."""
    titles: list[str] = []

    def note_title(figure: Figure, title: str, subtitle: str) -> float:
        titles.append(title)
        return write_head(figure, title, subtitle)

    write_head, write = plotting.write_head, Figure.savefig
    monkeypatch.setattr(plotting, "write_head", note_title)
    # Every line and label is drawn, on few pixels.
    monkeypatch.setattr(Figure, "savefig", lambda figure, path, **given: write(figure, path, **given | {"dpi": 20}))
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
def test_what_cannot_be_drawn_is_refused(tmp_path, capsys, names, complaint) -> None:
    if names == ["stages"]:
        (tmp_path / "stages.json").write_text(json.dumps({"finding": {}}))
    assert main([*names, "--results", str(tmp_path)]) == 2
    assert complaint in capsys.readouterr().err
