"""The race end to end, on two emulated hosts, and what its command line refuses."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from experiments.ethernet.__main__ import main
from tests.experiments.ethernet.cluster.needs import needs_cluster


@pytest.mark.parametrize(
    ("there", "complaint"),
    [
        (None, "no .*ethernet_losses.json to add to"),
        ({"learning_rate": 5.0}, "another race: .*learning_rate 5.0 and not 0.001"),
    ],
)
def test_runs_are_added_only_to_a_race_of_the_same_settings(
    there: dict[str, float] | None, complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if there is not None:
        (tmp_path / "ethernet_losses.json").write_text(json.dumps(there))
    adding = ["--add", "--races", "losses", "--loss-rate", "20", "--contenders", "zero-one-adam"]
    assert main([*adding, "--output", str(tmp_path)]) == 2
    assert re.search(complaint, capsys.readouterr().err)


@needs_cluster
@pytest.mark.launch
@pytest.mark.chaos
def test_steps_are_raced_and_bytes_counted(tmp_path: Path) -> None:
    racing = ["--contenders", "ddp-fp32", "ddp-bf16", "onebit-adam"]
    links = ["--hosts", "2", "--rates", "200", "2000", "--waiting", "0.01"]
    size = ["--model", "tiny", "--batch-size", "1", "--seconds", "1", "--probe-seconds", "1"]
    assert main(["--races", "steps", *racing, *links, *size, "--output", str(tmp_path)]) == 0
    results = json.loads((tmp_path / "ethernet.json").read_text())
    assert [entry["megabits"] for entry in results["rates"]] == [200, 2000]
    assert 0 < results["fairness"]["fraction_of_line_rate"] < 1.02
    slow = results["rates"][0]["contenders"]
    elements = 946_304
    assert slow["ddp-fp32"]["counted_bytes"] == 4 * elements
    assert slow["ddp-bf16"]["counted_bytes"] == 2 * elements
    assert slow["onebit-adam"]["counted_bytes"] < 4 * elements / 25
    for record in slow.values():
        # Headers and acknowledgements, and what agreeing on the next turn takes.
        assert record["counted_bytes"] < record["interface_bytes"] < 1.1 * record["counted_bytes"] + 20_000
    # What was sent has to fit through the link.
    assert slow["ddp-fp32"]["seconds"] > 8 * 4 * elements / 200e6
    assert (tmp_path / "ethernet.png").stat().st_size > 10_000
