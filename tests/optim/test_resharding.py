"""What one job saved is taken up by a job of another number of ranks, of other buckets or at another stage."""

import copy
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.launching import on_threads
from tests.optim.subject import FREEZE, LOCAL, SUBJECTS, Subject, alike
from tests.optim.training import make_model, through_a_file, train, weights
from tests.zero.saved import join, save
from thinwire.comm import Communicator, threads

BF16 = torch.bfloat16


@pytest.mark.parametrize(
    ("name", "stage", "ranks", "moment", "dtype"),
    [
        ("OneBitAdam", 1, 5, FREEZE + 8, BF16),
        ("OneBitAdam", 2, 1, FREEZE + 8, BF16),
        ("OneBitAdam", 2, 2, 3, None),
        ("OneBitAdam-stat2", 1, 2, FREEZE + 8, BF16),
        ("OneBitAdam-fp8", 2, 4, FREEZE + 3, None),
        ("OneBitLamb-bf16", 1, 3, FREEZE + 7, BF16),
        ("OneBitLamb", 1, 1, FREEZE + 7, None),
        ("OneBitLamb", 1, 4, FREEZE - 3, None),
        ("ZeroOneAdam", 1, 4, 3, None),
        ("ZeroOneAdam", 1, 2, FREEZE + 1, BF16),
        ("ZeroOneAdam", 1, 1, LOCAL + 1, None),
        ("OneBitLion", 1, 2, 9, BF16),
    ],
)
def test_state_and_the_mean_of_the_residuals_go_to_another_number_of_ranks(
    name: str, stage: int, ranks: int, moment: int, dtype: torch.dtype | None
) -> None:
    name, _, codec = name.partition("-")
    subject = Subject(name, stage, codec=codec or "sign1")
    options = {"param_dtype": dtype, "weight_decay": 0.1, "on_drift": "raise", "resync_interval": 5}

    def first(comm: Communicator):
        model, optimizer = subject.on_model(comm, moment, **options)
        return save(comm, optimizer), train(model, optimizer, range(moment, moment + 6))

    parts, losses = zip(*threads.run(first, 3), strict=True)
    saved = join(list(parts))

    def second(comm: Communicator):
        model = make_model(seed=9)
        optimizer = subject.build(model, comm, **options | {"bucket_bytes": 500})
        optimizer.load(saved)
        assert optimizer.steps == moment
        resumed = save(comm, optimizer)
        found = train(model, optimizer, range(moment, moment + 6))
        optimizer.synchronize_weights()
        assert alike(comm, model)
        return resumed, found

    again, others = zip(*threads.run(second, ranks), strict=True)
    joined = join(list(again))
    assert joined.kinds() == saved.kinds()
    assert joined.counters()["freeze_groups"] == saved.counters()["freeze_groups"]
    cut = {"momentum", "owner_residual"} if subject.packs and moment > FREEZE else set()
    for parameter_name, parameter in make_model().named_parameters():
        for kind in saved.kinds() - cut:
            numel = 1 if kind.startswith("scalar.") else parameter.numel()
            found, wanted = (one.read(kind, parameter_name, 0, numel) for one in (joined, saved))
            assert torch.equal(found, wanted), kind
        if cut:  # what blocks that are cut elsewhere cannot say of u goes into the owner's residual
            found, wanted = (
                sum(one.read(kind, parameter_name, 0, parameter.numel()) for kind in cut) for one in (joined, saved)
            )
            torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
    rounding = {"rtol": 1e-5, "atol": 1e-9} if dtype is None else {"rtol": 2**-7, "atol": 1e-7}
    for key in (key for key, one in parts[0][1].items() if one.is_floating_point()):
        found, wanted = (torch.stack([own[key].float() for _, own, _ in some]).mean(dim=0) for some in (again, parts))
        torch.testing.assert_close(found, wanted, **rounding)
    # Other ranks compress other means: the noise differs, and with so small a model the loss.
    assert np.mean(others) < 1.5 * np.mean(losses)


def saved_by_2_ranks(subject: Subject, moment: int) -> dict[str, Any]:
    def body(comm: Communicator) -> Any:
        model, optimizer = subject.on_model(comm, moment)
        return through_a_file({"model": model.state_dict(), "optimizer": optimizer.state_dict()})

    return threads.run(body, 2)[0]


@pytest.mark.parametrize("subject", [one for one in SUBJECTS if not one.stage], ids=str)
def test_rank_0s_file_serves_any_number_of_ranks_which_are_told_what_it_lacks(subject: Subject) -> None:
    moment = LOCAL + 1 if subject.entry.local_steps else FREEZE + 3
    saved = saved_by_2_ranks(subject, moment)

    def body(comm: Communicator) -> Tensor:
        model = make_model(seed=4)
        optimizer = subject.build(model, comm)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        assert optimizer.frozen
        state = optimizer.state_dict()
        torch.testing.assert_close(state["state"], saved["optimizer"]["state"], rtol=0, atol=0)
        assert state["thinwire"]["counters"] == saved["optimizer"]["thinwire"]["counters"]
        train(model, optimizer, range(moment, moment + 8))
        optimizer.synchronize_weights()
        return weights(model)

    for new_size in (1, 2, 3):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            results = threads.run(body, new_size)
        assert all(torch.equal(result, results[0]) for result in results)
        messages = [str(one.message) for one in caught if one.category is RuntimeWarning]
        assert len(messages) == (1 if new_size == 2 else new_size)  # rank 0 of 2 is where the file comes from
        assert all("saved by rank 0 of 2" in message for message in messages)


@pytest.mark.parametrize("subject", [one for one in SUBJECTS if not one.stage and one.entry.offloads], ids=str)
def test_what_it_lacks_starts_from_zero_where_a_rank_had_residuals_of_its_own(subject: Subject) -> None:
    saved, found = saved_by_2_ranks(subject, FREEZE + 3), []
    for earlier in (0, FREEZE + 5):
        model = make_model(seed=4)
        optimizer = Subject(subject.name, 1).build(model, threads.single(30.0))
        train(model, optimizer, range(earlier))
        model.load_state_dict(saved["model"])
        with pytest.warns(RuntimeWarning, match="residuals belong to one rank"):
            optimizer.load_state_dict(saved["optimizer"])
        found.append(train(model, optimizer, range(FREEZE + 3, FREEZE + 9)))
    assert found[0] == found[1]


def test_coordinates_that_stay_are_those_of_the_state_that_was_loaded() -> None:
    def steps(model: torch.nn.Module, optimizer: Any, dead: int | None, numbers: range) -> list[float]:
        losses = []
        for number in numbers:
            inputs = torch.randn(16, 64, generator=torch.Generator().manual_seed(number))
            if dead is not None:
                inputs[:, dead] = 0.0  # so that the variance of what it is multiplied by is
            loss = (model(inputs) - inputs.sum(dim=1, keepdim=True).tanh()).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    models = [torch.nn.Linear(64, 64) for _ in range(3)]  # so large that few coordinates stay
    for one in models:
        one.load_state_dict(models[0].state_dict())
    saved, *others = [(one, Subject("OneBitAdam", 1).build(one, threads.single(30.0))) for one in models]
    steps(*saved, 5, range(FREEZE + 3))
    steps(*others[0], 0, range(FREEZE + 3))
    for model, optimizer in others:
        model.load_state_dict(saved[0].state_dict())
        optimizer.load_state_dict(saved[1].state_dict())
    first, second = (steps(*one, None, range(FREEZE + 3, FREEZE + 9)) for one in others)
    assert first == second


TAMPERED: dict[str, Callable[[dict[str, Any]], object]] = {
    "a deleted key": lambda state: state["thinwire"].pop("rank_tensors"),
    "a list for a dict": lambda state: state["thinwire"].update(counters=[]),
    "a renamed kind": lambda state: state["thinwire"].update(
        slices=[(f"{kind}x", *others) for kind, *others in state["thinwire"]["slices"]],
        rank_tensors={f"{key}x": one for key, one in state["thinwire"]["rank_tensors"].items()},
    ),
    "another optimizer's step": lambda state: state["thinwire"]["counters"].update(skipped_steps=-1),
    "no groups": lambda state: state.update(param_groups=[]),
    "a rate that is none": lambda state: state["param_groups"][0].update(lr=None),
    "a rate that is no number": lambda state: state["param_groups"][0].update(lr=float("nan")),
    "a beta above 1": lambda state: state["param_groups"][0].update(betas=(0.9, 1.5)),
    "parameters exchanged": lambda state: state["param_groups"][0]["params"].reverse(),
    "state of other types": lambda state: state.update(state={0: None}),
}


@pytest.mark.parametrize("odd", [0, 1])
@pytest.mark.parametrize("subject", SUBJECTS, ids=str)
@on_threads(2)
def test_a_tampered_state_of_one_rank_is_refused_on_every_rank_before_anything_moves(
    comm: Communicator, subject: Subject, odd: int
) -> None:
    model, optimizer = subject.on_model(comm, FREEZE + 3)
    saved = optimizer.state_dict()
    train(model, optimizer, range(1))
    before = weights(model)
    for what, tamper in TAMPERED.items():
        state = copy.deepcopy(saved)
        if comm.rank == odd:
            tamper(state)
        with pytest.raises(ValueError, match="state"):
            optimizer.load_state_dict(state)
        assert torch.equal(weights(model), before), what
