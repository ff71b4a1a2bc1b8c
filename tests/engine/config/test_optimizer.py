"""The optimizer and scheduler sections: every class that can be named, its parameters, and why others are refused."""

import inspect
import re
from typing import Any

import pytest
import torch

from thinwire import initialize
from thinwire.engine.config import ConfigError, EngineConfig, load_config
from thinwire.engine.config.options import OPTIMIZERS, SCHEDULES
from thinwire.engine.config.sections import uncompressed_class
from thinwire.engine.schedules import build_schedule, schedule_names

TORCH_CLASSES = [
    name
    for name, found in vars(torch.optim).items()
    if isinstance(found, type) and issubclass(found, torch.optim.Optimizer) and found is not torch.optim.Optimizer
]
REFUSED_CLASSES = {"Adafactor", "LBFGS", "SparseAdam"}


def load(section: str, kind: str, **params: Any) -> EngineConfig:
    return load_config({"train_batch_size": 4, section: {"type": kind, "params": params}}, 1)


def refusal(section: str, kind: str, **params: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        load(section, kind, **params)
    return str(caught.value)


def optimizer_of(kind: str, **params: Any) -> tuple[str, dict[str, Any]]:
    section = load("optimizer", kind, **params).optimizer
    return section.type, dict(section.params)


@pytest.mark.parametrize("kind", TORCH_CLASSES)
def test_every_class_of_torch_is_accepted_or_refused_with_a_reason(kind: str) -> None:
    if kind in REFUSED_CLASSES:
        assert "is not supported: it" in refusal("optimizer", kind)
        return
    name, params = optimizer_of(kind.upper(), lr=0.25)
    assert name == kind
    built = uncompressed_class(name)([torch.zeros(3)], **params)
    assert built.param_groups[0]["lr"] == 0.25


@pytest.mark.parametrize("kind", [*OPTIMIZERS, *SCHEDULES])
def test_a_model_has_the_parameters_of_its_class_with_their_defaults(kind: str) -> None:
    """Those that a file can hold; `elastic`, `bias_correction` of Adam's family and two defaults are ours."""
    known = OPTIMIZERS.get(kind) or SCHEDULES[kind]
    build = uncompressed_class(kind) if kind in OPTIMIZERS else schedule_names()[kind]
    taken = dict(inspect.signature(build).parameters)
    ours = {"bias_correction"} if kind in ("Adam", "AdamW") else set()
    ours |= {"elastic"} if kind in OPTIMIZERS else set()
    another = {"Adam": {"decoupled_weight_decay"}, "AdamW": {"weight_decay"}}.get(kind, set())
    fields = known.model_fields
    assert fields.keys() - ours - {"last_epoch"} == taken.keys() - {"params", "optimizer", "last_epoch"}
    for name in fields.keys() & taken.keys() - another:
        required = taken[name].default is inspect.Parameter.empty
        assert fields[name].is_required() == required
        assert required or fields[name].default == taken[name].default


def test_adam_decouples_its_decay_unless_told_otherwise() -> None:
    assert optimizer_of("Adam", lr=0.1) == ("Adam", {"lr": 0.1, "decoupled_weight_decay": True})
    assert optimizer_of("Adam", adam_w_mode=False) == ("Adam", {"decoupled_weight_decay": False})
    assert optimizer_of("Adam", decoupled_weight_decay=False) == ("Adam", {"decoupled_weight_decay": False})
    assert optimizer_of("Adam", torch_adam=True)[1] == {"decoupled_weight_decay": True}
    assert optimizer_of("AdamW", weight_decay=0.01)[1] == {"weight_decay": 0.01}
    assert optimizer_of("AdamW", bias_correction=False)[1] == {"weight_decay": 0.0, "bias_correction": False}
    assert "mean the same: give one" in refusal("optimizer", "Adam", adam_w_mode=True, decoupled_weight_decay=False)


# As FusedAdam, DeepSpeedCPUAdam, DeepSpeedCPUAdagrad and the 1-bit optimizers have them.
DEEPSPEEDS_ADAM = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
DEEPSPEEDS_DEFAULTS = {
    "Adam": DEEPSPEEDS_ADAM,
    "AdamW": DEEPSPEEDS_ADAM,
    "Adagrad": {"lr": 1e-2, "eps": 1e-10, "weight_decay": 0.0},
    "SGD": {"lr": 1e-3, "momentum": 0.0, "weight_decay": 0.0},
    "OneBitAdam": DEEPSPEEDS_ADAM,
    "OneBitLamb": DEEPSPEEDS_ADAM,
    "ZeroOneAdam": DEEPSPEEDS_ADAM,
    "OneBitLion": {"lr": 1e-4, "betas": (0.9, 0.99), "weight_decay": 0.0},
}


@pytest.mark.parametrize("kind", DEEPSPEEDS_DEFAULTS)
def test_what_is_not_given_has_deepspeeds_default_and_auto_needs_the_trainer(kind: str) -> None:
    found = refusal("optimizer", kind, lr="auto", weight_decay="auto")
    for name in ("lr", "weight_decay"):
        assert f'"optimizer.params.{name}" is "auto", which is filled in only by thinwire.hugging_face.' in found
    engine, *_ = initialize(model=torch.nn.Linear(2, 2), config=load("optimizer", kind))
    (group,) = engine.optimizer.param_groups
    expected = DEEPSPEEDS_DEFAULTS[kind]
    assert {name: group[name] for name in expected} == expected


DEEPSPEEDS = {"lr": 4e-4, "betas": [0.9, 0.95], "eps": 1e-6, "weight_decay": 0.01, "comm_backend_name": "mpi"}
LAMBS = {"max_coeff": 0.3, "min_coeff": 0.01, "coeff_beta": 0.8, "factor_max": 4, "factor_min": 0.5}
LAMBS |= {"factor_threshold": 0.1, "freeze_step": 1000, "bias_correction": False}
POLICY = {"var_freeze_step": 1000, "var_update_scaler": 16, "local_step_scaler": 1000, "local_step_clipper": 8}
NO_NORM = {"amsgrad": False, "eps_inside_sqrt": False, "max_grad_norm": 0.0}


@pytest.mark.parametrize(
    ("kinds", "params", "what_happens", "kept"),
    [
        (
            ["OneBitAdam", "OnebitAdam", "onebitadam"],
            {"freeze_step": 23000, "block_size": 1024, "bias_correction": False, "codec": "stat2"},
            {"amsgrad": False, "compress": "update"},
            {"freeze_step": "auto"},
        ),
        (["OneBitLamb", "OnebitLamb", "onebitlamb"], LAMBS, NO_NORM, {"freeze_step": "auto"}),
        (["ZeroOneAdam", "zerooneadam"], POLICY, NO_NORM, {}),
    ],
)
def test_compressed_optimizers_take_deepspeeds_spellings_and_parameters(kinds, params, what_happens, kept) -> None:
    for kind in kinds:
        given_params = DEEPSPEEDS | params
        assert optimizer_of(kind, **given_params) == (kinds[0], given_params | {"betas": (0.9, 0.95)})
        assert optimizer_of(kind, **kept, **what_happens) == (kinds[0], kept)


@pytest.mark.parametrize(
    ("kind", "params", "message"),
    [
        ("Adma", {}, '"optimizer.type" "Adma" is not a known optimizer. Did you mean "Adam"?'),
        ("AdamW", {"beta": [0.9, 0.99]}, '"optimizer.params.beta" is not a parameter of AdamW. Did you mean "betas"?'),
        ("AdamW", {"lr": "big"}, '"optimizer.params.lr" must be a number, at least 0, got "big"'),
        ("AdamW", {"lr": float("nan")}, '"optimizer.params.lr" must be a number, at least 0, got NaN'),
        ("AdamW", {"lr": -1.0}, '"optimizer.params.lr" must be a number, at least 0, got -1.0'),
        ("AdamW", {"betas": [0.9, 1.5]}, 'betas" must be a list of 2 numbers, at least 0, below 1, got [0.9, 1.5]'),
        ("AdamW", {"max_grad_norm": "auto"}, 'can only be 0 or 0.0 or null, got "auto": use "gradient_clipping"'),
        ("OneBitAdam", {"cuda_aware": "no"}, '"optimizer.params.cuda_aware" must be true or false, got "no"'),
        ("OneBitAdam", {"torch_adam": True}, '"optimizer.params.torch_adam" is not a parameter of OneBitAdam'),
        ("AdamW", {"differentiable": True}, "can only be false"),
        ("SGD", {"nesterov": True}, "Nesterov momentum requires a momentum"),
        ("ZeroOneAdam", {"freeze_step": 10}, 'Did you mean "var_freeze_step"?'),
        ("ZeroOneAdam", {"var_freeze_step": 0}, 'var_freeze_step" must be a whole number, at least 1, got 0'),
        ("OneBitAdam", {"freeze_step": 0}, 'freeze_step" must be a whole number, at least 1 or "auto", got 0'),
        ("OneBitAdam", {"freeze_step": "soon"}, 'must be a whole number, at least 1 or "auto", got "soon"'),
        ("OneBitAdam", {"compress": "momentum"}, '"optimizer.params.compress" can only be "update"'),
        ("OneBitAdam", {"codec": "int3"}, '"optimizer.params.codec" must be "sign1" or "stat2" or'),
        ("RMSprop", {"bias_correction": False}, 'use "Adam" or "AdamW", which "bias_correction" is for'),
        ("OneBitAdam", {"block_size": 100}, "number, at least 64, at most 65536, a multiple of 64, got 100"),
        ("OneBitAdam", {"comm_backend_name": "ucx"}, '"nccl" or "gloo" or "mpi", got "ucx"'),
        ("OneBitAdam", {"amsgrad": True}, "the optimizer keeps no maximum of a variance"),
        ("OneBitLamb", {"max_coeff": 0.001}, "min_coeff must be above 0 and at most max_coeff"),
        ("OneBitLamb", {"factor_min": 2}, 'factor_min" must be a number, above 0, at most 1, got 2'),
        ("OneBitLamb", {"factor_threshold": "fast"}, 'factor_threshold" must be a number, at least 0, below 1, got'),
        ("Muon", {"ns_method": "gram"}, 'can only be "standard", got "gram"'),
        ("Lamb", {"min_coeff": 20.0}, "max_coeff must be at least min_coeff"),
        ("Lion", {"betas": [0.9]}, "must be a list of 2 numbers"),
        ("OneBitLamb", {"eps_inside_sqrt": True}, '"optimizer.params.eps_inside_sqrt" can only be false'),
    ],
)
def test_optimizers_that_cannot_work(kind: str, params: dict[str, Any], message: str) -> None:
    assert message in refusal("optimizer", kind, **params)


@pytest.mark.parametrize(
    ("kind", "params", "changes"),
    [
        ("WarmupLR", {"warmup_num_steps": 1e2}, {"warmup_num_steps": 100}),
        ("WarmupDecayLR", {"total_num_steps": 2000}, {}),
        ("WarmupLR", {"last_batch_iteration": -1, "warmup_max_lr": [0.1, 0.2]}, {"last_batch_iteration": None}),
        ("OneCycle", {"cycle_min_lr": 0, "cycle_max_lr": 0.1}, {}),
        ("OneCycle", {"cycle_min_lr": 0, "cycle_max_lr": [0.1, 0.2]}, {}),
        ("OneCycle", {"cycle_min_lr": 0, "cycle_max_lr": 1, "cycle_min_mom": [0.8, 0.7]}, {}),
        ("CosineAnnealingLR", {"T_max": 50}, {}),
        ("CyclicLR", {"base_lr": [0.1, 0.2], "max_lr": 0.5}, {}),
        ("OneCycleLR", {"max_lr": [0.1, 0.2, 0.3], "total_steps": 9}, {}),
    ],
)
def test_schedules_that_work(kind: str, params: dict[str, Any], changes: dict[str, Any]) -> None:
    section = load("scheduler", kind, **params).scheduler
    expected = {name: value for name, value in (params | changes).items() if value is not None}
    assert section.params == expected
    groups = max((len(value) for value in expected.values() if isinstance(value, list)), default=1)
    optimizer = torch.optim.SGD([{"params": [torch.zeros(1)]} for _ in range(groups)], lr=0.5, momentum=0.9)
    assert type(build_schedule(section.type, section.params, optimizer)).__name__ == kind


@pytest.mark.parametrize(
    ("kind", "params", "message"),
    [
        ("WarmUpLr", {}, '"scheduler.type" "WarmUpLr" is not a known schedule. Did you mean "WarmupLR"?'),
        ("LRScheduler", {}, "is not a known schedule"),
        ("ReduceLROnPlateau", {}, "its step() needs a metric"),
        ("LambdaLR", {}, "it takes a function. Pass a schedule of your own to thinwire.initialize"),
        ("SequentialLR", {}, "it is made of other schedules"),
        ("WarmupLR", {"warmup_steps": 3}, 'Did you mean "warmup_num_steps"?'),
        ("WarmupLR", {"warmup_num_steps": 1.5}, 'warmup_num_steps" must be a whole number, at least 0, got 1.5'),
        ("WarmupLR", {"warmup_type": "cosine"}, 'must be "log" or "linear", got "cosine"'),
        ("WarmupLR", {"warmup_num_steps": -3}, '"scheduler.params.warmup_num_steps" must be a whole number, at least'),
        ("WarmupLR", {"last_batch_iteration": 12}, "a checkpoint says where to resume"),
        ("WarmupDecayLR", {}, '"scheduler.params.total_num_steps" is missing: WarmupDecayLR needs it'),
        ("WarmupDecayLR", {"total_num_steps": "auto"}, '.params.total_num_steps" is "auto", which is filled in'),
        ("WarmupDecayLR", {"total_num_steps": 10}, "total_num_steps must be at least warmup_num_steps 1000, got 10"),
        ("OneCycle", {"cycle_max_lr": 0.1}, '"scheduler.params.cycle_min_lr" is missing'),
        ("CosineAnnealingLR", {"t_max": 3}, 'Did you mean "T_max"?'),
        ("CyclicLR", {"base_lr": 0.1, "max_lr": 0.2, "scale_fn": "x"}, "it is a function"),
        ("StepLR", {"step_size": "4"}, '"scheduler.params.step_size" must be a whole number, at least 1, got "4"'),
        ("MultiStepLR", {"milestones": [1, "x"]}, "must be a list of whole numbers"),
        ("OneCycleLR", {"max_lr": 0.1}, '"scheduler.params" cannot work: You must define either total_steps OR'),
    ],
)
def test_schedules_that_cannot_work(kind: str, params: dict[str, Any], message: str) -> None:
    assert message in refusal("scheduler", kind, **params)


LOCAL = [
    ({"betas": [0.9, 0.9], "inner": "Muon"}, '"optimizer.params.betas" is a parameter of the inner optimizer, "Muon"'),
    ({"inner": {"type": "OneBitAdam"}}, '"optimizer.params.inner.type" "OneBitAdam" communicates by itself'),
    ({"inner": {"type": "DiLoCo"}}, "communicates by itself"),
    ({"inner": {"type": "AdamV"}}, '"optimizer.params.inner.type" "AdamV" is not a known optimizer. Did you mean'),
    ({"inner": {"type": "LBFGS"}}, '"optimizer.params.inner.type" "LBFGS" is not supported'),
    ({"inner": {"type": "AdamW", "params": {"every": 3}}}, '"optimizer.params.inner.params.every" is a parameter of D'),
    ({"inner": {"type": "AdamW", "params": {"eps": "x"}}}, '"optimizer.params.inner.params.eps" must be a number'),
    ({"inner": {"type": "AdamW", "params": {"lr": 1}}, "lr": 2}, "are the same rate, the inner optimizer's: give one"),
    ({"inner": {"type": "AdamW", "lr": 1}}, '"optimizer.params.inner.lr" is not a known key'),
    ({"inner": {"type": 3}}, '"optimizer.params.inner.type" must be a string'),
    ({"inner": 3}, '"optimizer.params.inner" must be the section of an optimizer'),
    ({"evry": 3}, '"optimizer.params.evry" is not a parameter of DiLoCo. Did you mean "every"?'),
    ({"every": 4, "overlap": 4}, '"optimizer.params" cannot work: overlap must be a number of steps from 0'),
    ({"mix": "carry", "overlap": 0}, 'mix "carry" wants an overlap of 1 or more'),
    ({"every": 1, "outer_lr": "auto"}, 'outer_lr "auto" follows .*: set a rate for single steps'),
    ({"outer_lr": "best"}, '"optimizer.params.outer_lr" must be a number, at least 0 or "auto" or null, got "best"'),
    ({"codec": "int3"}, '"optimizer.params.codec" must be "sign1" or'),
    ({"fragments": 0}, '"optimizer.params.fragments" must be a whole number, at least 1 or "auto", got 0'),
    ({"nodes": [0, 0.5]}, '"optimizer.params.nodes" must be a list of whole numbers or "auto" or "flat", got'),
    ({"max_norm": 1.0}, '"optimizer.params.max_norm" can only be 0 or null, got 1.0: use "gradient_clipping"'),
    ({"elastic": {"workers": 2, "min_workers": 3}}, '"optimizer.params" cannot work: min_workers=3 is more than'),
    ({"elastic": {"worker": 2}}, '"optimizer.params.elastic.worker" is not a parameter'),
    ({"elastic": 2}, '"optimizer.params.elastic" must be'),
    ({"stage": 1}, '"optimizer.params.stage" can only be null, got 1: it is "zero_optimization.stage"'),
    ({"lr": -1.0}, '"optimizer.params.inner.params.lr" must be a number, at least 0, got -1.0'),
]


@pytest.mark.parametrize(("params", "message"), LOCAL, ids=[str(one[0]) for one in LOCAL])
def test_what_local_updates_cannot_do_is_told_at_its_place(params: dict[str, Any], message: str) -> None:
    assert re.search(message, refusal("optimizer", "DiLoCo", **params))


@pytest.mark.parametrize("precision", ["bf16", "fp16", None])
def test_local_updates_are_told_what_only_single_precision_and_larger_workers_have(precision: str | None) -> None:
    params: dict[str, Any] = {"touch": 0.1, "nodes": "flat"}
    sections: dict[str, Any] = {"train_batch_size": 4, "zero_optimization": {"stage": 1}}
    if precision is not None:
        sections[precision] = {"enabled": True}
    told = {"bf16": "touch", "fp16": "touch", None: 'nodes" "flat" makes every rank one'}[precision]
    with pytest.raises(ConfigError, match=told):
        load_config({"optimizer": {"type": "DiLoCo", "params": params}, **sections}, 2)
    load_config({"optimizer": {"type": "DiLoCo", "params": {"nodes": [0, 0]}}, **sections}, 2)


def test_local_updates_hold_the_section_of_their_inner_optimizer() -> None:
    inner = {"type": "fusedadam", "params": {"adam_w_mode": False, "torch_adam": True}}
    kind, params = optimizer_of("diloco", lr=0.1, every=9, nodes=[0, 0], inner=inner)
    assert (kind, params["every"], params["nodes"]) == ("DiLoCo", 9, [0, 0])
    assert params["inner"] == {"type": "Adam", "params": {"decoupled_weight_decay": False, "lr": 0.1}}
    config = load("optimizer", "diloco", lr=0.1)
    assert config.optimizer.params["inner"] == {"type": "AdamW", "params": {"weight_decay": 0.0, "lr": 0.1}}
    assert load_config(config.describe(), 1) == config


ZERO = "zero_optimization"
BESIDE_ELASTIC: list[tuple[str, dict[str, Any], str]] = [
    ("OneBitAdam", {ZERO: {"stage": 1}}, 'elastic" goes with "zero_optimization.stage" 0, got 1'),
    ("AdamW", {ZERO: {"stage": 2}}, 'stage" 0, or 1 in fp32 and without "communication_codec", got 2'),
    ("AdamW", {ZERO: {"stage": 3}}, "got 3"),
    ("AdamW", {ZERO: {"stage": 1}, "communication_codec": "int4"}, 'got 1 and "communication_codec"'),
    ("AdamW", {ZERO: {"stage": 1}, "bf16": {"enabled": True}}, 'got 1 and "bf16"'),
    ("AdamW", {"fp16": {"enabled": True}}, '"fp16" does not go with "optimizer.params.elastic"'),
    ("OneBitAdam", {"fp16": {"enabled": True}}, '"fp16" does not go'),
    (
        "AdamW",
        {ZERO: {"stage": 1, "offload_optimizer": {"device": "cpu"}}},
        '"zero_optimization.offload_optimizer" does',
    ),
    (
        "SGD",
        {ZERO: {"stage": 1, "ignore_unused_parameters": False}},
        '"zero_optimization.ignore_unused_parameters" does',
    ),
    ("Muon", {"progressive_layer_drop": {"enabled": True}}, '"progressive_layer_drop" does not go'),
    ("Lamb", {"pipeline": {"stages": 2}}, '"pipeline.stages" does not go'),
    ("Lion", {"tensor_parallel": {"autotp_size": 2}}, '"tensor_parallel.autotp_size" does not go'),
    ("AdamW", {"prescale_gradients": True}, '"prescale_gradients" does not go'),
    ("AdamW", {"gradient_predivide_factor": 2.0}, '"gradient_predivide_factor" does not go'),
    ("OneBitLion", {"gradient_allreduce_op": "sum"}, '"gradient_allreduce_op" does not go'),
    ("AdamW", {"comms_logger": {"enabled": True}}, '"comms_logger" does not go'),
    ("OneBitMuon", {ZERO: {"stage": 1}, "bf16": {"enabled": True}}, '"bf16" does not go with "optimizer.params.elas'),
    (
        "OneBitMuon",
        {ZERO: {"stage": 1, "offload_optimizer": {"device": "cpu"}}},
        '"zero_optimization.offload_optimizer" does',
    ),
    ("OneBitMuon", {ZERO: {"stage": 3}}, '"zero_optimization.stage" 3'),
]


@pytest.mark.parametrize(("kind", "changes", "message"), BESIDE_ELASTIC)
def test_what_elastic_workers_cannot_have_is_told_with_its_key(kind: str, changes: Any, message: str) -> None:
    config = {"train_micro_batch_size_per_gpu": 4, "optimizer": {"type": kind, "params": {"elastic": {"workers": 2}}}}
    with pytest.raises(ConfigError, match=re.escape(message)):
        load_config(config | changes, 2)


@pytest.mark.parametrize("kind", ["OneBitAdam", "OneBitMuon", "AdamW"])
def test_elastic_workers_are_checked(kind: str) -> None:
    message = refusal("optimizer", kind, elastic={"workers": 2, "min_workers": 3})
    assert '"optimizer.params.elastic" cannot work: min_workers=3 is more than workers=2' in message
    assert initialize(model=torch.nn.Linear(2, 2), config=load("optimizer", kind, elastic=None))
