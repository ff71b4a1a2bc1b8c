"""Configurations that DeepSpeed, its examples and Hugging Face publish, key by key as people have them: they load and
train as they are."""

import copy
import json
import math
from typing import Any

import pytest
import torch
from torch import nn

from thinwire import initialize
from thinwire.comm import Communicator, threads
from thinwire.engine.config import load_config

_WIRE: dict[str, Any] = {"cuda_aware": False, "comm_backend_name": "nccl"}
_DYNAMIC: dict[str, Any] = {"enabled": True, "loss_scale": 0, "initial_scale_power": 16}
_LAMB: dict[str, Any] = {"weight_decay": 0.01, "bias_correction": False, "max_coeff": 0.3, "min_coeff": 0.01}
_LAMB |= {"freeze_step": 1000, **_WIRE, "coeff_beta": 0.9, "factor_max": 4.0, "factor_min": 0.5}
_LAMB |= {"factor_threshold": 0.1}
_ZERO_ONE: dict[str, Any] = {"var_freeze_step": 12500, "local_step_scaler": 32678, **_WIRE}
_UNCORRECTED: dict[str, Any] = {"weight_decay": 0.01, "bias_correction": False}


def _file(batch: int, micro: int | None, every: int, optimizer: str, params: Any, **changes: Any) -> dict[str, Any]:
    sizes = {"train_batch_size": batch} | ({} if micro is None else {"train_micro_batch_size_per_gpu": micro})
    return {**sizes, "steps_per_print": every, "optimizer": {"type": optimizer, "params": params}, **changes}


def _bert(batch: int, micro: int, every: int, optimizer: str, params: Any, fp16: Any, **changes: Any) -> dict[str, Any]:
    """As the files for BERT pre-training have it."""
    common = {"prescale_gradients": False, "gradient_clipping": 1.0, "wall_clock_breakdown": False, "fp16": fp16}
    return _file(batch, micro, every, optimizer, params, **common | changes)


_CIFAR_ADAM = {"lr": 0.001, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7}
_CIFAR_WARMUP = {"warmup_min_lr": 0, "warmup_max_lr": 0.001, "warmup_num_steps": 1000}
_CIFAR: dict[str, Any] = _file(4, None, 2000, "Adam", _CIFAR_ADAM) | {
    "scheduler": {"type": "WarmupLR", "params": _CIFAR_WARMUP},
    "wall_clock_breakdown": False,
}
_CIFAR_ZERO = {"stage": 2, **dict.fromkeys(["allgather_bucket_size", "reduce_bucket_size"], 50000000)}
_CIFAR_ZERO |= {"allgather_partitions": True, "reduce_scatter": True, "overlap_comm": True, "cpu_offload": True}
_CIFAR_ZERO |= {"contiguous_gradients": True}
_CIFAR_FP16 = {"enabled": True, "fp16_master_weights_and_grads": False, "loss_scale": 0, "loss_scale_window": 500}
_CIFAR_FP16 |= {"hysteresis": 2, "min_loss_scale": 1, "initial_scale_power": 15}
FILES: dict[str, dict[str, Any]] = {
    # DeepSpeedExamples, BingBertSquad/1-bit_adam
    "squad, 1-bit Adam": _file(
        96,
        3,
        100,
        "OnebitAdam",
        {"lr": 3e-5, "freeze_step": 400, "weight_decay": 0.0, "bias_correction": False, **_WIRE},
        gradient_clipping=1.0,
        fp16={"enabled": True},
    ),
    # DeepSpeedExamples, bing_bert/01_adam, bing_bert/1-bit_lamb, and bing_bert without the section that progressive
    # layer drop's tutorial adds
    "bert, 0/1 Adam": _bert(4096, 16, 100, "ZeroOneAdam", {"lr": 4e-4, **_UNCORRECTED, **_ZERO_ONE}, _DYNAMIC),
    "bert, 1-bit LAMB": _bert(65536, 64, 1000, "OneBitLamb", {"lr": 11e-3, **_LAMB}, _DYNAMIC),
    "bert, Adam": _bert(
        4096,
        16,
        100,
        "Adam",
        {"lr": 1e-3, **_UNCORRECTED},
        {"enabled": True, "loss_scale": 0},
        prescale_gradients=True,
        gradient_predivide_factor=8,
    ),
    # DeepSpeed's tutorial of BERT pre-training
    "bert, Adam of the tutorial": _file(
        4096, 64, 1000, "Adam", {"lr": 2e-4, "max_grad_norm": 1.0, **_UNCORRECTED}, fp16=_DYNAMIC
    ),
    # DeepSpeed's CIFAR-10 tutorial, and DeepSpeedExamples, cifar
    "cifar of the tutorial": _CIFAR,
    "cifar": _CIFAR
    | {"gradient_clipping": 1.0, "prescale_gradients": False, "fp16": _CIFAR_FP16, "zero_optimization": _CIFAR_ZERO},
    "cifar, 1-bit LAMB": _bert(
        1024, 16, 1000, "OneBitLamb", {"lr": 5e-3, **_LAMB, "factor_max": 2.0}, {"enabled": False, "loss_scale": 0}
    ),
}


def _autos(*names: str) -> dict[str, Any]:
    return dict.fromkeys(names, "auto")


_WARMUP = _autos("warmup_min_lr", "warmup_max_lr", "warmup_num_steps")
_FP16 = {**_autos("enabled"), "loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16, "hysteresis": 2}
_FILLED_IN: dict[str, Any] = {
    "optimizer": {"type": "AdamW", "params": _autos("lr", "betas", "eps", "weight_decay")},
    "scheduler": {"type": "WarmupLR", "params": _WARMUP},
    **_autos("gradient_accumulation_steps", "gradient_clipping", "train_batch_size", "train_micro_batch_size_per_gpu"),
    "steps_per_print": 2000,
    "wall_clock_breakdown": False,
    "fp16": _FP16 | {"min_loss_scale": 1},
}
_PINNED = {"device": "cpu", "pin_memory": True}
_OVERLAP = {"overlap_comm": True, "contiguous_gradients": True}
_ZERO_2 = {"stage": 2, "offload_optimizer": _PINNED, "allgather_partitions": True, "allgather_bucket_size": 2e8}
_ZERO_3 = _autos("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")
_ZERO_3 |= {"stage3_max_live_parameters": 1e9, "stage3_max_reuse_distance": 1e9, "sub_group_size": 1e14}
_ZERO_3 |= {"stage3_gather_fp16_weights_on_model_save": True}

# transformers, tests/deepspeed
ZERO_2: dict[str, Any] = _FILLED_IN | {
    "bf16": _autos("enabled"),
    "zero_optimization": _ZERO_2 | _OVERLAP | {"reduce_scatter": True, "reduce_bucket_size": 2e8},
}
ZERO_3: dict[str, Any] = _FILLED_IN | {
    "zero_optimization": {"stage": 3, "offload_optimizer": _PINNED, "offload_param": _PINNED, **_OVERLAP, **_ZERO_3}
}

STEPS = 6


def losses_of(source: dict[str, Any]) -> list[float]:
    """Of a regression; micro-batches are one sample, whatever the file says of them."""
    precision = torch.float16 if source.get("fp16", {}).get("enabled", False) else torch.float32

    def body(comm: Communicator) -> list[float]:
        generator = torch.Generator().manual_seed(3)
        model = nn.Linear(3, 1)
        with torch.no_grad():
            model.weight.normal_(generator=generator)
            model.bias.zero_()
        engine, *_ = initialize(model=model, config=source, comm=comm)
        inputs = torch.randn(1, 3, generator=generator).to(precision) + comm.rank
        losses = []
        for _ in range(STEPS):
            for _ in range(engine.gradient_accumulation_steps()):
                loss = (engine(inputs).float() - 1).square().mean() / 64  # no overflow at 2^16
                engine.backward(loss)
                engine.step()
            losses.append(float(loss.detach()))
        assert engine.global_steps == STEPS
        assert engine.skipped_steps == 0
        weights = model.weight.detach().clone()
        engine.close()
        return [*losses, float(weights.sum())]

    first, second = threads.run(body, 2)
    assert first[-1] == pytest.approx(second[-1], rel=1e-3)
    return first[:-1]


@pytest.mark.filterwarnings("ignore:.*first batch of 1 sample")
@pytest.mark.parametrize("name", FILES)
def test_it_trains_as_it_is(name: str) -> None:
    before = json.dumps(FILES[name])
    config, params = load_config(FILES[name], 4), FILES[name]["optimizer"]["params"]
    assert config.train_batch_size == FILES[name]["train_batch_size"]
    assert config.optimizer.params["lr"] == params["lr"]
    assert config.optimizer.params.get("bias_correction") == params.get("bias_correction")
    assert config.gradient_clipping == FILES[name].get("gradient_clipping", params.get("max_grad_norm", 0.0))
    losses = losses_of(copy.deepcopy(FILES[name]))
    assert all(math.isfinite(loss) for loss in losses)
    assert losses[-1] < losses[0]
    assert json.dumps(FILES[name]) == before
