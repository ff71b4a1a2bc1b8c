"""OneBitMuon against Muon in float64 on its owners, and what must hold of ranks, residuals, codecs and marks."""

import copy
import math
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import thinwire
from tests.launching import on_threads
from tests.optim.training import make_model, train, weights
from tests.refusing import refused
from tests.zero.saved import join, save
from thinwire.comm import Communicator, threads
from thinwire.optim.muon import orthogonalize, rate_of_matrix
from thinwire.zero import ShardedOptimizer

SETTINGS = {"lr": 1e-2, "weight_decay": 2.0**-10 / 1e-2}


def make_marked(seed: int = 0) -> nn.Module:
    model = make_model(seed)
    model[4].weight.use_muon = False  # type: ignore[union-attr]
    return model


def build(model: nn.Module, comm: Communicator, **options: Any) -> thinwire.OneBitMuon:
    options = {**SETTINGS, "block_size": 64, "codec": "sign1"} | options
    return thinwire.OneBitMuon(model.named_parameters(), comm=comm, **options)


class Owners:
    """All owners' arithmetic in float64, of the averages that reach them, beside what `optimizer` makes of them."""

    def __init__(self, optimizer: thinwire.OneBitMuon) -> None:
        self.home = optimizer._home
        self.optimizer = optimizer
        self.nesterov = optimizer.param_groups[0]["nesterov"]
        self.master_weights = [one.weights.double() for one in self.home._parameters.master_weights]
        self.momenta = [torch.zeros_like(one) for one in self.master_weights]
        self.squares = [torch.zeros_like(one) for one in self.master_weights]
        self.steps = 0

    def step(self) -> None:
        self.home._finish()
        averages = [one.average.double() for one in self.home.gradients]
        self.optimizer.step()
        self.steps += 1
        for number, average in enumerate(averages):
            self._move(number, average)

    def _move(self, number: int, average: Tensor) -> None:
        master_weights, momentum, square = self.master_weights[number], self.momenta[number], self.squares[number]
        lr, decay = SETTINGS["lr"], 1 - SETTINGS["lr"] * SETTINGS["weight_decay"]
        for run in self.home._parameters.master_weights[number].runs:
            mean, weight, gradient = (one[run.place] for one in (momentum, master_weights, average))
            if self.home._parameters.buckets[number].layout.whole:
                shape = self.home.parameters[run.parameter].shape
                mean.mul_(0.95).add_(gradient, alpha=0.05)
                ahead = 0.95 * mean + 0.05 * gradient if self.nesterov else mean
                update = orthogonalize(ahead.view(shape), 5, torch.float64) * rate_of_matrix(shape, "match_rms_adamw")
                weight.mul_(decay).sub_(lr * update.reshape(-1))
            else:
                mean.mul_(0.9).add_(gradient, alpha=0.1)
                square[run.place].mul_(0.95).add_(gradient.square(), alpha=0.05)
                root = (square[run.place] / (1 - 0.95**self.steps)).sqrt() + 1e-10
                weight.mul_(decay).sub_(lr * mean / (1 - 0.9**self.steps) / root)


@pytest.mark.parametrize("nodes", [[0], [0, 1], [0, 1, 2], [0, 0, 1, 1]], ids=str)
@pytest.mark.parametrize("codec", ["sign1", "stat2", "int4", ("stat2", "sign1")])
def test_owners_step_as_muon_and_adamw_in_float64_and_ranks_hold_the_same(codec: Any, nodes: list[int]) -> None:
    def body(comm: Communicator) -> Tensor:
        model = make_marked()
        optimizer = build(model, comm, codec=codec, bucket_bytes=1000, nodes=nodes, nesterov=codec != "stat2")
        owners = Owners(optimizer)
        for step in range(15):
            optimizer.zero_grad()
            inputs = torch.randn(8, 6, generator=torch.Generator().manual_seed(100 * step + comm.rank))
            (model(inputs) - inputs.sum(1, keepdim=True)).square().mean().backward()
            owners.step()
        for expected, one in zip(owners.master_weights, optimizer._home._parameters.master_weights, strict=True):
            gap = (one.weights.double() - expected).abs().max()
            assert gap < 1e-6 * max(1.0, expected.abs().max())
            ahead = (one.weights - one.bucket.shard_of(one.bucket.flat)).abs().max()
            assert ahead < 0.1
        return weights(model)

    found = threads.run(body, len(nodes))
    assert all(torch.equal(mine, found[0]) for mine in found)


def test_stages_are_one_thing_and_matrices_have_one_owner_each() -> None:
    def body(comm: Communicator, stage: int) -> tuple[Tensor, set[tuple[str, int]]]:
        model = make_marked()
        optimizer = build(model, comm, stage=stage, max_norm=0.5)
        train(model, optimizer, range(6))
        assert optimizer.stage == stage
        assert optimizer.frozen
        slices = optimizer.saved_slices()
        return weights(model), {(one.name, one.tensor.numel()) for one in slices if one.kind == "momentum_buffer"}

    found = [threads.run(lambda comm, stage=stage: body(comm, stage), 2) for stage in (0, 1, 2)]
    for of_rank in found:
        assert torch.equal(of_rank[0][0], found[0][0][0])
        assert torch.equal(of_rank[1][0], found[0][0][0])
        assert sorted(of_rank[0][1] | of_rank[1][1]) == [("0.weight", 222), ("2.weight", 407)]
        assert not of_rank[0][1] & of_rank[1][1]


@pytest.mark.filterwarnings("ignore:step 4 was skipped")
def test_a_skipped_step_changes_nothing_and_a_resumed_run_goes_on_bit_for_bit() -> None:
    def first(comm: Communicator) -> Any:
        model = make_marked()
        optimizer = build(model, comm)
        train(model, optimizer, range(3))
        saved, parts, before = copy.deepcopy(optimizer.state_dict()), save(comm, optimizer), weights(model)
        optimizer.zero_grad()
        (model(torch.ones(2, 6)).sum() * (math.nan if comm.rank else 1.0)).backward()
        optimizer.step()
        assert optimizer.last_step.overflow
        assert torch.equal(weights(model), before)
        train(model, optimizer, range(3, 6))
        return saved, parts, weights(model)

    found = threads.run(first, 3)
    checkpoint = join([parts for _, parts, _ in found])

    def second(comm: Communicator, from_file: bool) -> Tensor:
        model = make_marked(seed=1)
        optimizer = build(model, comm)
        train(model, optimizer, range(7, 8))
        optimizer.load(checkpoint) if from_file else optimizer.load_state_dict(found[comm.rank][0])
        train(model, optimizer, range(3, 6))
        return weights(model)

    for from_file in (True, False):
        for mine in threads.run(lambda comm, f=from_file: second(comm, f), 3):
            assert torch.equal(mine, found[0][2])


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_checkpoints_cross_to_and_from_exact_muon_on_any_number_of_ranks(ranks: int) -> None:
    def exact(model: nn.Module, comm: Communicator) -> ShardedOptimizer:
        return ShardedOptimizer(
            model.named_parameters(), thinwire.optim.Muon, comm=comm, adjust_lr_fn="match_rms_adamw", **SETTINGS
        )

    def train_first(comm: Communicator, make: Any) -> Any:
        model = make_marked()
        optimizer = make(model, comm)
        train(model, optimizer, range(4))
        return save(comm, optimizer), weights(model)

    def take_up(comm: Communicator, checkpoint: Any, make: Any) -> tuple[Tensor, Tensor]:
        model = make_marked(seed=1)
        optimizer = make(model, comm)
        optimizer.load(checkpoint)
        loaded = weights(model)
        (momentum,) = [one for one in save(comm, optimizer)[0] if one.kind == "momentum_buffer"][:1] or [None]
        assert comm.size > 2 or momentum is not None
        train(model, optimizer, range(4, 8))
        return loaded, weights(model)

    for first, second in ((exact, build), (build, exact)):
        outcomes = threads.run(lambda comm, make=first: train_first(comm, make), 3)
        checkpoint = join([parts for parts, _ in outcomes])
        found = threads.run(lambda comm, c=checkpoint, make=second: take_up(comm, c, make), ranks)
        for loaded, after in found:
            torch.testing.assert_close(loaded, outcomes[0][1], rtol=0, atol=0.05)  # of exact: the master weights
            assert torch.equal(after, found[0][1])


def test_embeddings_heads_and_what_is_marked_are_no_hidden_matrices() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wte, self.token_embedding = nn.Embedding(5, 4), nn.Embedding(5, 4)
            self.heads, self.mlp, self.odd = nn.Linear(4, 4), nn.Linear(4, 8), nn.Linear(8, 4)
            self.lm_head = nn.Linear(4, 5)

    model, comm = Model(), threads.single(60.0)
    model.odd.weight.use_muon = False
    matrices, rest = build(model, comm).param_groups
    assert matrices["use_muon"]
    assert {id(one) for one in matrices["params"]} == {id(model.heads.weight), id(model.mlp.weight)}
    assert len(rest["params"]) == len(list(model.parameters())) - 2
    with pytest.warns(RuntimeWarning, match=r"takes 2 parameters for hidden matrices by their dimensions alone"):
        thinwire.OneBitMuon(nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 2)).parameters(), comm=comm)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        other = nn.Linear(4, 2)
        thinwire.OneBitMuon(other.parameters(), comm=comm, named_parameters=other.named_parameters())
        thinwire.OneBitMuon([{"params": nn.Linear(4, 2).weight, "use_muon": True}], comm=comm)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"codec": "int5"}, "codec must be one of sign1, stat2"),
        ({"codec": ("sign1", "stat2", "int4")}, "codec must be one of .* or a pair of them .* got"),
        ({"codec": 3}, "codec must be one of .* got 3"),
        ({"rest_codec": "bf16"}, "rest_codec must be one of sign1, stat2"),
        ({"codec": None}, "must name what is sent, got None"),
        ({"stage": 3}, "stage must be 0, 1 or 2, got 3"),
        ({"block_size": 96}, "block_size must be a multiple of 64"),
        ({"adjust_lr_fn": "none"}, "adjust_lr_fn must be one of original, match_rms_adamw"),
        ({"ns_steps": 2.5}, "ns_steps must be a whole number from 1 to 99, got 2.5"),
        ({"ns_dtype": torch.float32}, "ns_dtype must be one of fp32, bf16"),
        ({"momentum": -1.0}, "momentum must be at least 0"),
        ({"momentum": 1.0}, "momentum must be from 0 to below 1, got 1.0"),
        ({"resync_interval": 0}, "resync_interval must be a whole number of steps from 1"),
        ({"resync_interval": 1.5}, "resync_interval must be .* got 1.5"),
        ({"low_rank": -1}, "low_rank must be a whole number of directions"),
    ],
)
@on_threads(2)
def test_what_cannot_work_is_refused_on_every_rank(comm: Communicator, options: dict[str, Any], message: str) -> None:
    refused(ValueError, message, build, make_marked(), comm, **options)


@on_threads(2)
def test_ranks_that_differ_are_refused(comm: Communicator) -> None:
    refused(ValueError, "differ|against", build, make_marked(), comm, codec="stat2" if comm.rank else "sign1")
    refused(ValueError, "differ|against", build, make_marked(), comm, resync_interval=5 + comm.rank)
    refused(ValueError, "differ|against", build, make_marked(), comm, low_rank=comm.rank)


@pytest.mark.parametrize("options", [{"stage": 0}, {"codec": None}, {"optimizer_class": torch.optim.AdamW}], ids=str)
def test_directions_that_nothing_would_carry_are_refused(options: dict[str, Any]) -> None:
    given = {"optimizer_class": thinwire.optim.Muon, "codec": "sign1", "low_rank": 2, "comm": threads.single(60.0)}
    refused(ValueError, "low_rank=2 needs codec=", ShardedOptimizer, make_marked().parameters(), **{**given, **options})


def test_matrices_too_few_for_the_ranks_are_said_to_keep_them_waiting() -> None:
    """Of four ranks three have nothing of the one matrix, and get none of it in leg 1."""

    def body(comm: Communicator) -> int:
        model = nn.Linear(256, 256, bias=False)
        optimizer = build(model, comm, codec="sign1", low_rank=1)
        before = optimizer.bytes_sent
        model(torch.ones(1, 256)).sum().backward()
        optimizer.step()
        return optimizer.bytes_sent - before

    with pytest.warns(RuntimeWarning, match=r"wait for one with 4.0 times its share of the matrices"):
        owner, *others = threads.run(body, 4)
    packet, directions, headers = 16 + 1024 * (4 + 8), 2 * (256 + 256), 3 * 16
    assert set(others) == {packet + directions + 2 * 16 + headers + (owner - 3 * packet - headers)}
