"""Who races: one table, from which every measurement and picture takes its names, colours and learners."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import nn

from experiments.ethernet.race.data_parallel import DataParallelLearner
from experiments.training.learners import Learner, LoopLearner
from experiments.training.optimizers import OPTIMIZERS
from experiments.training.plans import Plan
from thinwire.comm import Communicator
from thinwire.plan import Method

__all__ = ["BASELINE", "CONTENDERS", "FAIR_BASELINE", "POWER_SGD", "Contender"]

BASELINE = "ddp-fp32"
FAIR_BASELINE = "ddp-bf16"
"""What is honest to beat: 16 bits cost nothing (Agarwal et al., MLSys 2022)."""
POWER_SGD = ("ddp-powersgd-1", "ddp-powersgd-4", "ddp-powersgd-16")
"""The compression that torch brings along; it begins where 1-bit Adam freezes, and until then is DDP in fp32."""


@dataclass(frozen=True)
class Contender:
    """One way to train a model on several hosts.

    Attributes:
        label: for tables and pictures.
        colour: for pictures.
        build: makes the learner of a model, on every rank alike. Collective.
        method: what `thinwire plan` calls it; None for what it does not plan.
        phase: the kind of step that the step race measures, in the plan's words.
        ours: thinwire's, to be compared with the baselines.
        trains: races to a loss; what shows one stage only does not.
        steps_alike: races steps, which are all alike in its last stage.
        by_node: exchanges hierarchically where ranks share a host, if it is ours.
        sends: sends what a backward could hide.
        bursts: sends at a step now and then: all its steps go over the slow links, so that each of those is timed.
        needs_shared_hosts: differs from another contender only where several ranks share a host.
    """

    label: str
    colour: str
    build: Callable[[nn.Module, Plan, Communicator], Learner]
    method: Method | None
    phase: str
    ours: bool = False
    by_node: bool = True
    trains: bool = True
    steps_alike: bool = True
    sends: bool = True
    bursts: bool = False
    needs_shared_hosts: bool = False


def _learner(
    optimizer: str, times_rate: float = 1.0, **options: Any
) -> Callable[[nn.Module, Plan, Communicator], Learner]:
    """What makes the learner of one of `OPTIMIZERS` with these options, at the plan's learning rate `times_rate`."""

    def build_learner(model: nn.Module, plan: Plan, comm: Communicator) -> Learner:
        own = replace(plan, learning_rate=times_rate * plan.learning_rate)
        return LoopLearner(model, own, optimizer, comm, **options)

    return build_learner


def _ours(optimizer: str, **options: Any) -> Callable[[nn.Module, Plan, Communicator], Learner]:
    """The same of a 1-bit optimizer, whose exact steps go in bf16."""
    return _learner(optimizer, warmup_wire="bf16", **options)


def _diloco(every: int, codec: str, colour: str, suffix: str = "", **options: Any) -> Contender:
    label = f"DiLoCo, {every} steps, {'fp32' if codec == 'none' else codec}{suffix}"
    build = _learner("diloco", every=every, codec=codec, fused=True, **options)  # as DDP's AdamW
    return Contender(label, colour, build, None, "local", ours=True, steps_alike=False, bursts=True)


def _muon(codec: str, colour: str) -> Contender:
    label = f"{OPTIMIZERS['onebit-muon'].label}, {codec}"
    build = _learner("onebit-muon", _MUON_RATE, codec=codec, ns_dtype="bf16")  # as torch.optim.Muon on every device
    method = Method("onebit-muon") if codec == "sign1" else None
    return Contender(label, colour, build, method, "every step", ours=True)


_NEVER = 2**31
_MUON_RATE = 2.0
"""Of Muon's best rate beside AdamW's: `make frontier` found it between 1 and 2 times."""
_ONEBIT = OPTIMIZERS["onebit-adam"]

CONTENDERS = {
    BASELINE: Contender("DDP, fp32", "#5b6572", DataParallelLearner, Method("ddp-fp32"), "every step"),
    FAIR_BASELINE: Contender(
        "DDP, bf16 hook", "#2b6ca3", partial(DataParallelLearner, hook="bf16"), Method("ddp-bf16"), "every step"
    ),
    "ddp-meeting": Contender(
        "Only meeting",
        "#c9a227",
        partial(DataParallelLearner, hook="meet"),
        None,
        "every step",
        trains=False,
        sends=False,
    ),
    "ddp-powersgd-1": Contender(
        "DDP, PowerSGD rank 1",
        "#7a9e3f",
        partial(DataParallelLearner, hook=1),
        Method("powersgd", rank=1),
        "low rank",
    ),
    "ddp-powersgd-4": Contender(
        "DDP, PowerSGD rank 4",
        "#3f7d53",
        partial(DataParallelLearner, hook=4),
        Method("powersgd", rank=4),
        "low rank",
    ),
    "ddp-powersgd-16": Contender(
        "DDP, PowerSGD rank 16",
        "#1f4d3a",
        partial(DataParallelLearner, hook=16),
        Method("powersgd", rank=16),
        "low rank",
    ),
    "onebit-adam": Contender(
        _ONEBIT.label, _ONEBIT.colour, _ours("onebit-adam"), Method("onebit-adam"), "frozen", ours=True
    ),
    "onebit-adam-int4": Contender(
        f"{_ONEBIT.label}, int4 warmup",
        "#e4572e",
        _learner("onebit-adam", warmup_wire="int4"),
        None,
        "frozen",
        ours=True,
        steps_alike=False,
    ),
    "adamw-int4": Contender(
        "AdamW, int4", "#8c6d31", _learner("sharded-adamw", stage=0, codec="int4"), None, "every step", ours=True
    ),
    "adamw-zero-int4": Contender(
        "AdamW, ZeRO-1, int4",
        "#bd9e39",
        _learner("sharded-adamw", stage=1, codec="int4"),
        None,
        "every step",
        ours=True,
    ),
    "ddp-bf16-muon": Contender(
        "DDP, bf16 hook, Muon",
        "#9c89b8",
        partial(DataParallelLearner, hook="bf16", muon_rate=_MUON_RATE),
        None,
        "every step",
    ),
    "onebit-muon": _muon("sign1", "#6a4c93"),
    "onebit-muon-stat2": _muon("stat2", "#b5179e"),
    "zero-one-adam": Contender(
        OPTIMIZERS["zero-one-adam"].label,
        "#5a3e85",
        _ours("zero-one-adam"),
        Method("zero-one-adam"),
        "local",
        ours=True,
        steps_alike=False,
    ),
    "onebit-adam-flat": Contender(
        f"{_ONEBIT.label}, flat",
        "#8f6bb3",
        _ours("onebit-adam", nodes="flat"),
        Method("onebit-adam"),
        "frozen",
        ours=True,
        by_node=False,
        needs_shared_hosts=True,
    ),
    "onebit-adam-warmup": Contender(
        f"{_ONEBIT.label}, bf16 warmup",
        "#e0a13c",
        _ours("onebit-adam", freeze_step=_NEVER),
        Method("onebit-adam"),
        "warmup",
        ours=True,
        trains=False,
    ),
    "diloco-10-int4": _diloco(10, "int4", "#4aa8d8"),
    "diloco-30-none": _diloco(30, "none", "#00798c"),
    "diloco-30-int4": _diloco(30, "int4", "#17b8a6"),
    "diloco-30-mean": _diloco(
        30, "int4", "#d62976", ", mean of weights", outer_lr=1.0, outer_momentum=0.0, overlap=0, mix=0.0
    ),
    "diloco-30-stat2": _diloco(30, "stat2", "#8ac926"),
    "diloco-100-int4": _diloco(100, "int4", "#3d5a80"),
    "diloco-30-plain": Contender(
        "DiLoCo, 30 steps, 20 lines of torch",
        "#b07aa1",
        _learner("plain-diloco", every=30),
        None,
        "local",
        steps_alike=False,
        bursts=True,
    ),
}
"""By name. The step race measures the last stage of those that change their ways: 1-bit Adam frozen, PowerSGD begun.

1-bit Adam is hierarchical where ranks share a host.
"""
