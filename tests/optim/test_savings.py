"""What rank 0 says of bytes, where it speaks at all."""

from __future__ import annotations

import pytest

from tests.optim.subject import SUBJECTS, Subject
from tests.optim.training import make_model, train
from thinwire.comm import Communicator, threads


def said(capsys: pytest.CaptureFixture[str], subject: Subject, steps: int, ranks: int = 2, **options) -> list[str]:
    """What one run writes to stderr."""

    def body(comm: Communicator) -> None:
        comm.speaks = comm.rank == 0
        model = make_model()
        optimizer = subject.build(model, comm, **options)
        train(model, optimizer, range(steps))
        optimizer.close()
        optimizer.close()

    threads.run(body, ranks)
    return capsys.readouterr().err.splitlines()


@pytest.mark.parametrize("subject", SUBJECTS, ids=str)
def test_a_run_says_what_it_saves(capsys: pytest.CaptureFixture[str], subject: Subject) -> None:
    first, *freeze, last = said(capsys, subject, 40)
    # 6 * 37 + 37 + 37 * 11 + 11 + 11 + 1 elements of 4 bytes, of which half travels twice.
    assert first.startswith(f"thinwire: {subject.name} on 2 ranks: 2.76 kB a step uncompressed; it ")
    if subject.entry.freeze_option is None:
        assert first.endswith("it compresses from the first step on")
        assert not freeze
    else:
        assert first.endswith(f"it freezes by {subject.entry.freeze_option}=6")
        assert len(freeze) == 1
        assert freeze[0].startswith(f"thinwire: {subject.name} froze after step 6: ")
        assert freeze[0].endswith(" kB a step from now on instead of 2.76 kB")
    assert last.startswith(f"thinwire: {subject.name} sent ")
    assert " in 40 steps, " in last


def test_a_run_that_never_freezes_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    _, last = said(capsys, Subject("OneBitAdam", 0), 5, freeze_step=1000)
    assert last.endswith(
        "OneBitAdam never froze in 5 steps, so that it saved nothing to speak of: freeze_step=1000 should come after "
        "about a fifth of the steps"
    )


def test_one_rank_has_nothing_to_say(capsys: pytest.CaptureFixture[str]) -> None:
    assert said(capsys, Subject("OneBitAdam", 0), 3, ranks=1) == []


def test_nobody_speaks_who_was_not_asked(capsys: pytest.CaptureFixture[str]) -> None:
    threads.run(lambda comm: train(model := make_model(), Subject("OneBitAdam", 0).build(model, comm), range(3)), 2)
    assert capsys.readouterr().err == ""
