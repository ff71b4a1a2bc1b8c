"""What is sent while a model computes: buckets during backward, new weights during the next forward."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from tests.optim.training import make_model, watcher
from tests.zero.training import ADAMW, build, train
from thinwire.comm import Communicator, threads
from thinwire.zero import ShardedOptimizer


def test_buckets_leave_during_backward() -> None:
    def body(comm: Communicator) -> list[int]:
        model = make_model()
        optimizer = build(comm, model, 2, **(ADAMW | {"bucket_bytes": 4}))
        seen: list[int] = []
        model[0].weight.register_hook(lambda _: seen.append(watcher(optimizer).started))
        train(optimizer, model, range(1))
        return seen

    for seen in threads.run(body, 2):
        assert seen == [4] or seen == [5]


def test_weights_read_in_any_way_are_the_new_ones() -> None:
    def body(comm):
        torch.manual_seed(0)
        model = nn.MultiheadAttention(8, 2, batch_first=True)  # computes with its child's weight without calling it
        optimizer = ShardedOptimizer(
            model.parameters(), torch.optim.SGD, stage=1, comm=comm, bucket_bytes=256, block_size=8, lr=0.1
        )
        optimizer.gather_during_forward(model)
        inputs = torch.ones(2, 3, 8) * (comm.rank + 1)
        model(inputs, inputs, inputs)[0].square().sum().backward()
        optimizer.step()
        waited = set(optimizer._home._parameters.gate._pending)
        assert waited
        read = copy.deepcopy(model).out_proj.weight
        assert not optimizer._home._parameters.gate._pending
        model(inputs, inputs, inputs)[0].square().sum().backward()
        optimizer.step()
        assert optimizer._home._parameters.gate._pending
        model(inputs, inputs, inputs)
        assert not optimizer._home._parameters.gate._pending
        optimizer.zero_grad()
        return read

    weights = threads.run(body, 2)
    assert torch.equal(weights[0], weights[1])


def test_parameters_outside_of_the_gated_module_do_not_wait() -> None:
    def body(comm):
        torch.manual_seed(0)
        inner, outer = nn.Linear(8, 8), nn.Linear(8, 8)
        optimizer = ShardedOptimizer(
            [*inner.parameters(), *outer.parameters()],
            torch.optim.SGD,
            comm=comm,
            bucket_bytes=64,
            block_size=8,
            lr=0.1,
        )
        optimizer.gather_during_forward(inner)
        with pytest.raises(RuntimeError, match="was called before"):
            optimizer.gather_during_forward(outer)
        outer(inner(torch.ones(2, 8))).square().sum().backward()
        optimizer.step()
        return [parameter.detach().clone() for parameter in outer.parameters()]

    found = threads.run(body, 2)
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
