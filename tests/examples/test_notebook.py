"""The notebook runs from its first cell to its last, shows what it says, and is kept without what it printed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import matplotlib
import matplotlib.pyplot as plt
import pytest

from tests.docs.pages import REPOSITORY

NOTEBOOK = json.loads((REPOSITORY / "examples/convergence.ipynb").read_text())
CODE = [cell for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]


@pytest.fixture(autouse=True)
def _without_a_screen() -> Iterator[None]:
    before = matplotlib.get_backend()
    plt.switch_backend("agg")
    yield
    plt.close("all")
    plt.switch_backend(before)


def test_it_runs() -> None:
    names: dict[str, Any] = {"__name__": "__main__"}
    for number, cell in enumerate(CODE):
        exec(compile("".join(cell["source"]), f"convergence.ipynb, code cell {number}", "exec"), names)
    (_, exact_bytes, exact_loss), (_, sent, loss) = (curve[-1] for curve in names["curves"].values())
    assert loss == pytest.approx(exact_loss, rel=0.05)
    assert sent < exact_bytes / 4
    left, right = names["figure"].axes
    assert [line.get_label() for line in left.lines[:2]] == list(names["curves"])
    assert len(right.lines) == 2


def test_it_is_kept_without_outputs() -> None:
    assert NOTEBOOK["nbformat"] == 4
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in CODE)
