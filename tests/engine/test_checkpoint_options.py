"""What save_checkpoint and load_checkpoint can be asked for besides a folder."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

from tests.engine.tiny import Tiny, make_engine, make_model, settings, train
from thinwire import initialize
from thinwire.comm import threads
from thinwire.engine import CheckpointError, ConfigError
from thinwire.engine.job_checkpoints import TagError


@pytest.mark.parametrize("validation", ["FAIL", "warn", "Ignore", None])
def test_ranks_that_save_under_several_tags(tmp_path, validation) -> None:
    checkpoint = {} if validation is None else {"checkpoint": {"tag_validation": validation}}

    def body(comm):
        engine = make_engine(comm, settings(**checkpoint))
        if validation == "FAIL":
            with pytest.raises(AssertionError, match=r"rank 1 .*'tag-1', rank 0 .*'tag-0'") as caught:
                engine.save_checkpoint(tmp_path, f"tag-{comm.rank}")
            assert isinstance(caught.value, TagError)
            return None
        assert engine.save_checkpoint(tmp_path, f"tag-{comm.rank}")
        return engine.load_checkpoint(tmp_path)[0]

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = threads.run(body, 2)
    told = [str(one.message) for one in caught if "under rank 0's" in str(one.message)]
    assert len(told) == (1 if validation in ("warn", None) else 0)
    assert all(path is None or path.endswith("tag-0") for path in found)


def test_an_unknown_tag_validation() -> None:
    with pytest.raises(ConfigError, match=r"checkpoint\.tag_validation"):
        make_engine(None, settings(checkpoint={"tag_validation": "foo"}))


def test_a_tag_may_be_a_number_and_latest_may_stay(tmp_path) -> None:
    engine = make_engine(None, settings())
    engine.save_checkpoint(tmp_path, 7)
    train(engine, range(1))
    engine.save_checkpoint(tmp_path, 8, save_latest=False)
    assert (tmp_path / "latest").read_text() == "7\n"
    with pytest.warns(RuntimeWarning, match="'8' is newer"):
        assert engine.load_checkpoint(tmp_path)[0].endswith("7")
    assert engine.load_checkpoint(tmp_path, 8)[0].endswith("8")
    assert engine.global_steps == 1


@pytest.mark.parametrize("stage", [0, 2])
def test_frozen_parameters_may_be_left_out(tmp_path, stage) -> None:
    def body(comm):
        engine = make_engine(comm, settings(stage))
        train(engine, range(2))
        engine.save_checkpoint(tmp_path, "all")
        engine.save_checkpoint(tmp_path, "trained", exclude_frozen_parameters=True)
        model = make_model(1)
        with torch.no_grad():
            model.frozen.fill_(3.0)
        other, *_ = initialize(model=model, comm=comm, config=settings(stage))
        other.load_checkpoint(tmp_path, "trained")
        assert torch.equal(other.module.frozen, torch.full_like(model.frozen, 3.0))
        assert torch.equal(other.module.mix.weight, engine.module.mix.weight)
        other.load_checkpoint(tmp_path, "all")
        assert torch.equal(other.module.frozen, engine.module.frozen)
        trainable = make_model(1)
        trainable.frozen.requires_grad_(True)
        with pytest.raises(CheckpointError, match=r"'frozen'.* is not in it"):
            initialize(model=trainable, comm=comm, config=settings(stage))[0].load_checkpoint(tmp_path, "trained")

    threads.run(body, 2)
    sizes = [sum(path.stat().st_size for path in (tmp_path / tag).glob("*.safetensors")) for tag in ("all", "trained")]
    assert sizes[0] > sizes[1]


class Counting(torch.optim.Optimizer):
    """SGD that counts in numbers and in tensors of one element, which are no state of elements."""

    def __init__(self, params, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                state["number"] = state.get("number", 0) + 1
                state["one"] = state.get("one", torch.zeros(1)) + 1
                state["none"] = state.get("none", torch.tensor(0.0)) + 1
                state["moment"] = parameter.grad.clone()
                parameter.sub_(parameter.grad, alpha=group["lr"])


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_state_of_every_form_comes_back(tmp_path, stage) -> None:
    config = {key: value for key, value in settings(stage).items() if key != "optimizer"}

    def body(comm):
        engine, *_ = initialize(model=make_model(), optimizer=Counting, config=config, comm=comm)
        train(engine, range(3))
        engine.save_checkpoint(tmp_path)
        other, *_ = initialize(model=make_model(1), optimizer=Counting, config=config, comm=comm)
        other.load_checkpoint(tmp_path)
        assert train(other, range(3, 5)) == train(engine, range(3, 5))
        mine, theirs = (
            {(one.kind, one.name, one.start): one.tensor for one in each.optimizer.saved_slices()}
            for each in (engine, other)
        )
        assert mine.keys() == theirs.keys()
        assert {"scalar.number[number]", "scalar.one[1]", "scalar.none", "moment"} <= {kind for kind, *_ in mine}
        assert all(torch.equal(one, theirs[place]) and one.dtype == theirs[place].dtype for place, one in mine.items())

    threads.run(body, 2)


class Longer(Tiny):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(16, 3)


@pytest.mark.parametrize("precision", [{}, {"bf16": {"enabled": True}}])
@pytest.mark.parametrize("optimizer", [True, False])
def test_without_strictness_what_both_have_is_loaded(tmp_path, precision, optimizer) -> None:
    def body(comm):
        engine = make_engine(comm, settings(1, **precision))
        train(engine, range(2))
        engine.save_checkpoint(tmp_path)
        longer, *_ = initialize(model=Longer(), comm=comm, config=settings(1, **precision))
        before = longer.module.head.weight.clone()
        masters = {one.name: one.tensor.clone() for one in longer.optimizer.saved_slices() if one.kind == "master"}
        with pytest.raises(CheckpointError, match=r"'head\.weight'"):
            longer.load_checkpoint(tmp_path)
        longer.load_checkpoint(tmp_path, load_module_strict=False, load_optimizer_states=optimizer)
        assert torch.equal(longer.module.head.weight, before)
        for one in longer.optimizer.saved_slices():
            if one.kind == "master" and one.name.startswith("head"):
                assert torch.equal(one.tensor, masters[one.name])
        assert torch.equal(longer.module.layers[1].up.weight, engine.module.layers[1].up.weight)
        # And the other way round: what the model lacks is passed over.
        longer.save_checkpoint(tmp_path / "longer")
        back = make_engine(comm, settings(1, **precision), seed=2)
        back.load_checkpoint(tmp_path / "longer", load_module_strict=False, load_optimizer_states=False)
        assert torch.equal(back.module.mix.weight, engine.module.mix.weight)
        assert train(back, [2])

    threads.run(body, 2)


@pytest.mark.parametrize("precision", [{}, {"bf16": {"enabled": True}}])
def test_a_function_loads_the_weights(tmp_path, precision) -> None:
    def load(src, dst) -> None:
        assert src.keys() >= {"mix.weight", "unmix.weight", "calls"}
        for name, parameter in dst.named_parameters():
            parameter.copy_(src[name] * 2)

    def body(comm):
        engine = make_engine(comm, settings(2, **precision))
        train(engine, range(2))
        engine.save_checkpoint(tmp_path)
        other = make_engine(comm, settings(2, **precision), seed=1)
        other.load_checkpoint(tmp_path, custom_load_fn=load)
        for name, parameter in other.module.named_parameters():
            assert torch.equal(parameter, engine.module.get_parameter(name) * 2)
        assert other.global_steps == 2
        # The master weights follow what was written.
        before = other.module.mix.weight.clone()
        other.optimizer.param_groups[0]["lr"] = 0.0
        train(other, [2])
        assert torch.equal(other.module.mix.weight, before)

    threads.run(body, 2)
