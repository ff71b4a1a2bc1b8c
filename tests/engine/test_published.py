"""Published configurations load as they are and train 20 steps on 2 ranks."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.engine.published import AS_TEXT, FILES
from thinwire import initialize
from thinwire.comm import Communicator, threads
from thinwire.engine.config import load_config

STEPS = 20


def losses_of(source: Any) -> list[float]:
    """Of a regression; micro-batches are one sample, whatever the file says of them."""
    precision = torch.float16 if fp16(source) else torch.float32

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


def fp16(source: Any) -> bool:
    return not isinstance(source, dict) or bool(source.get("fp16", {}).get("enabled", False))


@pytest.mark.filterwarnings("ignore:.*first batch of 1 sample")
@pytest.mark.parametrize("name", FILES)
def test_it_trains_as_it_is(name: str) -> None:
    before = json.dumps(FILES[name])
    losses = losses_of(copy.deepcopy(FILES[name]))
    assert all(math.isfinite(loss) for loss in losses)
    assert losses[-1] < losses[0]
    assert json.dumps(FILES[name]) == before


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("name", FILES)
def test_it_loads_as_it_is(name: str, world_size: int) -> None:
    config = load_config(FILES[name], world_size)
    assert config.train_batch_size == FILES[name]["train_batch_size"]
    assert config.optimizer is not None
    params = FILES[name]["optimizer"]["params"]
    assert config.optimizer.params["lr"] == params["lr"]
    assert config.optimizer.params.get("bias_correction") == params.get("bias_correction")
    assert config.gradient_clipping == FILES[name].get("gradient_clipping", params.get("max_grad_norm", 0.0))


@pytest.mark.filterwarnings("ignore:.*first batch of 1 sample")
def test_a_file_with_a_comma_too_many_trains_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "onebit.json"
    path.write_text(AS_TEXT)
    losses = losses_of(path)
    assert losses[-1] < losses[0]
