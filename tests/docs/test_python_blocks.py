"""Every Python block of the documentation runs as it is written, on one rank.

A block that begins with an import is run by itself, as a reader would paste it. Any other goes on where the block above
it stopped. Nothing is set up for them.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

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
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """In a folder of its own, from a seed of its own, leaving no process group behind."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.parametrize("page", WITH_PYTHON, ids=lambda page: page.relative_to(REPOSITORY).as_posix())
def test_it_runs(page: Path) -> None:
    run_page(page)


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.relative_to(REPOSITORY).as_posix())
def test_every_block_says_what_it_is(page: Path) -> None:
    strange = [f"{block}: {block.language!r}" for block in blocks(page) if block.language not in LANGUAGES]
    assert not strange, f"expected one of {', '.join(sorted(LANGUAGES))} after ```"
