"""A checkpoint keeps everything, residuals included: the losses after a resume are bit-identical."""

from __future__ import annotations

import warnings

import pytest
import torch

import thinwire
from tests.optim.training import loss_of, make_model, make_optimizer, through_a_file, train, weights
from thinwire.comm import threads


@pytest.mark.parametrize("stop", [1, 10, 25])
@pytest.mark.parametrize(
    ("freeze_step", "dtype", "compress"),
    [
        (10, torch.float32, "momentum"),
        ("auto", torch.float32, "update"),
        ("auto", torch.float32, "momentum"),
        ("auto", torch.bfloat16, "update"),
    ],
)
def test_losses_after_a_resume_are_bit_identical(stop, freeze_step, dtype, compress) -> None:
    def rank(comm):
        options = {"freeze_step": freeze_step, "bucket_bytes": 600, "compress": compress, "betas": (0.9, 0.95)}
        model = make_model(dtype=dtype)
        optimizer = make_optimizer(model, comm, **options)
        train(model, optimizer, range(stop))
        saved = through_a_file({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
        expected = train(model, optimizer, range(stop, stop + 16))

        resumed = make_model(seed=5, dtype=dtype)
        again = make_optimizer(resumed, comm, **options)
        resumed.load_state_dict(saved["model"])
        again.load_state_dict(saved["optimizer"])
        assert train(resumed, again, range(stop, stop + 16)) == expected
        assert torch.equal(weights(resumed), weights(model))
        assert again.frozen_at == optimizer.frozen_at
        assert again.bytes_sent == optimizer.bytes_sent
        assert again.bytes_uncompressed == optimizer.bytes_uncompressed
        assert again.frozen == optimizer.frozen

    threads.run(rank, 3)


def test_residuals_are_in_the_state_and_matter() -> None:
    def rank(comm):
        model = make_model()
        optimizer = make_optimizer(model, comm)
        train(model, optimizer, range(20))
        saved = optimizer.state_dict()["thinwire"]
        of_worker = {key: one for key, one in saved["rank_tensors"].items() if key.startswith("worker_residual.")}
        of_owner = [tensor for kind, _, _, tensor in saved["slices"] if kind == "owner_residual"]
        assert len(of_worker) == 6
        assert all(bool(one.any()) for one in [*of_worker.values(), *of_owner])
        # As slices are cut at shards, every rank owns some.
        assert 0 < sum(one.numel() for one in of_owner) < weights(model).numel()

    threads.run(rank, 2)


def test_a_resume_with_grad_scaler_is_bit_identical() -> None:
    def rank(comm):
        def run(model, optimizer, scaler, steps):
            for step in steps:
                optimizer.zero_grad()
                scaler.scale(loss_of(model, comm.rank, step)).backward()
                scaler.step(optimizer)
                scaler.update()
            return weights(model)

        def make():
            model = make_model()
            scaler = torch.amp.GradScaler("cpu", init_scale=3.0 * 2**10, growth_interval=10)
            return model, make_optimizer(model, comm), scaler

        model, optimizer, scaler = make()
        run(model, optimizer, scaler, range(30))  # the scale grows after step 30, right before the resume
        parts = (model, optimizer, scaler)
        saved = through_a_file([part.state_dict() for part in parts])
        expected = run(model, optimizer, scaler, range(30, 60))
        resumed = make()
        for part, state in zip(resumed, saved, strict=True):
            part.load_state_dict(state)
        return torch.equal(run(*resumed, range(30, 60)), expected)

    assert threads.run(rank, 2) == [True, True]


@pytest.mark.parametrize("new_size", [1, 3])
def test_another_number_of_ranks_restores_all_but_the_residuals_and_says_so(new_size) -> None:
    def first(comm):
        model = make_model()
        optimizer = make_optimizer(model, comm)
        train(model, optimizer, range(20))
        return through_a_file({"model": model.state_dict(), "optimizer": optimizer.state_dict()})

    saved = threads.run(first, 2)[0]

    def second(comm):
        model = make_model()
        optimizer = make_optimizer(model, comm)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        assert optimizer.frozen
        before = saved["optimizer"]["state"]
        assert all(torch.equal(optimizer.state_dict()["state"][i]["exp_avg"], before[i]["exp_avg"]) for i in before)
        train(model, optimizer, range(20, 40))
        return weights(model)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        results = threads.run(second, new_size)
    assert all(torch.equal(result, results[0]) for result in results)
    messages = [str(one.message) for one in caught if one.category is RuntimeWarning]
    assert len(messages) == new_size
    assert "saved by rank 0 of 2" in messages[0]


def test_a_resume_may_change_the_freeze_step() -> None:
    def rank(comm):
        model = make_model()
        optimizer = make_optimizer(model, comm, freeze_step=50)
        train(model, optimizer, range(6))
        again = make_optimizer(model, comm, freeze_step="auto")
        again.load_state_dict(optimizer.state_dict())
        train(model, again, range(6, 12))
        return again.frozen

    assert threads.run(rank, 2) == [False, False]


def settings_in(state):
    return state["thinwire"]["counters"]["settings"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state.pop("thinwire"), "no 'thinwire' entry"),
        (lambda state: state["thinwire"].update(format=99), "has format 99"),
        (lambda state: settings_in(state).update(codec="int8"), "saved with codec='int8'"),
        (lambda state: settings_in(state).update(compress="momentum"), "saved with compress='momentum'"),
        (lambda state: settings_in(state).update(block_size=4096), "block_size=4096"),
        (lambda state: state["state"][2].update(exp_avg=torch.zeros(5)), r"parameter 2 has shape \(5,\)"),
    ],
)
def test_a_state_that_cannot_be_ours_is_refused_and_nothing_changes(change, message) -> None:
    def rank(comm):
        model = make_model()
        optimizer = make_optimizer(model, comm)
        train(model, optimizer, range(15))
        state = through_a_file(optimizer.state_dict())
        change(state)
        twin = make_model()
        twin.load_state_dict(model.state_dict())
        with pytest.raises(ValueError, match=message):
            optimizer.load_state_dict(state)
        before = weights(model).clone()
        train(model, optimizer, range(15, 18))
        return optimizer.frozen and not torch.equal(before, weights(model))

    assert threads.run(rank, 2) == [True, True]


def test_adamw_states_are_refused() -> None:
    def rank(comm):
        model = make_model()
        adamw = torch.optim.AdamW(model.parameters())
        with pytest.raises(ValueError, match="not from OneBitAdam"):
            thinwire.OneBitAdam(model.parameters(), comm=comm).load_state_dict(adamw.state_dict())

    threads.run(rank, 1)
