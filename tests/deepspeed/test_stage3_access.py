"""Parameters of stage 3 are read, set and gathered, and models built shard by shard, on real processes."""

from __future__ import annotations

import pytest

from thinwire.comm import threads
from thinwire.deepspeed import zero

PROGRAM = ("-m", "tests.deepspeed.stage3_access_program")


@pytest.mark.launch
def test_on_three_ranks(jobs) -> None:
    done = jobs.torchrun(3, *PROGRAM)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all held on gloo with 3 ranks" in done.stdout


@pytest.mark.launch
def test_in_a_process_of_its_own(jobs) -> None:
    done = jobs.alone(*PROGRAM)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all held on single with 1 ranks" in done.stdout


def test_models_are_not_built_by_threads() -> None:
    def body(comm):
        with pytest.raises(ValueError, match="stage 3 needs processes, and these ranks are threads"):
            zero.Init()

    threads.run(body, 2)
