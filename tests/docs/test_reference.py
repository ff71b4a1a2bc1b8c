"""The API reference has every public name: what `__all__` of thinwire and of each of its rooms lists."""

from __future__ import annotations

import importlib
import re

import pytest

import thinwire
from tests.docs.pages import REPOSITORY

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


def test_rooms() -> None:
    assert {"comm", "engine", "optim", "zero"} <= set(ROOMS)


def test_what_thinwire_offers_itself_is_on_the_page_of_its_room() -> None:
    overview = (REFERENCE / "README.md").read_text()
    everything = {name.rpartition(".")[2] for room in ROOMS for name in shown(room)}
    for name in set(thinwire.__all__) - set(ROOMS) - {"__version__"}:
        assert name in everything
        assert f"`{name}`" in overview
    for room in ROOMS:
        assert f"({room}.md)" in overview
