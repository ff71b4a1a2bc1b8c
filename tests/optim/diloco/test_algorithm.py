"""DiLoCo against its published algorithms in float64, and what has to hold of the weights at every moment."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.optim.diloco.reference import flat, streaming
from tests.optim.diloco.tower import NUMEL, Tower, loss_of, make, outer_weights, train
from thinwire.comm import Communicator, threads


def _relative_error(given: Tensor, wanted: Tensor) -> float:
    return float((given.double() - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("workers", [1, 2, 3, 4])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_one_fragment_is_algorithm_1(workers: int, momentum: float) -> None:
    outer, replicas = streaming(
        Tower(),
        workers,
        20,
        lambda weights: torch.optim.AdamW(weights, lr=0.01),
        loss_of,
        [torch.arange(NUMEL)],
        every=4,
        overlap=0,
        mix=0.0,
        outer_lr=0.7,
        momentum=momentum,
    )

    def body(comm: Communicator) -> tuple[Tensor, Tensor]:
        model = Tower()
        optimizer = make(
            comm, model, torch.optim.AdamW, lr=0.01, fragments=1, overlap=0, outer_lr=0.7, outer_momentum=momentum
        )
        train(model, optimizer, 1, 20)
        return outer_weights(model, optimizer), flat(model.parameters())

    for rank, (common, own) in enumerate(threads.run(body, workers)):
        assert _relative_error(common, outer) < 1e-6
        assert _relative_error(own, replicas[rank]) < 1e-6


@pytest.mark.parametrize(("workers", "overlap", "mix"), [(1, 1, 0.5), (2, 3, 0.5), (3, 2, 0.25), (4, 5, 0.0)])
def test_fragments_under_way_are_algorithm_2(workers: int, overlap: int, mix: float) -> None:
    def body(comm: Communicator) -> tuple[Tensor, Tensor, list[Tensor]]:
        model = Tower()
        optimizer = make(
            comm,
            model,
            torch.optim.AdamW,
            lr=0.01,
            every=6,
            fragments=2,
            overlap=overlap,
            mix=mix,
            outer_lr=0.4,
        )
        starts = [0, *itertools.accumulate(one.numel() for one in model.parameters())]
        places = [
            torch.cat([starts[piece.parameter] + piece.start + torch.arange(piece.numel) for piece in one.pieces])
            for one in optimizer._home.fragments
        ]
        train(model, optimizer, 1, 31)
        return outer_weights(model, optimizer), flat(model.parameters()), places

    results = threads.run(body, workers)
    outer, replicas = streaming(
        Tower(),
        workers,
        31,
        lambda weights: torch.optim.AdamW(weights, lr=0.01),
        loss_of,
        results[0][2],
        every=6,
        overlap=overlap,
        mix=mix,
        outer_lr=0.4,
        momentum=0.9,
    )
    for rank, (common, own, _) in enumerate(results):
        assert _relative_error(common, outer) < 1e-6
        assert _relative_error(own, replicas[rank]) < 1e-6


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


@pytest.mark.parametrize(("workers", "codec"), [(2, "int8"), (3, "sign1"), (4, "bf16")])
def test_outer_weights_are_the_same_bits_on_every_rank(workers: int, codec: str) -> None:
    def body(comm: Communicator) -> tuple[Tensor, Tensor]:
        model = Tower()
        optimizer = make(comm, model, torch.optim.AdamW, lr=0.01, every=6, fragments=3, overlap=2, codec=codec)
        train(model, optimizer, 1, 200)
        before = outer_weights(model, optimizer)
        optimizer.synchronize()
        assert torch.equal(outer_weights(model, optimizer), flat(model.parameters()))
        assert optimizer.in_sync
        return before, flat(model.parameters())

    results = threads.run(body, workers)
    for before, after in results:
        assert torch.equal(before, results[0][0])
        assert torch.equal(after, results[0][1])
