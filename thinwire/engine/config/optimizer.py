"""The optimizer section: which classes can be sharded, and why the others cannot; DeepSpeed's names for what torch
calls otherwise."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch

from thinwire.compress import make_codec
from thinwire.engine.config.declined import Declined
from thinwire.engine.config.errors import did_you_mean, dotted
from thinwire.engine.config.params import Expected, check_params, expected_by
from thinwire.optim import ShardedOneBitLamb
from thinwire.optim.lamb.formulas import LAMB_OPTIONS, check_lamb_options
from thinwire.optim.options import check_group
from thinwire.optim.zero_one.schedule import ZeroOneSchedule, check_count

__all__ = ["ONEBIT_ADAM", "ONEBIT_LAMB", "OWN_OPTIMIZERS", "ZERO_ONE_ADAM", "check_optimizer"]

ONEBIT_ADAM = "OneBitAdam"
ONEBIT_LAMB = "OneBitLamb"
ZERO_ONE_ADAM = "ZeroOneAdam"
OWN_OPTIMIZERS = (ONEBIT_ADAM, ONEBIT_LAMB, ZERO_ONE_ADAM)

# torch.optim's elementwise classes: a shard steps as it would inside the whole tensor.
_ELEMENTWISE = (
    "Adadelta",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "ASGD",
    "NAdam",
    "RAdam",
    "RMSprop",
    "Rprop",
    "SGD",
)

_REFUSED = {
    "Adafactor": "its variance is factored over a matrix's rows and columns, so that a shard cannot step alone",
    "Lamb": "its trust ratio is a norm over a whole layer, so that a shard cannot step alone; use OneBitLamb or AdamW",
    "LBFGS": "its line search needs a closure and products over all parameters, so that a shard cannot step alone",
    "Lion": "torch has none; pass an optimizer of your own to thinwire.initialize",
    "Muon": "it orthogonalises whole matrices, so that a shard cannot step alone",
    "MuAdam": "scale the learning rate of your parameter groups and use Adam",
    "MuAdamW": "scale the learning rate of your parameter groups and use AdamW",
    "MuSGD": "scale the learning rate of your parameter groups and use SGD",
    "SparseAdam": "it takes sparse gradients, and gradients here are dense; use Adam",
}

_ONEBIT_ADAM_EXPECTS = {
    "lr": Expected("float"),
    "freeze_step": Expected("int | Literal['auto']"),
    "betas": Expected("tuple[float, float]"),
    "eps": Expected("float"),
    "weight_decay": Expected("float"),
    "block_size": Expected("int"),
    "comm_backend_name": Expected("Literal['nccl', 'gloo', 'mpi']"),
}

_ONEBIT_ADAM_DECLINES = {
    "bias_correction": Declined("warmup is torch's AdamW, which always corrects", (True,)),
    "codec": Declined("on sharded state it is sign1; thinwire.OneBitAdam has others", ("sign1",)),
    "compress": Declined("on sharded state it is the update; thinwire.OneBitAdam has the momentum too", ("update",)),
    "cuda_aware": Declined(
        "thinwire finds out itself whether MPI can send from GPU memory; to overrule it, set THINWIRE_MPI_CUDA_AWARE"
    ),
    "exp_avg_mask": Declined("give it in a parameter group of thinwire.OneBitAdam"),
    "eps_inside_sqrt": Declined("use thinwire.OneBitAdam without the engine", (False,)),
    "amsgrad": Declined("a frozen variance has no maximum to keep", (False,)),
}

_ONEBIT_LAMB_EXPECTS = (
    _ONEBIT_ADAM_EXPECTS | {"bias_correction": Expected("bool")} | {name: Expected("float") for name in LAMB_OPTIONS}
)

_ONEBIT_LAMB_DECLINES = {
    "codec": Declined("on sharded state it is sign1; thinwire.OneBitLamb has others", ("sign1",)),
    "compress": Declined("on sharded state it is the update; thinwire.OneBitLamb has the momentum too", ("update",)),
    "cuda_aware": _ONEBIT_ADAM_DECLINES["cuda_aware"],
    "exp_avg_mask": Declined("give it in a parameter group of thinwire.OneBitLamb"),
    "eps_inside_sqrt": Declined("LAMB adds eps to the root", (False,)),
    "amsgrad": _ONEBIT_ADAM_DECLINES["amsgrad"],
}

_INTERVALS = ("var_update_scaler", "local_step_scaler", "local_step_clipper")

_ZERO_ONE_ADAM_EXPECTS = {
    **{name: expected for name, expected in _ONEBIT_ADAM_EXPECTS.items() if name != "freeze_step"},
    **{name: Expected("int") for name in ("var_freeze_step", *_INTERVALS)},
}

_ZERO_ONE_ADAM_DECLINES = _ONEBIT_ADAM_DECLINES | {
    "bias_correction": Declined("on sharded state it always corrects; thinwire.ZeroOneAdam need not", (True,)),
    "codec": Declined("on sharded state it is sign1; thinwire.ZeroOneAdam has others", ("sign1",)),
    "compress": Declined("on sharded state it is the update; thinwire.ZeroOneAdam has the momentum too", ("update",)),
    "exp_avg_mask": Declined("give it in a parameter group of thinwire.ZeroOneAdam"),
    "eps_inside_sqrt": Declined("use thinwire.ZeroOneAdam without the engine", (False,)),
    "freeze_step": Declined('give "var_freeze_step"'),
}

_OWN = {
    ONEBIT_ADAM: (_ONEBIT_ADAM_EXPECTS, _ONEBIT_ADAM_DECLINES),
    ONEBIT_LAMB: (_ONEBIT_LAMB_EXPECTS, _ONEBIT_LAMB_DECLINES),
    ZERO_ONE_ADAM: (_ZERO_ONE_ADAM_EXPECTS, _ZERO_ONE_ADAM_DECLINES),
}

_EVERY_OPTIMIZER_DECLINES = {"max_grad_norm": Declined('use "gradient_clipping"', (0, 0.0))}

_TORCH_DECLINES = {
    "adam_w_mode": Declined('use "Adam", which "adam_w_mode" is for', (True,)),
    "differentiable": Declined("a sharded step cannot be differentiated", (False,)),
    "torch_adam": Declined("Adam is always torch's", (True,)),
    "bias_correction": Declined("torch's Adam always corrects", (True,)),
    "set_grad_none": Declined("gradients are always set to None after a step", (True,)),
}

_NOT_PARAMETERS = frozenset({"self", "params", "defaults", "differentiable"})


def check_optimizer(tree: Mapping[str, Any], problems: list[str]) -> dict[str, Any]:
    """{"type", "params"} with the type's proper name and exactly the keyword arguments its class takes.

    `type` in any case. As in DeepSpeed, "Adam" decouples its weight decay (AdamW) unless `adam_w_mode` is false.
    What cannot work joins `problems`.
    """
    given, params = tree.get("type"), tree.get("params", {})
    if not isinstance(given, str) or not isinstance(params, Mapping):
        return dict(tree)  # the model says what is wrong with them
    name = _proper_name(given, problems)
    if name is None:
        return dict(tree)
    before = len(problems)
    if name in _OWN:
        expected, declined = _OWN[name]
        declined = _EVERY_OPTIMIZER_DECLINES | declined
        params = check_params("optimizer.params", name, params, expected, declined, problems)
    else:
        params = _check_torch_params(name, params, problems)
    if len(problems) == before:
        _check_values(name, params, problems)
    return {**tree, "type": name, "params": params}


def _proper_name(given: str, problems: list[str]) -> str | None:
    names = (*_OWN, *_ELEMENTWISE)
    by_lower = {name.lower(): name for name in (*names, *_REFUSED)}
    name = by_lower.get(given.lower())
    if name is None:
        problems.append(f'"optimizer.type" "{given}" is not a known optimizer.{did_you_mean(given, names)}')
    elif name in _REFUSED:
        problems.append(f'"optimizer.type" "{given}" is not supported: {_REFUSED[name]}')
        return None
    return name


def _check_torch_params(name: str, params: Mapping[str, Any], problems: list[str]) -> dict[str, Any]:
    expected = expected_by(getattr(torch.optim, name).__init__, _NOT_PARAMETERS)
    if name == "Adam":
        expected["adam_w_mode"] = Expected("bool")
    declined = _EVERY_OPTIMIZER_DECLINES | _TORCH_DECLINES
    params = check_params("optimizer.params", name, params, expected, declined, problems)
    if name == "Adam":
        if "adam_w_mode" in params and "decoupled_weight_decay" in params:
            problems.append('"optimizer.params": "adam_w_mode" and "decoupled_weight_decay" mean the same: give one')
        params.setdefault("decoupled_weight_decay", params.pop("adam_w_mode", True))
    return params


def _check_values(name: str, params: Mapping[str, Any], problems: list[str]) -> None:
    """What the class itself says about its values, on a parameter of one element."""
    try:
        if name == ONEBIT_ADAM:
            _check_onebit_adam(params)
        elif name == ONEBIT_LAMB:
            _check_onebit_lamb(params)
        elif name == ZERO_ONE_ADAM:
            _check_zero_one_adam(params)
        else:
            getattr(torch.optim, name)([torch.zeros(1)], **params)
    except (ValueError, TypeError, RuntimeError) as error:
        problems.append(f'"{dotted("optimizer", "params")}" cannot work: {error}')


def _check_onebit_adam(params: Mapping[str, Any]) -> None:
    _check_adam_and_codec(params)
    _check_freeze_step(params)


def _check_zero_one_adam(params: Mapping[str, Any]) -> None:
    _check_adam_and_codec(params)
    check_count("var_freeze_step", params.get("var_freeze_step", 1))
    ZeroOneSchedule(**{name: params.get(name, 1) for name in _INTERVALS})


def _check_adam_and_codec(params: Mapping[str, Any]) -> None:
    torch.optim.AdamW(
        [torch.zeros(1)], **{key: params[key] for key in ("lr", "betas", "eps", "weight_decay") if key in params}
    )
    _check_exchange(params)


def _check_onebit_lamb(params: Mapping[str, Any]) -> None:
    taken = inspect.signature(ShardedOneBitLamb).parameters
    defaults = {key: taken[key].default for key in _ONEBIT_LAMB_EXPECTS if key in taken}
    group = defaults | dict(params)
    check_group(group)
    check_lamb_options(group)
    _check_exchange(params)
    _check_freeze_step(params)


def _check_freeze_step(params: Mapping[str, Any]) -> None:
    freeze_step = params.get("freeze_step", "auto")
    if freeze_step != "auto" and freeze_step < 1:
        raise ValueError(f"freeze_step must be at least 1 warmup step, got {freeze_step}")


def _check_exchange(params: Mapping[str, Any]) -> None:
    make_codec("sign1", **{key: params[key] for key in ("block_size",) if key in params})
