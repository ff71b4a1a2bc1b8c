"""Keys that cannot change a result: accepted at any well-typed value, listed once, and refused at a wrong type."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from tests.engine.config.test_keys import WORKS, nested, refusal
from thinwire.deepspeed.config.keys import WITHOUT_EFFECT
from thinwire.engine.config import ConfigError, EngineConfig, load_config
from thinwire.optim.settings import WholeNumber

# Values of each kind, and one of another.
VALUES: dict[Any, tuple[list[Any], Any]] = {
    bool: ([True, False], 1),
    float: ([0.5, 1], "half"),
    WholeNumber: ([0, 7, 1e14], 0.5),
    WholeNumber | bool: ([True, False, 0, 1], 0.5),
    WholeNumber | None: ([1024], 0.5),
    WholeNumber | bool | None: ([4, False], 0.5),
    str | None: (["/local_nvme"], 3),
    Mapping[str, Any] | None: ([{}, {"block_size": 262144}], [1]),
}

AS_OTHER_FILES_HAVE_THEM: dict[str, Any] = {
    "stage": 3,
    "overlap_comm": True,
    "contiguous_gradients": True,
    "sub_group_size": 1e14,
    "reduce_bucket_size": 0,
    "stage3_prefetch_bucket_size": "auto",
    "stage3_param_persistence_threshold": "auto",
    "stage3_max_live_parameters": 1e9,
    "stage3_gather_fp16_weights_on_model_save": True,
}


def load(world_size: int = 1, **keys: Any) -> EngineConfig:
    return load_config({"train_batch_size": 4, **keys}, world_size)


def listed(**keys: Any) -> list[str]:
    return list(load(**keys).remarks.without_effect)


@pytest.mark.parametrize("path", WITHOUT_EFFECT)
def test_any_well_typed_value_is_listed_and_changes_nothing(path: str) -> None:
    values, wrong = VALUES[WITHOUT_EFFECT[path].kind]
    for value in [*values, "auto"]:
        config = load_config(nested(path, value), 1)
        assert config == load_config(WORKS, 1)
        assert config.remarks.without_effect == {path: WITHOUT_EFFECT[path].why}
    assert not load_config(nested(path, None), 1).remarks.without_effect
    assert f'"{path}" must be ' in refusal(nested(path, wrong))


def test_one_line_lists_them_all() -> None:
    config = load(zero_optimization=AS_OTHER_FILES_HAVE_THEM, gradient_clipping=1.0, dump_state=True)
    line = config.remarks.line()
    assert "\n" not in line
    for key in AS_OTHER_FILES_HAVE_THEM.keys() - {"stage"}:
        assert f"zero_optimization.{key}" in line
    assert "dump_state" in line
    assert "zero_optimization.stage," not in line
    assert not load(gradient_clipping=0).remarks.line()


def test_clipping_that_nobody_sets_is_off_and_said() -> None:
    config = load()
    assert config.gradient_clipping == 0.0
    assert '"gradient_clipping" is not set' in config.remarks.line()
    assert not load(gradient_clipping=0.0).remarks.unclipped


def test_a_warmup_that_does_not_say_where_it_ends_is_told_of() -> None:
    warmup = {"warmup_num_steps": 3, "total_num_steps": 9}
    line = load(scheduler={"type": "WarmupDecayLR", "params": warmup}).remarks.line()
    assert "rises to that of each parameter group (elsewhere it may rise to 0.001)" in line
    told = load(scheduler={"type": "WarmupDecayLR", "params": {**warmup, "warmup_max_lr": 0.01}}).remarks
    assert not told.own_peak
    assert not load(scheduler={"type": "WarmupCosineLR", "params": warmup}).remarks.own_peak


def test_remarks_stay_with_a_configuration_that_is_loaded_again() -> None:
    config = load(dump_state=True)
    again = load_config(config, 1)
    assert again == config
    assert again.remarks == config.remarks
    assert again.remarks != load_config(config.describe(), 1).remarks


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"fp16": {"loss_scale": 128}}, ["fp16.loss_scale"]),
        ({"fp16": {"enabled": False, "loss_scale": 128}}, []),
        ({"prescale_gradients": True, "gradient_predivide_factor": 8}, ["gradient_predivide_factor"]),
        ({"gradient_predivide_factor": 8}, []),
        ({"zero_optimization": {"ignore_unused_parameters": False}}, ["zero_optimization.ignore_unused_parameters"]),
        ({"zero_optimization": {"stage": 2, "ignore_unused_parameters": False}}, []),
        ({"csv_monitor": {"output_path": "logs"}}, ["csv_monitor.output_path"]),
        (
            {"fp16": {"enabled": True, "loss_scale": 128, "loss_scale_window": 500, "hysteresis": 2}},
            ["fp16.loss_scale_window", "fp16.hysteresis"],
        ),
        ({"fp16": {"enabled": True, "loss_scale": 0, "loss_scale_window": 500}}, []),
        ({"activation_checkpointing": {"cpu_checkpointing": True}}, ["activation_checkpointing.cpu_checkpointing"]),
        ({"activation_checkpointing": {"cpu_checkpointing": True, "modules": ["Layer"]}}, []),
        (
            {"wandb": {"project": "p"}, "flops_profiler": {"profile_step": 5}},
            ["wandb.project", "flops_profiler.profile_step"],
        ),
        ({"zero_optimization": {"overlap_comm": True}}, ["zero_optimization.overlap_comm"]),
        ({"zero_optimization": {"stage": 1, "overlap_comm": True}}, []),
        ({"zero_optimization": {"stage": 3, "overlap_comm": False}}, ["zero_optimization.overlap_comm"]),
        (
            {"zero_optimization": {"stage": 1, "overlap_comm": True}, "optimizer": {"type": "ZeroOneAdam"}},
            ["zero_optimization.overlap_comm"],
        ),
        (
            {"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu", "pin_memory": True}}},
            ["zero_optimization.offload_param"],
        ),
        (
            {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "none", "pin_memory": True}}},
            ["zero_optimization.offload_optimizer.pin_memory"],
        ),
        (
            {"zero_optimization": {"stage": 3, "reduce_bucket_size": 1e6, "allgather_bucket_size": 0}},
            ["zero_optimization.allgather_bucket_size", "zero_optimization.reduce_bucket_size"],
        ),
    ],
)
def test_keys_without_effect_beside_others(keys: dict[str, Any], expected: list[str]) -> None:
    assert listed(**keys) == expected


def test_idle_values_are_put_to_their_defaults() -> None:
    zero = load(zero_optimization={"overlap_comm": True, "offload_param": {"device": "cpu"}}).zero_optimization
    assert zero == load().zero_optimization
    assert zero.offload_param.device == "none"
    stage_3 = load(zero_optimization={"stage": 3, "reduce_bucket_size": 0}).zero_optimization
    assert stage_3.reduce_bucket_size == load().zero_optimization.reduce_bucket_size


def test_an_idle_size_of_a_wrong_type() -> None:
    with pytest.raises(ConfigError, match=r'reduce_bucket_size" must be a whole number, got "big"'):
        load(zero_optimization={"stage": 3, "reduce_bucket_size": "big"})


@pytest.mark.parametrize(
    ("kind", "params", "kept"),
    [
        ("OneBitAdam", {"cuda_aware": True, "comm_backend_name": "compressed"}, {}),
        ("OneBitLamb", {"cuda_aware": False, "comm_backend_name": "hccl", "set_grad_none": True}, {}),
        ("AdamW", {"torch_adam": True, "adam_w_mode": False, "set_grad_none": False}, {"weight_decay": 0.0}),
        ("Adagrad", {"torch_adam": False}, {}),
    ],
)
def test_optimizer_parameters_that_cannot_change_a_step(
    kind: str, params: dict[str, Any], kept: dict[str, Any]
) -> None:
    config = load(optimizer={"type": kind, "params": params})
    assert config.optimizer is not None
    assert config.optimizer.params == kept
    assert sorted(config.remarks.without_effect) == sorted(f"optimizer.params.{name}" for name in params)


def test_steps_per_print_of_never() -> None:
    assert load(steps_per_print=float("inf")).steps_per_print is None
    assert load(steps_per_print=1e9).steps_per_print == 10**9
