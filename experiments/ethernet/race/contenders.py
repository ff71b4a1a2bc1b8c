"""Who races: one table, from which every measurement and picture takes its names, colours and learners."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

from torch import nn

from experiments.ethernet.race.data_parallel import DataParallelLearner
from experiments.training.learners import Learner, LoopLearner, zero_one_intervals
from experiments.training.plans import Plan
from thinwire import OneBitAdam, ZeroOneAdam
from thinwire.comm import Communicator
from thinwire.plan import Method

__all__ = ["BASELINE", "CONTENDERS", "FAIR_BASELINE", "POWER_SGD", "Contender"]

BASELINE = "ddp-fp32"
FAIR_BASELINE = "ddp-bf16"
"""What is honest to beat: 16 bits cost nothing (Agarwal et al., MLSys 2022)."""
POWER_SGD = ("ddp-powersgd-1", "ddp-powersgd-4")
"""The compression that torch brings along."""


@dataclass(frozen=True)
class Contender:
    """One way to train a model on several hosts.

    Attributes:
        label: for tables and pictures.
        colour: for pictures.
        build: makes the learner of a model, on every rank alike. Collective.
        method: what `thinwire plan` calls it.
        phase: the kind of step that the step race measures, in the plan's words.
        ours: thinwire's, to be compared with the baselines.
        trains: races to a loss; what shows one stage only does not.
        steps_alike: races steps, which are all alike in its last stage.
        by_node: exchanges hierarchically where ranks share a host, if it is ours.
        needs_shared_hosts: differs from another contender only where several ranks share a host.
    """

    label: str
    colour: str
    build: Callable[[nn.Module, Plan, Communicator], Learner]
    method: Method
    phase: str
    ours: bool = False
    by_node: bool = True
    trains: bool = True
    steps_alike: bool = True
    needs_shared_hosts: bool = False


def _onebit_adam(
    model: nn.Module,
    plan: Plan,
    comm: Communicator,
    *,
    nodes: Literal["auto", "flat"] = "auto",
    freeze_step: int | None = None,
) -> Learner:
    """1-bit Adam whose warmup goes in bf16, frozen as the plan says unless `freeze_step` is given."""
    return LoopLearner(
        model,
        plan,
        lambda groups: OneBitAdam(
            groups,
            lr=plan.learning_rate,
            freeze_step=plan.freeze_step if freeze_step is None else freeze_step,
            comm=comm,
            warmup_wire="bf16",
            nodes=nodes,
        ),
    )


def _zero_one_adam(model: nn.Module, plan: Plan, comm: Communicator) -> Learner:
    """0/1 Adam, whose exact steps go in bf16."""
    return LoopLearner(
        model,
        plan,
        lambda groups: ZeroOneAdam(
            groups,
            lr=plan.learning_rate,
            comm=comm,
            warmup_wire="bf16",
            **zero_one_intervals(plan),
        ),
    )


_NEVER = 2**31

CONTENDERS = {
    BASELINE: Contender("DDP, fp32", "#5b6572", DataParallelLearner, Method("ddp-fp32"), "every step"),
    FAIR_BASELINE: Contender(
        "DDP, bf16 hook", "#2b6ca3", partial(DataParallelLearner, hook="bf16"), Method("ddp-bf16"), "every step"
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
    "onebit-adam": Contender("1-bit Adam", "#d1495b", _onebit_adam, Method("onebit-adam"), "frozen", ours=True),
    "zero-one-adam": Contender(
        "0/1 Adam", "#5a3e85", _zero_one_adam, Method("zero-one-adam"), "local", ours=True, steps_alike=False
    ),
    "onebit-adam-flat": Contender(
        "1-bit Adam, flat",
        "#8f6bb3",
        partial(_onebit_adam, nodes="flat"),
        Method("onebit-adam"),
        "frozen",
        ours=True,
        by_node=False,
        needs_shared_hosts=True,
    ),
    "onebit-adam-warmup": Contender(
        "1-bit Adam, bf16 warmup",
        "#e0a13c",
        partial(_onebit_adam, freeze_step=_NEVER),
        Method("onebit-adam"),
        "warmup",
        ours=True,
        trains=False,
    ),
}
"""By name. The step race measures the last stage of those that change their ways: 1-bit Adam frozen, PowerSGD begun.

1-bit Adam is hierarchical where ranks share a host.
"""
