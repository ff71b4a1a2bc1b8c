"""What DeepSpeed asserts against before it builds an engine is refused at its door, and only there."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import thinwire.deepspeed as deepspeed
from thinwire.deepspeed.ops.adam import DeepSpeedCPUAdam
from thinwire.deepspeed.runtime.zero.utils import ZeRORuntimeException


def engine_of(optimizer: type[torch.optim.Optimizer] | None = None, **keys: Any) -> deepspeed.DeepSpeedEngine:
    """One that trains three features to one."""
    model = torch.nn.Linear(3, 1)
    config = {"train_micro_batch_size_per_gpu": 2, **keys}
    if optimizer is None:
        config["optimizer"] = {"type": "Adam", "params": {"lr": 0.01}}
        return deepspeed.initialize(model=model, config=config)[0]
    return deepspeed.initialize(model=model, optimizer=optimizer(model.parameters()), config=config)[0]


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_buckets_of_gathered_weights_are_of_even_size(stage: int) -> None:
    engine_of(zero_optimization={"stage": stage, "allgather_bucket_size": 1000}).close()
    odd = {"stage": stage, "allgather_bucket_size": 1001}
    if stage:
        with pytest.raises(AssertionError, match=r"is 1001: allgather_bucket_size must be a multiple of nccl_start"):
            engine_of(zero_optimization=odd)
    else:
        engine_of(zero_optimization=odd).close()


def test_offloaded_state_is_stepped_by_an_optimizer_for_it_where_that_is_forced() -> None:
    offloads = {"stage": 1, "offload_optimizer": {"device": "cpu"}}
    with pytest.raises(ZeRORuntimeException, match='"zero_force_ds_cpu_optimizer" is true, and AdamW is not'):
        engine_of(torch.optim.AdamW, zero_optimization=offloads, zero_force_ds_cpu_optimizer=True)
    engine_of(torch.optim.AdamW, zero_optimization=offloads, zero_force_ds_cpu_optimizer=False).close()
    engine_of(torch.optim.AdamW, zero_optimization=offloads).close()
    engine_of(torch.optim.AdamW, zero_optimization={"stage": 1}, zero_force_ds_cpu_optimizer=True).close()
    engine_of(DeepSpeedCPUAdam, zero_optimization=offloads, zero_force_ds_cpu_optimizer=True).close()
    engine_of(zero_optimization=offloads, zero_force_ds_cpu_optimizer=True).close()
