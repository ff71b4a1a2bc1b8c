"""An elastic job that is saved, ends, and is taken up again by as many workers, by fewer, or by more."""

from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.optim.diloco.tower import SETTINGS, Tower, flat, make, make_elastic, meeting, outer_weights, step, together
from tests.optim.training import through_a_file
from thinwire.comm import Communicator, Elastic, MembershipError, threads
from thinwire.optim.diloco.elastic_meeting import Plan, Standing

__all__ = ["meeting"]

STEPS = 20


def job(name: str, workers: int) -> Elastic:
    return replace(SETTINGS, workers=workers, job=name)


def run(
    elastic: Elastic, saves_at: int | None, states: list[Any], comm: Communicator | None, number: int, **options: Any
) -> tuple[Tensor, Any, Tensor, int]:
    """One rank from the first step, or from the `number`th of `states`, to the last: its weights there; what it saved
    after step `saves_at`; the outer weights a step later, or as it begins; its worker's number."""
    model = Tower()
    optimizer, home = make_elastic(model, elastic=elastic, comm=comm, **options)
    if number < len(states):
        optimizer.load_state_dict(states[number])
    saved, outer = None, torch.empty(0)
    if saves_at is None:
        outer = outer_weights(model, optimizer)
    while optimizer.steps < STEPS:
        step(model, optimizer, 10 * home.index + optimizer.comm.rank)
        if optimizer.steps == saves_at:
            saved = through_a_file(optimizer.state_dict())
            step(model, optimizer, 10 * home.index + optimizer.comm.rank)
            outer = outer_weights(model, optimizer)
    index = home.index
    optimizer.synchronize()
    return flat(model.parameters()), saved, outer, index


def workers(
    name: str, count: int, saves_at: int | None = None, states: list[Any] | None = None, ranks: int = 1, **options: Any
) -> list[Any]:
    """Each worker's ranks' results of `run`; `states`: by worker and rank."""

    def body(worker: int) -> Callable[[], list[Any]]:
        def of_rank(comm: Communicator) -> Any:
            own = [of_worker[comm.rank] for of_worker in states or []]
            return run(job(name, count), saves_at, own, comm if ranks > 1 else None, worker, **options)

        return lambda: threads.run(of_rank, ranks)

    return together([body(worker) for worker in range(count)])


@pytest.mark.parametrize(
    ("stopped_at", "codec", "ranks", "options"),
    [
        (7, "int4", 1, {"fragments": 2, "overlap": 2}),  # a fragment is under way
        (9, "stat2", 1, {"fragments": 1, "overlap": 0}),
        (8, "int8", 1, {"fragments": 2, "overlap": 2, "share": {"exp_avg": 1, "exp_avg_sq": 2}}),
        (13, "int4", 2, {"fragments": 2, "overlap": 2, "stage": 2, "share": {"exp_avg": 2}}),
        (10, "stat2", 2, {"fragments": 2, "overlap": 2, "stage": 1}),
    ],
)
def test_as_many_workers_go_on_with_the_bits_of_a_job_that_never_stopped(
    stopped_at: int, codec: str, ranks: int, options: dict[str, Any]
) -> None:
    options = {**options, "codec": codec}
    count = 3 if ranks == 1 else 2
    through = workers("first", count, stopped_at, ranks=ranks, **options)
    # Not in the order of the workers: a state knows whose it is.
    states = [[one[1] for one in of_worker] for of_worker in reversed(through)]
    resumed = workers("second", count, None, states, ranks=ranks, **options)
    assert [of_worker[0][3] for of_worker in resumed] == [of_worker[0][3] for of_worker in reversed(through)]
    wanted = through[0][0][0]
    for weights, *_ in (one for of_worker in (*through, *resumed) for one in of_worker):
        assert torch.equal(weights, wanted)


SHARE = {"exp_avg": 1, "exp_avg_sq": 2}


@pytest.mark.parametrize(
    ("before", "after", "share"), [(3, 2, {}), (3, 2, SHARE), (2, 3, {}), (2, 3, SHARE), (2, 1, SHARE)]
)
def test_fewer_workers_go_on_as_if_the_others_had_died_and_more_as_if_they_joined(
    before: int, after: int, share: dict[str, int]
) -> None:
    options: dict[str, Any] = {"fragments": 2, "overlap": 2, "codec": "int8", "share": share}
    through = workers("first", before, 7, **options)
    resumed = workers("second", after, None, [[of_worker[0][1]] for of_worker in through], **options)
    # One outer step was under way when all saved, until a step later: it is taken in as they begin.
    for number, ((weights, _, outer, _),) in enumerate(resumed):
        assert torch.equal(weights, resumed[0][0][0])
        assert number >= before or torch.equal(outer, through[0][0][2])


def test_what_was_not_saved_together_is_not_loaded_together() -> None:
    first = Standing(taken=4, steps=7, place=0, checkpoint="3 workers after step 7", resumes=3)
    other = Standing(taken=6, steps=9, place=1, checkpoint="3 workers after step 9", resumes=3)
    with pytest.raises(MembershipError, match="of different runs or steps: 3 workers after step 7 and 3 workers after"):
        Plan.of([asdict(first), asdict(other)])
    with pytest.raises(MembershipError, match=r"states of workers \[0, 0\]: each loads a file of its own"):
        Plan.of([asdict(first), asdict(first), None])
    # Who began before another loaded begins anew, and so does who comes.
    plan = Plan.of([asdict(Standing(taken=1, steps=9, place=1)), None, asdict(first)])
    assert (plan.source, plan.lacking, plan.order, plan.as_saved) == (2, (0, 1), (2, 0, 1), False)


def test_a_state_is_loaded_where_a_job_begins_alone() -> None:
    model = Tower()
    optimizer, _ = make_elastic(model, elastic=job("first", 1))
    step(model, optimizer, 0)
    saved = through_a_file(optimizer.state_dict())
    assert optimizer.steps == 1
    with pytest.raises(RuntimeError, match="in a job that is at step 1: load a state at step 0"):
        optimizer.load_state_dict(saved)
    with pytest.raises(RuntimeError, match="load them into the model before the optimizer is built"):
        optimizer.load_weights(None)  # type: ignore[arg-type]
    optimizer.synchronize()
    after = through_a_file(optimizer.state_dict())

    resumed, _ = make_elastic(Tower(), elastic=job("second", 1))
    resumed.load_state_dict(after)
    assert resumed.steps == 1
    resumed.close()

    # A DiLoCo whose workers stay can take it, too.
    other = Tower()
    plain = make(threads.single(60.0), other, torch.optim.AdamW, every=6)
    plain.load_state_dict(after)
    assert plain.steps == 1
    assert torch.equal(flat(other.parameters()), flat(model.parameters()))
