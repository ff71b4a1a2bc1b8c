"""A configuration for the engine under a Trainer: filled in from real TrainingArguments, or one error with all that
contradicts them."""

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from transformers import TrainingArguments

from thinwire.engine import ConfigError, EngineConfig
from thinwire.hugging_face.filled_config import TrainerConfig


def autos(*names: str) -> dict[str, Any]:
    return dict.fromkeys(names, "auto")


# As Hugging Face's documentation has it, every value left to the Trainer.
_WARMUP = autos("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps")
_ZERO = autos("reduce_bucket_size", "allgather_bucket_size", "overlap_comm", "stage3_prefetch_bucket_size")
EVERY_AUTO: dict[str, Any] = {
    "fp16": autos("enabled"),
    "bf16": autos("enabled"),
    "optimizer": {"type": "AdamW", "params": autos("lr", "betas", "eps", "weight_decay")},
    "scheduler": {"type": "WarmupDecayLR", "params": _WARMUP},
    "zero_optimization": {"stage": 2, "offload_optimizer": autos("device"), **_ZERO},
    **autos("gradient_accumulation_steps", "gradient_clipping", "train_batch_size", "train_micro_batch_size_per_gpu"),
}
LEFT_OUT: dict[str, Any] = {
    "optimizer": {"type": "AdamW"},
    "scheduler": {"type": "WarmupDecayLR"},
    "zero_optimization": {"stage": 2},
}


def arguments(folder: Path, **changes: Any) -> TrainingArguments:
    settings: dict[str, Any] = {
        "output_dir": str(folder),
        "use_cpu": True,
        "report_to": "none",
        "per_device_train_batch_size": 6,
        "gradient_accumulation_steps": 2,
        "max_grad_norm": 0.7,
        "learning_rate": 3e-4,
        "adam_beta2": 0.98,
        "adam_epsilon": 1e-6,
        "weight_decay": 0.1,
        "warmup_steps": 0.1,
        "seed": 5,
    }
    return TrainingArguments(**(settings | changes))


def complete(config: dict[str, Any], folder: Path, total_steps: int | None = 50, **changes: Any) -> EngineConfig:
    return TrainerConfig(config).complete(arguments(folder, **changes), total_steps)


def problems(config: dict[str, Any], folder: Path, total_steps: int | None = 50, **changes: Any) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        complete(config, folder, total_steps, **changes)
    return caught.value.problems


@pytest.mark.parametrize("config", [EVERY_AUTO, LEFT_OUT], ids=["auto", "left out"])
def test_what_is_auto_or_left_out_is_what_the_arguments_say(config: dict[str, Any], tmp_path: Path) -> None:
    before = json.dumps(config)
    found = complete(config, tmp_path)
    assert json.dumps(config) == before
    assert (found.train_batch_size, found.train_micro_batch_size_per_gpu) == (12, 6)
    assert found.gradient_accumulation_steps == 2
    assert found.gradient_clipping == 0.7
    assert found.seed == 5
    assert not found.fp16.enabled
    assert not found.bf16.enabled
    assert found.optimizer.params == {"lr": 3e-4, "betas": (0.9, 0.98), "eps": 1e-6, "weight_decay": 0.1}
    assert found.scheduler.params == {
        "warmup_min_lr": 0.0,
        "warmup_max_lr": 3e-4,
        "warmup_num_steps": 5,
        "total_num_steps": 50,
    }


def test_precision_follows_the_arguments(tmp_path: Path) -> None:
    assert complete(EVERY_AUTO, tmp_path, bf16=True).bf16.enabled
    assert complete({"fp16": {"hysteresis": 1}}, tmp_path, fp16=True).fp16.hysteresis == 1


def test_a_file_is_read_and_named(tmp_path: Path) -> None:
    path = tmp_path / "engine.json"
    path.write_text(json.dumps(EVERY_AUTO))
    assert TrainerConfig(path).complete(arguments(tmp_path), 50) == complete(EVERY_AUTO, tmp_path)
    path.write_text('{"gradient_clipping": 3}')
    with pytest.raises(ConfigError, match=r"engine.json: \"gradient_clipping\" is 3, and max_grad_norm .* 0.7"):
        TrainerConfig(str(path)).complete(arguments(tmp_path), 50)
    nested: dict[str, Any] = {}
    for _ in range(2000):
        nested = {"optimizer": nested}
    with pytest.raises(ConfigError, match="nested more than 16 deep"):
        TrainerConfig(nested)
    with pytest.raises(TypeError, match="takes the path of a JSON file or a dict, got int"):
        TrainerConfig(3)  # type: ignore[arg-type]


def test_every_contradiction_is_told_at_once(tmp_path: Path) -> None:
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 3,
        "train_batch_size": 24,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "seed": 1,
        "dataloader_drop_last": True,
        "optimizer": {
            "type": "OneBitAdam",
            "params": {"lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0},
        },
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {"warmup_max_lr": 1e-3, "warmup_num_steps": 7, "total_num_steps": 100},
        },
        "checkpoint": {"keep_last": 2, "async_save": True},
    }
    found = problems(config, tmp_path)
    for path, argument in (
        ('"train_micro_batch_size_per_gpu" is 4', "per_device_train_batch_size of TrainingArguments 6"),
        ('"gradient_accumulation_steps" is 3', "gradient_accumulation_steps of TrainingArguments 2"),
        ('"train_batch_size" is 24', "ranks of TrainingArguments 12"),
        ('"gradient_clipping" is 1.0', "max_grad_norm of TrainingArguments 0.7"),
        ('"bf16.enabled" is true', "bf16 of TrainingArguments false"),
        ('"seed" is 1', "seed of TrainingArguments 5"),
        ('"dataloader_drop_last" is true', "dataloader_drop_last of TrainingArguments false"),
        ('"optimizer.params.lr" is 0.001', "learning_rate of TrainingArguments 0.0003"),
        ('"optimizer.params.betas" is [0.9, 0.999]', "adam_beta1, adam_beta2 of TrainingArguments [0.9, 0.98]"),
        ('"optimizer.params.eps" is 1e-08', "adam_epsilon of TrainingArguments 1e-06"),
        ('"optimizer.params.weight_decay" is 0', "weight_decay of TrainingArguments 0.1"),
        ('"scheduler.params.warmup_max_lr" is 0.001', "learning_rate of TrainingArguments 0.0003"),
        ('"scheduler.params.warmup_num_steps" is 7', "warmup_steps of TrainingArguments 5"),
        ('"scheduler.params.total_num_steps" is 100', "the number of steps that follows from them"),
        ('"checkpoint.keep_last" does not go with a Trainer', "use save_total_limit"),
        ('"checkpoint.async_save" does not go with a Trainer', "without waiting"),
    ):
        assert sum(path in one and argument in one for one in found) == 1, (path, found)
    assert len(found) == 17  # and that the three sizes do not multiply out


def test_until_the_steps_are_known_nothing_is_held_against_them(tmp_path: Path) -> None:
    config = {"scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 7, "total_num_steps": 100}}}
    assert complete(config, tmp_path, None).scheduler.params["total_num_steps"] == 100  # type: ignore[union-attr]
    assert len(problems(config, tmp_path, 50)) == 2
    assert len(problems(config, tmp_path, None, warmup_steps=5)) == 1


def test_parameters_that_an_optimizer_lacks_are_left_alone(tmp_path: Path) -> None:
    of_ours = {
        name: complete({"optimizer": {"type": name}}, tmp_path).optimizer for name in ("QHAdamW", "Muon", "Lion")
    }
    for name, optimizer in of_ours.items():
        eps = {"eps": 1e-6} if name == "QHAdamW" else {}
        assert optimizer.params == {"lr": 3e-4, "weight_decay": 0.1, **eps}  # betas are AdamW's
    lion = complete({"optimizer": {"type": "OneBitLion", "params": {"betas": [0.9, 0.95]}}}, tmp_path).optimizer
    assert lion.params == {"lr": 3e-4, "betas": (0.9, 0.95), "weight_decay": 0.1}
    sgd = complete({"optimizer": {"type": "sgd", "params": {"momentum": 0.9}}}, tmp_path).optimizer
    assert sgd.params == {"lr": 3e-4, "momentum": 0.9, "weight_decay": 0.1}
    adam = complete({"optimizer": {"type": "OneBitAdam", "params": {"freeze_step": "auto"}}}, tmp_path).optimizer
    assert adam.params["freeze_step"] == "auto"


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        ({"optimizer": {"type": "SGD", "params": {"momentum": "auto"}}}, {}, "TrainingArguments have nothing that it"),
        ({"optimizer": {"type": "OneBitLion", "params": {"betas": "auto"}}}, {}, '"optimizer.params.betas" is "auto"'),
        ({"optimizer": {"type": "SGD"}}, {"optim": "adafactor"}, 'optim="adafactor" .* name the optimizer once'),
        ({"scheduler": {"type": "WarmupLR"}}, {"lr_scheduler_type": "cosine"}, 'lr_scheduler_type="cosine"'),
        ({"scheduler": {"type": "ExponentialLR", "params": {"gamma": 0.9}}}, {}, "has no use for warmup_steps=0.1"),
        ({"zero_optimization": {"stage": "auto"}}, {}, '"zero_optimization.stage" cannot be "auto"'),
        ({"zero_optimisation": {}}, {}, 'Did you mean "zero_optimization"'),
        ({"optimizer": {"type": "OneBitAdam"}, "zero_optimization": {"stage": 3}}, {}, "3 does not go with OneBitAdam"),
        ({"pipeline": {"stages": 2}}, {}, '"pipeline.stages" is 2, and a Trainer runs a whole model'),
        ({"tensor_parallel": {"autotp_size": 2}}, {}, '"tensor_parallel.autotp_size" is 2, .*stage 3'),
    ],
)
def test_what_cannot_work(config: dict[str, Any], changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        complete(config, tmp_path, **changes)


def test_the_same_schedule_may_be_named_twice(tmp_path: Path) -> None:
    found = complete({"scheduler": {"type": "WarmupCosineLR"}}, tmp_path, lr_scheduler_type="cosine").scheduler
    assert found.params == {"warmup_num_steps": 5, "total_num_steps": 50}
