"""docs/internals/gradient.md names the calls through which a gradient passes, in the order that a trace shows."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import thinwire

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
