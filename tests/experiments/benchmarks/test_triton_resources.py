"""The table of what Triton's kernels need: a cell for every GPU, and empty ones where a kernel was not compiled."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from experiments.benchmarks.triton_resources import table


def test_a_line_for_each_kernel_and_case_and_a_cell_for_each_gpu() -> None:
    where = {"dtype": "bfloat16", "case": "width 64, masks: BERT", "spills": 0}
    rows = [
        {**where, "capability": 90, "kernel": "forward", "registers": 221, "shared": 41984},
        {**where, "capability": 80, "kernel": "forward", "registers": 140, "shared": 16512},
        {**where, "capability": 80, "kernel": "keys", "registers": 249, "shared": 20608, "spills": 2},
    ]
    assert table(rows).splitlines() == [
        "| kernel | dtype | case | sm_80 | sm_90 |",
        "| --- | --- | --- | --- | --- |",
        "| forward | bfloat16 | width 64, masks: BERT | 140 / 0 / 16 | 221 / 0 / 41 |",
        "| keys | bfloat16 | width 64, masks: BERT | 249 / 2 / 20 |  |",
    ]
