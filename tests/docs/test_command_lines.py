"""Command lines of the documentation name targets, files and options that exist; configurations can be loaded."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.docs.command_lines import check
from tests.docs.pages import REPOSITORY, blocks, pages, spans
from thinwire.engine import load_config

COMMAND = re.compile(r"(make|pip|thinwire|torchrun|mpirun|srun|sbatch|python -[cm]) ")
ENGINE_KEYS = {"train_batch_size", "train_micro_batch_size_per_gpu"}
SHOWN = [(page, "".join(f"{line}\n" for line in page.read_text().splitlines())) for page in pages()]
SAVED = {name for _, text in SHOWN for name in re.findall(r"Save this as `([^`]+)`", text)}


def lines(text: str) -> list[str]:
    return text.replace("\\\n", " ").splitlines()


def wrong(page: Path) -> list[str]:
    """What is wrong with the command lines of a page, each with its place."""
    shown = [
        (str(block), line, True) for block in blocks(page) if block.language == "bash" for line in lines(block.text)
    ]
    shown += [
        (str(block), line.removeprefix("$ "), True)
        for block in blocks(page)
        if block.language == "console"
        for line in lines(block.text)
        if line.startswith("$ ")
    ]
    shown += [(f"{page}:{line}", text, False) for line, text in spans(page) if COMMAND.match(text)]
    found = []
    for place, line, complete in shown:
        try:
            check(line, SAVED, complete)
        except ValueError as error:
            found.append(f"{place}: {line.strip()}: {error}")
    return found


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.relative_to(REPOSITORY).as_posix())
def test_command_lines(page: Path) -> None:
    assert not wrong(page)


def test_engine_configurations() -> None:
    """Those in fences, and those in files."""
    files = [*REPOSITORY.glob("examples/*.json"), *REPOSITORY.glob("experiments/configs/*.json")]
    texts = {str(path): path.read_text() for path in files}
    texts |= {str(block): block.text for page in pages() for block in blocks(page) if block.language == "json"}
    checked = 0
    for place, text in texts.items():
        content = json.loads(text)
        if ENGINE_KEYS & content.keys():
            try:
                load_config(content, world_size=2)
            except ValueError as error:
                raise AssertionError(f"{place}: {error}") from error
            checked += 1
    assert checked >= 2


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("make tests", "no target tests"),
        ("pip install '.[gpu]'", "no extra gpu"),
        ("thinwire plan --nodes 4 --gigabits 1", "unrecognized arguments: --gigabits"),
        ("thinwire checkpoint verify runs --deep", "unrecognized arguments: --deep"),
        ("torchrun --nproc-per-node 2 nothing.py", "no file nothing.py"),
        ("torchrun --processes 2 examples/engine.py", "processes"),
        ("mpirun -n 2 python nothing.py", "no file nothing.py"),
        ("mpirun -n 2", "expected python"),
        ("python -m thinwire.nothing", "no module thinwire.nothing"),
        ("cd docs && examples/nothing.sh", "no file examples/nothing.sh"),
        ("frobnicate --now", "cannot check"),
    ],
)
def test_what_would_not_work_is_an_error(line: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check(line)
