"""What no configuration holds: deep nesting, huge numbers, values of another kind; told by key, and briefly."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.engine.config.test_loading import refusal
from thinwire.engine.config import ConfigError, load_config


def nested(depth: int) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for _ in range(depth):
        tree = {"a": tree}
    return tree


@pytest.mark.parametrize("depth", [20, 5000, 100_000])
def test_deep_nesting_is_told_by_its_key(tmp_path: Path, depth: int) -> None:
    assert '"gradient_clipping.a.a' in refusal(gradient_clipping=nested(min(depth, 5000)))
    assert "is nested more than 16 deep" in refusal(optimizer={"type": "SGD", "params": {"lr": [nested(5000)]}})
    path = tmp_path / "deep.json"
    for opening, closing in (("[", "]"), ('{"x": ', "}")):
        path.write_text('{"fp16": {"enabled": true},\n"seed": ' + opening * depth + "1" + closing * depth + "}")
        with pytest.raises(ConfigError, match=r'deep.json: "seed" is nested more than 16 deep, at line 2'):
            load_config(path, 1)
    path.write_text("[" * depth)
    with pytest.raises(ConfigError, match="it is nested more than 16 deep"):
        load_config(path, 1)


def test_brackets_in_strings_do_not_nest(tmp_path: Path) -> None:
    path = tmp_path / "brackets.json"
    path.write_text(json.dumps({"train_batch_size": 4, "csv_monitor": {"enabled": True, "job_name": '[{"\\"' * 20}}))
    assert load_config(path, 1).csv_monitor.job_name.startswith('[{"')


def test_a_value_that_holds_itself() -> None:
    tree: dict[str, Any] = {}
    tree["fp16"] = tree
    with pytest.raises(ConfigError, match="is nested more than 16 deep"):
        load_config(tree, 1)


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
    file = tmp_path / "large.json"
    file.write_text(f'{{"train_micro_batch_size_per_gpu": 4, {text}}}')
    with pytest.raises(ConfigError, match=f'"{path}" must be a number of at most 64 bits, got') as caught:
        load_config(file, 1)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("bits", [63, 100, 1400, 20_000])
@pytest.mark.parametrize("path", ["train_batch_size", "gradient_clipping", "seed"])
def test_large_numbers_of_a_dict(path: str, bits: int) -> None:
    number = 2**bits
    assert f'"{path}" must be a number of at most 64 bits, got' in refusal(**{path: number})
    assert "must be a number of at most 64 bits, got" in refusal(**{path: -2 * number})


@pytest.mark.parametrize("value", [[], {}, [[]], None, "", float("nan"), b"bytes", object(), {1: 2}])
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
def test_values_of_a_wrong_kind_are_told_by_their_key(path: str, section: dict[str, Any], value: Any) -> None:
    first, *inner, key = path.split(".")
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
    for keys in (
        {"fp16": {"enabled": text}},
        {text: 1},
        {"fp16": {text: 1}},
        {"optimizer": {"type": text}},
        {"optimizer": {"type": "SGD", "params": {text: 1}}},
        {"optimizer": {"type": "SGD", "params": {"lr": text}}},
        {"scheduler": {"type": text}},
        {"scheduler": {"type": "WarmupLR", "params": {"warmup_type": text}}},
        {"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": [0.5] * length + ["x"]}}},
        {"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": ["x"] * length}}},
        {"sparse_attention": {"mode": text}},
        {"sparse_attention": {text: 1}},
        {"sparse_attention": {"block": text}},
        {"sparse_attention": {"attention": text}},
        {"sparse_attention": {"mode": "variable", "local_window_blocks": [0.5] * length}},
        {"seed": [1] * length},
    ):
        assert len(refusal(**keys)) < 800
    path = tmp_path / "twice.json"
    path.write_text(f'{{"{text}": "{text}", "{text}": 3}}')
    with pytest.raises(ConfigError, match="is there twice") as caught:
        load_config(path, 1)
    assert len(str(caught.value)) < 800


def test_many_problems_are_not_all_told() -> None:
    message = refusal(**{f"unknown_{number}": 1 for number in range(100)})
    assert "has 100 problems" in message
    assert "and 80 more" in message


def test_a_file_without_end(tmp_path: Path) -> None:
    path = tmp_path / "large.json"
    with path.open("wb") as file:
        file.truncate((16 << 20) + 1)
    with pytest.raises(ConfigError, match="is larger than 16 MiB"):
        load_config(path, 1)
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config("null\0character", 1)


@pytest.mark.parametrize("collection", [range(3), {1, 2}, {"a": 1}.keys(), iter([1])])
def test_a_collection_that_is_no_list(collection: Any) -> None:
    layout = {"mode": "variable", "local_window_blocks": [4], "global_block_indices": collection}
    assert '"sparse_attention.global_block_indices" must be a list' in refusal(sparse_attention=layout)


@pytest.mark.parametrize("number", [1e308, -1e19, 2.0**63])
def test_a_number_too_large_for_a_whole_one(number: float) -> None:
    assert "fp16.hysteresis" in refusal(fp16={"enabled": True, "hysteresis": number})
    assert "optimizer.params.freeze_step" in refusal(
        optimizer={"type": "OneBitAdam", "params": {"lr": 0.1, "freeze_step": number}}
    )
