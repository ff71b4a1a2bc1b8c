"""Every Python block of the documentation runs as it is written, on one rank; and docs/internals/gradient.md names the
calls through which a gradient passes, in the order that a trace shows."""

import re
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import thinwire
from tests.docs.pages import REPOSITORY, Block, blocks, pages

LANGUAGES = {"bash", "console", "diff", "json", "python", "text"}


def python_blocks(page: Path) -> list[Block]:
    return [block for block in blocks(page) if block.language == "python"]


WITH_PYTHON = [page for page in pages() if python_blocks(page)]


def run_page(page: Path) -> None:
    """Run its blocks; what they raise names the page and the line, as the file of a traceback."""
    names: dict[str, Any] = {}
    for block in python_blocks(page):
        if block.starts_anew:
            names = {"__name__": "__main__"}
        if not names:
            raise AssertionError(f"{block}: the first block of a page begins with what it imports")
        above = "\n" * (block.line - 1)  # so that line numbers are the page's
        exec(compile(above + block.text, str(page), "exec", dont_inherit=True), names)


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_process_group: None) -> None:
    """In a folder of its own, from a seed of its own, leaving no process group behind."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)


@pytest.mark.parametrize("page", WITH_PYTHON, ids=lambda page: page.relative_to(REPOSITORY).as_posix())
def test_it_runs(page: Path) -> None:
    run_page(page)


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.relative_to(REPOSITORY).as_posix())
def test_every_block_says_what_it_is(page: Path) -> None:
    strange = [f"{block}: {block.language!r}" for block in blocks(page) if block.language not in LANGUAGES]
    assert not strange, f"expected one of {', '.join(sorted(LANGUAGES))} after ```"


ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "internals" / "gradient.md"
PACKAGE = str(ROOT / "thinwire") + "/"
BOX = re.compile(r"^\d  +(\S+\.py) +([\w.]+)", re.MULTILINE)


@pytest.fixture(scope="module")
def traced() -> list[tuple[str, str]]:
    """File and function of every call of the library in a frozen step, in the order of their first calls."""
    torch.manual_seed(0)
    model = nn.Linear(64, 64)
    optimizer = thinwire.OneBitAdam(model.parameters(), lr=1e-3, freeze_step=3)

    def step() -> None:
        model(torch.ones(4, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(5):
        step()
    seen: dict[tuple[str, str], None] = {}

    def note(frame: FrameType, event: str, argument: Any) -> None:
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(PACKAGE):
            seen.setdefault((name.removeprefix(PACKAGE), frame.f_code.co_qualname))

    sys.setprofile(note)
    try:
        step()
    finally:
        sys.setprofile(None)
    return list(seen)


def test_every_box_is_entered_in_the_order_of_the_page(traced: list[tuple[str, str]]) -> None:
    pytest.importorskip("numba")
    ways = [BOX.findall(fence) for fence in re.findall(r"```text\n(.*?)```", PAGE.read_text(), re.DOTALL)]
    ways = [way for way in ways if way]
    assert [len(way) for way in ways] == [5, 6]
    for way in ways:
        places = [traced.index(box) for box in way]
        assert places == sorted(places)
