"""What no file holds: other kinds of text, deep nesting, huge numbers, values of another kind; told by key, and
briefly."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.engine.config.test_values import WITHOUT_AUTO, refusal
from thinwire.engine.config import ConfigError, errors, load_config


def told_of(path: Path, text: str | bytes, world_size: int = 1) -> str:
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError) as caught:
        load_config(path, world_size)
    return str(caught.value)


def nested(depth: int) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for _ in range(depth):
        tree = {"a": tree}
    return tree


def test_a_path_and_a_dict_give_the_same(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(WITHOUT_AUTO))
    before = json.dumps(WITHOUT_AUTO)
    assert load_config(path, 2) == load_config(str(path), 2) == load_config(WITHOUT_AUTO, 2)
    assert json.dumps(WITHOUT_AUTO) == before


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON, at line 1 column 2"),
        ('{"train_batch_size": 4, /* four\n}', "is not JSON, at line 1 column 25: this comment does not end"),
        ("[1, 2]", "must hold a JSON object, {...}, not a list"),
        ("4", "must hold a JSON object"),
        ('{"fp16": {"enabled": true, "enabled": false}}', '"enabled" is there twice in one object: true and false'),
        ('{"gradient_clipping": NaN}', "NaN is not JSON"),
        ('{"gradient_clipping": -Infinity}', "-Infinity is not JSON"),
        (b"\xff\xfe\x00", "is not UTF-8 text, at byte 0"),
    ],
)
def test_files_that_are_no_configuration(tmp_path: Path, text: str | bytes, message: str) -> None:
    told = told_of(tmp_path / "odd.json", text)
    assert message in told
    assert str(tmp_path / "odd.json") in told


def test_what_cannot_be_read(tmp_path: Path) -> None:
    large, pipe = tmp_path / "large.json", tmp_path / "pipe.json"
    with large.open("wb") as file:
        file.truncate((1 << 20) + 1)
    os.mkfifo(pipe)
    sources: list[tuple[Any, str]] = [
        (tmp_path / "missing.json", "missing.json: cannot be read: No such file"),
        (tmp_path, "cannot be read: it is a folder"),
        (pipe, "cannot be read: it is a folder, a pipe or a device. Give the path of a file"),
        ("/dev/zero", "cannot be read: it is a folder, a pipe or a device"),
        ("null\0character", "cannot be read"),
        (large, "is larger than 1 MiB"),
        *((source, "the path of a JSON file or a dict") for source in (None, 3, ["a"], b"config.json")),
    ]
    for source, message in sources:
        with pytest.raises(ConfigError, match=message):
            load_config(source, 1)


@pytest.mark.parametrize("depth", [20, 100_000])
def test_deep_nesting_is_told_by_its_key(tmp_path: Path, depth: int) -> None:
    assert '"gradient_clipping.a.a' in refusal(gradient_clipping=nested(min(depth, 5000)))
    assert "is nested more than 16 deep" in refusal(optimizer={"type": "SGD", "params": {"lr": [nested(5000)]}})
    path = tmp_path / "deep.json"
    for opening, closing in (("[", "]"), ('{"x": ', "}")):
        text = '{"fp16": {"enabled": true},\n"seed": ' + opening * depth + "1" + closing * depth + "}"
        assert 'deep.json: "seed" is nested more than 16 deep, at line 2' in told_of(path, text)
    assert "it is nested more than 16 deep" in told_of(path, "[" * depth)
    tree: dict[str, Any] = {}
    tree["fp16"] = tree
    with pytest.raises(ConfigError, match="is nested more than 16 deep"):
        load_config(tree, 1)


def test_brackets_in_strings_do_not_nest(tmp_path: Path) -> None:
    path = tmp_path / "brackets.json"
    path.write_text(json.dumps({"train_batch_size": 4, "csv_monitor": {"enabled": True, "job_name": '[{"\\"' * 20}}))
    assert load_config(path, 1).csv_monitor.job_name.startswith('[{"')


@pytest.mark.parametrize(
    ("path", "digits"),
    [
        ("train_batch_size", "9" * 5000),
        ("gradient_clipping", "1" + "0" * 400),
        ("optimizer.params.lr", "1" + "0" * 400),
        ("optimizer.params.betas", "[0.9, " + "7" * 5000 + "]"),
        ("seed", "-" + "8" * 60),
        ("steps_per_print", str(2**63)),
    ],
)
def test_whole_numbers_that_fit_no_machine_number(tmp_path: Path, path: str, digits: str) -> None:
    *sections, key = path.split(".")
    text = f'"{key}": {digits}'
    for section in reversed(sections):
        text = f'"{section}": {{"type": "SGD", {text}}}' if section == "optimizer" else f'"{section}": {{{text}}}'
    told = told_of(tmp_path / "large.json", f'{{"train_micro_batch_size_per_gpu": 4, {text}}}')
    assert f'"{path}" must be a number of at most 64 bits, got' in told
    assert len(told) < 400


@pytest.mark.parametrize("number", [1e308, -1e19, 2.0**63])
def test_a_number_too_large_for_a_whole_one(number: float) -> None:
    assert "fp16.hysteresis" in refusal(fp16={"enabled": True, "hysteresis": number})
    params = {"lr": 0.1, "freeze_step": number}
    assert "optimizer.params.freeze_step" in refusal(optimizer={"type": "OneBitAdam", "params": params})


@pytest.mark.parametrize(
    ("path", "section"),
    [
        ("optimizer.params.lr", {"type": "AdamW"}),
        ("optimizer.params.lr", {"type": "OneBitAdam"}),
        ("optimizer.params.comm_backend_name", {"type": "OneBitAdam"}),
        ("scheduler.params.warmup_min_lr", {"type": "WarmupLR"}),
        ("scheduler.params.warmup_type", {"type": "WarmupLR"}),
        ("sparse_attention.mode", {}),
        ("sparse_attention.block", {}),
        ("sparse_attention.attention", {}),
        ("progressive_layer_drop.gamma", {"enabled": True}),
        ("progressive_layer_drop.theta", {"enabled": True}),
        ("zero_optimization.stage", {}),
        ("zero_optimization.offload_optimizer.device", {}),
    ],
)
def test_values_of_a_wrong_kind_are_told_by_their_key(path: str, section: dict[str, Any]) -> None:
    first, *inner, key = path.split(".")
    for value in ([], {}, [[]], None, "", float("nan"), b"bytes", object(), {1: 2}):
        tree: dict[str, Any] = dict(section)
        place = tree
        for name in inner:
            place = place.setdefault(name, {})
        place[key] = value
        message = refusal(**{first: tree})
        assert key in message
        assert first in message


@pytest.mark.parametrize("length", [200, 100_000])
def test_a_long_value_is_not_echoed(tmp_path: Path, length: int) -> None:
    text = "x" * length
    warmup = {"type": "WarmupLR"}
    for keys in (
        {"fp16": {"enabled": text}},
        {text: 1},
        {"fp16": {text: 1}},
        {"optimizer": {"type": text}},
        {"optimizer": {"type": "SGD", "params": {text: 1}}},
        {"optimizer": {"type": "SGD", "params": {"lr": text}}},
        {"scheduler": {"type": text}},
        {"scheduler": warmup | {"params": {"warmup_type": text}}},
        {"scheduler": warmup | {"params": {"warmup_max_lr": [0.5] * length + ["x"]}}},
        {"scheduler": warmup | {"params": {"warmup_max_lr": ["x"] * length}}},
        {"sparse_attention": {"mode": text}},
        {"sparse_attention": {text: 1}},
        {"sparse_attention": {"block": text}},
        {"sparse_attention": {"attention": text}},
        {"sparse_attention": {"mode": "variable", "local_window_blocks": [0.5] * length}},
        {"seed": [1] * length},
    ):
        assert len(refusal(**keys)) < 800
    told = told_of(tmp_path / "twice.json", f'{{"{text}": "{text}", "{text}": 3}}')
    assert "is there twice" in told
    assert len(told) < 800


def test_many_problems_are_not_all_told() -> None:
    message = refusal(**{f"unknown_{number}": 1 for number in range(100)})
    assert "has 100 problems" in message
    assert f"and {101 - message.count(chr(10))} more" in message
    assert len(message) < 4000


def test_time_grows_as_the_length_of_a_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its square would be an hour each."""
    long, path = 1 << 19, tmp_path / "long.json"
    for text, message in (
        ('{"seed": a' + " " * long + "b 'c'}", "line 1 column 10"),
        ("a" + " " * long + "b", "must hold a JSON object"),
        ('{"seed": ' + "9" * long + "}", '"seed" must be a number of at most 64 bits'),
        ('{"optimizer": {"type": ["SGD"' + ", 1" * (long // 3) + "]}}", '"optimizer.type" has 174,763 entries'),
    ):
        assert message in told_of(path, text)
    compared = []
    monkeypatch.setattr(errors, "_ratio", lambda name, _: compared.append(name) or 0.0)
    unknown = {f"unknown_{number}": 1 for number in range(4000)}
    assert "has 4000 problems" in refusal(**unknown)
    assert "has 4000 problems" in refusal(optimizer={"type": "SGD", "params": unknown})
    assert "is no collective" in refusal(comms_logger={"prof_ops": list(unknown)})
    assert len(set(compared)) <= 3 * 20


@pytest.mark.parametrize("number", ["1e400", "-1e400", "1" + "0" * 400 + ".5", "1" * 400 + "e0"])
@pytest.mark.parametrize("key", ["steps_per_print", "gradient_clipping", "allgather_size", "zero_optimization.stage"])
def test_a_number_that_is_infinite_is_told_by_its_key(tmp_path: Path, key: str, number: str) -> None:
    outer, _, inner = key.rpartition(".")
    text = f'{{"{outer}": {{"{inner}": {number}}}}}' if outer else f'{{"{inner}":\n[{number}]}}'
    assert f'"{inner}" is "{number[:70]}' in (told := told_of(tmp_path / "infinite.json", text))
    assert f"at line {1 if outer else 2}: it must be a number, and the largest is 1.8e+308" in told


@pytest.mark.parametrize("text", ["a\0b", "\ud800", "half \udfff"])
def test_what_is_no_text_is_told_by_its_key(text: str) -> None:
    assert '"csv_monitor.output_path" must be text' in refusal(csv_monitor={"enabled": True, "output_path": text})
    assert "must be text" in refusal(csv_monitor={text: 1})
    assert '"comms_logger.prof_ops" must be text' in refusal(comms_logger={"prof_ops": [text]})


def test_errors_are_short_and_printable() -> None:
    kind = "\x1b[31m\n- and 3 more\n" + "A" * 1_000_000
    for keys, count in (
        ({"optimizer": {"type": kind}, "thinwire": {"resync_interval": 9}}, 2),
        ({"fp16": {kind: 1}, kind: 1}, 2),
    ):
        told = refusal(**keys)
        assert len(told) < 4000
        assert "\x1b" not in told
        assert told.count("\n- ") == count
    with pytest.raises(ConfigError) as caught:
        load_config(kind, 1)
    assert len(str(caught.value)) < 1000
    assert "\x1b" not in str(caught.value)


@pytest.mark.parametrize("collection", [range(3), {1, 2}, {"a": 1}.keys(), iter([1])])
def test_a_collection_that_is_no_list(collection: Any) -> None:
    layout = {"mode": "variable", "local_window_blocks": [4], "global_block_indices": collection}
    assert '"sparse_attention.global_block_indices" must be a list' in refusal(sparse_attention=layout)
