"""State of inner optimizers that elastic workers share: what is in common of it outlives who dies, and who joins begins
with it."""

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import thinwire
from tests.optim.diloco.tower import SETTINGS, Tower, flat, go_on, make_elastic, meeting, step, together
from tests.optim.training import through_a_file
from tests.refusing import refused
from thinwire.comm import CommunicationError, Communicator, Elastic, threads
from thinwire.optim.diloco.elastic_home import ElasticHome

__all__ = ["meeting"]

SHARE = {"exp_avg": 1, "exp_avg_sq": 2}


def in_common(home: ElasticHome) -> list[Tensor]:
    return [home.weights.outer(number).clone() for number in range(len(home.fragments))]


@pytest.mark.parametrize(("dies_at", "codec"), [(6, "int4"), (12, "int4"), (12, "stat2"), (13, "stat2")])
def test_copies_stay_alike_through_a_death_in_flight_and_a_newcomer_begins_with_them(dies_at: int, codec: str) -> None:
    """Before the first outer step that all share, with weights and state on leg 1, and on leg 2 at the earliest."""
    options: dict[str, Any] = {"fragments": 2, "overlap": 2, "codec": codec, "share": SHARE}
    options["elastic"] = replace(SETTINGS, workers=4)
    come = threading.Event()

    def stays(worker: int) -> Any:
        model = Tower()
        optimizer, home = make_elastic(model, **options)
        while optimizer.steps < 33:
            if optimizer.steps == 17:
                come.set()
            while optimizer.steps == 19 and not home.membership.wanted:
                time.sleep(0.01)
            step(model, optimizer, worker)
        optimizer.synchronize()
        assert optimizer.workers == 4
        return flat(model.parameters()), *in_common(home)

    def dies() -> None:
        model = Tower()
        optimizer, _ = make_elastic(model, **options)
        go_on(model, optimizer, 3, dies_at)
        optimizer.close()

    def joins() -> Any:
        assert come.wait(60)
        model = Tower()
        optimizer, home = make_elastic(model, **options)
        states = [number for number, fragment in enumerate(home.fragments) if fragment.kind]
        assert [home.fragments[number].kind for number in states] == ["exp_avg"] * 2 + ["exp_avg_sq"] * 2
        for number in states:
            assert home.weights.outer(number).any()
            assert torch.equal(home.weights.replica(number), home.weights.outer(number))
        assert {entry["step"].item() for entry in optimizer.inner.state.values()} <= set(range(19, 25))
        go_on(model, optimizer, 4, 33)
        optimizer.synchronize()
        return flat(model.parameters()), *in_common(home)

    first, *others = together([*(lambda n=n: stays(n) for n in range(3)), dies, joins])  # type: ignore[misc]
    assert len(first) == 1 + 2 + 4
    for found in (one for one in others if one is not None):
        assert all(torch.equal(one, other) for one, other in zip(found, first, strict=True))


@pytest.mark.parametrize(("ranks", "of_newcomer"), [(1, 1), (1, 2), (2, 1), (2, 3)])
def test_a_newcomer_has_state_of_the_others_where_there_is_nothing_in_common_yet(ranks: int, of_newcomer: int) -> None:
    """A step counter that is not the moments' own would have its first steps be many times too long. Of a process or a
    node, whatever the newcomer is."""
    options: dict[str, Any] = {"every": 4, "fragments": 1, "overlap": 0, "share": {"exp_avg": 1, "exp_avg_sq": 9}}
    options["elastic"] = replace(SETTINGS, workers=1)
    come = threading.Event()

    def state_of(home: ElasticHome) -> dict[tuple[str, str], Tensor]:
        return {key: one.clone() for key, one in home.worker.whole_state(home.names).items()}

    def stays(comm: Communicator) -> Any:
        model = Tower()
        optimizer, home = make_elastic(model, comm=comm, **options)
        go_on(model, optimizer, 0, 7)
        come.set()
        while comm.rank == 0 and not home.membership.wanted:
            time.sleep(0.01)
        step(model, optimizer, 0)
        found = state_of(home)
        go_on(model, optimizer, 0, 12)
        optimizer.synchronize()
        return found

    def joins(comm: Communicator) -> Any:
        assert come.wait(60)
        model = Tower()
        optimizer, home = make_elastic(model, comm=comm, **options)
        found = state_of(home)
        go_on(model, optimizer, 1, 12)
        optimizer.synchronize()
        return found

    others, own = together([lambda: threads.run(stays, ranks)[0], lambda: threads.run(joins, of_newcomer)[0]])
    assert {kind for kind, _ in own} == {"exp_avg", "exp_avg_sq", "step"}
    assert own["exp_avg_sq", "first.weight"].any()
    assert set(own) == set(others)
    for key, values in own.items():
        assert torch.equal(values, others[key])


@pytest.mark.parametrize("known_by", [[], [1], [0, 1]])
def test_what_is_shared_is_agreed_on_anew_where_not_all_know_it(known_by: list[int]) -> None:
    """A connection breaks as three workers agree, after some of them have heard of it."""

    def run(job: str, break_off: Callable[[ElasticHome], None]) -> list[Tensor]:
        def body(worker: int) -> Tensor:
            model = Tower()
            options = {"fragments": 1, "overlap": 0, "share": SHARE, "elastic": replace(SETTINGS, job=job)}
            optimizer, home = make_elastic(model, **options)
            break_off(home)
            while optimizer.steps < 14:
                step(model, optimizer, home.index)
            optimizer.synchronize()
            return flat(model.parameters())

        return together([lambda n=n: body(n) for n in range(3)])  # type: ignore[misc]

    def break_off(home: ElasticHome) -> None:
        agree, shared = home._shared.agree, home._shared

        def once() -> Any:
            shared.agree = agree  # type: ignore[method-assign]
            found = agree()
            if home.index not in known_by:
                raise CommunicationError("lost")
            return found

        shared.agree = once  # type: ignore[method-assign]

    disturbed, plain = run("one", break_off), run("another", lambda home: None)
    for weights in disturbed:
        assert torch.equal(weights, plain[0])


def test_who_shares_other_state_is_refused_and_the_others_go_on() -> None:
    alone = Elastic(workers=1, address="here:1")
    model = Tower()
    optimizer, _ = make_elastic(model, elastic=alone, share=SHARE)
    go_on(model, optimizer, 0, 7)
    for options in ({"share": {"exp_avg": 1}}, {"share": {"exp_avg_sq": 2, "exp_avg": 1}}, {}):
        refused(
            ValueError,
            "share is .* here and .* on the job's first worker",
            make_elastic,
            Tower(),
            elastic=alone,
            **options,
        )
    others: Any = [(torch.optim.SGD, {"momentum": 0.9}), (torch.optim.AdamW, {"betas": (0.5, 0.9)})]
    for inner, options in others:
        given = {"lr": 0.01, "every": 6, "block_size": 64, "elastic": alone, "share": SHARE, **options}
        refused(
            ValueError, "inner optimizer is .* here and", thinwire.DiLoCo, Tower().named_parameters(), inner, **given
        )
    go_on(model, optimizer, 0, 14)
    saved = through_a_file(optimizer.state_dict())
    optimizer.synchronize()

    # A state of a job that shared nothing, or less, has outer steps of other numbers.
    more, _ = make_elastic(Tower(), elastic=replace(alone, job="more"), share=SHARE | {"step": 1})
    refused(
        ValueError, r"the job that saved this state shared \['exp_avg', 'exp_avg_sq'\]", more.load_state_dict, saved
    )
    more.close()
    less, _ = make_elastic(Tower(), elastic=replace(alone, job="less"), share={"exp_avg": 1})
    less.load_state_dict(saved)
    assert less.steps == 14
    less.close()


def test_state_that_is_not_there_is_an_error_on_every_worker() -> None:
    model, other = Tower(), Tower()

    def body(own: Tower, kind: str) -> None:
        optimizer, _ = make_elastic(own, elastic=replace(SETTINGS, workers=2), share={kind: 1})
        refused(ValueError, f"share has '{kind}'", go_on, own, optimizer, 0, 7)
        optimizer.close()

    together([lambda: body(model, "velocity"), lambda: body(other, "velocity")])
