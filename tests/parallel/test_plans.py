"""Hugging Face models that two ranks hold together, beside the same models whole."""

import pytest

from tests.launching import Jobs, since_torch_2_13
from tests.parallel.cutting import PROGRAM


@since_torch_2_13
@pytest.mark.launch
def test_two_ranks_hold_a_model(jobs: Jobs) -> None:
    done = jobs.torchrun(2, *PROGRAM)
    assert done.returncode == 0, done.stdout + done.stderr
