"""Dropped layers under every optimizer: what their parameters do, ranks that stay alike to the bit, and buckets of
nothing else that are not sent: fewer bytes, the same step, an error on every rank where that is unsafe."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import thinwire
from tests.launching import on_threads
from tests.pld.models import WIDTH, Residual, Stack, batch, make_stack
from thinwire.comm import Communicator, threads
from thinwire.optim import registry
from thinwire.pld import LayerDrop, ProgressiveLayerDrop, drop_layers

FREEZE = 6
STEPS = 18  # two resyncs of ranks once one-bit is frozen


def build(kind: str, model: nn.Module, comm: Communicator, **options: Any) -> Any:
    name, stage = kind.split()
    common = {"lr": 3e-3, "stage": int(stage), "comm": comm, "bucket_bytes": 2000, "block_size": 64} | options
    if name == "AdamW":
        return thinwire.ShardedOptimizer(model.parameters(), torch.optim.AdamW, weight_decay=0.1, **common)
    entry = registry.entry(name)
    if entry.freeze_option is not None:
        common[entry.freeze_option] = FREEZE
    if int(stage):
        common |= {"on_drift": "raise", "resync_interval": 5}
    return entry.load()(model.named_parameters(), **common)


# 1-bit Muon leaves a dropped layer alone at its owner, and rounds otherwise what else is in its blocks.
LEAVING_OUT = [one for one in map(registry.entry, registry.NAMES) if not one.local_steps and one.name != "OneBitMuon"]
COMPRESSED = [f"{entry.name} {stage}" for entry in LEAVING_OUT for stage in entry.stages]
KINDS = ["AdamW 0", "AdamW 1", "AdamW 2", *COMPRESSED]
HOMES = ["AdamW 1", "AdamW 2", "OneBitAdam 0", "OneBitAdam 1"]


def weights(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().float().reshape(-1) for parameter in model.parameters()]).clone()


def dropped_layers(handle: LayerDrop) -> tuple[bool, ...]:
    dropped = {id(parameter) for parameter in handle.dropped_parameters()}
    return tuple(any(id(parameter) in dropped for parameter in layer.parameters()) for layer in handle.layers)


def train(
    optimizer: Any,
    model: Stack,
    rank: int,
    *,
    leave_out: bool = False,
    accumulations: tuple[int, ...] = (1,),
    zeroed: bool = False,
) -> list[tuple[bool, bool]]:
    """Of every layer that a step has dropped, whether the optimizer was frozen and whether the layer moved, but for the
    step that froze; steps take the numbers of micro-batches in turn."""
    schedule = ProgressiveLayerDrop(0.3, 1.0)
    handle = drop_layers(model, schedule, seed=12)
    seen = []
    for step in range(STEPS):
        schedule.update_state(step)
        optimizer.zero_grad(set_to_none=not zeroed)
        accumulation = accumulations[step % len(accumulations)]
        with optimizer.no_sync():
            for micro in range(accumulation - 1):
                (model(batch(rank, step, micro)).square().mean() / accumulation).backward()
        loss = model(batch(rank, step, accumulation)).square().mean() / accumulation
        if leave_out:
            optimizer.leave_out(handle.dropped_parameters())
        loss.backward()
        dropped = zip(handle.layers, dropped_layers(handle), strict=True)
        before = {layer: weights(layer) for layer, gone in dropped if gone}
        optimizer.step()
        frozen = getattr(optimizer, "frozen", False)
        if not frozen or step >= FREEZE + 1:
            seen += [(frozen, not torch.equal(old, weights(layer))) for layer, old in before.items()]
    return seen


def trained_both_ways(
    comm: Communicator, kind: str, how: dict[str, Any] | None = None, **options: Any
) -> tuple[list[Tensor], list[int], list[list[tuple[bool, bool]]]]:
    """Weights, bytes and what became of dropped layers, without and with `leave_out`."""
    found, sent, seen = [], [], []
    for leave_out in (False, True):
        model = make_stack()
        optimizer = build(kind, model, comm, **options)
        seen.append(train(optimizer, model, comm.rank, leave_out=leave_out, **how or {}))
        found.append(weights(model))
        sent.append(optimizer.bytes_sent)
    return found, sent, seen


def difference(waited: Tensor, left_out: Tensor) -> float:
    """Beside how far the weights have moved."""
    return float((waited - left_out).norm() / (waited - weights(make_stack())).norm())


@pytest.mark.parametrize("kind", KINDS)
def test_a_dropped_layer_moves_only_once_one_bit_is_frozen_and_the_step_is_the_same_with_fewer_bytes(kind: str) -> None:
    (weights_of_first, (all_bytes, fewer_bytes), both_seen), (weights_of_second, *_) = threads.run(
        lambda comm: trained_both_ways(comm, kind), 2
    )
    for seen in both_seen:
        assert len(seen) > 10
        assert all(frozen == moved for frozen, moved in seen)
    assert all(map(torch.equal, weights_of_first, weights_of_second))
    assert bool(weights_of_first[1].isfinite().all())
    assert fewer_bytes < 0.95 * all_bytes
    if kind.startswith("AdamW"):
        assert torch.equal(*weights_of_first)
    elif not kind.startswith("OneBitLion"):  # whose step is a sign, so that what is rounded differently moves by a step
        # What the codec rounds differently once frozen; the same rule otherwise.
        assert difference(*weights_of_first) < 0.25


@pytest.mark.parametrize(("kind", "zeroed"), [("AdamW 1", False), *((f"AdamW {stage}", True) for stage in (0, 1, 2))])
def test_accumulated_steps_are_the_same(kind: str, zeroed: bool) -> None:
    how = {"accumulations": (2,), "zeroed": zeroed}
    waited, left_out = threads.run(lambda comm: trained_both_ways(comm, kind, how)[0], 2)[0]
    # Without leave_out, a gradient of zeros is a gradient: moments decay.
    assert torch.equal(waited, left_out) != (zeroed and kind != "AdamW 2")


@pytest.mark.parametrize("codec", ["none", "int8"])
def test_momentum_decays_without_an_exchange_as_with_one(codec: str) -> None:
    waited, left_out = threads.run(lambda comm: trained_both_ways(comm, "OneBitAdam 0", codec=codec)[0], 2)[0]
    assert difference(waited, left_out) < (1e-5 if codec == "none" else 0.05)


@pytest.mark.parametrize("kind", ["OneBitAdam 0", "OneBitAdam 1"])
@on_threads(2)
def test_a_bucket_that_stays_keeps_its_direction_and_its_residuals(comm: Communicator, kind: str) -> None:
    model = make_stack()
    optimizer = build(kind, model, comm)
    for step in range(10):
        model(batch(comm.rank, step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert optimizer.frozen
    moves, before = [], weights(model.layers[1])
    for step in range(3):
        loss = model.head(model.embed(batch(comm.rank, step))).square().mean()
        optimizer.leave_out(model.layers.parameters())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        moves.append(weights(model.layers[1]) - before)
        before = weights(model.layers[1])
    assert float(moves[0].abs().max()) > 0
    corrected = (1 - 0.9**11) / (1 - 0.9**12)
    torch.testing.assert_close(moves[1], moves[0] * 0.9 * corrected, rtol=1e-2, atol=1e-6)


def differs(comm: Communicator, model: Stack, optimizer: Any) -> None:
    optimizer.leave_out([nn.Parameter(torch.zeros(3)), *model.layers[2].parameters()])  # others' are left to them
    optimizer.leave_out(model.layers[comm.rank].parameters())


def is_used(comm: Communicator, model: Stack, optimizer: Any) -> None:
    loss = model(batch(comm.rank)).square().mean()
    optimizer.leave_out(model.layers[0].parameters())
    loss.backward()


def has_a_gradient(comm: Communicator, model: Stack, optimizer: Any) -> None:
    if comm.rank == 1:
        with optimizer.no_sync():
            model(batch(0)).square().mean().backward()
    optimizer.leave_out(model.layers.parameters())


def is_late(comm: Communicator, model: Stack, optimizer: Any) -> None:
    model.head(model.embed(batch(0))).square().mean().backward()
    optimizer.leave_out(model.layers.parameters())


@pytest.mark.parametrize(
    ("misuse", "kind", "messages"),
    [
        *((differs, kind, ["rank 1 and rank 0 disagree on leaving out parameter"]) for kind in HOMES),
        *((is_used, kind, ["was left out"]) for kind in HOMES),
        *(
            (
                has_a_gradient,
                kind,
                ["rank 1 could not leave parameters out", "has a gradient from an earlier backward()"],
            )
            for kind in ("OneBitAdam 0", "AdamW 1")
        ),
        *((is_late, kind, ["comes before"]) for kind in ("OneBitAdam 0", "AdamW 0", "OneBitAdam 1")),
    ],
)
def test_what_cannot_be_left_out_is_an_error_on_every_rank(misuse: Any, kind: str, messages: list[str]) -> None:
    def body(comm: Communicator) -> str:
        model = make_stack()
        optimizer = build(kind, model, comm)
        with pytest.raises((ValueError, RuntimeError)) as caught:
            misuse(comm, model, optimizer)
        return str(caught.value)

    found = threads.run(body, 2)
    assert all(message in one for message, one in zip(messages * 2, found, strict=False))


def test_what_a_kept_layer_or_the_rest_of_the_model_uses_is_not_dropped() -> None:
    model = make_stack(layers=3)
    shared = model.layers[0].norm
    for layer in model.layers:
        layer.norm = shared
    model.layers[2].up = model.layers[1].up
    tied = Residual(WIDTH)
    model.layers[1].down = tied.down
    model.add_module("other", nn.Sequential(tied.down))
    schedule = ProgressiveLayerDrop(0.0, 5.0)
    drop = drop_layers(model, schedule, seed=3)
    seen = set()
    for step in range(1, 60):
        schedule.update_state(step)
        model(batch(step))
        dropped = {id(one) for one in drop.dropped_parameters()}
        assert id(tied.down.weight) not in dropped
        first, last = (id(model.layers[index].down.weight) in dropped for index in (0, 2))
        of_both = id(model.layers[2].up.weight) in dropped  # of the second and the third
        of_all = id(shared.weight) in dropped
        assert of_both <= last
        assert of_all == (first and of_both)
        seen.add((last, of_both, of_all))
    assert {(True, False, False), (True, True, False), (True, True, True)} <= seen
