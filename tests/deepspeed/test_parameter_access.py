"""Weights, gradients and state by parameter, and gathered weights: at stages 0 to 2 on threads, at stage 3, where
models are built shard by shard too, on real processes."""

import pickle

import pytest
import torch
from torch import nn

from tests.deepspeed import parameter_access as behaviours
from tests.engine.tiny import loss_of, make_engine, settings, train
from tests.launching import on_threads
from tests.refusing import refused
from thinwire.comm import threads
from thinwire.deepspeed import utils, zero
from thinwire.deepspeed.parameters.sharded import mark_configured
from thinwire.engine import NonFiniteError
from thinwire.engine.config.models import LeafModuleConfig

FP32, BF16, FP16 = {}, {"bf16": {"enabled": True}}, {"fp16": {"enabled": True, "initial_scale_power": 8}}


SUM, PRESCALED, PREDIVIDED = (
    {"gradient_allreduce_op": "sum"},
    {"prescale_gradients": True},
    {"gradient_predivide_factor": 3.0},
)
SHOWN = [
    *((stage, SUM | precision, ranks) for stage, precision, ranks in ((0, FP16, 2), (1, FP32, 3), (2, FP32, 2))),
    *((stage, {"own": True}, 2) for stage in (0, 1, 2)),
    *((stage, {"own": True} | SUM | PREDIVIDED, 2) for stage in (0, 2)),
    *((stage, SUM | PRESCALED, 2) for stage in (0, 1)),
]
SET = [(0, FP32, 3), (1, FP32, 1), (1, FP32, 4), (2, FP32, 2), (0, BF16, 2), (1, BF16, 3), (2, FP16, 2)]


@pytest.mark.parametrize(
    ("body", "stage", "precision", "ranks"),
    [
        *((behaviours.what_was_set_is_what_is_stepped, *one) for one in SET),
        *((behaviours.what_is_shown_is_what_is_stepped, *one) for one in SHOWN),
        *((behaviours.gradients_are_averages, stage, FP32, 2) for stage in (0, 1, 2)),
        *((behaviours.bad_values, stage, FP32, 2) for stage in (0, 1, 2)),
        *((behaviours.one_rank_changes_gathered_weights, *one, 3) for one in ((0, BF16), (1, FP32), (2, BF16))),
    ],
    ids=lambda one: getattr(one, "__name__", None),
)
def test_stages_0_to_2(body, stage, precision, ranks) -> None:
    threads.run(lambda comm: body(comm, stage, **precision), ranks)


@pytest.mark.launch
@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.programs), 1])
def test_stage_3(jobs, ranks: int) -> None:
    program = ("-m", "tests.deepspeed.stage3_program")
    done = jobs.alone(*program) if ranks == 1 else jobs.torchrun(ranks, *program)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"all held on {'single' if ranks == 1 else 'gloo'} with {ranks} ranks" in done.stdout


@on_threads(2)
def test_models_are_not_built_by_threads(comm) -> None:
    refused(ValueError, "stage 3 needs processes, and these ranks are threads", zero.Init)


@on_threads(2)
def test_weights_that_are_on_their_way(comm) -> None:
    found = {}
    for overlap in (False, True):
        engine = make_engine(comm, settings(1, zero_optimization={"stage": 1, "overlap_comm": overlap}))
        weight = engine.module.mix.weight
        train(engine, range(3))
        found[overlap] = utils.safe_get_full_fp32_param(weight)
    assert torch.equal(found[False], found[True])


def test_below_stage_3_there_are_no_local_forms() -> None:
    engine = make_engine(None, settings(1))
    with pytest.raises(ValueError, match="the local forms are for parameters of stage 3"):
        utils.safe_get_local_fp32_param(engine.module.mix.weight)


@pytest.mark.filterwarnings("ignore:step 2 was skipped:RuntimeWarning")
def test_a_gradient_that_was_set_and_is_not_finite_skips_the_step() -> None:
    def body(comm, optimizer):
        engine = make_engine(comm, settings(1 if optimizer is None else 0, **({} if optimizer is None else optimizer)))
        train(engine, range(1))
        weight = engine.module.mix.weight
        engine.backward(loss_of(engine, comm.rank, 1))
        before = utils.safe_get_full_fp32_param(weight)
        utils.safe_set_full_grad(weight, torch.full((16, 16), float("inf")))
        refused(NonFiniteError, "every rank's loss was finite, but the averaged gradient is not", engine.step)
        assert torch.equal(utils.safe_get_full_fp32_param(weight), before)
        assert torch.tensor(train(engine, range(2, 4))).isfinite().all()

    onebit = {"optimizer": {"type": "OneBitAdam", "params": {"lr": 1e-3, "freeze_step": 50}}}
    for optimizer in (None, onebit):
        threads.run(lambda comm, optimizer=optimizer: body(comm, optimizer), 2)


ONEBIT = {
    "OneBitAdam": {"lr": 1e-2, "freeze_step": 4},
    "OneBitLamb": {"lr": 1e-2, "freeze_step": 4},
    "ZeroOneAdam": {"lr": 1e-2, "var_freeze_step": 4, "local_step_scaler": 3, "local_step_clipper": 2},
    "OneBitLion": {"lr": 1e-3},
}


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("name", ONEBIT)
@on_threads(2)
def test_one_bit_optimizers(comm, name, stage) -> None:
    optimizer = {"type": name, "params": ONEBIT[name]}
    bf16 = {"bf16": {"enabled": True}} if stage else {}
    engine = make_engine(comm, settings(stage, optimizer=optimizer, **bf16))
    weight = engine.module.mix.weight
    warms_up = name in ("OneBitAdam", "OneBitLamb")
    if name != "OneBitLion":
        engine.backward(loss_of(engine, comm.rank, 0))
        average = utils.safe_get_full_grad(weight)
        of_ranks = average.clone()
        comm.broadcast(of_ranks)
        assert torch.equal(of_ranks, average)
        assert average.abs().sum() > 0
        utils.safe_set_full_grad(weight, torch.zeros(16, 16))
        engine.step()
        # What was set is what was stepped.
        assert torch.equal(utils.safe_get_full_optimizer_state(weight, "exp_avg"), torch.zeros(16, 16))
    if warms_up:
        moments = behaviours.values(weight, 3)
        utils.safe_set_full_optimizer_state(weight, moments, "exp_avg")
        assert torch.equal(utils.safe_get_full_optimizer_state(weight, "exp_avg"), moments)
    train(engine, range(1, 8))
    if name == "OneBitLion":
        assert utils.safe_get_full_optimizer_state(weight, "exp_avg").abs().sum() > 0
    else:
        with pytest.raises(RuntimeError, match=r"frozen since step|cannot be set"):
            utils.safe_set_full_optimizer_state(weight, torch.ones(16, 16), "exp_avg")
    if not engine.optimizer.in_sync:
        refused(RuntimeError, "between two syncs", utils.safe_get_full_fp32_param, weight)
        engine.optimizer.synchronize_weights()
    value = behaviours.values(weight, 4)
    utils.safe_set_full_fp32_param(weight, value)
    assert torch.equal(utils.safe_get_full_fp32_param(weight), value)
    assert torch.equal(weight, value.to(weight.dtype))
    engine.backward(loss_of(engine, comm.rank, 20))
    if engine.optimizer.frozen:
        refused(RuntimeError, "ranks send momenta instead of gradients", utils.safe_get_full_grad, weight)
    engine.step()
    train(engine, range(21, 24))


def test_parameters_that_are_pickled_or_outlive_their_engine_know_no_optimizer_any_more() -> None:
    engine = make_engine(None, settings(1))
    weight = engine.module.mix.weight
    again = pickle.loads(pickle.dumps(weight))
    assert torch.equal(again, weight)
    assert utils.safe_get_full_fp32_param(again) is None
    engine.close()
    del engine
    assert utils.safe_get_full_grad(weight) is None


# Leaves of stage 3


def test_modules_are_marked_by_class_and_by_name() -> None:
    model = nn.Sequential(nn.ModuleList([nn.Linear(2, 2)]), nn.Linear(2, 2), nn.ReLU())
    assert utils.get_z3_leaf_modules(model) == []
    assert utils.set_z3_leaf_modules(model, [nn.Linear]) == utils.get_z3_leaf_modules(model) == [model[0][0], model[1]]
    assert utils.set_z3_leaf_modules(model, ["ModuleList", "torch.nn.modules.activation.ReLU"]) == [model[0], model[2]]
    assert utils.unset_z3_leaf_modules(model, [nn.Linear, nn.ReLU]) == [model[0][0], model[1], model[2]]
    assert utils.get_z3_leaf_modules(model) == [model[0]]
    assert utils.set_z3_leaf_modules_by_name(model, ["0", "0.0"], flag=False) == ([model[0], model[0][0]], [])
    assert utils.set_z3_leaf_modules_by_name(model, ["0.0", "9"], raise_if_not_found=False) == ([model[0][0]], ["9"])
    assert utils.set_z3_leaf_modules_by_suffix(model, ["0"]) == ([model[0], model[0][0]], [])
    assert utils.get_z3_leaf_modules(model) == [model[0], model[0][0]]
    utils.set_z3_leaf_module(model, True)
    assert utils.z3_leaf_module(model)
    assert not utils.z3_leaf_module(model[1])


def test_what_is_not_there_is_said() -> None:
    model = nn.Linear(2, 2)
    for call in (utils.set_z3_leaf_modules, utils.unset_z3_leaf_modules):
        refused(ValueError, r"Linear has no module of \[.*Conv2d", call, model, [nn.Conv2d])
        assert call(model, [nn.Conv2d], raise_if_not_found=False) == []
        refused(AssertionError, "is a list of classes, or of their names, got", call, model, nn.Linear)
    for call in (utils.set_z3_leaf_modules_by_name, utils.set_z3_leaf_modules_by_suffix):
        refused(ValueError, r"Linear has no module of \['experts'\]", call, model, ["experts"])
        refused(AssertionError, "names are given as a list, got 'experts'", call, model, "experts")
    with pytest.warns(RuntimeWarning, match="names no module of Linear"):
        mark_configured(model, LeafModuleConfig.model_validate({"names": "experts"}))
