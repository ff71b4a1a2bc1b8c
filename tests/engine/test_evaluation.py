"""An engine without an optimizer evaluates: forward, and weights in and out; it cannot train, and says so."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from tests.engine.tiny import Tiny, batch, make_engine, make_model, settings, train
from thinwire import initialize
from thinwire.comm import threads
from thinwire.engine import CallError


def without_optimizer(stage=0, **changes):
    return {key: value for key, value in settings(stage, **changes).items() if key != "optimizer"}


def weights(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("precision", [{}, {"bf16": {"enabled": True}}])
def test_weights_of_a_training_job_are_evaluated(tmp_path, precision) -> None:
    def body(comm, stage):
        trained = make_engine(comm, settings(stage, **precision))
        train(trained, range(2))
        assert trained.save_checkpoint(tmp_path / str(stage), "two")
        engine, optimizer, loader, schedule = initialize(
            model=make_model(seed=7), comm=comm, config=without_optimizer(stage, **precision)
        )
        assert (optimizer, engine.optimizer, loader, schedule) == (None, None, None, None)
        assert engine.get_lr() == engine.get_mom() == []
        path, _ = engine.load_checkpoint(tmp_path / str(stage))
        assert path is not None
        assert (engine.global_steps, engine.loaded_checkpoint_dp_world_size) == (2, comm.size)
        engine.eval()
        trained.eval()
        inputs, _ = batch(comm.rank, 0)
        with torch.no_grad():
            assert torch.equal(engine(inputs), trained(inputs))
        for name, value in weights(trained.module).items():
            assert name == "calls" or torch.equal(engine.state_dict()[name], value)
        engine.destroy()

    for stage in (0, 2):
        threads.run(lambda comm, stage=stage: body(comm, stage), 2)


def test_what_it_saves_is_loaded_by_others(tmp_path) -> None:
    def body(comm):
        engine = initialize(model=make_model(3), comm=comm, config=without_optimizer())[0]
        expected = weights(engine.module)
        assert engine.save_checkpoint(tmp_path / "checkpoints", client_state={"of": "evaluation"})
        assert engine.save_16bit_model(tmp_path, "model.safetensors")
        other = initialize(model=make_model(4), comm=comm, config=without_optimizer(1))[0]
        assert other.load_checkpoint(tmp_path / "checkpoints")[1] == {"of": "evaluation"}
        trained = make_engine(comm, settings(1), seed=5)
        trained.load_checkpoint(tmp_path / "checkpoints", load_optimizer_states=False)
        with pytest.raises(ValueError, match="none"):
            trained.load_checkpoint(tmp_path / "checkpoints")
        for found in (other.module, trained.module):
            assert all(torch.equal(value, expected[name]) for name, value in weights(found).items())
        other.load_state_dict(make_model(6).state_dict())
        assert torch.equal(other.module.mix.weight, make_model(6).mix.weight)

    threads.run(body, 2)
    assert load_file(tmp_path / "model.safetensors").keys() <= Tiny().state_dict().keys()


def test_it_cannot_train() -> None:
    engine = initialize(model=make_model(), config=without_optimizer())[0]
    loss = engine(batch(0, 0)[0]).mean()
    for call in (lambda: engine.backward(loss), lambda: engine.scale(loss), engine.step, engine.end_backward):
        with pytest.raises(CallError, match="an engine without an optimizer, which evaluates only: to train, pass one"):
            call()
    loss.backward()
    with pytest.raises(AssertionError, match="without an optimizer"):
        engine.step()
    engine.zero_grad()
    assert all(parameter.grad is None for parameter in engine.parameters())
    with pytest.raises(AttributeError, match=r"no load_state_dict\(\)"):
        make_engine(None, settings()).load_state_dict({})


def test_rank_0_gives_its_weights_to_all() -> None:
    def body(comm):
        model = make_model(comm.rank).requires_grad_(False)
        # frozen on every rank: there is nothing to train, and nothing has to be
        engine = initialize(model=model, comm=comm, config=without_optimizer())[0]
        return engine.module.mix.weight.clone()

    first, second = threads.run(body, 2)
    assert torch.equal(first, second)
    assert torch.equal(first, make_model(0).mix.weight)
