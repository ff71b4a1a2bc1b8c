"""Stages whose activations travel in packets, in torch's schedules, in real processes: see `pipelines`."""

import pytest

from tests.launching import Jobs, since_torch_2_13
from tests.parallel.pipelines import PROGRAM

pytestmark = since_torch_2_13


@pytest.mark.launch
@pytest.mark.parametrize(
    ("ranks", "tasks"),
    [(2, "schedules tensors evaluations bad_codecs integers uneven"), (4, "schedules"), (2, "astray")],
)
def test_stages_train_as_one_process_does_and_refuse_on_the_rank_that_is_wrong(
    jobs: Jobs, ranks: int, tasks: str
) -> None:
    """Every schedule, without codecs as torch does. After what ends in an error nothing else can run."""
    done = jobs.torchrun(ranks, *PROGRAM, *tasks.split())
    assert done.returncode == 0, done.stdout + done.stderr
