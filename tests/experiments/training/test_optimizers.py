"""The one place that knows optimizers: what it builds, and what it tells the engine."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import thinwire
from experiments.training.optimizers import COMPRESSED, ENGINE, EXACT, OPTIMIZERS, build, engine_section
from tests.experiments.helpers import PLAN
from thinwire.comm import threads
from thinwire.engine import load_config


def groups() -> list[dict[str, object]]:
    return [{"params": [nn.Parameter(torch.ones(65, 3))], "weight_decay": 0.25}]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_is_built_as_the_plan_says(name: str) -> None:
    optimizer = build(name, groups(), PLAN, threads.single(60.0))
    assert optimizer.param_groups[0]["lr"] == PLAN.learning_rate
    assert optimizer.param_groups[0]["weight_decay"] == 0.25
    assert optimizer.bytes_sent == 0
    if name in COMPRESSED:
        assert type(optimizer) is getattr(thinwire, COMPRESSED[name].class_name)


def test_options_come_on_top_of_the_plan() -> None:
    def warmup_bytes(wire: str) -> int:
        def rank(comm: thinwire.comm.Communicator) -> int:
            weight = nn.Parameter(torch.ones(65, 64))
            optimizer = build("onebit-adam", [{"params": [weight]}], PLAN, comm, freeze_step=9, warmup_wire=wire)
            before = optimizer.bytes_sent
            for _ in range(5):
                weight.square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            assert not optimizer.frozen
            return optimizer.bytes_sent - before

        return threads.run(rank, 2)[0]

    assert 0 < warmup_bytes("bf16") < 0.6 * warmup_bytes("fp32")


@pytest.mark.parametrize("name", ENGINE)
def test_the_engine_takes_the_section_of_what_it_knows(name: str) -> None:
    section = engine_section(name, 0.5, 7, weight_decay=0.125)
    config = load_config({"train_batch_size": 4, "optimizer": section}, 2)
    assert config.optimizer is not None
    assert config.optimizer.type == OPTIMIZERS[name].class_name
    assert config.optimizer.params["lr"] == 0.5
    assert config.optimizer.params["weight_decay"] == 0.125
    if name in COMPRESSED and COMPRESSED[name].freeze_option is not None:
        assert config.optimizer.params[COMPRESSED[name].freeze_option] == 7


def test_every_compressed_optimizer_has_a_parent() -> None:
    assert {one.parent for one in COMPRESSED.values()} <= EXACT.keys()
    assert len({one.label for one in OPTIMIZERS.values()}) == len(OPTIMIZERS)


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(ValueError, match=r"one of adamw, .*got 'sgd'"):
        build("sgd", groups(), PLAN, threads.single(60.0))
