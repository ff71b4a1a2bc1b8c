"""A reader never finds half a file."""

from __future__ import annotations

from pathlib import Path

import pytest

from experiments.common.results import write_json


def test_json_replaces_the_old_file_whole(tmp_path: Path) -> None:
    path = tmp_path / "numbers.json"
    write_json(path, {"a": 1})
    with pytest.raises(TypeError):
        write_json(path, {"b": object()})
    assert path.read_text() == '{\n "a": 1\n}\n'
