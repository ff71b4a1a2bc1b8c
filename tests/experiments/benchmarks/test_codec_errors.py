"""The measurement of what codecs lose writes what it says."""

from __future__ import annotations

import json
from pathlib import Path

from experiments.benchmarks.codec_errors import CONTENDERS, main


def test_a_run_writes_numbers(tmp_path: Path) -> None:
    output = tmp_path / "new" / "errors.json"
    assert main(["--steps", "2", "--output", str(output)]) == 0
    results = json.loads(output.read_text())["results"]
    assert [(one["codec"], one["block_size"]) for one in results] == CONTENDERS
    for values in ("Gaussian", "outer gradient"):
        lost = {(one["codec"], one["block_size"]): one["lost"][values] for one in results}
        assert lost["sign1", 2048] > lost["stat2", 2048] > lost["int4", 2048] > lost["int4", 128] > lost["fp8", 2048]
    assert next(one for one in results if one["block_size"] == 128)["bits"] == 4.25
