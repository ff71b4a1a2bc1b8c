"""Models that real processes hold together, in stages, cut or sharded, train as in one process: each case is a
program."""

import pytest

from tests.launching import Jobs, since_torch_2_13

PROGRAMS = pytest.mark.programs


@pytest.mark.launch
@pytest.mark.parametrize(
    ("ranks", "program"),
    [
        pytest.param(2, "parallel.training models schedules sequential refusals", marks=since_torch_2_13),
        pytest.param(4, "parallel.training models replicas", marks=PROGRAMS),
        pytest.param(8, "parallel.training cube", marks=PROGRAMS),
        pytest.param(2, "parallel.cutting", marks=[since_torch_2_13, PROGRAMS]),
        pytest.param(
            2,
            "parallel.pipelines schedules tensors layouts evaluations bad_codecs integers uneven",
            marks=since_torch_2_13,
        ),
        pytest.param(4, "parallel.pipelines schedules", marks=[since_torch_2_13, PROGRAMS]),
        pytest.param(2, "parallel.pipelines astray", marks=since_torch_2_13),
        pytest.param(2, "parallel.pipelines lowered", marks=since_torch_2_13),
        # Two replicas; one alone is in parts_job.
        pytest.param(4, "zero.tensor_parallel_job 2 2 exact compressed resume sharded refusals", marks=PROGRAMS),
        (4, "compress.fully_sharded_job"),
        pytest.param(2, "engine.parts_job two", marks=PROGRAMS),
        pytest.param(4, "engine.parts_job four", marks=PROGRAMS),
    ],
)
def test_they_train_as_one_process_does_and_refuse_on_the_rank_that_is_wrong(
    jobs: Jobs, ranks: int, program: str
) -> None:
    """After what ends in an error nothing else can run."""
    module, *tasks = program.split()
    done = jobs.torchrun(ranks, "-m", f"tests.{module}", *tasks)
    assert done.returncode == 0, done.stdout + done.stderr
