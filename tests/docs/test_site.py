"""The site has every public name, and links that lead to what comes along; nothing is loaded from elsewhere.

`make docs` builds it; mkdocs itself refuses links and anchors that lead nowhere."""

import importlib
import json
import re
import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest
from mkdocs.exceptions import PluginError

import thinwire
from tests.docs.pages import REPOSITORY

THEME = SimpleNamespace(**runpy.run_path(str(REPOSITORY / "docs/theme/repository_pages.py")))


PLACES = {
    REPOSITORY / "README.md": "index.md",
    REPOSITORY / "docs/start/swap.md": "start/swap.md",
    REPOSITORY / "examples/README.md": "repository/examples.md",
    REPOSITORY / "examples/Dockerfile": "repository/examples/Dockerfile.md",
    REPOSITORY / "examples/engine.py": "repository/examples/engine.py.md",
    REPOSITORY / "experiments/results/lion.png": "repository/experiments/results/lion.png",
}


@pytest.mark.parametrize(
    ("written", "led"),
    [
        ("[examples](../../examples/README.md)", "[examples](../repository/examples.md)"),
        ("![Lion](../../experiments/results/lion.png)", "![Lion](../repository/experiments/results/lion.png)"),
        ("[a](../../README.md), [b](swap.md#saving)", "[a](../index.md), [b](swap.md#saving)"),
        ("[there](https://example.org/a.md) [here](#saving)", "[there](https://example.org/a.md) [here](#saving)"),
        ("[nowhere](../nothing.md)", "[nowhere](../nothing.md)"),
    ],
)
def test_links_lead_to_what_comes_along(written: str, led: str) -> None:
    assert THEME.relinked(written, REPOSITORY / "docs/start/launchers.md", "start/launchers.md", PLACES) == led


def test_every_file_has_a_place() -> None:
    for path, place in PLACES.items():
        if place.startswith("repository/"):
            assert THEME._place(path.relative_to(REPOSITORY)) == place


def test_a_source_is_shown_in_a_fence_that_it_cannot_close(tmp_path: Path) -> None:
    source = tmp_path / "a.py"
    source.write_text("'''\n```\n'''\n")
    assert THEME.shown(source, "a.py") == "# a.py\n\n````python\n'''\n```\n'''\n````\n"


def test_a_notebook_is_shown_cell_by_cell(tmp_path: Path) -> None:
    cells = [{"cell_type": "markdown", "source": ["# Title\n", "text"]}, {"cell_type": "code", "source": ["x = 1"]}]
    (tmp_path / "a.ipynb").write_text(json.dumps({"cells": cells}))
    assert THEME.shown(tmp_path / "a.ipynb", "a.ipynb") == "# Title\ntext\n\n```python\nx = 1\n```\n"


@pytest.mark.parametrize(
    "loads",
    [
        '<script src="https://example.org/a.js">',
        "<img src=//example.org/a.png>",
        '<link rel=x href="http://e.org/a.css">',
    ],
)
def test_a_page_that_loads_from_elsewhere_is_refused(loads: str) -> None:
    page = SimpleNamespace(file=SimpleNamespace(src_uri="index.md"))
    with pytest.raises(PluginError, match=r"index\.md loads from elsewhere"):
        THEME.on_post_page(f"<p>text</p>{loads}", page, None)
    THEME.on_post_page('<a href="https://example.org">a link is none</a>', page, None)


REFERENCE = REPOSITORY / "docs/reference"


# A room that lists nothing offers nothing to users.
DOORS = [path for path in sorted(REPOSITORY.glob("thinwire/*/__init__.py")) if "__all__" in path.read_text()]


ROOMS = [path.parent.name for path in DOORS]


def shown(room: str) -> list[str]:
    """What the page of a room asks mkdocstrings for; nothing where there is no page."""
    page = REFERENCE / f"{room}.md"
    return re.findall(r"^::: (\S+)$", page.read_text(), re.MULTILINE) if page.exists() else []


@pytest.mark.parametrize("room", ROOMS)
def test_a_page_has_every_public_name_of_its_room_once(room: str) -> None:
    names = [f"thinwire.{room}.{name}" for name in importlib.import_module(f"thinwire.{room}").__all__]
    missing = set(names) - set(shown(room))
    assert not missing, f"docs/reference/{room}.md, which mkdocs.yml has in its nav, lacks `::: NAME` for these"
    assert len(shown(room)) == len(set(shown(room)))


def test_what_thinwire_offers_itself_is_on_the_page_of_its_room() -> None:
    overview = (REFERENCE / "README.md").read_text()
    everything = {name.rpartition(".")[2] for room in ROOMS for name in shown(room)}
    for name in set(thinwire.__all__) - set(ROOMS) - {"__version__"}:
        assert name in everything
        assert f"`{name}`" in overview
    for room in ROOMS:
        assert f"({room}.md)" in overview
