"""Parameters of every size and dtype, their groups, which may begin and stop to train, and those that a backward does
not reach, on every rank or on some, foreseen or not."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.optim.subject import FREEZE, LOCAL, Subject, alike, behaviour, next_send
from tests.optim.training import make_model, through_a_file, train, weights
from thinwire.comm import Communicator
from thinwire.optim.step import Send


def awkward_model() -> nn.ParameterList:
    """An empty parameter, a scalar, and sizes around a block's."""
    shapes = [(), (0, 3), (1,), (63,), (8, 8), (5, 13), (0,), (300,)]
    generator = torch.Generator().manual_seed(1)
    return nn.ParameterList([nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes])


@behaviour(1, 3)
def empty_scalar_and_odd_sizes_train(comm: Communicator, subject: Subject) -> None:
    model = awkward_model()
    optimizer = subject.build(model, comm)
    before = weights(model).norm()
    for _ in range(FREEZE + 10):
        optimizer.zero_grad()
        sum((one - 0.1 * comm.rank).square().sum() for one in model).backward()
        optimizer.step()
    optimizer.synchronize_weights()
    assert alike(comm, model)
    assert weights(model).norm() < before


@behaviour(2, of_home=True)
def only_empty_parameters_are_no_trouble(comm: Communicator, subject: Subject) -> None:
    empty = nn.Parameter(torch.empty(0, 3))
    optimizer = subject.build_on([empty], comm)
    for _ in range(FREEZE + 2):
        empty.grad = None
        empty.sum().backward()
        optimizer.step()
    assert optimizer.last_step.applied


@behaviour(2)
def weights_in_16_bits_agree_and_follow_fp32_master_weights(comm: Communicator, subject: Subject) -> None:
    narrowed = torch.float16 if subject.stage % 2 else torch.bfloat16
    for dtype, of_model in ((torch.bfloat16, True), (narrowed, False)):
        model = make_model(dtype=dtype if of_model else torch.float32)
        optimizer = subject.build(model, comm, resync_interval=4, **({} if of_model else {"param_dtype": dtype}))
        assert {parameter.dtype for parameter in model.parameters()} == {dtype}
        first = {one.name: one.tensor for one in optimizer.saved_slices() if one.kind == "master"}
        assert all(tensor.dtype == torch.float32 for tensor in first.values())
        losses = train(model, optimizer, range(20))
        optimizer.synchronize_weights()
        assert alike(comm, model)
        assert sum(losses[-5:]) < sum(losses[:5])
        shown = dict(model.named_parameters())
        for one in optimizer.saved_slices():
            if one.kind == "master":
                run = shown[one.name].detach().float().reshape(-1)[one.start : one.start + one.tensor.numel()]
                # Rounded at random up to four times since copies were taken from the master weights.
                torch.testing.assert_close(run, one.tensor, rtol=8 * torch.finfo(dtype).eps, atol=1e-4)


@behaviour(2)
def groups_and_schedulers_are_obeyed(comm: Communicator, subject: Subject) -> None:
    model = make_model()
    named = list(model.named_parameters())
    groups = [
        {"params": [one for one in named if one[1].dim() > 1], "lr": 0.0, "weight_decay": 0.1},
        {"params": [one for one in named if one[1].dim() == 1]},
    ]
    optimizer = subject.build_on(groups, comm)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 if step < FREEZE + 4 else 0.0)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    train(model, optimizer, range(FREEZE + 4), lambda step: schedule.step())
    optimizer.synchronize_weights()
    middle = [parameter.detach().clone() for parameter in model.parameters()]
    train(model, optimizer, range(FREEZE + 4, FREEZE + 8))
    after = list(model.parameters())
    moved = [not torch.equal(one, other) for one, other in zip(before, middle, strict=True)]
    assert moved == [parameter.dim() == 1 for parameter in after]
    assert all(torch.equal(one, other) for one, other in zip(middle, after, strict=True))


def step_times(weight: nn.Parameter, optimizer: Any, numbers: range) -> None:
    for number in numbers:
        weight.grad = None
        (weight * (optimizer.comm.rank + 1 + number)).sum().backward()
        optimizer.step()


@behaviour(2)
def an_exp_avg_mask_holds_coordinates_or_is_refused(comm: Communicator, subject: Subject) -> None:
    mask = torch.ones(1, 32)
    mask[0, 20:] = 0
    if subject.entry.freeze_option is None:
        with pytest.raises(ValueError, match="exp_avg_mask"):
            subject.build_on([{"params": [nn.Parameter(torch.ones(4, 32))], "exp_avg_mask": mask}], comm)
        return
    with pytest.raises(TypeError, match="exp_avg_mask must be a tensor, got list"):
        subject.build_on([{"params": [nn.Parameter(torch.ones(4, 32))], "exp_avg_mask": [1.0]}], comm)
    with pytest.raises(ValueError, match=r"exp_avg_mask of shape \(127,\) does not broadcast"):
        subject.build_on([{"params": [nn.Parameter(torch.ones(4, 32))], "exp_avg_mask": torch.ones(127)}], comm)
    flat = mask.expand(4, 32).flatten()  # DeepSpeed's form
    ends = []
    for form in (mask, mask.expand(4, 32), flat, flat.bool()):
        weight = nn.Parameter(torch.ones(4, 32))
        optimizer = subject.build_on([{"params": [weight], "exp_avg_mask": form}], comm)
        step_times(weight, optimizer, range(FREEZE))
        at_freeze = weight.detach().clone()
        step_times(weight, optimizer, range(FREEZE, FREEZE + 6))
        assert (weight != at_freeze).all(dim=0).tolist() == [True] * 20 + [False] * 12
        # What compression lost there is forgotten, as it would blur its block's scale.
        residuals = [one for key, one in optimizer.rank_tensors().items() if key.startswith("worker_residual")]
        loses = subject.codec == "sign1"  # others lose nothing of values that are all alike
        assert residuals or subject.nodes  # by node the first lane has all of it
        for residual in residuals:
            assert residual.view(4, 32).any(dim=0).tolist() == [loses] * 20 + [False] * 12
        ends.append(weight.detach().clone())
    assert all(torch.equal(end, ends[0]) for end in ends)


@behaviour(2)
def an_exp_avg_mask_is_the_new_one_after_a_checkpoint(comm: Communicator, subject: Subject) -> None:
    if subject.entry.freeze_option is None:
        return

    def build(first_held: int | None) -> tuple[nn.Parameter, Any]:
        weight = nn.Parameter(torch.ones(4, 32))
        group = {"params": [weight]}
        if first_held is not None:
            group["exp_avg_mask"] = (torch.arange(32) < first_held).float().expand(4, 32).flatten()
        return weight, subject.build_on([group], comm)

    weight, optimizer = build(20)
    step_times(weight, optimizer, range(LOCAL + 1))
    saved = through_a_file(optimizer.state_dict())
    for first_held in (10, 30, None):
        resumed, again = build(first_held)
        with torch.no_grad():
            resumed.copy_(weight)
        again.load_state_dict(saved)
        mask = again.param_groups[0].get("exp_avg_mask")
        assert (None if mask is None else int(mask.sum())) == (None if first_held is None else 4 * first_held)
        again.synchronize_weights()
        before = resumed.detach().clone()
        step_times(resumed, again, range(LOCAL + 1, LOCAL + 9))
        again.synchronize_weights()
        # What was held at the freeze has no variance to move by, whatever the new mask says.
        moving = min(20, 20 if first_held is None else first_held)
        assert (resumed != before).all(dim=0).tolist() == [True] * moving + [False] * (32 - moving)


@behaviour(2)
def a_parameter_that_stops_training_stays(comm: Communicator, subject: Subject) -> None:
    for moment in subject.moments:
        model, optimizer = subject.on_model(comm, moment, weight_decay=0.1)
        model[2].requires_grad_(False)
        before = weights(model[2])
        train(model, optimizer, range(moment, LOCAL + 3))
        assert torch.equal(before, weights(model[2])), moment
        optimizer.synchronize_weights()
        assert alike(comm, model)


@behaviour(2)
def parameters_that_come_later_warm_up_on_their_own_or_are_refused(comm: Communicator, subject: Subject) -> None:
    """Since they begin to train, or as a group that is added."""
    for added in (False, True):
        model = make_model()
        model[0].requires_grad_(added)
        before = weights(model[0])
        optimizer = subject.build_on(model[0].named_parameters() if added else model.named_parameters(), comm)
        train(model, optimizer, range(FREEZE + 2))
        assert torch.equal(weights(model[0]), before) != added
        model.zero_grad()
        model[0].requires_grad_(True)
        group = {"params": model[2].named_parameters(prefix="2"), "lr": 1e-3}
        if subject.stage:
            says = (
                "cannot be added to a sharded optimizer: build a new one" if added else "2 parameters require gradients"
            )
            with pytest.raises(RuntimeError, match=says):
                optimizer.add_param_group(group) if added else train(model, optimizer, [FREEZE + 2])
            assert len(optimizer.param_groups) == 1
            continue
        if added:
            optimizer.add_param_group(group)
            assert optimizer.frozen
        before = weights(model[2 if added else 0])
        train(model, optimizer, range(FREEZE + 2, FREEZE + 6))
        assert not torch.equal(weights(model[2 if added else 0]), before)
        assert optimizer.frozen == (subject.entry.freeze_option is None)
        # The first one's local steps, if there are any, go on beside the second's warmup, and then beside its own.
        train(model, optimizer, range(FREEZE + 6, FREEZE + LOCAL + 6))
        optimizer.synchronize_weights()
        assert optimizer.frozen
        assert [group.clock.frozen_at for group in optimizer._home.groups] == [optimizer.frozen_at] * 2
        assert alike(comm, model)


@behaviour(2, of_home=True)
def an_optimizer_built_later_is_the_one_that_sends(comm: Communicator, subject: Subject) -> None:
    if subject.stage:
        return  # its parameters lie in the first one's buckets
    model, first = subject.on_model(comm, FREEZE + 2)
    sent = first.bytes_sent
    train(model, subject.build(model, comm), range(FREEZE + 2))
    assert first.bytes_sent == sent


@behaviour(2)
def a_parameter_without_gradient_is_left_alone_or_counts_as_zero(comm: Communicator, subject: Subject) -> None:
    for moment in subject.moments:
        model, optimizer = subject.on_model(comm, moment)
        before = weights(model[4])
        optimizer.zero_grad()
        left_alone = next_send(optimizer) is Send.EXACT
        model[0](torch.randn(4, 6, generator=torch.Generator().manual_seed(comm.rank))).square().sum().backward()
        optimizer.step()
        assert optimizer.last_step.applied
        assert torch.equal(before, weights(model[4])) == left_alone  # else its momentum goes on
        train(model, optimizer, range(moment + 1, moment + 3))
        assert alike(comm, model)


@behaviour(2, of_home=True)
def a_parameter_that_no_step_reaches_stays(comm: Communicator, subject: Subject) -> None:
    model = make_model()
    model.unused = nn.Parameter(torch.ones(70))
    optimizer = subject.build(model, comm)
    train(model, optimizer, range(LOCAL + 2))
    optimizer.synchronize_weights()
    assert torch.equal(model.unused, torch.ones(70))
    assert alike(comm, model)


@behaviour(3, of_home=True)
def a_gradient_on_some_ranks_only_is_an_error_or_counts_as_zero_on_the_others(
    comm: Communicator, subject: Subject
) -> None:
    """Where every rank holds all state, all have to take the same parameters along; owners of shards do not care."""
    for moment in (0, *subject.moments):
        model, optimizer = subject.on_model(comm, moment)
        optimizer.zero_grad()
        before = weights(model)
        inputs = torch.randn(4, 6, generator=torch.Generator().manual_seed(comm.rank))
        loss = (model[0](inputs) if comm.rank == 1 else model(inputs)).square().sum()
        if subject.stage == 0:
            message = r"parameter 2 of group 0 '2.weight'.* on ranks \[0, 2\] but none on ranks \[1\]"
            with pytest.raises(ValueError, match=message):
                step_on(loss, optimizer)  # backward() raises where gradients are complete, step() where they are not
            assert torch.equal(before, weights(model))
        else:
            step_on(loss, optimizer)
            assert optimizer.last_step.applied
            assert alike(comm, model)


def step_on(loss: Tensor, optimizer: Any) -> None:
    loss.backward()
    optimizer.step()


@behaviour(2)
def leaving_out_saves_bytes_or_is_refused(comm: Communicator, subject: Subject) -> None:
    model, optimizer = subject.on_model(comm, bucket_bytes=256)
    if subject.entry.local_steps:
        with pytest.raises(RuntimeError, match="an optimizer with local steps leaves no parameters out"):
            optimizer.leave_out(model[4].parameters())
        return
    for moment in subject.moments:
        train(model, optimizer, range(optimizer.steps, moment))
        sent = optimizer.bytes_sent
        train(model, optimizer, [moment])
        usually = optimizer.bytes_sent - sent
        optimizer.zero_grad()
        optimizer.leave_out([*model[2].parameters(), *model[4].parameters()])
        model[0](torch.ones(4, 6)).square().sum().backward()
        optimizer.step()
        assert optimizer.last_step.applied
        assert optimizer.bytes_sent - sent - usually < usually
        assert alike(comm, model)
