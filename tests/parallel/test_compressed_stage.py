"""Stages whose activations travel in packets, in torch's schedules, in real processes: see `pipelines`."""

import pytest

from tests.launching import Jobs, since_torch_2_13
from tests.parallel.pipelines import PROGRAM

pytestmark = since_torch_2_13


@pytest.mark.launch
@pytest.mark.parametrize("ranks", [2, 4])
def test_every_schedule_trains_as_one_process_does_and_without_codecs_as_torch_does(jobs: Jobs, ranks: int) -> None:
    done = jobs.torchrun(ranks, *PROGRAM, "schedules")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.launch
@pytest.mark.parametrize("task", ["cases", "uneven", "astray"])
def test_what_travels_and_what_is_refused_on_which_rank(jobs: Jobs, task: str) -> None:
    done = jobs.torchrun(2, *PROGRAM, task)
    assert done.returncode == 0, done.stdout + done.stderr
