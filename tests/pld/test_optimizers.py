"""Dropped layers under every optimizer: what their parameters do, and ranks that stay alike to the bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import thinwire
from tests.pld.models import Stack, batch, make_stack
from thinwire.comm import Communicator, threads
from thinwire.optim import registry
from thinwire.pld import LayerDrop, ProgressiveLayerDrop, drop_layers

FREEZE = 6
STEPS = 18  # two resyncs of ranks once one-bit is frozen


def build(kind: str, model: nn.Module, comm: Communicator) -> torch.optim.Optimizer:
    name, stage = kind.split()
    common = {"lr": 3e-3, "stage": int(stage), "comm": comm, "bucket_bytes": 2000, "block_size": 64}
    if name == "AdamW":
        return thinwire.ShardedOptimizer(model.parameters(), torch.optim.AdamW, weight_decay=0.1, **common)
    entry = registry.entry(name)
    if entry.freeze_option is not None:
        common[entry.freeze_option] = FREEZE
    if int(stage):
        common |= {"on_drift": "raise", "resync_interval": 5}
    return entry.load()(model.named_parameters(), **common)


LEAVING_OUT = [registry.entry(name) for name in registry.NAMES if not registry.entry(name).local_steps]
COMPRESSED = [f"{entry.name} {stage}" for entry in LEAVING_OUT for stage in entry.stages]
KINDS = ["AdamW 0", "AdamW 1", "AdamW 2", *COMPRESSED]


def weights(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().float().reshape(-1) for parameter in model.parameters()]).clone()


def dropped_layers(handle: LayerDrop) -> tuple[bool, ...]:
    dropped = {id(parameter) for parameter in handle.dropped_parameters()}
    return tuple(any(id(parameter) in dropped for parameter in layer.parameters()) for layer in handle.layers)


def train(
    optimizer, model: Stack, rank: int, accumulations: tuple[int, ...] = (1,), steps: int = STEPS
) -> list[tuple[bool, ...]]:
    """Which layers every step dropped; steps take the numbers of micro-batches in turn."""
    schedule = ProgressiveLayerDrop(0.3, 1.0)
    handle = drop_layers(model, schedule, seed=12)
    dropped = []
    for step in range(steps):
        schedule.update_state(step)
        optimizer.zero_grad()
        accumulation = accumulations[step % len(accumulations)]
        with optimizer.no_sync():
            for micro in range(accumulation - 1):
                (model(batch(rank, step, micro)).square().mean() / accumulation).backward()
        (model(batch(rank, step, accumulation)).square().mean() / accumulation).backward()
        dropped.append(dropped_layers(handle))
        optimizer.step()
    return dropped


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_stay_alike(kind: str) -> None:
    def body(comm: Communicator) -> tuple[Tensor, list[tuple[bool, ...]]]:
        model = make_stack()
        dropped = train(build(kind, model, comm), model, comm.rank, accumulations=(1, 3))
        return weights(model), dropped

    (mine, dropped), *others = threads.run(body, 3)
    for steps_of_one_accumulation in (dropped[::2], dropped[1::2]):
        assert any(any(step) for step in steps_of_one_accumulation)
    assert bool(mine.isfinite().all())
    assert not torch.equal(mine, weights(make_stack()))
    for other, theirs in others:
        assert torch.equal(mine, other)
        assert dropped == theirs


@pytest.mark.parametrize("kind", KINDS)
def test_a_dropped_layer_moves_only_once_one_bit_is_frozen(kind: str) -> None:
    def body(comm: Communicator) -> list[bool]:
        model = make_stack()
        optimizer = build(kind, model, comm)
        schedule = ProgressiveLayerDrop(0.3, 1.0)
        handle = drop_layers(model, schedule, seed=12)
        as_documented = []
        for step in range(STEPS):
            schedule.update_state(step)
            before = [weights(layer) for layer in handle.layers]
            optimizer.zero_grad()
            model(batch(comm.rank, step)).square().mean().backward()
            dropped = dropped_layers(handle)
            optimizer.step()
            frozen = getattr(optimizer, "frozen", False)
            for gone, old, layer in zip(dropped, before, handle.layers, strict=True):
                if gone and (not frozen or step >= FREEZE + 1):
                    as_documented.append(torch.equal(old, weights(layer)) != frozen)
        return as_documented

    for seen in threads.run(body, 2):
        assert len(seen) > 10
        assert all(seen)


def test_every_stage_steps_as_torch_does() -> None:
    model = make_stack()
    plain = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
    schedule = ProgressiveLayerDrop(0.3, 1.0)
    drop_layers(model, schedule, seed=12)
    for step in range(STEPS):
        schedule.update_state(step)
        plain.zero_grad()
        model(batch(0, step, 1)).square().mean().backward()
        plain.step()
    for stage in (0, 1, 2):
        sharded = make_stack()
        comm = threads.run(lambda comm: comm, 1)[0]
        train(build(f"AdamW {stage}", sharded, comm), sharded, 0)
        torch.testing.assert_close(weights(sharded), weights(model), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["OneBitAdam 0", "OneBitAdam 2"])
def test_ranks_stay_alike_for_100_steps(kind: str) -> None:
    def body(comm: Communicator) -> Tensor:
        model = make_stack(layers=3)
        train(build(kind, model, comm), model, comm.rank, steps=100)
        return weights(model)

    mine, other = threads.run(body, 2)
    assert torch.equal(mine, other)
