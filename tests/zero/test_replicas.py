from __future__ import annotations

import pytest
import torch

from tests.optim.subject import LOCAL, Subject
from tests.optim.training import make_model, train
from thinwire.comm import Communicator, threads
from thinwire.zero.rank_checks import ReplicaDriftError
from thinwire.zero.sharded_home import ComparisonTimes


def test_every_interval() -> None:
    times = ComparisonTimes(3)
    assert [step for step in range(1, 13) if times.due(step, True)] == [3, 6, 9, 12]


def test_a_skipped_step_is_no_other_step() -> None:
    times = ComparisonTimes(2)
    assert [times.due(step, True) for step in (1, 2, 2, 3)] == [False, True, False, False]


def test_when_ranks_share_weights_again() -> None:
    """Ranks that share weights after steps that no interval meets are compared all the same."""
    times = ComparisonTimes(3)
    shared = (1, 2, 4, 8, 16)
    assert [step for step in range(1, 17) if times.due(step, step in shared)] == [4, 8, 16]


@pytest.mark.parametrize(("stage", "interval"), [(0, 1), (1, 2), (0, 3), (1, 4), (0, 5)])
def test_drift_is_found_between_local_steps(stage: int, interval: int) -> None:
    def body(comm: Communicator) -> None:
        model = make_model()
        optimizer = Subject("ZeroOneAdam", stage).build(model, comm, resync_interval=interval, on_drift="raise")
        train(model, optimizer, range(LOCAL))
        if comm.rank == 1:
            with torch.no_grad():
                model[2].weight[0, 0] += 0.1
        with pytest.raises(ReplicaDriftError, match=r"weights of ranks \[1\] differ"):
            train(model, optimizer, range(LOCAL, LOCAL + 12))

    threads.run(body, 2)
