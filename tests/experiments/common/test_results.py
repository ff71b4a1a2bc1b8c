"""A reader never finds half a file."""

from __future__ import annotations

from pathlib import Path

import pytest

from experiments.common.errors import InputError
from experiments.common.results import check_writable, read_json, write_json


def test_json_replaces_the_old_file_whole(tmp_path: Path) -> None:
    path = tmp_path / "numbers.json"
    write_json(path, {"a": 1})
    with pytest.raises(TypeError):
        write_json(path, {"b": object()})
    assert path.read_text() == '{\n "a": 1\n}\n'


def test_numbers_that_json_does_not_know_become_null(tmp_path: Path) -> None:
    path = tmp_path / "numbers.json"
    write_json(path, {"a": [1.5, float("nan"), (float("inf"), {"b": float("-inf")})], 0.5: "x"})
    assert read_json(path) == {"a": [1.5, None, [None, {"b": None}]], "0.5": "x"}


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(InputError, match=r"--output .*file cannot be written"):
        check_writable(tmp_path / "file", "--output")
    check_writable(tmp_path / "new" / "folder", "--output")
    assert list((tmp_path / "new" / "folder").iterdir()) == []
