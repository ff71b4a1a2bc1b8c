"""How the engine's gradients are averaged, by the configuration's keys."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.engine.tiny import make_engine, settings, train
from thinwire.comm import threads
from thinwire.engine.config import ConfigError, load_config

ADAMW: dict[str, Any] = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}}}
ONE_BIT: dict[str, Any] = {"optimizer": {"type": "OneBitAdam", "params": {"lr": 1e-2, "freeze_step": 2}}}


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("optimizer", [ADAMW, ONE_BIT], ids=["AdamW", "OneBitAdam"])
def test_every_key_trains_as_without_it_up_to_rounding(stage: int, optimizer: dict[str, Any]) -> None:
    def losses(**changes: Any) -> torch.Tensor:
        config = settings(stage, gradient_accumulation_steps=2, **optimizer, **changes)
        return torch.tensor(threads.run(lambda comm: train(make_engine(comm, config), range(5)), 2)[0])

    expected = losses()
    tolerance = 1e-5 if optimizer is ADAMW else 2e-3  # signs turn a last bit into one of a step
    for changes in (
        {"prescale_gradients": True},
        {"gradient_predivide_factor": 3.0},
        {"gradient_allreduce_op": "avg"},
        {"communication_data_type": "fp32"},
        {"data_types": {"grad_accum_dtype": "fp32"}},
        {"gradient_allreduce_op": "sum"},  # Adam does not care by what its gradient is multiplied
    ):
        torch.testing.assert_close(losses(**changes), expected, rtol=tolerance, atol=0)
    for dtype in ("bf16", "fp16"):
        narrow = losses(communication_data_type=dtype)
        torch.testing.assert_close(narrow, expected, rtol=0.05, atol=0)
        assert not torch.equal(narrow, expected)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_sum_has_the_sums_norm_in_fp16_too(stage: int) -> None:
    def norm(operation: str) -> float | None:
        def body(comm: Any) -> float | None:
            fp16 = {"enabled": True, "initial_scale_power": 8}
            engine = make_engine(comm, settings(stage, fp16=fp16, gradient_allreduce_op=operation))
            train(engine, range(1))
            assert engine.optimizer.loss_scale == 256
            return engine.get_global_grad_norm()

        return threads.run(body, 2)[0]

    mean = norm("mean")
    assert mean is not None
    assert norm("sum") == pytest.approx(2 * mean, rel=1e-4)


def load(**keys: Any) -> Any:
    return load_config({"train_batch_size": 1, **keys}, 1)


def test_deepspeeds_names_of_types() -> None:
    for given, name in {"FP16": "fp16", "bfp16": "bf16", "BF16": "bf16", "fp32": "fp32"}.items():
        assert load(communication_data_type=given).communication_data_type == name
    for given, name in {"float32": "fp32", "torch.bfloat16": "bf16", "half": "fp16"}.items():
        precision = {} if name == "fp32" else {name: {"enabled": True}}
        assert load(data_types={"grad_accum_dtype": given}, **precision).data_types.grad_accum_dtype == name
    assert load(data_types={}).data_types.grad_accum_dtype is None


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"communication_data_type": "int8"}, '"communication_data_type" must be "fp32" or "fp16" or "bf16" or null'),
        ({"data_types": {"grad_accum_dtype": 16}}, '"data_types.grad_accum_dtype" must be "fp32" or "fp16" or "bf16"'),
        ({"gradient_predivide_factor": 0}, '"gradient_predivide_factor" must be a number, above 0'),
        ({"gradient_allreduce_op": "max"}, '"gradient_allreduce_op" must be "mean" or "avg" or "sum", got "max"'),
    ],
)
def test_what_cannot_be_is_told(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(**keys)
    assert message in str(caught.value)


def test_sums_in_another_16_bit_dtype_would_hold_no_more_and_are_listed() -> None:
    config = load(fp16={"enabled": True}, data_types={"grad_accum_dtype": "bf16"})
    assert config.data_types.grad_accum_dtype is None
    assert "data_types.grad_accum_dtype" in config.remarks.line()
