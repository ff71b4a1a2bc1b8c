"""Every behaviour of every optimizer of the registry, at every stage of its. Of those with an unusual warmup, and of
those with an unusual codec, one meets it, by turns, or all where it is one of `EVERYWHERE`."""

import warnings

import pytest

from tests.optim.behaviours import parameters, refusals, rounds, scaling, state
from tests.optim.subject import CODED, EVERYWHERE, ROUNDED, SIZES, SUBJECTS, WARNS, Body, Subject
from thinwire.comm import threads

NOTED = (parameters, refusals, rounds, scaling, state)  # importing one notes its behaviours


def of_turn(number: int, some: list[Subject], body: Body) -> list[Subject]:
    return some if body in EVERYWHERE else [some[number % len(some)]]


CASES = [
    pytest.param(body, size, subject, id=f"{body.__name__}-{size}-{subject}")
    for number, (body, sizes) in enumerate(SIZES.items())
    for size in sizes
    for subject in [*SUBJECTS, *(one for some in (ROUNDED, CODED) for one in of_turn(number, some, body))]
]


@pytest.mark.parametrize(("body", "size", "subject"), CASES)
def test(body: Body, size: int, subject: Subject) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        threads.run(lambda comm: body(comm, subject), size)
    messages = [str(one.message) for one in caught if one.category is RuntimeWarning]
    expected = WARNS.get(body)
    assert bool(messages) == (expected is not None), messages
    assert all(expected in message for message in messages)
    assert len(set(messages)) == len(messages)  # one rank speaks for all
