"""One of the jobs whose workers are killed: nodes of two ranks, of which one rank dies, and a node that joins."""

from __future__ import annotations

import pytest

from tests.chaos import elastic


@pytest.mark.launch
def test_surviving_nodes_end_together_and_a_node_joins() -> None:
    outcome = elastic.run(1, seed=5)
    assert outcome.tried == 1
    assert outcome.bad == 0, "\n".join(outcome.examples)
