"""Trainer and Accelerate as they are installed, with an optimizer and with the engine: two real processes for what
ranks do together, one for what a Trainer that drives the engine refuses."""

import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("accelerate")

import torch
import transformers
from torch.utils.data import DataLoader

from tests.hugging_face.tiny import BATCH, KEEP_BEST, RATE, logged, make_arguments, make_model, make_samples
from tests.optim.diloco.tower import meeting, together
from tests.refusing import refused
from thinwire import ElasticSampler, OneBitAdam, initialize
from thinwire.comm import threads
from thinwire.engine import CheckpointError, ConfigError, Engine
from thinwire.engine.optimizer_checkpoints import load_optimizer
from thinwire.hugging_face import Trainer, TrainerMixin, adapt
from thinwire.hugging_face.acceleration import check_optimizer
from thinwire.hugging_face.engine_training import NOTHING_TO_GO_ON_FROM, TAG
from thinwire.hugging_face.mixin import _parameter_groups

__all__ = ["meeting"]

ONE_BIT = {"optimizer": {"type": "OneBitAdam"}}


@pytest.mark.programs
@pytest.mark.parametrize("program", ["program", "engine_program"])
def test_on_two_processes(jobs, tmp_path: Path, program: str) -> None:
    """One launch for all that a program checks, as imports take longest."""
    done = jobs.torchrun(2, "-m", f"tests.hugging_face.{program}", str(tmp_path), HF_HUB_OFFLINE="1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all held with 2 ranks" in done.stdout


def make(folder: Path, config: Any = ONE_BIT, options: dict[str, Any] | None = None, **changes: Any) -> Trainer:
    arguments = make_arguments(folder, **{"lr_scheduler_type": "linear", **changes})
    return Trainer(make_model(), arguments, train_dataset=make_samples(32), thinwire_config=config, **(options or {}))


PARAMS: dict[str, dict[str, Any]] = {
    "DiLoCo": {"every": 4, "fragments": 1, "overlap": 0},
    "OneBitAdam": {"freeze_step": 4},
    "OneBitMuon": {},
    "AdamW": {},
}


def elastic(name: str, job: str = "job") -> dict[str, Any]:
    params = PARAMS[name] | {"elastic": {"workers": 1, "address": "here:1", "job": job}}
    return {"optimizer": {"type": name, "params": params}}


@pytest.mark.parametrize("name", PARAMS)
def test_it_joins_an_elastic_job_late_and_ends_with_it(tmp_path: Path, name: str) -> None:
    """The other worker trains with the engine alone; who joins is told to resume, as whoever is started again. Then
    what the Trainer saved goes on as a new job."""
    come, rates, last = threading.Event(), [], 12
    saves = {"save_strategy": "steps", "max_steps": 2, "save_steps": 2}
    make(tmp_path / "first", elastic(name, "first"), **saves).train()

    def other() -> Any:
        trainer = make(tmp_path / "other", elastic(name), max_steps=last)
        settings = trainer._engine_training.config.complete(trainer.args, last)
        groups, comm = _parameter_groups(trainer), threads.single(60.0)
        engine: Any = initialize(model=trainer.model, model_parameters=groups, config=settings, comm=comm)[0]
        batches = iter(DataLoader(make_samples(32), BATCH, sampler=ElasticSampler(engine.optimizer, 32, seed=42)))
        home = engine.optimizer._home
        membership = home.membership if name == "DiLoCo" else home.workers.membership
        while engine.global_steps < last:
            for group in engine.optimizer.param_groups:  # the Trainer's schedule
                group |= {"lr": RATE * ((last - engine.global_steps) / last), "initial_lr": RATE}
            if engine.global_steps == 6:
                come.set()
                while not membership.wanted:
                    time.sleep(0.01)
            engine.backward(engine(**next(batches)).loss)
            engine.step()
        engine.optimizer.synchronize_weights()
        return engine.module.state_dict()

    class Records(transformers.TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            rates.append((state.global_step, given["optimizer"].param_groups[0]["lr"]))

    def joins() -> Any:
        assert come.wait(60)
        options = {"callbacks": [Records()]}
        trainer = make(tmp_path / "late", elastic(name), options, max_steps=last, save_strategy="steps", save_steps=10)
        trainer.train(resume_from_checkpoint=str(tmp_path / "first" / "checkpoint-2"))
        assert trainer.state.global_step == last
        return trainer.model.state_dict()

    alone, late = together([other, joins])
    begin = rates[0][0]
    assert begin == 8 if name == "DiLoCo" else 6 < begin < last
    assert rates == [(step, pytest.approx(RATE * (1 - step / last))) for step in range(begin, last)]
    assert all(torch.equal(one, late[name]) for name, one in alone.items())

    trainer = make(tmp_path / "again", elastic(name, "again"), {"callbacks": [Records()]}, max_steps=14)
    rates.clear()
    trainer.train(resume_from_checkpoint=str(tmp_path / "late" / "checkpoint-10"))
    assert [step for step, _ in rates] == [10, 11, 12, 13]


def make_plain(folder: Path, optimizer: Any = (OneBitAdam, {}), **changes: Any) -> Trainer:
    return make(folder, None, {"optimizer_cls_and_kwargs": optimizer}, **changes)


def test_what_an_optimizer_without_an_engine_refuses(tmp_path: Path) -> None:
    one_batch = {"gradient_accumulation_kwargs": {"sync_each_batch": True}}
    for changes, message in (
        ({"auto_find_batch_size": True}, "set per_device_train_batch_size"),
        ({"fsdp": True}, "fsdp divides the model"),
        ({"accelerator_config": one_batch}, "remove it from gradient_accumulation_kwargs"),
    ):
        refused(ValueError, message, make_plain, tmp_path, **changes)
    for given, message in (
        ((torch.optim.AdamW, {}), r"was given AdamW.*pass optimizer_cls_and_kwargs="),
        (None, r"optimizer_cls_and_kwargs=\(thinwire.OneBitAdam"),
        ((OneBitAdam, {"max_norm": 0.5}), r"max_grad_norm is 1.0 .* max_norm of OneBitAdam is 0.5: give both the same"),
    ):
        refused((TypeError, ValueError), message, make_plain(tmp_path, given).train)
    with pytest.raises(TypeError, match=r"Wrong names TrainerMixin after a Trainer"):
        type("Wrong", (transformers.Trainer, TrainerMixin), {})
    optimizer, late = OneBitAdam(make_model().parameters(), stage=2), OneBitAdam(make_model().parameters())
    late.comes_and_goes = True
    for one, ranks, fp16, message in (
        (optimizer, 1, True, "use stage=1, or bf16=True"),
        (optimizer, 2, False, "start the job with torchrun or accelerate launch"),
        (late, 1, False, "the Trainer counts steps and saves by itself"),
    ):
        with pytest.raises(ValueError, match=message):
            check_optimizer(one, SimpleNamespace(world_size=ranks, max_grad_norm=0.0, fp16=fp16))
    with pytest.raises(ValueError, match="load_best_model_at_end does not go with elastic"):
        make(tmp_path, elastic("DiLoCo"), **KEEP_BEST)
    with pytest.raises(CheckpointError, match=r"train without resume_from_checkpoint"):
        load_optimizer(optimizer, tmp_path, TAG, NOTHING_TO_GO_ON_FROM)


@pytest.mark.parametrize("engine", [False, True])
@pytest.mark.parametrize(
    ("warmup", "message"),
    [
        ({"warmup_steps": 4}, r"freeze_step=3 .* warmup, which rises until step 5.* Give freeze_step=5 or later"),
        ({"warmup_steps": 0.2}, r"freeze_step=3 .* warmup, which rises until step 5"),
        ({"warmup_steps": 1}, r"freeze_step=3 .* too few of 20 steps.* Give freeze_step=4 or later"),
    ],
)
def test_a_freeze_that_comes_too_early_is_refused_before_the_first_step(engine, warmup, message, tmp_path) -> None:
    options = {"freeze_step": 3}
    changes = warmup | {"max_steps": 20}
    if engine:
        trainer = make(tmp_path, {"optimizer": {"type": "OneBitAdam", "params": options}}, **changes)
    else:
        trainer = make_plain(tmp_path, (OneBitAdam, options), **changes)
    before = {name: one.clone() for name, one in trainer.model.state_dict().items()}
    refused(ValueError, message, trainer.train)
    assert trainer.state.global_step == 0
    assert all(torch.equal(one, before[name]) for name, one in trainer.model.state_dict().items())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"torch_compile": True}, r"call model.compile\(\) before"),
        ({"bf16_full_eval": True}, "the engine evaluates in the precision it trains in; use bf16"),
        ({"save_on_each_node": True}, "whole weights are on rank 0 alone"),
        ({"fsdp": True}, "fsdp divides the model"),
        ({"auto_find_batch_size": True}, "set per_device_train_batch_size"),
        (KEEP_BEST | {"save_only_model": True}, "from which load_best_model_at_end loads"),
        ({"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "steps"}, "needs a metric"),
    ],
)
def test_arguments_that_an_engine_cannot_keep(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    refused(ValueError, message, make, tmp_path, **changes)


def test_layers_are_recomputed_once(tmp_path: Path) -> None:
    config = ONE_BIT | {"activation_checkpointing": {"modules": ["BertLayer"]}}
    refused(ValueError, "would both run layers again", make, tmp_path, config, activation_checkpointing=True)


def test_two_optimizers_or_schedules_are_refused(tmp_path: Path) -> None:
    model = make_model()
    plain = torch.optim.AdamW(model.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(plain, 2)
    with pytest.raises(ValueError, match="there are two optimizers"):
        make(tmp_path, options={"optimizer_cls_and_kwargs": (torch.optim.SGD, {})})
    refused(ValueError, "there are two optimizers", make, tmp_path, options={"optimizers": (plain, None)})
    with pytest.raises(ValueError, match="there are two schedules"):
        make(tmp_path, {"scheduler": {"type": "WarmupLR"}}, {"optimizers": (plain, schedule)})
    with pytest.raises(ValueError, match='OneBitAdam would too: name it in the configuration\'s "optimizer" section'):
        make(tmp_path, {}, {"optimizer_cls_and_kwargs": (OneBitAdam, {})})


def test_what_is_wrong_with_the_configuration_is_told_at_construction(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r'"gradient_clipping" is 3(.|\n)*"optimizer.params.lr" is 0.5'):
        make(tmp_path, {"gradient_clipping": 3, "optimizer": {"type": "SGD", "params": {"lr": 0.5}}})
    trainer = transformers.Trainer(make_model(), make_arguments(tmp_path), train_dataset=make_samples(8))
    with pytest.raises(ConfigError, match="does not go with OneBitAdam"):
        adapt(trainer, thinwire_config=ONE_BIT | {"zero_optimization": {"stage": 3}})
    refused(TypeError, "pass thinwire_config where it is built", adapt, make(tmp_path), thinwire_config=ONE_BIT)


def test_steps_that_only_the_data_tell_are_held_against_the_file(tmp_path: Path) -> None:
    config = {"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 100, "warmup_num_steps": "auto"}}}
    trainer = make(tmp_path, config, num_train_epochs=2, max_steps=-1)
    refused(ConfigError, r'"scheduler.params.total_num_steps" is 100, .* 16', trainer.train)


def test_fp16_skips_and_the_schedule_waits(tmp_path: Path) -> None:
    """Scaled and stepped by the engine, on a CPU too, where Accelerate has no scaler."""
    config = ONE_BIT | {"fp16": {"initial_scale_power": 40, "hysteresis": 1}}
    trainer = make(tmp_path, config, fp16=True, max_steps=30)
    trainer.train()
    engine = trainer.model_wrapped
    assert isinstance(engine, Engine)
    assert 0 < engine.skipped_steps < 30
    rates = logged(trainer, "learning_rate")
    assert rates[0] == rates[engine.skipped_steps] > rates[engine.skipped_steps + 1]
    assert trainer.evaluate(make_samples(4))["eval_loss"] > 0


def test_a_given_optimizer_and_schedule_are_taken_over(tmp_path: Path) -> None:
    model = make_model()
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(plain, 2, gamma=0.5)
    given = {"train_dataset": make_samples(32), "thinwire_config": {"zero_optimization": {"stage": 1}}}
    trainer = Trainer(model, make_arguments(tmp_path, max_steps=5), optimizers=(plain, schedule), **given)
    before = trainer.evaluate(make_samples(8))["eval_loss"]
    trainer.train()
    rates = logged(trainer, "learning_rate")
    assert rates == pytest.approx([0.1, 0.1, 0.05, 0.05, 0.025])
    assert trainer.evaluate(make_samples(8))["eval_loss"] != before


def test_a_model_init_gives_every_training_its_own_engine(tmp_path: Path) -> None:
    arguments = make_arguments(tmp_path, max_steps=2)
    trainer = Trainer(
        None, arguments, train_dataset=make_samples(8), model_init=lambda: make_model(), thinwire_config=ONE_BIT
    )
    losses = [trainer.train().training_loss for _ in range(2)]
    assert losses[0] == losses[1]
