"""Every example runs as its first lines say, and fits on a page.

Those of transformers' Trainer, peft and Lightning run in tests/hugging_face and tests/lightning, on two ranks that have
imported these for much else too.
"""

import json
import os
import runpy
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.pyplot as plt
import pytest
from transformers import BertForMaskedLM

from tests.launching import WHOLLY, Jobs, environment, free_port, since_torch_2_13
from thinwire.comm.elastic import serve
from thinwire.sparse_attn import densify

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(name: str, *arguments: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process, as one rank."""
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")


def test_each_fits_on_a_page() -> None:
    """And what bash runs is bash."""
    for path in (one for kind in ("*.py", "*.yaml", "*.sh", "*.sbatch", "Dockerfile") for one in EXAMPLES.glob(kind)):
        assert len(path.read_text().splitlines()) < 80, path.name
        if path.suffix in (".sh", ".sbatch"):
            subprocess.run(["bash", "-n", str(path)], check=True)


def test_plain_loop(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run("plain_loop.py", "--steps", "30", "--width", "32", monkeypatch=monkeypatch)
    lines = capsys.readouterr().out.splitlines()
    losses = [float(line.split()[3]) for line in lines]
    assert losses[-1] < losses[0]
    assert lines[0].endswith("exact")
    assert lines[-1].endswith("1 bit")


def test_engine(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for steps in ("50", "100"):  # the second time it goes on where the first one stopped
        run("engine.py", "--checkpoints", str(tmp_path), "--steps", steps, monkeypatch=monkeypatch)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines] == ["50", "100"]
    assert float(lines[1].split()[3]) < float(lines[0].split()[3])


def test_layer_drop(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run("layer_drop.py", "--steps", "40", monkeypatch=monkeypatch)
    *losses, rates = capsys.readouterr().out.splitlines()
    assert float(losses[-1].split()[3]) < float(losses[0].split()[3])
    ran = [int(word.rstrip("%")) for word in rates.split() if word.endswith("%")]
    assert len(ran) == 8
    assert ran[-1] < ran[0]


@pytest.mark.programs
def test_tensor_parallel(jobs: Jobs) -> None:
    done = jobs.torchrun(4, str(EXAMPLES / "tensor_parallel.py"), "--steps", "20", **WHOLLY)
    assert done.returncode == 0, done.stdout + done.stderr
    first, *_, last = [line.split() for line in done.stdout.splitlines() if line.startswith("step")]
    assert float(last[3]) < float(first[3])
    assert last[-1] == "bit"


@pytest.mark.launch
def test_accelerate_loop(jobs: Jobs) -> None:
    """On one process, where Accelerate has nothing to wrap."""
    pytest.importorskip("accelerate")
    done = jobs.alone(str(EXAMPLES / "accelerate_loop.py"), "--steps", "100", HF_HUB_OFFLINE="1", **WHOLLY)
    assert done.returncode == 0, done.stdout + done.stderr
    losses = [float(line.split()[3]) for line in done.stdout.splitlines() if line.startswith("step")]
    assert len(losses) == 4
    assert losses[-1] < losses[0]


@since_torch_2_13
@pytest.mark.programs
def test_pipeline(jobs: Jobs) -> None:
    """Two stages of two replicas."""
    done = jobs.torchrun(4, str(EXAMPLES / "pipeline.py"), "--steps", "30", "--width", "16", **WHOLLY)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    losses = [float(line.split()[3]) for line in lines]
    assert losses[-1] < losses[0]
    assert [line.split()[4] for line in lines] == ["exact", *["1"] * 5]


@pytest.mark.launch
def test_mpirun(jobs: Jobs, tmp_path: Path) -> None:
    mpirun = Path(sys.executable).with_name("mpirun")
    if not mpirun.exists():
        pytest.skip("no mpirun")
    hosts = tmp_path / "hosts"
    hosts.write_text("localhost slots=2\n")
    path = f"{mpirun.parent}{os.pathsep}{os.environ['PATH']}"
    command = [str(EXAMPLES / "mpirun.sh"), str(hosts), "2", "--steps", "12", "--width", "16"]
    given = environment(PATH=path, OVERSUBSCRIBE="1", PYTHON=jobs.python, **WHOLLY)
    done = subprocess.run(command, env=given, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 ranks on 1 host, backend mpi" in done.stderr
    assert "OneBitAdam sent" in done.stderr


def test_sparse_bert(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the wire is thin, the model is long. " * 200)
    arguments = ["--text", str(text), "--steps", "8", "--length", "512", "--save", str(tmp_path / "model")]
    run("sparse_bert.py", *arguments, monkeypatch=monkeypatch)
    *losses, share = capsys.readouterr().out.splitlines()
    assert float(losses[-1].split()[3]) < float(losses[0].split()[3])
    assert 10 < float(share.split()[2].rstrip("%")) < 25
    loaded = BertForMaskedLM.from_pretrained(tmp_path / "model")
    assert loaded.config.thinwire_sparse_attention["layout"]["mode"] == "bigbird"
    densify(loaded)


@pytest.fixture
def without_a_screen() -> Iterator[None]:
    before = matplotlib.get_backend()
    plt.switch_backend("agg")
    yield
    plt.close("all")
    plt.switch_backend(before)


@pytest.mark.usefixtures("without_a_screen")
def test_the_notebook_runs_from_its_first_cell_to_its_last_and_is_kept_without_what_it_printed() -> None:
    notebook = json.loads((EXAMPLES / "convergence.ipynb").read_text())
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert notebook["nbformat"] == 4
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)
    names: dict[str, Any] = {"__name__": "__main__"}
    for number, cell in enumerate(code):
        exec(compile("".join(cell["source"]), f"convergence.ipynb, code cell {number}", "exec"), names)
    (_, exact_bytes, exact_loss), (_, sent, loss) = (curve[-1] for curve in names["curves"].values())
    assert loss == pytest.approx(exact_loss, rel=0.05)
    assert sent < exact_bytes / 4
    left, right = names["figure"].axes
    assert [line.get_label() for line in left.lines[:2]] == list(names["curves"])
    assert len(right.lines) == 2


@pytest.mark.launch
@pytest.mark.parametrize("name", ["elastic.py", "elastic_steps.py"])
def test_elastic(name: str, jobs: Jobs) -> None:
    """Two workers, started by themselves."""
    address = f"127.0.0.1:{free_port()}"
    place = serve(address)
    command = (str(EXAMPLES / name), "--workers", "2", "--pause", "0")
    with ThreadPoolExecutor(2) as pool:
        runs = [pool.submit(jobs.alone, *command, THINWIRE_MEETING=address) for _ in range(2)]
    done = [run.result() for run in runs]
    del place
    ends = {one.stdout.splitlines()[-1] for one in done if one.returncode == 0}
    assert len(ends) == 1, done
    assert "after 300 steps: error 0.0" in ends.pop()
