"""What ZeRO stages save: any stage and number of ranks takes it up, and the same ones go on bit for bit; what is sent
while a model computes; and when ranks are compared."""

import copy

import pytest
import torch
from torch import Tensor, nn

from tests.launching import on_threads
from tests.optim.subject import LOCAL, Subject
from tests.optim.training import loss_of, make_model, through_a_file, weights
from tests.optim.training import train as train_one
from tests.refusing import refused
from tests.zero.saved import join, save
from tests.zero.training import ADAMW, SGD, build, train
from thinwire.comm import Communicator, threads
from thinwire.zero.rank_checks import ReplicaDriftError
from thinwire.zero.sharded_home import ComparisonTimes


@pytest.mark.parametrize(("saved_stage", "dtype"), [(0, None), (1, torch.bfloat16), (2, None)])
def test_any_stage_and_number_of_ranks_takes_up_what_another_saved(saved_stage: int, dtype: torch.dtype | None) -> None:
    def first_half(comm: Communicator):
        model = make_model()
        optimizer = build(comm, model, saved_stage, param_dtype=dtype, **ADAMW)
        train(optimizer, model, range(10))
        return save(comm, optimizer)

    saved = join(threads.run(first_half, 4))

    def go_on(comm: Communicator, stage: int) -> Tensor:
        model = make_model(seed=5)
        optimizer = build(comm, model, stage, param_dtype=dtype, **(ADAMW | {"lr": 9.9, "bucket_bytes": 300}))
        optimizer.load(saved)
        assert optimizer.param_groups[0]["lr"] == ADAMW["lr"]
        for step in range(10, 20):
            optimizer.zero_grad()
            # the same 12 batches a step, however many ranks share them
            for share in range(12 // comm.size):
                loss = loss_of(model, comm.rank * (12 // comm.size) + share, step) * comm.size / 12
                if share < 12 // comm.size - 1:
                    with optimizer.no_sync():
                        loss.backward()
                        optimizer.end_backward()
                else:
                    loss.backward()
            optimizer.step()
        return weights(model)

    reference = threads.run(lambda comm: go_on(comm, saved_stage), 4)[0]
    tolerance = 2e-6 if dtype is None else 4e-3
    for ranks, stage in ((1, (saved_stage + 1) % 3), (2, (saved_stage + 2) % 3), (3, saved_stage)):
        for mine in threads.run(lambda comm, s=stage: go_on(comm, s), ranks):
            torch.testing.assert_close(mine, reference, rtol=0, atol=tolerance)


@pytest.mark.parametrize(
    ("saved_stage", "stage", "options"),
    [(0, 0, {}), (1, 1, {}), (2, 2, {}), (0, 2, {}), (2, 1, {}), (1, 0, {}), (1, 1, {"bucket_bytes": 300})],
)
def test_every_rank_saves_and_loads_its_own_state(saved_stage: int, stage: int, options: dict) -> None:
    def body(comm: Communicator) -> tuple[bool, dict]:
        model, resumed = make_model(), make_model(seed=3)
        optimizer, again = build(comm, model, saved_stage), build(comm, resumed, stage, **(ADAMW | options))
        train(optimizer, model, range(5))
        state = optimizer.state_dict()  # not a copy: two optimizers must not share memory
        again.load_state_dict(state)
        state = through_a_file(state)
        train(optimizer, model, range(5, 9))
        train(again, resumed, range(5, 9))
        return torch.equal(weights(model), weights(resumed)), state

    same, states = zip(*threads.run(body, 3), strict=True)
    assert all(same)

    def others_file(comm: Communicator) -> None:
        with pytest.raises(ValueError, match=r"were given the states of ranks \[1, 1, 1\]"):
            build(comm, make_model(), stage).load_state_dict(states[1])

    threads.run(others_file, 3)
    with pytest.raises(ValueError, match="save_checkpoint"):
        build(threads.run(lambda comm: comm, 1)[0], make_model(), stage).load_state_dict(states[1])


# What is sent while a model computes: buckets during backward, new weights during the next forward


def test_weights_read_in_any_way_are_the_new_ones() -> None:
    def body(comm):
        torch.manual_seed(0)
        model = nn.MultiheadAttention(8, 2, batch_first=True)  # computes with its child's weight without calling it
        optimizer = build(comm, model, 1, **SGD, bucket_bytes=256)
        optimizer.gather_during_forward(model)
        inputs = torch.ones(2, 3, 8) * (comm.rank + 1)
        model(inputs, inputs, inputs)[0].square().sum().backward()
        optimizer.step()
        gate = optimizer._home._parameters.gate
        assert gate._pending
        read = copy.deepcopy(model).out_proj.weight
        assert not gate._pending
        optimizer.zero_grad()
        model(inputs, inputs, inputs)[0].square().sum().backward()
        optimizer.step()
        assert gate._pending
        model(inputs, inputs, inputs)
        assert not gate._pending
        optimizer.zero_grad()
        return read

    weights = threads.run(body, 2)
    assert torch.equal(weights[0], weights[1])


def test_parameters_outside_of_the_gated_module_do_not_wait() -> None:
    def body(comm):
        torch.manual_seed(0)
        inner, outer = nn.Linear(8, 8), nn.Linear(8, 8)
        optimizer = build(comm, nn.ModuleList([inner, outer]), 1, **SGD, bucket_bytes=64)
        optimizer.gather_during_forward(inner)
        refused(RuntimeError, "was called before", optimizer.gather_during_forward, outer)
        outer(inner(torch.ones(2, 8))).square().sum().backward()
        optimizer.step()
        return [parameter.detach().clone() for parameter in outer.parameters()]

    found = threads.run(body, 2)
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


# Ranks are compared


@pytest.mark.parametrize(
    ("interval", "steps", "shared", "due"),
    [
        (3, range(1, 13), range(1, 13), [3, 6, 9, 12]),
        (2, (1, 2, 2, 3), range(1, 4), [2]),  # a skipped step is no other step
        (3, range(1, 17), (1, 2, 4, 8, 16), [4, 8, 16]),  # weights are shared after steps that no interval meets
    ],
)
def test_when_ranks_are_compared(interval, steps, shared, due) -> None:
    times = ComparisonTimes(interval)
    assert [step for step in steps if times.due(step, step in shared)] == due


@pytest.mark.parametrize(("stage", "interval"), [(0, 1), (1, 2), (0, 3), (1, 4), (0, 5)])
@on_threads(2)
def test_drift_is_found_between_local_steps(comm: Communicator, stage: int, interval: int) -> None:
    model = make_model()
    optimizer = Subject("ZeroOneAdam", stage).build(model, comm, resync_interval=interval, on_drift="raise")
    train_one(model, optimizer, range(LOCAL))
    if comm.rank == 1:
        with torch.no_grad():
            model[2].weight[0, 0] += 0.1
    refused(ReplicaDriftError, r"weights of ranks \[1\] differ", train_one, model, optimizer, range(LOCAL, LOCAL + 12))
