"""The optimizer section: which classes can be sharded, and why the others cannot; DeepSpeed's names for what torch
calls otherwise."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from thinwire.comm import threads
from thinwire.engine.config.declined import Declined
from thinwire.engine.config.errors import CANNOT_WORK, did_you_mean, dotted, reason, shown
from thinwire.engine.config.local_updates import LOCAL_UPDATES, check_local_updates, is_local_updates
from thinwire.engine.config.params import Expected, check_params, expected_by
from thinwire.engine.config.trial import trial_class
from thinwire.engine.config.without_effect import WithoutEffect
from thinwire.optim import registry
from thinwire.optim.exact import EXACT
from thinwire.optim.registry import OptimizerEntry

__all__ = ["check_optimizer", "uncompressed_class"]

_ALONE_SECONDS = 60.0

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
    "LBFGS": "its line search needs a closure and products over all parameters, so that a shard cannot step alone",
    "MuAdam": "scale the learning rate of your parameter groups and use Adam",
    "MuAdamW": "scale the learning rate of your parameter groups and use AdamW",
    "MuSGD": "scale the learning rate of your parameter groups and use SGD",
    "SparseAdam": "it takes sparse gradients, and gradients here are dense; use Adam",
}

# DeepSpeed's classes that compute what one of torch's does.
_SAME_AS = {
    "FusedAdam": "Adam",
    "DeepSpeedCPUAdam": "Adam",
    "DeepSpeedCPUAdagrad": "Adagrad",
    "FusedLamb": "Lamb",
    "FusedLion": "Lion",
    "DeepSpeedCPULion": "Lion",
}

_EVERY_OPTIMIZER_DECLINES = {"max_grad_norm": Declined('use "gradient_clipping"', (0, 0.0, None))}

_TORCH_DECLINES = {
    "adam_w_mode": Declined('use "Adam", which "adam_w_mode" is for', (True,)),
    "differentiable": Declined("a sharded step cannot be differentiated", (False,)),
    "bias_correction": Declined('use "Adam" or "AdamW", which "bias_correction" is for', (True,)),
    "fp32_optimizer_states": Declined("optimizer state is fp32", (True,)),
}

_GRADIENTS = "gradients are always set to None after a step"
_ADAM = "Adam is always torch's"
_CARRIED = "the job's own communicator carries the bytes, as in DeepSpeed"
# Of every optimizer, and of those named: what cannot change a step.
_IDLE = {"set_grad_none": WithoutEffect("bool", _GRADIENTS)}
_IDLE_OF_TORCHS = {"torch_adam": WithoutEffect("bool", _ADAM)}
_IDLE_OF_OURS = {
    "cuda_aware": WithoutEffect(
        "bool", "whether MPI can send from GPU memory is found out; THINWIRE_MPI_CUDA_AWARE overrules that"
    )
}
_ADAMW_IDLE = {"adam_w_mode": WithoutEffect("bool", "AdamW decouples its weight decay, as in DeepSpeed")}
_OWN_COMMUNICATOR = ("compressed", "hccl")

_EXACT_DECLINES: Mapping[str, dict[str, Declined]] = {
    "Lamb": {"amsgrad": Declined("LAMB keeps no maximum", (False,))},
    "Muon": {"ns_method": Declined("it is torch's iteration, on the whole matrix", ("standard",))},
}

# Torch's own have no switch for their bias correction: uncorrected_adam.py has them without.
_ADAMS = ("Adam", "AdamW")

# Where torch's default is not DeepSpeed's: a file that leaves it out trains as it did there. All others are alike.
_DEEPSPEEDS_DEFAULTS: Mapping[str, Mapping[str, Any]] = {"AdamW": {"weight_decay": 0.0}}

_NOT_PARAMETERS = frozenset({"self", "params", "defaults", "differentiable"})


def check_optimizer(
    tree: Mapping[str, Any],
    problems: list[str],
    stage: Any = 0,
    without_effect: dict[str, str] | None = None,
    path: str = "optimizer",
) -> dict[str, Any]:
    """{"type", "params"} with the type's proper name and exactly the keyword arguments its class takes.

    `type` in any case. As in DeepSpeed, "Adam" decouples its weight decay (AdamW) unless `adam_w_mode` is false.
    What is not given has DeepSpeed's default. `stage`: ZeRO's, as it was given. What cannot work joins `problems`, and
    what cannot change a step `without_effect`. `path`: of the section.
    """
    given, params = tree.get("type"), tree.get("params", {})
    if not isinstance(given, str) or not isinstance(params, Mapping):
        return dict(tree)  # the model says what is wrong with them
    without_effect = {} if without_effect is None else without_effect
    if is_local_updates(given):

        def check_inner(section: Mapping[str, Any], path: str) -> dict[str, Any]:
            return check_optimizer(section, problems, stage, without_effect, path)

        kept = _without_idle(LOCAL_UPDATES, params, without_effect, problems, path)
        kept = check_local_updates(kept, problems, check_inner, (*_ELEMENTWISE, *EXACT))
        return {**tree, "type": LOCAL_UPDATES, "params": kept}
    name = _proper_name(given, problems, path)
    if name is None:
        return dict(tree)
    before = len(problems)
    own = registry.entry(name) if name in registry.NAMES else None
    params = _without_idle(name, params, without_effect, problems, path)
    if own is None:
        params = _check_torch_params(name, params, problems, f"{path}.params")
    else:
        params = _check_own_params(own, params, problems)
    if len(problems) == before:
        try:
            if own is None:
                options = dict(params)
                if name in _ADAMS:
                    options.pop("bias_correction", None)
                trial_class(uncompressed_class(name))([torch.zeros(1)], **options)
            else:
                _build_alone(own, params, stage)
        except CANNOT_WORK as error:
            problems.append(f'"{path}.params" cannot work: {reason(error)}')
    return {**tree, "type": name, "params": params}


def uncompressed_class(name: str) -> type[torch.optim.Optimizer]:
    """The class of that name which sends gradients exactly: one of ours or torch's."""
    found: type[torch.optim.Optimizer] = EXACT.get(name) or getattr(torch.optim, name)
    return found


def _proper_name(given: str, problems: list[str], path: str) -> str | None:
    names = (*registry.NAMES, LOCAL_UPDATES, *_ELEMENTWISE, *EXACT)
    by_lower = {name.lower(): name for name in (*names, *_REFUSED)}
    by_lower |= {other.lower(): by_lower[name.lower()] for other, name in _SAME_AS.items()}
    name = by_lower.get(given.lower())
    if name is None:
        problems.append(f'"{path}.type" {shown(given)} is not a known optimizer.{did_you_mean(given, names)}')
    elif name in _REFUSED:
        problems.append(f'"{path}.type" {shown(given)} is not supported: {_REFUSED[name]}')
        return None
    return name


def _without_idle(
    name: str, params: Mapping[str, Any], without_effect: dict[str, str], problems: list[str], section: str
) -> dict[str, Any]:
    """`params` but those that cannot change a step."""
    communicates = name in (*registry.NAMES, LOCAL_UPDATES)
    idle = _IDLE | (_IDLE_OF_OURS if communicates else _IDLE_OF_TORCHS)
    if name == "AdamW":
        idle = idle | _ADAMW_IDLE
    kept = dict(params)
    if communicates and kept.get("comm_backend_name") in _OWN_COMMUNICATOR:
        del kept["comm_backend_name"]
        without_effect["optimizer.params.comm_backend_name"] = _CARRIED
    for key in [key for key in params if key in idle]:
        path = dotted(section, "params", key)
        if (problem := idle[key].problem(path, kept.pop(key))) is not None:
            problems.append(problem)
        else:
            without_effect[path] = idle[key].why
    return kept


def _check_own_params(entry: OptimizerEntry, params: Mapping[str, Any], problems: list[str]) -> dict[str, Any]:
    expected = {name: Expected(option.kind) for name, option in entry.options.items()}
    declined = {name: Declined(one.instead, one.matches) for name, one in entry.declines.items()}
    declined = _EVERY_OPTIMIZER_DECLINES | declined
    return check_params("optimizer.params", entry.name, params, expected, declined, problems)


def _build_alone(entry: OptimizerEntry, params: Mapping[str, Any], stage: Any) -> None:
    """Build the optimizer for a parameter of one element and a job of one rank: it checks its options itself."""
    options = {name: value for name, value in params.items() if name != "comm_backend_name"}
    stage = stage if stage in entry.stages else entry.stages[0]
    parameter = torch.nn.Parameter(torch.zeros(1))
    trial_class(entry.load())([parameter], stage=stage, comm=threads.single(_ALONE_SECONDS), **options).close()


def _check_torch_params(name: str, params: Mapping[str, Any], problems: list[str], path: str) -> dict[str, Any]:
    expected = expected_by(uncompressed_class(name).__init__, _NOT_PARAMETERS)
    if name == "Adam":
        expected["adam_w_mode"] = Expected("bool")
    if name in _ADAMS:
        expected["bias_correction"] = Expected("bool")
    declined = _EVERY_OPTIMIZER_DECLINES | _TORCH_DECLINES | _EXACT_DECLINES.get(name, {})
    params = check_params(path, name, params, expected, declined, problems)
    if name == "Adam":
        if "adam_w_mode" in params and "decoupled_weight_decay" in params:
            problems.append(f'"{path}": "adam_w_mode" and "decoupled_weight_decay" mean the same: give one')
        params.setdefault("decoupled_weight_decay", params.pop("adam_w_mode", True))
    if params.get("bias_correction"):
        del params["bias_correction"]  # as torch's own always do
    return {**_DEEPSPEEDS_DEFAULTS.get(name, {}), **params}
