"""DiLoCo against its published algorithms in float64, and against its inner optimizer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.optim.diloco.bodies import follows_the_published_algorithms, outer_weights_agree
from tests.optim.diloco.reference import flat
from tests.optim.diloco.tower import Tower, loss_of, make, train
from thinwire.comm import Communicator, threads


@pytest.mark.parametrize(("workers", "momentum"), [(1, 0.9), (2, 0.0), (3, 0.9), (4, 0.9)])
def test_one_fragment_is_algorithm_1(workers: int, momentum: float) -> None:
    threads.run(lambda comm: follows_the_published_algorithms(comm, momentum, fragments=1, overlap=0, mix=0.0), workers)


@pytest.mark.parametrize(("workers", "overlap", "mix"), [(1, 1, 0.5), (2, 3, 0.5), (3, 2, 0.25), (4, 5, 0.0)])
def test_fragments_under_way_are_algorithm_2(workers: int, overlap: int, mix: float) -> None:
    threads.run(lambda comm: follows_the_published_algorithms(comm, 0.9, 2, overlap, mix), workers)


@pytest.mark.parametrize("inner", [torch.optim.AdamW, torch.optim.SGD, torch.optim.RMSprop])
def test_one_worker_that_syncs_at_every_step_is_the_inner_optimizer(inner: Any) -> None:
    def body(comm: Communicator) -> Tensor:
        model = Tower()
        optimizer = make(comm, model, inner, lr=0.01, every=1, outer_lr=1.0, outer_momentum=0.0)
        train(model, optimizer, 1, 40)
        return flat(model.parameters())

    plain = Tower()
    optimizer = inner(plain.parameters(), lr=0.01)
    for step in range(1, 41):
        optimizer.zero_grad()
        loss_of(plain, 0, step).backward()
        optimizer.step()
    assert torch.equal(threads.run(body, 1)[0], flat(plain.parameters()))


@pytest.mark.parametrize(
    ("workers", "codec"), [(2, "int8"), (3, "sign1"), (4, "bf16"), (3, "int4"), (2, "stat2"), (2, "fp8")]
)
def test_outer_weights_are_the_same_bits_on_every_rank(workers: int, codec: str) -> None:
    threads.run(lambda comm: outer_weights_agree(comm, codec), workers)
