"""Everything that initialize takes, in every form that it takes it, and what it refuses, on every rank."""

import argparse
import json

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from tests.engine.tiny import MICRO, equal, loss_of, make_engine, make_model, settings, speaking, train
from tests.launching import on_threads
from tests.refusing import refused
from thinwire import initialize
from thinwire.engine import ConfigError
from thinwire.engine.job import agree_on_model
from thinwire.engine.model import first_dimension


def test_a_file_and_the_command_line(tmp_path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(settings()))
    for given in ({"config": path}, {"config": str(path)}, {"args": argparse.Namespace(deepspeed_config=str(path))}):
        assert initialize(model=make_model(), **given)[0].train_batch_size() == MICRO
    args = argparse.Namespace(deepspeed_config=None, thinwire_config=path)
    assert initialize(args, make_model())[0].train_batch_size() == MICRO
    refused(ConfigError, "two configurations", initialize, args, make_model(), config=settings())
    refused(ConfigError, "there is none", initialize, model=make_model())


def sgd(model):
    decayed, rest = list(model.layers.parameters()), [model.mix.weight, model.unmix.bias]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "lr": 0.005}]
    return torch.optim.SGD(groups, lr=0.01, momentum=0.9)


def plain_losses(steps: int, scheduler=None) -> list[float]:
    model = make_model()
    optimizer = sgd(model)
    schedule = scheduler(optimizer) if scheduler else None
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model, 0, step)
        loss.backward()
        optimizer.step()
        if schedule:
            schedule.step()
        losses.append(loss.item())
    return losses


def decaying(optimizer):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.8**step)


@pytest.mark.filterwarnings("error:.*lr_scheduler.*")
@pytest.mark.parametrize(
    ("form", "schedule_form", "named"),
    [("instance", None, 0), ("instance", "function", 0), ("instance", "instance", 1), ("function", "function", 1)],
)
def test_the_users_optimizer_and_schedule(form, schedule_form, named, capsys) -> None:
    """As in DeepSpeed: what a script passes wins over what its file names, if it does, and that is said once."""
    model = make_model()
    optimizer = sgd(model) if form == "instance" else lambda parameters: sgd(model)
    schedule = {None: None, "function": decaying}.get(schedule_form)
    if schedule_form == "instance":
        schedule = decaying(optimizer)
    file = {"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.5}}} if named else {"optimizer": None}
    given = {"model": model, "optimizer": optimizer, "lr_scheduler": schedule, "comm": speaking()}
    engine, sharded, loader, returned = initialize(**given, config=settings(gradient_clipping=0, **file))
    assert loader is None
    assert engine.lr_scheduler is returned
    assert (returned is None) == (schedule_form is None)
    assert engine.optimizer is sharded
    assert engine.get_lr() == [0.01, 0.005]
    losses = train(engine, range(5))
    expected = plain_losses(5, decaying if schedule_form else None)
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=1e-5, atol=0)
    told = capsys.readouterr().err
    for section, name in (("optimizer", "AdamW"), ("scheduler", "WarmupLR")):
        assert told.count(f'is used in place of "{name}" in the configuration\'s "{section}" section') == named


def test_an_optimizer_of_the_users_goes_with_a_schedule_of_the_file() -> None:
    model = make_model()
    config = settings(scheduler={"type": "WarmupLR", "params": {"warmup_max_lr": 0.5}})
    engine, _, _, schedule = initialize(model=model, optimizer=sgd(model), config=config)
    assert engine.lr_scheduler is schedule
    assert type(schedule).__name__ == "WarmupLR"


def test_keys_without_effect_are_said_in_one_line(capsys) -> None:
    config = settings(dump_state=True, zero_allow_untested_optimizer=True)
    initialize(model=make_model(), config=config, comm=speaking())
    lines = [line for line in capsys.readouterr().err.splitlines() if "configuration" in line]
    assert len(lines) == 1
    assert "dump_state, zero_allow_untested_optimizer" in lines[0]
    assert '"gradient_clipping" is not set' in lines[0]
    quiet = speaking()
    quiet.speaks = False
    initialize(model=make_model(), config=config, comm=quiet)
    assert not capsys.readouterr().err


def test_parameters_to_train() -> None:
    model = make_model()
    before = model.mix.weight.clone()
    groups = [{"params": list(model.layers.parameters()), "lr": 0.05}]
    engine, *_ = initialize(model=model, model_parameters=groups, config=settings())
    assert engine.get_lr() == [0.05]
    train(engine, range(2))
    assert torch.equal(model.mix.weight, before)
    assert model.mix.weight.grad is None


@pytest.mark.parametrize("held", ["trainable", "all"])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_model_parameters_may_name_frozen_ones_that_the_optimizer_does_not_hold(stage, held) -> None:
    """As with adapters: the rest of the model is frozen, and the optimizer is built on what trains."""

    def losses(**given):
        model = make_model()
        model.requires_grad_(False)
        model.layers.requires_grad_(True)
        every = [one for one in model.parameters() if held == "all" or one.requires_grad]
        optimizer = torch.optim.SGD(every, lr=0.01)
        passed = {name: choose(model) for name, choose in given.items()}
        engine, *_ = initialize(model=model, optimizer=optimizer, config=settings(stage, optimizer=None), **passed)
        return train(engine, range(3))

    expected = losses()
    assert losses(model_parameters=lambda model: model.parameters()) == expected
    assert losses(model_parameters=lambda model: list(model.layers.parameters())) == expected
    assert losses(model_parameters=lambda model: [dict(params=model.parameters())]) == expected
    assert losses(model_parameters=lambda model: model.named_parameters()) == expected
    with pytest.raises(ValueError, match=r"lacks 0 of the 4 that require a gradient, and has 8 others"):
        losses(model_parameters=lambda model: model.layers[0].parameters())


@pytest.mark.parametrize("stage", [0, 2])
def test_an_optimizer_over_a_part_of_model_parameters(stage, capsys) -> None:
    """It says what is trained; that it passes over some is said once."""
    model = make_model()
    mixing = model.mix.weight.detach().clone()
    groups = [{"params": list(model.layers.parameters()), "weight_decay": 0.1}, {"params": []}]
    optimizer = torch.optim.SGD(groups, lr=0.01)
    given = {"model": model, "optimizer": optimizer, "model_parameters": model.parameters()}
    engine, *_ = initialize(**given, config=settings(stage, optimizer=None), comm=speaking())
    left_out = sum(one.requires_grad for one in model.parameters()) - len(groups[0]["params"])
    lines = capsys.readouterr().err.splitlines()
    assert sum(f"{left_out} of model_parameters are not trained" in line for line in lines) == 1
    train(engine, range(3))
    assert torch.equal(model.mix.weight, mixing)


def test_adagrads_first_state_is_not_a_used_one() -> None:
    model = make_model()
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1, initial_accumulator_value=0.3)
    engine, *_ = initialize(model=model, optimizer=optimizer, config=settings(optimizer=None))
    assert train(engine, range(2))


WARMUP, LEYER = {"type": "WarmupLR"}, {"modules": ["Leyer"]}


def warming(schedule, **params):
    optimizer = {"type": "OneBitAdam", "params": {"lr": 1e-3, "freeze_step": 60}}
    return {"config": settings(optimizer=optimizer, scheduler={"type": schedule, "params": params})}


def own(optimizer):
    return {"config": settings(optimizer=None), "optimizer": optimizer}


def stepped(model):
    optimizer = torch.optim.AdamW(model.parameters())
    loss_of(model, 0, 0).backward()
    optimizer.step()
    return optimizer


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        (lambda _: {"config": settings(optimizer=None, scheduler=WARMUP)}, ValueError, "a schedule and no optimizer"),
        (lambda model: {"mpu": object()}, ValueError, "mpu is an object of another library"),
        (lambda model: {"mesh_param": (1, 2)}, ValueError, "mesh_param is an object"),
        (lambda model: {"distributed_port": "29500"}, TypeError, "distributed_port is a number or None, not '29500'"),
        (lambda model: {"config_params": settings()}, ValueError, "`config_params`, its old name"),
        (lambda model: own(stepped(model)), ValueError, "stepped already"),
        (lambda model: own(torch.optim.LBFGS(model.parameters())), ValueError, "cannot be sharded.*LBFGS"),
        (lambda model: own(3), TypeError, "must be a torch.optim.Optimizer"),
        (lambda model: own(lambda parameters: None), TypeError, "returned None"),
        (
            lambda model: own(torch.optim.Muon([model.mix.weight])),
            ValueError,
            r"pass thinwire\.optim.Muon, which has AdamW",
        ),
        (
            lambda model: own(torch.optim.SGD(model.parameters())) | {"model_parameters": [model.mix.weight]},
            ValueError,
            "lacks 0 of the 1 that require a gradient, and has 15 others",
        ),
        (lambda model: {"model_parameters": nn.Linear(2, 2).parameters()}, ValueError, "2 of 2 parameters"),
        (lambda model: {"lr_scheduler": decaying(sgd(model))}, ValueError, "built on another optimizer"),
        (lambda model: {"lr_scheduler": 3}, TypeError, "got int"),
        (lambda model: {"lr_scheduler": lambda optimizer: None}, TypeError, "returned None"),
        (lambda model: {"lr_scheduler": ReduceLROnPlateau}, ValueError, "ReduceLROnPlateau cannot be stepped"),
        (lambda model: {"model": None}, TypeError, "must be a torch.nn.Module, got NoneType"),
        (lambda model: {"model": nn.ReLU()}, ValueError, "ReLU has no parameters"),
        (lambda model: {"model": model.double()}, TypeError, "'mix.weight'|'nothing'.*float64"),
        (lambda model: {"model": nn.Linear(2, 2, dtype=torch.complex64)}, TypeError, "'weight'.*complex64"),
        (lambda model: {"model": nn.Linear(2, 2, device="meta")}, ValueError, "'weight' is on the meta device"),
        (lambda model: {"model": model.requires_grad_(False)}, ValueError, "no parameter requires a gradient"),
        (lambda model: {"config": settings(train_batch_size=7)}, ConfigError, "train_batch_size 7"),
        (lambda model: {"training_data": []}, ValueError, "dataset is empty"),
        (lambda _: {"config": settings(activation_checkpointing=LEYER)}, ValueError, "'Leyer' is neither"),
        (lambda _: warming("WarmupLR", warmup_num_steps=90), ValueError, "freeze_step=60 .* rises until step 91"),
        (lambda _: warming("OneCycle", cycle_min_lr=0, cycle_max_lr=1), ValueError, "=60 .*Give freeze_step=[0-9]+ or"),
        (lambda _: warming("WarmupCosineLR", warmup_num_steps=9, total_num_steps=400), ValueError, "Give .*=80 or"),
        (lambda _: warming("LinearLR", start_factor=0.1, total_iters=90), ValueError, "rises until step 91"),
        (lambda model: {"config": settings(3)}, ValueError, "needs processes, and these ranks are threads"),
    ],
)
@on_threads(2)
def test_bad_input(comm, given, error, message) -> None:
    model = make_model()
    refused(error, message, initialize, **{"model": model, "config": settings(), "comm": comm} | given(model))
    comm.barrier()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (lambda: {"config": settings(gradient_clipping=1.0)}, '"gradient_clipping" is 0.0 on rank 0 and 1.0 on rank 1'),
        (lambda: {"config": {"nonsense": 1}}, "rank 1 could not load its configuration|nonsense"),
        (lambda: {"model": nn.Linear(3, 2)}, "ranks have different models"),
        (lambda: {"model": make_model().requires_grad_(False)}, 'requires_grad=True" on rank 0 and .*False" on rank 1'),
        (lambda: {"model": nn.Linear(2, 2).double()}, "rank 1 could not train this model|float64"),
        (lambda: {"lr_scheduler": 3}, "rank 1 could not build its optimizer|got int"),
    ],
)
@on_threads(3)
def test_ranks_that_differ(comm, given, message) -> None:
    mine = {"model": make_model(), "config": settings(), "comm": comm}
    refused((ValueError, TypeError), message, initialize, **mine | (given() if comm.rank == 1 else {}))
    comm.barrier()


@on_threads(2)
def test_a_model_that_has_values_on_some_ranks_alone_is_named(comm) -> None:
    with pytest.raises(ValueError, match=r'"weight" is "[^"]*True" on rank 0 and "[^"]*, without values" on rank 1'):
        agree_on_model(comm, nn.Linear(2, 2, device="meta" if comm.rank else None))


@on_threads(2)
def test_every_rank_gets_rank_0s_values(comm) -> None:
    model = make_model(seed=comm.rank)
    model.calls += comm.rank
    engine, *_ = initialize(model=model, config=settings(), comm=comm)
    assert equal(engine.module.state_dict(), make_model().state_dict())


def test_a_batch_of_another_size_is_a_warning() -> None:
    assert first_dimension((torch.tensor(1.0), {"a": ["x", torch.ones(4, 2)]}, torch.ones(3))) == 4
    assert first_dimension(({}, [], "text", torch.tensor(1))) is None
    engine = make_engine(None, settings())
    engine.eval()
    engine(torch.ones(1, 16))
    engine.train()
    with pytest.warns(RuntimeWarning, match="first batch of 2 samples, and train_micro_batch_size_per_gpu is 6"):
        engine(torch.ones(2, 16))
    engine(torch.ones(3, 16))


def test_recomputed_layers_give_the_same_gradients() -> None:
    recomputing = settings(activation_checkpointing={"modules": ["Layer"], "cpu_checkpointing": True})
    assert train(make_engine(None, recomputing), range(4)) == train(make_engine(None, settings()), range(4))
