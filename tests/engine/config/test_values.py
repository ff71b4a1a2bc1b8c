"""Defaults, types and ranges, options that exclude each other, and batch sizes, of which any two give the third."""

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from tests.engine.test_published import ZERO_2
from thinwire.engine.config import ConfigError, EngineConfig, load_config
from thinwire.engine.config.loading import complete_batch_sizes


def _without_auto(tree: dict[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in tree.items() if value != "auto"}
    return {key: _without_auto(value) if isinstance(value, dict) else value for key, value in kept.items()}


WITHOUT_AUTO = _without_auto(ZERO_2) | {"train_micro_batch_size_per_gpu": 4}


def load(world_size: int = 2, **keys: Any) -> EngineConfig:
    return load_config({"train_batch_size": 8, **keys}, world_size)


def refusal(world_size: int = 2, **keys: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        load(world_size, **keys)
    return str(caught.value)


def test_a_hugging_face_file_without_its_trainer_names_every_auto() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(ZERO_2 | {"train_micro_batch_size_per_gpu": 4}, 3)
    told = [problem for problem in caught.value.problems if 'is "auto", which is filled in only by' in problem]
    assert len(told) == json.dumps(ZERO_2).count('"auto"') - 1 == len(caught.value.problems)


def test_a_hugging_face_file_loads_without_what_its_trainer_fills_in() -> None:
    config = load_config(WITHOUT_AUTO, 3)
    assert (config.train_batch_size, config.gradient_accumulation_steps) == (12, 1)
    assert config.optimizer.params == {"weight_decay": 0.0}
    assert config.scheduler.params == {}
    assert config.zero_optimization.reduce_bucket_size == 200_000_000
    assert config.zero_optimization.offload_optimizer.device == "cpu"
    assert not config.fp16.enabled
    assert not config.bf16.enabled
    assert config.gradient_clipping == 0.0


def test_defaults() -> None:
    config = load()
    assert config.optimizer is config.scheduler is config.checkpoint.keep_last is None
    assert config.zero_optimization.stage == 0
    scale = {"loss_scale": 0.0, "initial_scale_power": 16, "loss_scale_window": 1000, "min_loss_scale": 1.0}
    hysteresis = {"hysteresis": None, "consecutive_hysteresis": False}
    assert config.fp16.model_dump() == {"enabled": False, **scale, **hysteresis}
    assert config.thinwire.resync_interval == 100
    assert load(optimizer=None, scheduler=None, fp16=None, steps_per_print=None) == config


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


def test_a_loaded_configuration_cannot_be_changed_nor_shares_the_callers_values() -> None:
    tree: dict[str, Any] = {"train_batch_size": 4, "optimizer": {"type": "SGD", "params": {"lr": 0.5}}}
    config = load_config(tree, 1)
    tree["optimizer"]["params"]["lr"] = 7.0
    assert config.optimizer.params["lr"] == 0.5
    with pytest.raises(ValidationError, match="frozen"):
        config.train_batch_size = 3
    with pytest.raises(ValidationError, match="frozen"):
        config.fp16.enabled = True


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
        ({"zero_optimization": {"stage": 4}}, 'optimization.stage" must be a whole number, at least 0, at most 3'),
        ({"zero_optimization": {"stage": "auto"}}, '"zero_optimization.stage" cannot be "auto"'),
        ({"zero_optimization": 1}, '"zero_optimization" must be an object'),
        ({"zero_optimization": {"reduce_bucket_size": 0}}, "reduce_bucket_size"),
        (
            {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "disk"}}},
            '"zero_optimization.offload_optimizer.device" must be "none" or "cpu" or "nvme", got "disk"',
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
        ({"communication_data_type": "int8"}, '"communication_data_type" must be "fp32" or "fp16" or "bf16" or null'),
        ({"communication_codec": "int5"}, '"communication_codec" must be'),
        ({"data_types": {"grad_accum_dtype": 16}}, '"data_types.grad_accum_dtype" must be "fp32" or "fp16" or "bf16"'),
        ({"gradient_predivide_factor": 0}, '"gradient_predivide_factor" must be a number, above 0'),
        ({"gradient_allreduce_op": "max"}, '"gradient_allreduce_op" must be "mean" or "avg" or "sum", got "max"'),
        *(
            ({"train_batch_size": size}, '"train_batch_size" must be a whole number, at least 1, got')
            for size in (0, -4, 1.5, "8", True, float("nan"))
        ),
        *(({"world_size": size}, "world_size") for size in (0, -1, 2.0, True)),
    ],
)
def test_wrong_types_and_ranges(keys: dict[str, Any], message: str) -> None:
    assert message in refusal(**keys)


LATE_STAGES = {"Lamb": [3], "Muon": [3], "DiLoCo": [3], "OneBitAdam": [3], "OneBitLamb": [2, 3], "ZeroOneAdam": [2, 3]}
OFFLOAD = {"device": "cpu"}
NVME = {"device": "nvme", "nvme_path": "/nvme"}
NOT_WITH_LOCAL_STEPS: dict[str, dict[str, Any]] = {
    "offload_optimizer": {"zero_optimization": {"stage": 1, "offload_optimizer": OFFLOAD}},
    "progressive_layer_drop": {"progressive_layer_drop": {"enabled": True}},
}


@pytest.mark.parametrize(
    ("keys", "optimizer", "message"),
    [
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, None, "are both true"),
        (
            {"fp16": {"enabled": True, "initial_scale_power": 2, "min_loss_scale": 8}},
            None,
            '"fp16.min_loss_scale" 8 is above the first scale, 2^2',
        ),
        ({"communication_codec": "int4"}, "OneBitAdam", 'which has "optimizer.params.codec"'),
        ({"communication_codec": "int4", "zero_optimization": {"stage": 3}}, "AdamW", "use stage 0, 1 or 2"),
        ({"communication_codec": "int4", "communication_data_type": "bf16"}, "AdamW", "delete it"),
        ({"communication_data_type": "bf16"}, "OneBitMuon", 'params.codec" of OneBitMuon says how gradients travel'),
        (
            {"communication_codec": "int4", "zero_optimization": {"offload_optimizer": NVME}},
            "AdamW",
            'device" "nvme" and "communication_codec"',
        ),
        ({"prescale_gradients": True}, "OneBitMuon", 'beside which "prescale_gradients" can do nothing'),
        ({"zero_optimization": {"stage": 3}}, "OneBitLamb", "Use stage 0 or 1, or AdamW with stage 3"),
        ({"zero_optimization": {"stage": 3}}, "OneBitAdam", "in full precision"),
        ({"zero_optimization": {"stage": 3}}, "OneBitAdam", "own whole residual and momentum"),
        ({"zero_optimization": {"stage": 3}}, "OneBitAdam", "Use stage 0, 1 or 2, or AdamW with stage 3"),
        *(
            (
                {"zero_optimization": {"stage": stage}},
                name,
                f'"zero_optimization.stage" {stage} does not go with {name}',
            )
            for name, stages in LATE_STAGES.items()
            for stage in stages
        ),
        *(
            (changes, name, f'{key}" does not go with {name}')
            for name in ("ZeroOneAdam", "DiLoCo")
            for key, changes in NOT_WITH_LOCAL_STEPS.items()
        ),
        ({"zero_optimization": {"stage": 1, "ignore_unused_parameters": False}}, "DiLoCo", "each other at every step"),
        ({"thinwire": {"resync_interval": 5}}, "DiLoCo", "the optimizer is DiLoCo"),
        (
            {"comms_logger": {"enabled": True, "prof_ops": ["all_redcue"]}},
            None,
            '"comms_logger.prof_ops" names "all_redcue", which is no collective. Did you mean "all_reduce"?',
        ),
        ({"comms_logger": {"enabled": True, "prof_all": False}}, None, "nothing would be counted"),
        (
            {"zero_optimization": {"stage": 0, "offload_optimizer": OFFLOAD}},
            "OneBitAdam",
            '"zero_optimization.offload_optimizer" does not go with OneBitAdam at stage 0',
        ),
        (
            {"zero_optimization": {"stage": 1, "offload_optimizer": NVME}},
            "OneBitAdam",
            "does not go with OneBitAdam: use",
        ),
        (
            {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "nvme"}}},
            "AdamW",
            '"zero_optimization.offload_optimizer.nvme_path" is missing',
        ),
        (
            {"zero_optimization": {"stage": 2, "offload_optimizer": NVME}, "checkpoint": {"async_save": True}},
            "AdamW",
            "copies all to memory",
        ),
        ({"zero_optimization": {"stage": 3, "offload_param": NVME}}, "AdamW", "needs the larger optimizer state there"),
        (
            {"zero_optimization": {"stage": 3, "offload_param": NVME, "offload_optimizer": NVME, "node_size": 2}},
            "AdamW",
            "codecs that keep copies of weights in memory",
        ),
        (
            {"thinwire": {"resync_interval": 10}},
            None,
            "only matters to OneBitAdam, OneBitLamb, ZeroOneAdam, OneBitLion",
        ),
        ({"thinwire": {"resync_interval": 10}}, "AdamW", "OneBitLion, OneBitMuon, and the optimizer is AdamW"),
    ],
)
def test_combinations_that_cannot_work(keys: dict[str, Any], optimizer: str | None, message: str) -> None:
    assert message in refusal(**keys, optimizer=optimizer and {"type": optimizer})


def test_a_warmups_wire_is_named_once() -> None:
    keys = {"communication_data_type": "fp16", "optimizer": {"type": "OneBitAdam", "params": {"warmup_wire": "bf16"}}}
    assert '"communication_data_type" and "optimizer.params.warmup_wire" say the same' in refusal(**keys)
    assert load(**(keys | {"optimizer": {"type": "OneBitAdam"}})).communication_data_type == "fp16"


def test_combinations_that_work() -> None:
    for stage in (0, 1, 2):
        assert load(zero_optimization={"stage": stage}, optimizer={"type": "OneBitAdam"})
    pinned = {"device": "cpu", "pin_memory": True}
    for parts in (["offload_param", "offload_optimizer"], ["offload_param"], ["offload_optimizer"]):
        zero = load(zero_optimization={"stage": 3, **dict.fromkeys(parts, pinned)}).zero_optimization
        assert [part for part in ("offload_param", "offload_optimizer") if getattr(zero, part).pin_memory] == parts
    for stage in range(4):
        zero = load(zero_optimization={"stage": stage, "offload_optimizer": NVME}).zero_optimization
        assert zero.offload_optimizer.nvme_path == "/nvme"
    assert load(zero_optimization={"stage": 3, "offload_optimizer": NVME, "offload_param": NVME})
    zero = load(zero_optimization={"stage": 2, "reduce_bucket_size": 1000, "allgather_bucket_size": 5e8})
    assert zero.zero_optimization.reduce_bucket_size == 1000
    off = {"enabled": False, "loss_scale": 128, "loss_scale_window": 500}
    assert load(fp16=off, bf16={"enabled": True}).bf16.enabled


def test_deepspeeds_names_of_types() -> None:
    for given_name, name in {"FP16": "fp16", "bfp16": "bf16", "BF16": "bf16", "fp32": "fp32"}.items():
        assert load(communication_data_type=given_name).communication_data_type == name
    for given_name, name in {"float32": "fp32", "torch.bfloat16": "bf16", "half": "fp16"}.items():
        precision = {} if name == "fp32" else {name: {"enabled": True}}
        assert load(data_types={"grad_accum_dtype": given_name}, **precision).data_types.grad_accum_dtype == name
    assert load(data_types={}).data_types.grad_accum_dtype is None
    # Sums in another 16-bit dtype would hold no more.
    config = load(fp16={"enabled": True}, data_types={"grad_accum_dtype": "bf16"})
    assert config.data_types.grad_accum_dtype is None
    assert "data_types.grad_accum_dtype" in config.remarks.line()
    # A backend that means the job's own communicator.
    config = load(optimizer={"type": "OneBitAdam", "params": {"comm_backend_name": "hccl"}})
    assert list(config.remarks.without_effect) == ["optimizer.params.comm_backend_name"]


# Batch sizes

KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
sizes = st.integers(1, 64)
optional_sizes = st.none() | st.integers(1, 40)


@given(micro=sizes, accumulation=sizes, world_size=sizes)
def test_any_two_give_the_third_and_one_alone_takes_one_forward(micro: int, accumulation: int, world_size: int) -> None:
    train = micro * accumulation * world_size
    expected = (train, micro, accumulation)
    assert complete_batch_sizes(None, micro, accumulation, world_size) == expected
    assert complete_batch_sizes(train, None, accumulation, world_size) == expected
    assert complete_batch_sizes(train, micro, None, world_size) == expected
    assert complete_batch_sizes(train, micro, accumulation, world_size) == expected
    expected = (micro * world_size, micro, 1)
    assert complete_batch_sizes(None, micro, None, world_size) == expected
    assert complete_batch_sizes(micro * world_size, None, None, world_size) == expected


@given(train=optional_sizes, micro=optional_sizes, accumulation=optional_sizes, world_size=st.integers(1, 9))
def test_what_comes_back_multiplies_out_and_what_does_not_names_what_would(
    train: int | None, micro: int | None, accumulation: int | None, world_size: int
) -> None:
    sizes = dict(zip(KEYS, (train, micro, accumulation), strict=True))
    if train is None and micro is None:
        return
    try:
        found = complete_batch_sizes(*sizes.values(), world_size)
    except ConfigError as error:
        for key, number in suggestions(str(error)):
            assert complete_batch_sizes(*(sizes | {key: number}).values(), world_size)
        return
    assert found[0] == found[1] * found[2] * world_size
    for was, now in zip(sizes.values(), found, strict=True):
        assert was in (None, now)


def suggestions(message: str) -> list[tuple[str, int]]:
    """(key, size) for each way out that a refusal names; there is always one."""
    found = [("train_batch_size", int(size)) for size in re.findall(r"\d+", message.partition("that works is")[2])]
    for way in filter(None, message.partition("or one of ")[2].split(", ")):
        key, size = way.split()
        found.append((key, int(size)))
    assert found
    return found


@pytest.mark.parametrize(
    ("given_sizes", "world_size", "message"),
    [
        ((64, 4, 2), 4, "64 is not train_micro_batch_size_per_gpu 4 x gradient_accumulation_steps 2 x 4 ranks = 32"),
        ((64, 4, 2), 4, "train_batch_size 32, gradient_accumulation_steps 4, train_micro_batch_size_per_gpu 8$"),
        ((65, 4, 2), 4, "one of train_batch_size 32$"),
        ((100, 8, None), 4, "not a multiple of train_micro_batch_size_per_gpu 8 x 4 ranks = 32, .* 96 or 128"),
        ((3, None, None), 4, "gradient_accumulation_steps 1 x 4 ranks = 4, .* 0.75 samples a micro-batch: .* is 4"),
        ((10, None, 3), 1, "gradient_accumulation_steps 3 x 1 rank = 3, .* 9 or 12"),
        ((None, None, None), 2, "the batch size is missing: give train_batch_size or"),
        ((None, None, 4), 2, "the batch size is missing: .* beside gradient_accumulation_steps"),
    ],
)
def test_sizes_that_cannot_work(given_sizes: tuple[int | None, ...], world_size: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        complete_batch_sizes(*given_sizes, world_size)


def test_a_configuration_has_its_sizes_and_is_checked_for_another_number_of_ranks() -> None:
    config = load_config({"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 3.0}, 2)
    assert (config.train_batch_size, config.gradient_accumulation_steps) == (24, 3)
    config = load_config({"train_batch_size": 8}, 2)
    assert load_config(config, 2) == config
    with pytest.raises(ConfigError, match="= 16"):
        load_config(config, 4)
