"""Each test here finds a process that has said nothing yet, whatever ran in it before."""

from __future__ import annotations

import pytest

from thinwire.comm import launch


@pytest.fixture(autouse=True)
def _nothing_said_yet() -> None:
    launch._say_once.cache_clear()
