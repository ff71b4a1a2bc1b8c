"""Elastic workers as threads that meet at a store of their process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

import thinwire
from tests.optim.diloco.tower import Tower, loss_of
from thinwire.comm import Elastic
from thinwire.optim.diloco import elastic_meeting
from thinwire.optim.diloco.elastic_home import ElasticHome

__all__ = ["SETTINGS", "go_on", "make", "meeting", "step", "together"]

SETTINGS = Elastic(workers=3, address="here:1", timeout=60.0, join_timeout=60.0, silence=20.0)


def together(bodies: list[Callable[[], Any]]) -> list[Any]:
    """Each on a thread of its own; their results, or the first error."""
    found: list[Any] = [None] * len(bodies)

    def run(number: int) -> None:
        torch.set_num_threads(1)
        try:
            with torch.autograd.set_multithreading_enabled(False):
                found[number] = bodies[number]()
        except BaseException as error:
            found[number] = error

    workers = [threading.Thread(target=run, args=(number,), daemon=True) for number in range(len(bodies))]
    for one in workers:
        one.start()
    for one in workers:
        one.join(120)
        assert not one.is_alive(), "a worker hangs"
    for one in found:
        if isinstance(one, BaseException):
            raise one
    return found


@pytest.fixture(autouse=True)
def meeting(monkeypatch: pytest.MonkeyPatch) -> None:
    """A meeting place for this test, in place of one that a process serves."""
    store = HashStore()
    monkeypatch.setattr(elastic_meeting, "reach", lambda settings: (store, "here"))


def make(model: Tower, **options: Any) -> tuple[thinwire.DiLoCo, ElasticHome]:
    options = {"lr": 0.01, "every": 6, "block_size": 64, "elastic": SETTINGS} | options
    optimizer = thinwire.DiLoCo(model.named_parameters(), torch.optim.AdamW, **options)
    home = optimizer._home
    assert isinstance(home, ElasticHome)
    return optimizer, home


def step(model: Tower, optimizer: thinwire.DiLoCo, data: int) -> None:
    optimizer.zero_grad()
    loss_of(model, data, optimizer.steps + 1).backward()
    optimizer.step()


def go_on(model: Tower, optimizer: thinwire.DiLoCo, data: int, until: int) -> None:
    while optimizer.steps < until:
        step(model, optimizer, data)
