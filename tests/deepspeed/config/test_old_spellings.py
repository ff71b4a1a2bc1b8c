"""What DeepSpeed wrote otherwise in earlier years loads as what replaced it."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from thinwire.engine.config import ConfigError, EngineConfig, load_config

CPU = {"device": "cpu"}
PINNED = {"device": "cpu", "pin_memory": True}


def load(**keys: Any) -> EngineConfig:
    return load_config({"train_batch_size": 4, **keys}, 1)


def clipped(optimizer: str = "AdamW", **keys: Any) -> EngineConfig:
    return load(optimizer={"type": optimizer, "params": {"lr": 0.1, "max_grad_norm": 2.5}}, **keys)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({"bfloat16": {"enabled": True}}, {"bf16": {"enabled": True}}),
        ({"zero_optimization": True}, {"zero_optimization": {"stage": 1}}),
        ({"zero_optimization": False}, {}),
        ({"zero_optimization": True, "allgather_size": 5e8}, {"zero_optimization": {"stage": 1}}),
        (
            {"zero_optimization": {"stage": 2, "cpu_offload": True}},
            {"zero_optimization": {"stage": 2, "offload_optimizer": CPU}},
        ),
        (
            {"zero_optimization": {"stage": 2, "cpu_offload": True, "cpu_offload_use_pin_memory": True}},
            {"zero_optimization": {"stage": 2, "offload_optimizer": PINNED}},
        ),
        ({"zero_optimization": {"stage": 2, "cpu_offload": False}}, {"zero_optimization": {"stage": 2}}),
        (
            {"zero_optimization": {"stage": 3, "cpu_offload": True, "cpu_offload_params": True}},
            {"zero_optimization": {"stage": 3, "offload_optimizer": CPU, "offload_param": CPU}},
        ),
        (
            {"zero_optimization": {"stage": 3, "cpu_offload": True, "cpu_offload_param": True}},
            {"zero_optimization": {"stage": 3, "offload_optimizer": CPU, "offload_param": CPU}},
        ),
        (
            {"zero_optimization": {"cpu_offload": True, "offload_optimizer": CPU}},
            {"zero_optimization": {"offload_optimizer": CPU}},
        ),
    ],
)
def test_old_and_new_spelling_give_the_same(old: dict[str, Any], new: dict[str, Any]) -> None:
    before = copy.deepcopy(old)
    assert load(**old) == load(**new)
    assert old == before


@pytest.mark.parametrize("optimizer", ["AdamW", "OneBitAdam", "SGD"])
def test_an_optimizers_max_grad_norm_is_gradient_clipping(optimizer: str) -> None:
    config = clipped(optimizer)
    assert config.gradient_clipping == 2.5
    assert config.optimizer is not None
    assert "max_grad_norm" not in config.optimizer.params
    assert not config.remarks.unclipped
    assert clipped(optimizer, gradient_clipping=2.5) == config
    assert clipped(optimizer, gradient_clipping=None) == config


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"bfloat16": {"enabled": True}, "bf16": {"enabled": False}}, '"bfloat16" is the old name of "bf16"'),
        ({"bfloat16": 3}, '"bf16" must be an object'),
        (
            {"zero_optimization": {"cpu_offload": True, "offload_optimizer": PINNED}},
            'keep "zero_optimization.offload_optimizer" alone',
        ),
        ({"zero_optimization": {"cpu_offload": 1}}, '"zero_optimization.cpu_offload" must be true or false, got 1'),
        (
            {"zero_optimization": {"cpu_offload_use_pin_memory": "yes"}},
            '"zero_optimization.cpu_offload_use_pin_memory" must be true or false, got "yes"',
        ),
    ],
)
def test_old_spellings_that_cannot_be_followed(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(**keys)
    assert message in str(caught.value)


def test_two_norms_that_differ() -> None:
    with pytest.raises(ConfigError, match=r'max_grad_norm" is 2.5 and "gradient_clipping" is 1.0'):
        clipped(gradient_clipping=1.0)


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("FusedAdam", "Adam"),
        ("deepspeedcpuadam", "Adam"),
        ("ADAMW", "AdamW"),
        ("DeepSpeedCPUAdagrad", "Adagrad"),
        ("onebitlamb", "OneBitLamb"),
    ],
)
def test_optimizers_in_any_case_and_by_their_deepspeed_class(given: str, meant: str) -> None:
    assert load(optimizer={"type": given}) == load(optimizer={"type": meant})
