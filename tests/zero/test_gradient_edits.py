"""What is done to `.grad` beside the optimizer takes effect as in torch, or is an error: nothing passes unseen."""

import math
from contextlib import nullcontext
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import thinwire
from tests.launching import on_threads
from tests.optim.training import loss_of, make_model, weights
from tests.refusing import refused
from thinwire.comm import Communicator, threads
from thinwire.zero import ShardedOptimizer

FREEZE = 2


class Case(NamedTuple):
    kind: str
    stage: int
    frozen: bool = False


CASES = [Case("sharded", stage) for stage in (0, 1, 2)]
CASES += [Case("1-bit", stage, frozen) for stage in (0, 1, 2) for frozen in (False, True)]
OVER = r"is still that of the last step.*call zero_grad\(\) between two steps"

every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.kind}-{case.stage}-{case.frozen}")


def build(comm: Communicator, model: nn.Module, kind: str, stage: int, **options: Any) -> Any:
    options |= {"stage": stage, "comm": comm, "lr": 0.1}
    if kind == "sharded":
        return ShardedOptimizer(model.parameters(), torch.optim.SGD, block_size=8, **options)
    return thinwire.OneBitAdam(model.parameters(), block_size=64, freeze_step=FREEZE, **options)


def begun(comm: Communicator, case: Case) -> tuple[nn.Module, Any]:
    model = make_model()
    optimizer = build(comm, model, case.kind, case.stage)
    for step in range(FREEZE + 2 if case.frozen else 1):
        loss_of(model, comm.rank, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def zero_by_numpy(gradient: Tensor) -> None:
    gradient.numpy()[...] = 0.0


def swap_by_numpy(gradient: Tensor) -> None:
    values = gradient.numpy().reshape(-1)
    values[[0, 1]] = values[[1, 0]]


def replace_data(gradient: Tensor) -> None:
    gradient.data = torch.ones(gradient.shape)


EDITS = {
    "data replaced": replace_data,
    "zero_": lambda gradient: gradient.zero_(),
    "data.zero_": lambda gradient: gradient.data.zero_(),
    "_foreach_zero_": lambda gradient: torch._foreach_zero_([gradient]),
    "mul_": lambda gradient: gradient.mul_(2.0),
    "numpy": zero_by_numpy,
    "numpy swap": swap_by_numpy,
}


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
@every_case
@on_threads(2)
def test_an_edit_after_backward_takes_effect_or_is_refused(comm: Communicator, case: Case, edit: Any) -> None:
    model, optimizer = begun(comm, case)
    before = model[0].weight.detach().clone()
    loss_of(model, comm.rank, 50).backward()
    if (case.kind, case.stage) == ("sharded", 0) and edit is not replace_data:  # averages are shown, as DDP shows them
        edit(model[0].weight.grad)
        given = model[0].weight.grad.clone()
        optimizer.step()
        torch.testing.assert_close(model[0].weight.detach(), before - 0.1 * given)
        return

    def edit_and_step() -> None:
        edit(model[0].weight.grad)
        optimizer.step()

    refused(RuntimeError, r"was changed or dropped between|has left for its owner|numpy", edit_and_step)


@pytest.mark.parametrize("leaves_version", [True, False])
@on_threads(2)
def test_the_norm_that_is_clipped_is_that_of_averages_as_they_were_edited(
    comm: Communicator, leaves_version: bool
) -> None:
    model = make_model()
    before = weights(model)
    optimizer = build(comm, model, "sharded", 0, max_norm=0.5)
    loss_of(model, comm.rank, 50).backward()
    for parameter in model.parameters():
        (parameter.grad if leaves_version else parameter.grad.data).fill_(100.0)
    optimizer.step()
    assert optimizer.last_step.grad_norm == pytest.approx(100.0 * len(before) ** 0.5)
    assert float((weights(model) - before).norm()) == pytest.approx(0.1 * 0.5, rel=1e-3)


@on_threads(1)
def test_a_gradient_that_another_thread_drops_within_backward_is_named(comm: Communicator) -> None:
    model, optimizer = begun(comm, Case("1-bit", 0))
    optimizer._home.watcher.before_first = model.zero_grad  # between the gradient's hook and its bucket
    with pytest.raises(RuntimeError, match=r"parameter 5 .* was dropped while backward\(\) was bringing it"):
        loss_of(model, comm.rank, 50).backward()


IN_A_HOOK = {
    "assigned": lambda parameter: setattr(parameter, "grad", torch.zeros_like(parameter)),
    "assigned a product": lambda parameter: setattr(parameter, "grad", parameter.grad * 2.0),
    "written": lambda parameter: parameter.grad.mul_(2.0),
    "dropped": lambda parameter: setattr(parameter, "grad", None),
    "_foreach_zero_": lambda parameter: torch._foreach_zero_([parameter.grad]),
    "_foreach_mul_": lambda parameter: torch._foreach_mul_([parameter.grad], 2.0),
}


@pytest.mark.parametrize("how", [*IN_A_HOOK, "at the end of backward"])
@every_case
@on_threads(2)
def test_an_edit_within_backward_behind_the_optimizers_hook_is_refused(
    comm: Communicator, case: Case, how: str
) -> None:
    model, optimizer = begun(comm, case)
    weight = model[0].weight
    queue = torch.autograd.Variable._execution_engine.queue_callback

    def edit(parameter: Tensor) -> None:
        if how in IN_A_HOOK:
            with torch.no_grad():
                IN_A_HOOK[how](parameter)
        else:
            queue(lambda: parameter.grad.mul_(2.0))

    weight.register_post_accumulate_grad_hook(edit)
    refused(RuntimeError, r"0.*was changed or dropped|has left for its owner", loss_of(model, comm.rank, 50).backward)
    optimizer.zero_grad()


@pytest.mark.parametrize("drop", ["one", "all"])
@every_case
@on_threads(2)
def test_a_first_backward_that_is_dropped_by_hand_does_not_count(comm: Communicator, case: Case, drop: str) -> None:
    model, optimizer = begun(comm, case)
    other, plain = begun(comm, case)
    with optimizer.no_sync():
        loss_of(model, comm.rank, 50).backward()
        optimizer.end_backward()
    for parameter in model.parameters() if drop == "all" else [model[0].weight, model[0].bias]:
        parameter.grad = None
    if case.stage == 2 and not case.frozen:
        with pytest.raises(
            RuntimeError, match=r"dropped or zeroed between two backward\(\).*the optimizer's zero_grad"
        ):
            loss_of(model, comm.rank, 51).backward()
        return
    loss_of(model, comm.rank, 51).backward()
    optimizer.step()
    loss_of(other, comm.rank, 51).backward()
    plain.step()
    of_one = torch.equal(model[0].weight, other[0].weight)
    assert of_one if drop == "all" or case.kind == "sharded" else torch.isfinite(model[0].weight).all()


@every_case
@on_threads(2)
def test_without_zero_grad_gradients_add_up_or_the_backward_is_refused(comm: Communicator, case: Case) -> None:
    model, optimizer = begun(comm, case)
    other, plain = begun(comm, case)
    loss_of(model, comm.rank, 50).backward()
    optimizer.step()
    if case.stage > 0:
        refused(RuntimeError, OVER, loss_of(model, comm.rank, 51).backward)
        return
    loss_of(other, comm.rank, 50).backward()
    plain.step()
    sums = [parameter.grad.clone() for parameter in other.parameters()]
    plain.zero_grad()
    loss_of(model, comm.rank, 51).backward()
    optimizer.step()
    with plain.no_sync():
        for parameter, gradient in zip(other.parameters(), sums, strict=True):
            parameter.grad = gradient
    loss_of(other, comm.rank, 51).backward()
    plain.step()
    torch.testing.assert_close(weights(model), weights(other))


@every_case
@on_threads(2)
def test_a_second_step_takes_the_gradients_again_or_is_refused(comm: Communicator, case: Case) -> None:
    model, optimizer = begun(comm, case)
    loss_of(model, comm.rank, 50).backward()
    optimizer.step()
    before = weights(model)
    if case.stage > 0:
        refused(RuntimeError, OVER, optimizer.step)
        return
    optimizer.step()
    assert not torch.equal(weights(model), before)


@pytest.mark.parametrize("skipped", [False, True])
@pytest.mark.parametrize("reversible", [True, None])
@pytest.mark.parametrize(
    ("kind", "stage"), [("OneBitAdam", 1), ("OneBitAdam", 2), ("OneBitLamb", 1), ("OneBitLion", 1)]
)
def test_a_frozen_backward_that_is_thrown_away_or_skipped_leaves_residuals_alone_or_says_that_they_restart(
    kind: str, stage: int, reversible: bool | None, skipped: bool
) -> None:
    restarts = reversible is None and kind in ("OneBitAdam", "OneBitLamb")
    given = {"reversible": reversible} if kind in ("OneBitAdam", "OneBitLamb") else {}
    given |= {"freeze_step": FREEZE} if given else {}

    def body(comm: Communicator) -> None:
        model = make_model()
        build = getattr(thinwire, kind)
        optimizer = build(model.parameters(), lr=0.1, block_size=64, stage=stage, comm=comm, **given)
        for step in range(FREEZE + 2):
            loss_of(model, comm.rank, step).backward()
            optimizer.step()
            optimizer.zero_grad()
        before = {name: one.clone() for name, one in optimizer.rank_tensors().items() if "residual" in name}
        assert any(one.any() for one in before.values())
        (loss_of(model, comm.rank, 50) * (math.inf if skipped else 1.0)).backward()
        if skipped:
            optimizer.step()
            assert ("begin again" in optimizer.last_step.reason) == restarts
        optimizer.zero_grad()
        for name, one in before.items():
            assert torch.equal(optimizer.rank_tensors()[name], torch.zeros_like(one) if restarts else one)

    text = "begin again from zero.*reversible=True" if restarts else "was skipped"
    with pytest.warns(RuntimeWarning, match=text) if restarts or skipped else nullcontext():
        threads.run(body, 2)


@pytest.mark.parametrize("zero", ["model", "in place", "by hand"])
@every_case
@on_threads(2)
def test_gradients_may_be_zeroed_in_any_way_between_steps(comm: Communicator, case: Case, zero: str) -> None:
    model, optimizer = begun(comm, case)
    other, plain = begun(comm, case)
    for step in (50, 51, 52):
        loss_of(model, comm.rank, step).backward()
        optimizer.step()
        if zero == "by hand":
            for parameter in model.parameters():
                parameter.grad = None
        else:
            model.zero_grad(set_to_none=zero == "model")
        loss_of(other, comm.rank, step).backward()
        plain.step()
        plain.zero_grad()
    assert torch.equal(weights(model), weights(other))


@on_threads(2)
def test_a_model_is_moved_after_a_step_whose_gradients_have_left(comm: Communicator) -> None:
    model, optimizer = begun(comm, Case("sharded", 2))
    loss_of(model, comm.rank, 50).backward()
    for use in (lambda: model.share_memory(), lambda: torch.from_dlpack(model[2].weight.grad)):
        refused(RuntimeError, "has left for its owner", use)
    optimizer.step()
    model.double()
    assert model[0].weight.dtype == torch.float64


# What is done to parameters and groups


@pytest.mark.parametrize(("kind", "stage"), sorted({case[:2] for case in CASES}))
@on_threads(2)
def test_two_parameters_may_change_places(comm: Communicator, kind: str, stage: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(40, 40) for _ in range(3)))
    optimizer = build(comm, model, kind, stage, bucket_bytes=1640 * 4)
    one, other = model[0].weight, model[2].weight
    values = one.detach().clone(), other.detach().clone()
    one.data, other.data = other.data, one.data
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    model(torch.ones(2, 40)).sum().backward()
    optimizer.step()
    assert torch.equal(one.detach(), values[1])
    assert torch.equal(other.detach(), values[0])


@every_case
@on_threads(2)
def test_groups_are_those_that_the_optimizer_has_now(comm: Communicator, case: Case) -> None:
    model, optimizer = begun(comm, case)
    before = weights(model)
    optimizer.param_groups = [{**group, "lr": 0.0} for group in optimizer.param_groups]
    loss_of(model, comm.rank, 50).backward()
    optimizer.step()
    assert torch.equal(weights(model), before)
    optimizer.zero_grad()
    optimizer.param_groups[0]["params"] = optimizer.param_groups[0]["params"][1:]
    loss_of(model, comm.rank, 51).backward()
    refused(RuntimeError, r"param_groups hold more or fewer.*requires_grad to False", optimizer.step)


@every_case
@on_threads(2)
def test_a_second_optimizer_over_the_same_parameters_ends_the_first(comm: Communicator, case: Case) -> None:
    model, optimizer = begun(comm, case)
    second = build(comm, model, case.kind, case.stage)
    loss_of(model, comm.rank, 50).backward()
    refused(RuntimeError, "another optimizer of thinwire was built over parameters of this", optimizer.step)
    second.step()
    assert second.last_step.applied


@pytest.mark.filterwarnings("ignore:the weights of ranks")
@on_threads(2)
def test_replicas_that_every_rank_steps_by_itself_are_compared(comm: Communicator) -> None:
    model, optimizer = begun(comm, Case("sharded", 0))
    if comm.rank == 1:
        with torch.no_grad():
            model[0].weight.add_(1.0)
    for step in range(optimizer.steps, 100):
        loss_of(model, comm.rank, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    found = weights(model)
    comm.broadcast(found)
    assert torch.equal(weights(model), found)
    assert torch.isfinite(found).all()
