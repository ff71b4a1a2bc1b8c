"""What single 1-bit optimizers refuse when they are built, on every rank; behaviours/refusals.py is of all of them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import thinwire
from tests.launching import on_threads
from tests.optim.training import loss_of, make_model, make_optimizer, train
from tests.refusing import refused
from thinwire.comm import CommunicationError, Communicator, LoggedCommunicator, OperationLog, threads
from thinwire.optim import CapturedStep
from thinwire.optim.adam import Adam
from thinwire.optim.lamb import Lamb
from thinwire.optim.replicated.capture import CudaGraphs, check_can_be_captured

BAD_OPTIONS: list[tuple[str, dict[str, Any], str]] = [
    ("OneBitAdam", {"amsgrad": True}, "amsgrad=True cannot work"),
    ("OneBitAdam", {"eps": 0.0}, "eps must be above 0"),
    ("OneBitAdam", {"freeze_step": 0}, "freeze_step must be"),
    ("OneBitAdam", {"freeze_step": 2.5}, "freeze_step must be"),
    ("OneBitAdam", {"freeze_step": "soon"}, "freeze_step must be"),
    ("OneBitAdam", {"freeze_step": 0, "stage": 1}, "freeze_step must be"),
    ("OneBitAdam", {"compress": "gradient"}, "compress must be"),
    ("OneBitAdam", {"codec": "topk"}, "codec must be"),
    ("OneBitAdam", {"warmup_wire": "fp8"}, "warmup_wire must be"),
    ("OneBitLion", {"warmup_wire": "bf16"}, "OneBitLion has no warmup"),
    ("OneBitLamb", {"stage": 2}, "stage must be 0 or 1 for OneBitLamb, got 2: once compressed"),
    ("OneBitLamb", {"stage": 3}, "stage must be 0 or 1 for OneBitLamb, got 3: stage 3 shards the model itself"),
    ("OneBitLamb", {"max_coeff": 0.001}, "min_coeff must be above 0 and at most max_coeff"),
    ("OneBitLamb", {"min_coeff": 0.0, "stage": 1}, "min_coeff must be above 0"),
    ("OneBitLamb", {"max_coeff": float("nan")}, "min_coeff must be"),
    ("OneBitLamb", {"coeff_beta": 1.0, "stage": 1}, "coeff_beta must be from 0"),
    ("OneBitLamb", {"factor_min": 1.5}, "factor_min must be"),
    ("OneBitLamb", {"factor_max": 0.9}, "factor_max at least 1"),
    ("OneBitLamb", {"factor_threshold": -0.1}, "factor_threshold must be from 0"),
    ("OneBitLamb", {"factor_threshold": 1.0, "stage": 1}, "factor_threshold must be"),
    ("OneBitLamb", {"eps": 0.0, "stage": 1}, "eps must be"),
    ("OneBitLamb", {"amsgrad": True}, "amsgrad=True"),
    ("ZeroOneAdam", {"var_freeze_step": 0}, "var_freeze_step must be a whole number of at least 1, got 0"),
    ("ZeroOneAdam", {"var_freeze_step": "auto"}, "var_freeze_step must be a whole number"),
    ("ZeroOneAdam", {"var_update_scaler": 0}, "var_update_scaler must be a whole number of at least 1, got 0"),
    ("ZeroOneAdam", {"local_step_scaler": 1.5, "stage": 1}, "local_step_scaler must be a whole number .*, got 1.5"),
    ("ZeroOneAdam", {"local_step_clipper": True}, "local_step_clipper must be a whole number"),
    ("ZeroOneAdam", {"amsgrad": True}, "amsgrad"),
    *((name, {"compress": "gradient"}, "compress must be") for name in ("OneBitLamb", "ZeroOneAdam")),
    ("ZeroOneAdam", {"codec": "sign2", "stage": 1}, "codec must be"),
]


@pytest.mark.parametrize(("name", "options", "message"), BAD_OPTIONS)
@on_threads(2)
def test_bad_options_of_one_rank_are_refused_on_every_rank(
    comm, name: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message if comm.rank == 1 else "rank 1"):
        getattr(thinwire, name)(make_model().parameters(), comm=comm, **(options if comm.rank == 1 else {}))


@pytest.mark.parametrize(
    ("name", "option", "first"),
    [
        *(("OneBitLamb", option, 0.5) for option in ("max_coeff", "factor_threshold", "coeff_beta")),
        *(("ZeroOneAdam", option, 7) for option in ("var_update_scaler", "local_step_scaler", "local_step_clipper")),
    ],
)
@on_threads(2)
def test_options_that_differ_between_ranks_are_told_on_every_rank(comm, name: str, option: str, first: float) -> None:
    given = {option: first + comm.rank * (1 if isinstance(first, int) else 0.25)}
    with pytest.raises(ValueError, match=f"rank 1 and rank 0 differ: .*{option}"):
        getattr(thinwire, name)(make_model().parameters(), comm=comm, **given)


@pytest.mark.parametrize(
    ("group", "message"),
    [
        ({"lr": -1.0}, "lr must be at least 0"),
        ({"betas": (0.9, 1.5)}, "betas must be"),
        ({"exp_avg_mask": torch.ones(3, 5)}, r"exp_avg_mask of shape \(3, 5\) does not broadcast"),
    ],
)
@on_threads(2)
def test_a_bad_group_is_refused_and_not_kept(comm, group, message) -> None:
    model = make_model()
    optimizer = make_optimizer(model[:2], comm)
    refused(ValueError, message, optimizer.add_param_group, {"params": [model[2].weight]} | group)
    optimizer.add_param_group({"params": [model[2].weight]})
    assert len(optimizer.param_groups) == 2


@on_threads(2)
def test_masks_that_differ_between_ranks_are_an_error(comm) -> None:
    mask = torch.ones(3)
    mask[comm.rank] = 0
    with pytest.raises(ValueError, match="rank 1 and rank 0 differ"):
        thinwire.OneBitAdam([{"params": [nn.Parameter(torch.zeros(3))], "exp_avg_mask": mask}], comm=comm)


@on_threads(2)
def test_sparse_gradients_are_refused(comm) -> None:
    embedding = nn.Embedding(10, 4, sparse=True)
    optimizer = make_optimizer(embedding, comm)
    refused(ValueError, r"has a sparse gradient.*sparse=False", embedding(torch.tensor([1, 2])).sum().backward)
    assert not optimizer.frozen


def test_what_a_frozen_stage_cannot_do_is_refused() -> None:
    weight = nn.Parameter(torch.ones(4, 3))
    refused(ValueError, "no maximize", thinwire.OneBitAdam, [{"params": [weight], "maximize": True}], stage=1)
    with pytest.raises(ValueError, match=r"exp_avg_mask of shape \(4, 2\) does not broadcast"):
        thinwire.OneBitAdam([{"params": [weight], "exp_avg_mask": torch.ones(4, 2)}], stage=1)
    with pytest.raises(ValueError, match="reversible=False does not go with max_norm"):
        thinwire.OneBitAdam([weight], max_norm=1.0, reversible=False, stage=1)


@on_threads(2)
def test_a_rank_that_drops_a_step_alone_is_found_out_at_the_next(comm) -> None:
    model = make_model()
    optimizer = make_optimizer(model, comm)
    train(model, optimizer, range(3))
    optimizer.zero_grad()
    loss_of(model, comm.rank, 3).backward()
    if comm.rank == 1:
        optimizer.zero_grad()
    else:
        optimizer.step()
    optimizer.zero_grad()
    with pytest.raises(CommunicationError, match=r"rank \d sent a packet of step \d where step \d was expected"):
        loss_of(model, comm.rank, 4).backward()


@on_threads(2)
def test_unfreezing_a_parameter_on_one_rank_only_is_an_error_on_every_rank(comm) -> None:
    model = make_model()
    model[0].requires_grad_(False)
    optimizer = make_optimizer(model, comm)
    train(model, optimizer, range(4))
    model[0].requires_grad_(comm.rank == 1)
    with pytest.raises(ValueError, match=r"rank 1 and rank 0 differ: requires_grad\[0\] is True against False"):
        train(model, optimizer, [4])


# Captured steps: the fake device has cases of what can be captured


@pytest.mark.parametrize(
    ("build", "says"),
    [
        (lambda weights: thinwire.OneBitAdam(weights), "parameters on a CUDA device, they are on cpu"),
        (lambda weights: thinwire.OneBitAdam(weights, stage=1), "at stage 0, got OneBitAdam at stage 1"),
        (lambda weights: torch.optim.AdamW(weights), "takes a OneBitAdam at stage 0, got AdamW"),
    ],
)
def test_other_optimizers_are_refused(build: Callable[[Any], Any], says: str) -> None:
    optimizer = build(nn.Linear(3, 2).parameters())
    refused(TypeError, says, CapturedStep, optimizer, lambda: None)


@pytest.mark.parametrize(
    ("algorithm", "by_node", "clips", "says"),
    [
        (Lamb("update"), False, False, "use OneBitAdam"),
        (Adam("update"), True, False, "ranks of a node"),
        (Adam("update"), False, True, "max_norm= has it estimate norms"),
    ],
)
def test_steps_that_differ_every_time_are_refused(algorithm: Any, by_node: bool, clips: bool, says: str) -> None:
    refused(TypeError, says, check_can_be_captured, "OneBit", algorithm, by_node, clips)


def test_the_host_takes_no_part_in_captured_collectives() -> None:
    def body(comm: Communicator) -> None:
        refused(ValueError, "collectives over threads cannot be captured", CudaGraphs.check, comm)

    threads.run(body, 2)
    alone = threads.single(10.0)
    CudaGraphs.check(alone)
    refused(ValueError, "whose times are logged", CudaGraphs.check, LoggedCommunicator(alone, OperationLog()))
