"""Files as people write them by hand: comments, commas left out or left over, names without quotes; and strictness
where Hjson would hide a mistake."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thinwire.deepspeed.config.relaxed_json import NotReadableError, read_relaxed_json
from thinwire.engine.config import ConfigError, load_config

TREES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**38), 10**38)
    | st.floats(allow_nan=False, allow_infinity=False)
    # Halves of characters beyond 16 bits are no text.
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=12),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=12,
)


@given(TREES, st.sampled_from([None, 2]), st.booleans())
def test_json_is_read_as_pythons_own_reader_does(tree: Any, indent: int | None, ascii_only: bool) -> None:
    text = json.dumps({"tree": tree}, indent=indent, ensure_ascii=ascii_only)
    assert read_relaxed_json(text) == json.loads(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"a": 1, "b": [1, 2,],}', {"a": 1, "b": [1, 2]}),
        ("{a: 1 # one\n b: 2 // two\n /* three\n */ c: 3 /* here */, d: 4}", {"a": 1, "b": 2, "c": 3, "d": 4}),
        (
            "# first\ntrain_batch_size: 4\noptimizer: {\n  type: Adam\n}\n",
            {"train_batch_size": 4, "optimizer": {"type": "Adam"}},
        ),
        (
            "{\n  type: Adam\n  params:\n  {\n    lr: 1e-4\n    betas:\n    [\n      0.9\n      0.95\n    ]\n  }\n}",
            {"type": "Adam", "params": {"lr": 1e-4, "betas": [0.9, 0.95]}},
        ),
        ('{\'it\': \'it\\\'s "so"\', "a\\u00e9": "// no # comment"}', {"it": 'it\'s "so"', "aé": "// no # comment"}),
        ("{a: true, b: false, c: null, d: -0.5e+3}", {"a": True, "b": False, "c": None, "d": -500.0}),
        ("\ufeff{a: 1}\r\n", {"a": 1}),
        ("a: True\nb: 1.0.0", {"a": "True", "b": "1.0.0"}),
    ],
)
def test_what_people_write(text: str, expected: Any) -> None:
    assert read_relaxed_json(text) == expected


def test_numbers_too_long_to_be_read() -> None:
    assert read_relaxed_json("{a: " + "7" * 50 + "}") == {"a": int("7" * 50)}
    assert read_relaxed_json("{a: -" + "7" * 5000 + "}")["a"].bit_length() > 16_000


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{\n  "lr": 1e-4 "x": 2}', r'line 2 column 9: "1e-4 \\"x\\": 2}" is no value: a comma is missing, or quotes'),
        ("{type: Adam, lr: 1}", '"Adam, lr: 1}" is no value'),
        ("a: http://host # where", "is no value"),
        ('{"a": }', 'line 1 column 7: a value is missing before "}"'),
        ('{"a" 1}', 'a colon must follow the name "a"'),
        ("{a: 1}}", 'line 1 column 7: nothing may follow, but there is "}"'),
        ('{"a": 1,\n "b": [1', r'line 2 column 9: the text ends inside a list: a "\]" is missing'),
        ('{"a": "b" "c": 1}', "must come after a comma or on a new line"),
        ('{"a": 1,, "b": 2}', "column 9: a name must stand here"),
        ('{"a": "x\n"}', "a string that ends on its line must stand here"),
        ("{a: '''x\n'''}", "a text over several lines"),
        (r'{"a": "\q"}', r"Invalid \\escape"),
        ("{a: NaN\n}", "NaN is not JSON: write a number"),
        ("/* a", "this comment does not end"),
        ("", "a value is missing"),
        ("{a: 1, b: 2\n a: 3}", '"a" is there twice in one object: 1 and 3, at line 2'),
    ],
)
def test_texts_that_cannot_be_meant(text: str, message: str) -> None:
    with pytest.raises(NotReadableError, match=message):
        read_relaxed_json(text)


def test_a_file_with_comments_and_trailing_commas(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{\n  // Of the paper.\n  "train_batch_size": 8,\n  "fp16": {"enabled": true,},  # halves\n}\n')
    assert load_config(path, 2) == load_config({"train_batch_size": 8, "fp16": {"enabled": True}}, 2)


def test_a_word_in_place_of_a_switch_is_told_as_one(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text("train_batch_size: 8\nfp16: {\n  enabled: True\n}")
    with pytest.raises(ConfigError, match=r'"fp16.enabled" must be true or false, got "True"'):
        load_config(path, 1)
