"""What holds on every backend: each body is run on threads, and on real ranks over Gloo and MPI."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.optim.diloco.reference import flat, streaming
from tests.optim.diloco.tower import NUMEL, Tower, loss_of, make, outer_weights, train
from thinwire.comm import Communicator

__all__ = ["ALL", "follows_the_published_algorithms", "outer_weights_agree", "relative_error"]


def relative_error(given: Tensor, wanted: Tensor) -> float:
    return float((given.double() - wanted).norm() / wanted.norm())


def follows_the_published_algorithms(
    comm: Communicator, momentum: float = 0.9, fragments: int = 2, overlap: int = 2, mix: float = 0.5
) -> None:
    """Algorithm 2 of Streaming DiLoCo in float64, 5 outer steps of each fragment; Algorithm 1 of DiLoCo with one
    fragment, no overlap and mix 0."""
    model = Tower()
    every = 6 if overlap else 4
    options = {"every": every, "overlap": overlap, "mix": mix, "outer_lr": 0.7}
    optimizer = make(comm, model, torch.optim.AdamW, lr=0.01, fragments=fragments, outer_momentum=momentum, **options)
    starts = [0, *torch.tensor([one.numel() for one in model.parameters()]).cumsum(0).tolist()]
    places = [
        torch.cat([starts[piece.parameter] + piece.start + torch.arange(piece.numel) for piece in one.pieces])
        for one in optimizer._home.fragments
    ]
    assert sum(map(len, places)) == NUMEL
    train(model, optimizer, 1, 5 * every + overlap)
    outer, replicas = streaming(
        Tower(),
        comm.size,
        5 * every + overlap,
        lambda weights: torch.optim.AdamW(weights, lr=0.01),
        loss_of,
        places,
        momentum=momentum,
        **options,
    )
    assert relative_error(outer_weights(model, optimizer), outer) < 1e-6
    assert relative_error(flat(model.parameters()), replicas[comm.rank]) < 1e-6
    optimizer.close()


def outer_weights_agree(comm: Communicator, codec: str = "int4") -> None:
    """The same bits on every rank after many steps; after `synchronize` they are everybody's own."""
    model = Tower()
    optimizer = make(comm, model, torch.optim.AdamW, lr=0.01, every=6, fragments=3, overlap=2, codec=codec)
    train(model, optimizer, 1, 200)
    common = outer_weights(model, optimizer)
    optimizer.synchronize()
    assert optimizer.in_sync
    assert torch.equal(outer_weights(model, optimizer), flat(model.parameters()))
    together = torch.cat([common, flat(model.parameters())])
    everyone = together.new_empty(comm.size * together.numel())
    comm.all_gather(everyone, together)
    assert all(torch.equal(one, together) for one in everyone.view(comm.size, -1))
    optimizer.close()


def _one_outer_step_at_a_time(comm: Communicator) -> None:
    follows_the_published_algorithms(comm, fragments=1, overlap=0, mix=0.0)


ALL = (_one_outer_step_at_a_time, follows_the_published_algorithms, outer_weights_agree)
