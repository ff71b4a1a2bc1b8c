"""Two of the jobs whose workers are killed."""

from __future__ import annotations

import pytest

from tests.chaos import elastic


@pytest.mark.launch
def test_survivors_end_together_and_a_worker_joins() -> None:
    outcome = elastic.run(2, seed=5)
    assert outcome.tried == 2
    assert outcome.bad == 0, "\n".join(outcome.examples)
