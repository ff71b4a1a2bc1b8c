"""The house only gets better: see tests/ratchets.py."""

import json

from tests import ratchets
from tests.launching import Jobs


def test_no_measure_of_the_house_has_grown(jobs: Jobs) -> None:
    recorded = json.loads(ratchets.RECORDED.read_text())
    worse = ratchets.grown(ratchets.measure(jobs.python), recorded)
    assert not worse, "grown since it was recorded; find what to merge or delete instead:\n" + "\n".join(worse)
