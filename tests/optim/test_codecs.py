"""What the 1-bit optimizers make of codecs of more bits: less loss, and runs that are taken up again with residuals."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from torch import Tensor

import thinwire
from tests.optim.training import make_model, train, weights
from thinwire.comm import Communicator, threads


def test_more_bits_follow_exact_averages_more_closely() -> None:
    """At a high rate, frozen early: weights come closer with every bit, and so does the loss with the second."""

    def body(comm: Communicator, codec: str) -> tuple[Tensor, float]:
        model = make_model()
        optimizer = thinwire.OneBitAdam(
            model.parameters(), lr=1e-2, freeze_step=20, block_size=512, comm=comm, codec=codec
        )
        losses = train(model, optimizer, range(70))
        return weights(model), sum(losses[-20:])

    codecs = ("none", "fp8", "int4", "stat2", "sign1")
    found = {codec: threads.run(functools.partial(body, codec=codec), 2)[0] for codec in codecs}
    wanted = found["none"][0]
    distances = {codec: float((one - wanted).norm()) for codec, (one, _) in found.items()}
    assert 5 * distances["fp8"] < distances["stat2"]
    assert 5 * distances["int4"] < distances["stat2"]
    assert 1.5 * distances["stat2"] < distances["sign1"]
    assert found["stat2"][1] <= found["sign1"][1]


@pytest.mark.parametrize(
    ("name", "codec", "options"),
    [
        ("OneBitAdam", "stat2", {"freeze_step": 10}),
        ("OneBitAdam", "fp8", {"freeze_step": 10, "nodes": [0, 1, 1]}),
        ("OneBitLamb", "int4", {"freeze_step": 10}),
        ("OneBitLion", "stat2", {}),
        ("ZeroOneAdam", "stat2", {"var_freeze_step": 10, "local_step_scaler": 5}),
    ],
)
def test_a_resumed_run_has_its_residuals(name: str, codec: str, options: dict[str, Any]) -> None:
    def body(comm: Communicator) -> tuple[Tensor, Tensor]:
        def make(seed: int) -> tuple[torch.nn.Module, Any]:
            model = make_model(seed)
            chosen = {"lr": 3e-3, "block_size": 64, "codec": codec, "comm": comm, **options}
            return model, getattr(thinwire, name)(model.parameters(), **chosen)

        model, optimizer = make(0)
        train(model, optimizer, range(25))
        saved = copy.deepcopy([model.state_dict(), optimizer.state_dict()])
        train(model, optimizer, range(25, 40))
        again, resumed = make(3)
        again.load_state_dict(saved[0])
        resumed.load_state_dict(saved[1])
        train(again, resumed, range(25, 40))
        for one in (optimizer, resumed):
            one.synchronize_weights()
        return weights(model), weights(again)

    found = threads.run(body, 3)
    for went_on, resumed in found:
        assert torch.equal(went_on, found[0][0])
        assert torch.equal(resumed, went_on)
