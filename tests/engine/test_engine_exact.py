"""Lamb, Lion and Muon named in a configuration: every stage and precision, checkpoints that cross both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.engine.tiny import make_engine, make_model, settings, train
from thinwire import initialize
from thinwire.comm import Communicator, threads
from thinwire.engine import ConfigError, load_config
from thinwire.optim import Lamb, Lion, Muon

PARAMS: dict[str, dict[str, Any]] = {
    "Lamb": {"lr": 1e-2, "weight_decay": 0.1, "max_coeff": 5.0, "bias_correction": False},
    "Lion": {"lr": 1e-3, "weight_decay": 0.1},
    "Muon": {"lr": 2e-2, "momentum": 0.9, "adam_lr": 3e-3},
}
PRECISIONS = {"fp32": {}, "bf16": {"bf16": {"enabled": True}}, "fp16": {"fp16": {"enabled": True, "loss_scale": 64}}}


def config(name: str, stage: int, **changes: Any) -> dict[str, Any]:
    optimizer = {"type": name.lower(), "params": PARAMS[name]}
    return settings(stage, optimizer=optimizer, gradient_clipping=0.5, **changes)


@pytest.mark.parametrize("name", PARAMS)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_it_learns_alike_at_every_stage(name: str, precision: str) -> None:
    def rank(comm: Communicator, stage: int) -> list[float]:
        return train(make_engine(comm, config(name, stage, **PRECISIONS[precision])), range(8))

    of_stage = [threads.run(lambda comm, stage=stage: rank(comm, stage), 2) for stage in (0, 1, 2)]
    assert all(losses == of_stage[0][0] for of_rank in of_stage for losses in of_rank)
    assert of_stage[0][0][-1] < 0.9 * of_stage[0][0][0]


@pytest.mark.parametrize("name", ["Lamb", "Muon"])
def test_checkpoints_cross_stages_and_numbers_of_ranks(name: str, tmp_path: Path) -> None:
    def rank(comm: Communicator) -> list[float]:
        engine = make_engine(comm, config(name, 2, bf16={"enabled": True}))
        train(engine, range(4))
        engine.save_checkpoint(tmp_path)
        return train(engine, range(4, 7))

    expected = threads.run(rank, 2)[0]

    def again(comm: Communicator, stage: int) -> list[float]:
        engine = make_engine(comm, config(name, stage, bf16={"enabled": True}), seed=1)
        assert engine.load_checkpoint(tmp_path)[0] is not None
        return train(engine, range(4, 7))

    for stage in (0, 1):
        assert threads.run(lambda comm, stage=stage: again(comm, stage), 2)[1] == expected
    for ranks in (1, 3):
        assert len(set(map(tuple, threads.run(lambda comm: again(comm, 1), ranks)))) == 1


def test_muon_takes_matrices_by_deepspeeds_rule() -> None:
    model = make_model()
    engine, optimizer, _, _ = initialize(model=model, comm=threads.single(60.0), config=config("Muon", 1))
    matrices, rest = optimizer.param_groups
    assert {one.dim() for one in matrices["params"]} == {2}
    assert {one.dim() for one in rest["params"]} == {1}
    assert engine.get_lr() == [2e-2, 3e-3]


def test_a_schedule_steers_both_groups() -> None:
    schedule = {"type": "WarmupLR", "params": {"warmup_max_lr": [0.2, 0.1], "warmup_num_steps": 4}}
    engine = make_engine(threads.single(60.0), config("Muon", 1, scheduler=schedule))
    train(engine, range(6))
    assert engine.get_lr() == pytest.approx([0.2, 0.1])


@pytest.mark.parametrize(("name", "cls"), [("Lamb", Lamb), ("Lion", Lion), ("Muon", Muon)])
def test_one_that_is_passed_trains_as_one_that_is_named(name: str, cls: type[torch.optim.Optimizer]) -> None:
    def rank(comm: Communicator) -> None:
        model = make_model()
        given = cls(model.parameters(), **PARAMS[name])
        plain = {key: value for key, value in config(name, 1).items() if key != "optimizer"}
        engine = initialize(model=model, optimizer=given, config=plain, comm=comm)[0]
        assert train(engine, range(4)) == train(make_engine(comm, config(name, 2)), range(4))

    threads.run(rank, 2)


def test_torchs_own_muon_is_an_error_that_names_ours() -> None:
    model = nn.Linear(3, 2, bias=False)
    with pytest.raises(ValueError, match=r"pass thinwire\.optim.Muon, which has AdamW for the rest"):
        initialize(
            model=model,
            optimizer=torch.optim.Muon(model.parameters()),
            config={"train_batch_size": 2},
            comm=threads.single(60.0),
        )


@pytest.mark.parametrize(
    ("optimizer", "changes", "message"),
    [
        ({"type": "Muon"}, {"zero_optimization": {"stage": 3}}, 'stage" 3 does not go with Muon, which steps whole'),
        ({"type": "Lamb"}, {"zero_optimization": {"stage": 3}}, "use stage 0, 1 or 2, or AdamW with stage 3"),
        ({"type": "Muon", "params": {"ns_method": "gram"}}, {}, 'can only be "standard", got "gram"'),
        ({"type": "Lamb", "params": {"amsgrad": True}}, {}, "the optimizer keeps no maximum of a variance"),
        ({"type": "Lamb", "params": {"max_coef": 1.0}}, {}, 'Did you mean "max_coeff"'),
        ({"type": "Lamb", "params": {"min_coeff": 20.0}}, {}, "max_coeff must be at least min_coeff"),
        ({"type": "Lion", "params": {"betas": [0.9]}}, {}, "must be a list of 2 numbers"),
    ],
)
def test_what_a_configuration_cannot_ask_for(optimizer: dict, changes: dict, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config({"train_batch_size": 4, "optimizer": optimizer, **changes}, 1)
    assert message in str(caught.value)
