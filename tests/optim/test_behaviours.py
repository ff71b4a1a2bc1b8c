"""Every behaviour of every optimizer of the registry, at every stage of its."""

import warnings

import pytest

from tests.optim.behaviours import parameters, refusals, rounds, scaling, state
from tests.optim.subject import CODED, ROUNDED, SIZES, SUBJECTS, WARNS, Body, Subject
from thinwire.comm import threads

NOTED = (parameters, refusals, rounds, scaling, state)  # importing one notes its behaviours
CASES = [(body, size) for body, sizes in SIZES.items() for size in sizes]


@pytest.mark.parametrize("subject", [*SUBJECTS, *ROUNDED, *CODED], ids=str)
@pytest.mark.parametrize(("body", "size"), [pytest.param(*case, id=f"{case[0].__name__}-{case[1]}") for case in CASES])
def test(body: Body, size: int, subject: Subject) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        threads.run(lambda comm: body(comm, subject), size)
    messages = [str(one.message) for one in caught if one.category is RuntimeWarning]
    expected = WARNS.get(body)
    assert bool(messages) == (expected is not None), messages
    assert all(expected in message for message in messages)
    assert len(set(messages)) == len(messages)  # one rank speaks for all
