"""Every behaviour of every optimizer of the registry, at every stage of its; what is one of `OF_HOMES` one of each of
`HOMES` meets, by turns. Of those with an unusual warmup, with an unusual codec, and by node, one meets it, by turns, or
all where it is one of `EVERYWHERE`."""

import warnings

import pytest

from tests.optim.behaviours import parameters, refusals, rounds, scaling, state
from tests.optim.subject import (
    EVERYWHERE,
    HOMES,
    OF_HOMES,
    SIZES,
    SUBJECTS,
    UNUSUAL,
    WARNS,
    Body,
    Subject,
)
from thinwire.comm import threads

NOTED = (parameters, refusals, rounds, scaling, state)  # importing one notes its behaviours


def subjects(number: int, body: Body, size: int) -> list[Subject]:
    usual = [some[number % len(some)] for some in HOMES] if body in OF_HOMES else SUBJECTS
    unusual = [one for one in UNUSUAL if size == 2 or not one.nodes]
    return [*usual, *(unusual if body in EVERYWHERE else [unusual[5 * number % len(unusual)]])]


CASES = [
    pytest.param(body, len(subject.nodes) or size, subject, id=f"{body.__name__}-{size}-{subject}")
    for number, (body, sizes) in enumerate(SIZES.items())
    for size in sizes
    for subject in subjects(number, body, size)
]


@pytest.mark.parametrize(("body", "size", "subject"), CASES)
def test(body: Body, size: int, subject: Subject) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        threads.run(lambda comm: body(comm, subject), size)
    messages = [str(one.message) for one in caught if one.category is RuntimeWarning]
    expected, stages = WARNS.get(body, ("", ()))
    assert bool(messages) == (subject.stage in stages), messages
    assert all(expected in message for message in messages)
    assert len(set(messages)) == len(messages)  # one rank speaks for all
