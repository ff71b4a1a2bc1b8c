"""Loading: files, dicts, DeepSpeed's files as people have them, types and ranges, options that exclude each other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from thinwire.engine.config import ConfigError, EngineConfig, load_config

# As Hugging Face's documentation has it for stage 2.
HUGGING_FACE: dict[str, Any] = {
    "fp16": {
        "enabled": "auto",
        "loss_scale": 0,
        "loss_scale_window": 1000,
        "initial_scale_power": 16,
        "hysteresis": 2,
        "min_loss_scale": 1,
    },
    "bf16": {"enabled": "auto"},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
    "scheduler": {
        "type": "WarmupLR",
        "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"},
    },
    "zero_optimization": {
        "stage": 2,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "allgather_partitions": True,
        "allgather_bucket_size": 2e8,
        "overlap_comm": True,
        "reduce_scatter": True,
        "reduce_bucket_size": 2e8,
        "contiguous_gradients": True,
    },
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": 4,
    "steps_per_print": 2000,
    "wall_clock_breakdown": False,
    "wandb": {"enabled": False},
    "zero_allow_untested_optimizer": True,
}


def _without_auto(tree: dict[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in tree.items() if value != "auto"}
    return {key: _without_auto(value) if isinstance(value, dict) else value for key, value in kept.items()}


WITHOUT_AUTO = _without_auto(HUGGING_FACE)


def load(world_size: int = 2, **keys: Any) -> EngineConfig:
    return load_config({"train_batch_size": 8, **keys}, world_size)


def refusal(world_size: int = 2, **keys: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        load(world_size, **keys)
    return str(caught.value)


def test_a_hugging_face_file_without_its_trainer_names_every_auto() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(HUGGING_FACE, 3)
    told = [problem for problem in caught.value.problems if 'is "auto", which is filled in only by' in problem]
    assert len(told) == json.dumps(HUGGING_FACE).count('"auto"') == len(caught.value.problems)


def test_a_hugging_face_file_loads_without_what_its_trainer_fills_in() -> None:
    config = load_config(WITHOUT_AUTO, 3)
    assert (config.train_batch_size, config.gradient_accumulation_steps) == (12, 1)
    assert config.optimizer is not None
    assert config.optimizer.params == {"weight_decay": 0.0}
    assert config.scheduler is not None
    assert config.scheduler.params == {}
    assert config.zero_optimization.reduce_bucket_size == 200_000_000
    assert config.zero_optimization.offload_optimizer.device == "cpu"
    assert not config.fp16.enabled
    assert not config.bf16.enabled
    assert config.gradient_clipping == 0.0


def test_defaults() -> None:
    config = load()
    assert config.optimizer is None
    assert config.scheduler is None
    assert config.zero_optimization.stage == 0
    assert config.fp16.model_dump() == {
        "enabled": False,
        "loss_scale": 0.0,
        "initial_scale_power": 16,
        "loss_scale_window": 1000,
        "hysteresis": None,
        "consecutive_hysteresis": False,
        "min_loss_scale": 1.0,
    }
    assert config.thinwire.resync_interval == 100
    assert config.checkpoint.keep_last is None


@pytest.mark.parametrize(
    "tree",
    [
        WITHOUT_AUTO,
        {"train_batch_size": 6, "optimizer": {"type": "adam", "params": {"adam_w_mode": False, "betas": [0.8, 0.9]}}},
        {
            "train_batch_size": 6,
            "zero_optimization": {"stage": 3},
            "scheduler": {"type": "MultiStepLR", "params": {"milestones": [4, 9]}},
        },
        {
            "train_batch_size": 6,
            "optimizer": {"type": "OnebitAdam", "params": {"freeze_step": "auto", "block_size": 1024}},
            "thinwire": {"resync_interval": 7},
            "activation_checkpointing": {"modules": ["BertLayer"], "cpu_checkpointing": True},
        },
    ],
)
def test_describe_is_json_that_loads_as_the_same(tree: dict[str, Any]) -> None:
    config = load_config(tree, 3)
    text = json.dumps(config.describe(), allow_nan=False)
    again = load_config(json.loads(text), 3)
    assert again == config
    assert again.describe() == config.describe()


def test_a_path_and_a_dict_give_the_same(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(WITHOUT_AUTO))
    before = json.dumps(WITHOUT_AUTO)
    assert load_config(path, 2) == load_config(str(path), 2) == load_config(WITHOUT_AUTO, 2)
    assert json.dumps(WITHOUT_AUTO) == before


def test_a_loaded_configuration_cannot_be_changed() -> None:
    config = load()
    with pytest.raises(ValidationError, match="frozen"):
        config.train_batch_size = 3
    with pytest.raises(ValidationError, match="frozen"):
        config.fp16.enabled = True


def test_a_loaded_configuration_does_not_share_the_callers_values() -> None:
    tree: dict[str, Any] = {"train_batch_size": 4, "optimizer": {"type": "SGD", "params": {"lr": 0.5}}}
    config = load_config(tree, 1)
    tree["optimizer"]["params"]["lr"] = 7.0
    assert config.optimizer is not None
    assert config.optimizer.params["lr"] == 0.5


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
    path = tmp_path / "odd.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError, match=message) as caught:
        load_config(path, 1)
    assert str(path) in str(caught.value)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"missing.json: cannot be read: No such file"):
        load_config(tmp_path / "missing.json", 1)
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(tmp_path, 1)


@pytest.mark.parametrize("source", [None, 3, ["a"], b"config.json"])
def test_a_source_of_another_kind(source: Any) -> None:
    with pytest.raises(ConfigError, match="the path of a JSON file or a dict"):
        load_config(source, 1)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"fp16": {"enabled": "yes"}}, '"fp16.enabled" must be true or false, got "yes"'),
        ({"fp16": {"enabled": 1}}, '"fp16.enabled" must be true or false, got 1'),
        ({"fp16": True}, '"fp16" must be an object, {...}, got true'),
        ({"fp16": {"hysteresis": 0}}, '"fp16.hysteresis" must be a whole number or null, at least 1, got 0'),
        ({"fp16": {"loss_scale": -1}}, '"fp16.loss_scale" must be a number, at least 0, at most'),
        ({"fp16": {"initial_scale_power": 65}}, "at least 0, at most 64, got 65"),
        ({"fp16": {"initial_scale_power": 3.5}}, "must be a whole number, at least 0, at most 64, got 3.5"),
        ({"gradient_clipping": float("inf")}, '"gradient_clipping" must be a number, at least 0, got Infinity'),
        ({"gradient_clipping": False}, '"gradient_clipping" must be a number, at least 0, got false'),
        ({"steps_per_print": 0}, '"steps_per_print" must be a whole number or null, at least 1, got 0'),
        (
            {"zero_optimization": {"stage": 4}},
            '"zero_optimization.stage" must be a whole number, at least 0, at most 3',
        ),
        ({"zero_optimization": {"stage": "auto"}}, '"zero_optimization.stage" cannot be "auto"'),
        ({"zero_optimization": 1}, '"zero_optimization" must be an object'),
        ({"zero_optimization": {"reduce_bucket_size": 0}}, "reduce_bucket_size"),
        (
            {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "nvme"}}},
            '"zero_optimization.offload_optimizer.device" must be "none" or "cpu", got "nvme"',
        ),
        ({"optimizer": {"params": {}}}, '"optimizer.type" is missing'),
        ({"optimizer": {"type": 3}}, '"optimizer.type" must be a string, got 3'),
        ({"optimizer": {"type": "SGD", "params": [1]}}, '"optimizer.params" must be an object, {...}, got [1]'),
        ({"checkpoint": {"keep_last": 1}}, '"checkpoint.keep_last" must be a whole number or null, at least 2, got 1'),
        ({"checkpoint": {"tag_validation": "foo"}}, '"checkpoint.tag_validation" must be'),
        ({"tensorboard": {"job_name": ""}}, '"tensorboard.job_name" must be a string, not empty'),
        ({"activation_checkpointing": {"modules": "BertLayer"}}, "must be a list of strings"),
        ({"activation_checkpointing": {"modules": ["a", 3]}}, "must be a list of strings"),
        ({"seed": -1}, '"seed" must be a whole number, at least 0'),
        ({"thinwire": {"resync_interval": 0}}, '"thinwire.resync_interval" must be a whole number, at least 1, got 0'),
    ],
)
def test_wrong_types_and_ranges(keys: dict[str, Any], message: str) -> None:
    assert message in refusal(**keys)


def test_every_problem_is_told_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        load(trackio={"enabled": True}, fp16={"hysteresis": 0, "enabld": True}, optimizer={"type": "Adma"})
    assert len(caught.value.problems) == 4
    assert "has 4 problems:\n- " in str(caught.value)


REFUSED_STAGES = {
    "OneBitAdam": [3],
    "OneBitLamb": [2, 3],
    "ZeroOneAdam": [2, 3],
    "Lamb": [3],
    "Muon": [3],
    "DiLoCo": [3],
}
NOT_WITH_LOCAL_STEPS: dict[str, dict[str, Any]] = {
    "offload_optimizer": {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}},
    "progressive_layer_drop": {"progressive_layer_drop": {"enabled": True}},
}
NO_UNUSED = {"stage": 1, "ignore_unused_parameters": False}


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "are both true"),
        (
            {"fp16": {"enabled": True, "initial_scale_power": 2, "min_loss_scale": 8}},
            '"fp16.min_loss_scale" 8 is above the first scale, 2^2',
        ),
        (
            {"zero_optimization": {"stage": 3}, "optimizer": {"type": "OneBitLamb"}},
            "Use stage 0 or 1, or AdamW with stage 3",
        ),
        *(
            (
                {"zero_optimization": {"stage": stage}, "optimizer": {"type": name}},
                f'"zero_optimization.stage" {stage} does not go with {name}',
            )
            for name, stages in REFUSED_STAGES.items()
            for stage in stages
        ),
        *(
            ({**changes, "optimizer": {"type": name}}, f'{key}" does not go with {name}')
            for name in ("ZeroOneAdam", "DiLoCo")
            for key, changes in NOT_WITH_LOCAL_STEPS.items()
        ),
        ({"zero_optimization": NO_UNUSED, "optimizer": {"type": "DiLoCo"}}, "ask each other at every step"),
        ({"thinwire": {"resync_interval": 5}, "optimizer": {"type": "DiLoCo"}}, "the optimizer is DiLoCo"),
        (
            {"comms_logger": {"enabled": True, "prof_ops": ["all_redcue"]}},
            '"comms_logger.prof_ops" names "all_redcue", which is no collective. Did you mean "all_reduce"?',
        ),
        ({"comms_logger": {"enabled": True, "prof_all": False}}, "nothing would be counted"),
        (
            {
                "zero_optimization": {"stage": 0, "offload_optimizer": {"device": "cpu"}},
                "optimizer": {"type": "OneBitAdam"},
            },
            '"zero_optimization.offload_optimizer" does not go with OneBitAdam at stage 0',
        ),
        ({"thinwire": {"resync_interval": 10}}, "only matters to OneBitAdam, OneBitLamb, ZeroOneAdam, OneBitLion, and"),
        (
            {"thinwire": {"resync_interval": 10}, "optimizer": {"type": "AdamW"}},
            "ZeroOneAdam, OneBitLion, and the optimizer is AdamW",
        ),
    ],
)
def test_combinations_that_cannot_work(keys: dict[str, Any], message: str) -> None:
    assert message in refusal(**keys)


def test_stage_3_with_onebit_says_why_and_what_works() -> None:
    message = refusal(zero_optimization={"stage": 3}, optimizer={"type": "OneBitAdam"})
    assert "in full precision" in message
    assert "own whole residual and momentum" in message
    assert "Use stage 0, 1 or 2, or AdamW with stage 3" in message
    for stage in (0, 1, 2):
        assert load(zero_optimization={"stage": stage}, optimizer={"type": "OneBitAdam"})


def test_stage_3_offloads_parameters_state_or_both() -> None:
    offload = {"device": "cpu", "pin_memory": True}
    for parts in (["offload_param", "offload_optimizer"], ["offload_param"], ["offload_optimizer"]):
        zero = load(zero_optimization={"stage": 3, **dict.fromkeys(parts, offload)}).zero_optimization
        assert [part for part in ("offload_param", "offload_optimizer") if getattr(zero, part).pin_memory] == parts


def test_the_size_of_reduced_buckets_governs() -> None:
    zero = load(zero_optimization={"stage": 2, "reduce_bucket_size": 1000, "allgather_bucket_size": 5e8})
    assert zero.zero_optimization.reduce_bucket_size == 1000


def test_a_switched_off_section_may_hold_values() -> None:
    config = load(fp16={"enabled": False, "loss_scale": 128, "loss_scale_window": 500}, bf16={"enabled": True})
    assert config.bf16.enabled


def test_null_is_as_good_as_nothing() -> None:
    assert load(optimizer=None, scheduler=None, fp16=None, steps_per_print=None) == load()
