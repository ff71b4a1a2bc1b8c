"""A checkpoint of 0/1 Adam keeps everything, between syncs too: the losses after a resume are bit-identical."""

from __future__ import annotations

import warnings

import pytest
import torch

from tests.optim.training import make_model, make_optimizer, through_a_file, train, weights
from tests.optim.zero_one.training import make_zero_one
from thinwire.comm import threads


@pytest.mark.parametrize("stop", [7, 12, 25, 73])  # before a compressed and an exact step, at the freeze, between syncs
def test_losses_after_a_resume_of_compressed_momenta_are_bit_identical(stop) -> None:
    def rank(comm):
        options = {"bucket_bytes": 600, "compress": "momentum", "weight_decay": 0.1}
        model = make_model()
        optimizer = make_zero_one(model, comm, **options)
        train(model, optimizer, range(stop))
        saved = through_a_file({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
        in_sync = optimizer.in_sync
        expected = train(model, optimizer, range(stop, stop + 22))

        resumed = make_model(seed=5)
        again = make_zero_one(resumed, comm, **options)
        resumed.load_state_dict(saved["model"])
        again.load_state_dict(saved["optimizer"])
        assert torch.equal(weights(resumed), torch.cat([v.float().flatten() for v in saved["model"].values()]))
        assert again.in_sync == in_sync
        assert train(resumed, again, range(stop, stop + 22)) == expected
        assert torch.equal(weights(resumed), weights(model))
        assert again.bytes_sent == optimizer.bytes_sent
        assert again.frozen_at == optimizer.frozen_at

    threads.run(rank, 3)


def test_between_syncs_the_state_brings_a_ranks_own_weights_whatever_the_model_held() -> None:
    def rank(comm):
        model = make_model()
        optimizer = make_zero_one(model, comm)
        train(model, optimizer, range(73))
        assert not optimizer.in_sync
        resumed = make_model(seed=5)
        again = make_zero_one(resumed, comm)
        again.load_state_dict(through_a_file(optimizer.state_dict()))
        return torch.equal(weights(resumed), weights(model))

    assert threads.run(rank, 2) == [True, True]


@pytest.mark.parametrize("stop", [12, 73])
@pytest.mark.parametrize("new_size", [1, 2, 3])
def test_rank_0s_file_on_all_ranks_or_another_number_of_them(new_size, stop) -> None:
    def first(comm):
        model = make_model()
        optimizer = make_zero_one(model, comm)
        train(model, optimizer, range(stop))
        return through_a_file({"model": model.state_dict(), "optimizer": optimizer.state_dict()})

    saved = threads.run(first, 2)[0]

    def second(comm):
        model = make_model()
        optimizer = make_zero_one(model, comm)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        train(model, optimizer, range(stop, stop + 20))
        optimizer.synchronize_weights()
        return weights(model)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        results = threads.run(second, new_size)
    assert all(torch.equal(result, results[0]) for result in results)
    messages = [str(one.message) for one in caught if one.category is RuntimeWarning]
    assert len(messages) == (1 if new_size == 2 else new_size)  # rank 0 of 2 is where the file comes from
    assert all("saved by rank 0 of 2" in message for message in messages)


def test_a_resume_may_change_the_schedule() -> None:
    def rank(comm):
        model = make_model()
        optimizer = make_zero_one(model, comm)
        train(model, optimizer, range(40))
        again = make_zero_one(model, comm, local_step_clipper=1)
        again.load_state_dict(optimizer.state_dict())
        again.synchronize_weights()
        seen = []
        train(model, again, range(40, 60), lambda step: seen.append(again.in_sync))
        return all(seen)

    assert threads.run(rank, 2) == [True, True]


def test_states_of_other_optimizers_and_options_are_refused_and_nothing_changes() -> None:
    def rank(comm):
        model = make_model()
        optimizer = make_zero_one(model, comm)
        one_bit = make_optimizer(make_model(), comm)
        train(model, optimizer, range(30))
        before = weights(model).clone()
        with pytest.raises(ValueError, match="saved by OneBitAdam with 1 parameter groups, this is ZeroOneAdam"):
            optimizer.load_state_dict(one_bit.state_dict())
        with pytest.raises(ValueError, match="not from ZeroOneAdam"):
            optimizer.load_state_dict(torch.optim.AdamW(make_model().parameters()).state_dict())
        with pytest.raises(ValueError, match="saved with compress='update'"):
            make_zero_one(make_model(), comm, compress="momentum").load_state_dict(optimizer.state_dict())
        return torch.equal(weights(model), before)

    assert threads.run(rank, 2) == [True, True]
