"""What cannot work is refused when an optimizer is built, on every rank, whichever ranks have asked for it."""

import math
from typing import Any

import pytest
import torch
from torch import nn

from tests.optim.subject import FREEZE, SUBJECTS, Subject, behaviour
from tests.optim.training import make_model
from thinwire.comm import Communicator

BAD_OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"lr": -1.0}, "lr must be at least 0"),
    ({"lr": float("nan")}, "lr must be at least 0"),
    ({"lr": "fast"}, "lr must be a number"),
    ({"betas": 0.9}, "betas must be"),
    ({"betas": (0.9, 1.0)}, "betas must be"),
    ({"betas": (0.9,)}, "betas must be"),
    ({"weight_decay": -0.1}, "weight_decay must be"),
    ({"block_size": 100}, "block_size must be"),
    ({"bucket_bytes": 0}, "bucket_bytes must be"),
    *(
        ({"max_norm": bad}, "max_norm must be a number of at least 0.* or None, got")
        for bad in (-1.0, math.nan, "1", [])
    ),
    ({"param_dtype": torch.float64}, "param_dtype must be"),
    ({"resync_interval": 0}, "resync_interval must be"),
    ({"resync_interval": True}, "resync_interval must be"),
    ({"on_drift": "ignore"}, "on_drift must be"),
    ({"stage": -1}, "stage must be"),
    ({"stage": True}, "stage must be .*, got True"),
]


def tensors(*shapes: tuple[int, ...], **kind: Any) -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(shape, **kind)) for shape in shapes]


@behaviour(2)
def bad_options_of_one_rank_are_told_on_every_rank(comm: Communicator, subject: Subject) -> None:
    for options, message in BAD_OPTIONS:
        mine = options if comm.rank == 1 else {}
        expected = message if comm.rank == 1 else "rank 1 could not build its optimizer"
        with pytest.raises((ValueError, TypeError), match=expected):
            subject.build(make_model(), comm, **mine)


@behaviour(3, of_home=True)
def parameters_that_one_rank_cannot_use_are_told_on_every_rank(comm: Communicator, subject: Subject) -> None:
    for bad, message in (
        ([], "empty parameter list"),
        (tensors((3,), dtype=torch.float64), f"is torch.float64: {subject.name} takes fp32, bf16 and fp16"),
        (tensors((3,), dtype=torch.complex64), f"is torch.complex64: {subject.name} takes fp32, bf16 and fp16"),
        (tensors((3,)) + tensors((3,), device="meta"), "parameter 1 is on meta but parameter 0 on cpu"),
    ):
        mine = bad if comm.rank == 1 else tensors((3,))
        expected = message if comm.rank == 1 else "rank 1 could not build its optimizer"
        with pytest.raises((ValueError, TypeError), match=expected):
            subject.build_on(mine, comm)


@behaviour(3)
def ranks_that_differ_are_told_on_every_rank(comm: Communicator, subject: Subject) -> None:
    differences: list[tuple[tuple[tuple[int, ...], ...], dict[str, Any], str]] = [
        (((300,), (400,)), {}, "number of parameters is 2 against 1 on rank 0"),
        (((400,),), {}, r"parameter 0 has shape \(400,\).* against shape \(300,\)"),
        (((300,),), {"lr": 0.5}, r"parameter groups are .*0\.5"),
        (((300,),), {"block_size": 128}, "block_size is 128 against 64"),
    ]
    if subject.entry.freeze_option is not None:
        name = subject.entry.freeze_option
        differences.append((((300,),), {name: FREEZE + 1}, f"{name} is {FREEZE + 1} against {FREEZE} on rank 0"))
    for shapes, options, message in differences:
        mine, mine_options = (shapes, options) if comm.rank == 1 else (((300,),), {})
        with pytest.raises(ValueError, match=f"rank 1 and rank 0 differ: {message}"):
            subject.build_on(tensors(*mine), comm, **mine_options)


@behaviour(2)
def another_optimizer_or_stage_of_one_rank_is_told(comm: Communicator, subject: Subject) -> None:
    others = [other for other in SUBJECTS if (other.name == subject.name) != (other.stage == subject.stage)]
    for other in others:
        mine, name = (other, "optimizer") if other.name != subject.name else (other, "stage")
        with pytest.raises(ValueError, match=f"rank 1 and rank 0 differ: {name} is"):
            (mine if comm.rank == 1 else subject).build(make_model(), comm)


@behaviour(2, of_home=True)
def another_order_of_equal_shapes_is_found_by_name(comm: Communicator, subject: Subject) -> None:
    names = ("first", "second") if comm.rank == 0 else ("second", "first")
    with pytest.raises(ValueError, match=r"rank 1 and rank 0 differ: names\[0\] is 'second' against 'first' on rank 0"):
        subject.build_on(list(zip(names, tensors((3,), (3,)), strict=True)), comm)
