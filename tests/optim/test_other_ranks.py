"""The state_dict of rank 0 is taken up by any number of ranks, which are told what it lacks."""

from __future__ import annotations

import warnings

import pytest
import torch

from tests.optim.subject import FREEZE, LOCAL, SUBJECTS, Subject
from tests.optim.training import make_model, through_a_file, train, weights
from thinwire.comm import threads


@pytest.mark.parametrize("new_size", [1, 2, 3])
@pytest.mark.parametrize("subject", [one for one in SUBJECTS if not one.stage], ids=str)
def test_rank_0s_file_on_all_ranks(subject: Subject, new_size: int) -> None:
    moment = LOCAL + 1 if subject.entry.local_steps else FREEZE + 3

    def first(comm):
        model = make_model()
        optimizer = subject.build(model, comm)
        train(model, optimizer, range(moment))
        return through_a_file({"model": model.state_dict(), "optimizer": optimizer.state_dict()})

    saved = threads.run(first, 2)[0]

    def second(comm):
        model = make_model(seed=4)
        optimizer = subject.build(model, comm)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        assert optimizer.frozen
        state = optimizer.state_dict()
        torch.testing.assert_close(state["state"], saved["optimizer"]["state"], rtol=0, atol=0)
        assert state["thinwire"]["counters"] == saved["optimizer"]["thinwire"]["counters"]
        train(model, optimizer, range(moment, moment + 20))
        optimizer.synchronize_weights()
        return weights(model)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        results = threads.run(second, new_size)
    assert all(torch.equal(result, results[0]) for result in results)
    messages = [str(one.message) for one in caught if one.category is RuntimeWarning]
    assert len(messages) == (1 if new_size == 2 else new_size)  # rank 0 of 2 is where the file comes from
    assert all("saved by rank 0 of 2" in message for message in messages)
