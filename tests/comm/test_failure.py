from __future__ import annotations

import pytest

from thinwire.comm import CommunicationError, CommunicationTimeout
from thinwire.comm.errors import Call, RollCall, describe_failure

CALL = Call(4, "all_reduce(sum) of 3 float32")


def test_call_survives_the_roll_call():
    assert Call.decode(CALL.encode()) == CALL


def test_silent_ranks_are_to_blame():
    error = describe_failure(CALL, 0, 4, RollCall({0: CALL, 3: CALL}, (1, 2)), None, "Connection reset")
    assert type(error) is CommunicationError
    assert error.ranks == (1, 2)
    assert error.collective == CALL.signature
    assert "ranks 1, 2 did not answer" in str(error)
    assert "Connection reset" in str(error)


def test_ranks_at_another_call_are_to_blame():
    elsewhere = Call(5, "barrier")
    error = describe_failure(CALL, 0, 2, RollCall({0: CALL, 1: elsewhere}, ()), 2.0, None)
    assert isinstance(error, CommunicationTimeout)
    assert error.ranks == (1,)
    assert "timed out after 2 s" in str(error)
    assert "rank 1 is at barrier (call 5)" in str(error)


@pytest.mark.parametrize("remark", ["", "the store does not answer"])
def test_nobody_is_blamed_when_all_answer(remark):
    error = describe_failure(CALL, 0, 2, RollCall({0: CALL, 1: CALL}, (), remark), 2.0, None)
    assert error.ranks == ()
    assert remark in str(error)
