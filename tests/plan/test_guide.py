"""The guide's examples print what the guide shows."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from thinwire.command_line import main

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "planning.md"
EXAMPLES = re.findall(r"```console\n\$ thinwire (.*)\n([\s\S]*?)```", GUIDE.read_text())


def test_there_are_examples() -> None:
    assert EXAMPLES[0][0] == "plan --model bert-large --nodes 16 --link 1Gb/s"
    assert len(EXAMPLES) >= 2


@pytest.mark.parametrize(("command", "shown"), EXAMPLES)
def test_examples(command: str, shown: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(shlex.split(command)) == 0
    assert capsys.readouterr().out == shown
