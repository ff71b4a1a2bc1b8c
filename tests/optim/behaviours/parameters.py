"""Parameters of every size and dtype, and their groups, which may begin and stop to train."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.optim.behaviours.behaviour import alike, behaviour
from tests.optim.subject import FREEZE, LOCAL, Subject
from tests.optim.training import make_model, through_a_file, train, weights
from thinwire.comm import Communicator


def awkward_model() -> nn.ParameterList:
    """An empty parameter, a scalar, and sizes around a block's."""
    shapes = [(), (0, 3), (1,), (63,), (8, 8), (5, 13), (0,), (300,)]
    generator = torch.Generator().manual_seed(1)
    return nn.ParameterList([nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes])


@behaviour(1, 2, 3)
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


@behaviour(2)
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
    for dtype, of_model in ((torch.bfloat16, True), (torch.bfloat16, False), (torch.float16, False)):
        model = make_model(dtype=dtype if of_model else torch.float32)
        exact = weights(model)
        optimizer = subject.build(model, comm, resync_interval=4, **({} if of_model else {"param_dtype": dtype}))
        assert {parameter.dtype for parameter in model.parameters()} == {dtype}
        first = {one.name: one.tensor for one in optimizer.saved_slices() if one.kind == "master"}
        assert all(tensor.dtype == torch.float32 for tensor in first.values())
        if comm.size == 1:
            assert torch.equal(torch.cat([first[name] for name, _ in model.named_parameters()]), exact)
        losses = train(model, optimizer, range(28))
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
        for step in range(FREEZE + 6):
            weight.grad = None
            (weight * (comm.rank + 1 + step)).sum().backward()
            optimizer.step()
            if step == FREEZE - 1:
                at_freeze = weight.detach().clone()
        assert (weight != at_freeze).all(dim=0).tolist() == [True] * 20 + [False] * 12
        ends.append(weight.detach().clone())
    assert all(torch.equal(end, ends[0]) for end in ends)


@behaviour(2)
def an_exp_avg_mask_is_the_new_one_after_a_checkpoint(comm: Communicator, subject: Subject) -> None:
    if subject.entry.freeze_option is None:
        return

    def build(first_held: int | None) -> tuple[nn.Parameter, torch.optim.Optimizer]:
        weight = nn.Parameter(torch.ones(4, 32))
        group = {"params": [weight]}
        if first_held is not None:
            group["exp_avg_mask"] = (torch.arange(32) < first_held).float().expand(4, 32).flatten()
        return weight, subject.build_on([group], comm)

    def step(weight: nn.Parameter, optimizer: torch.optim.Optimizer, numbers: range) -> None:
        for number in numbers:
            weight.grad = None
            (weight * (comm.rank + 1 + number)).sum().backward()
            optimizer.step()

    weight, optimizer = build(20)
    step(weight, optimizer, range(LOCAL + 1))
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
        step(resumed, again, range(LOCAL + 1, LOCAL + 9))
        again.synchronize_weights()
        # What was held at the freeze has no variance to move by, whatever the new mask says.
        moving = min(20, 20 if first_held is None else first_held)
        assert (resumed != before).all(dim=0).tolist() == [True] * moving + [False] * (32 - moving)


@behaviour(2)
def a_parameter_that_stops_training_stays(comm: Communicator, subject: Subject) -> None:
    for moment in subject.moments:
        model = make_model()
        optimizer = subject.build(model, comm, weight_decay=0.1)
        train(model, optimizer, range(moment))
        model[2].requires_grad_(False)
        before = weights(model[2])
        train(model, optimizer, range(moment, LOCAL + 3))
        assert torch.equal(before, weights(model[2])), moment
        optimizer.synchronize_weights()
        assert alike(comm, model)


@behaviour(2)
def a_parameter_that_begins_to_train_later_warms_up_on_its_own_or_is_refused(
    comm: Communicator, subject: Subject
) -> None:
    model = make_model()
    model[0].requires_grad_(False)
    before = weights(model[0])
    optimizer = subject.build(model, comm)
    train(model, optimizer, range(FREEZE + 2))
    assert torch.equal(weights(model[0]), before)
    model[0].requires_grad_(True)
    if subject.stage:
        with pytest.raises(RuntimeError, match="2 parameters require gradients now but did not"):
            train(model, optimizer, [FREEZE + 2])
        return
    train(model, optimizer, range(FREEZE + 2, FREEZE + 6))
    assert not torch.equal(weights(model[0]), before)
    assert optimizer.frozen == (subject.entry.freeze_option is None)
    train(model, optimizer, range(FREEZE + 6, 2 * FREEZE + 4))
    assert optimizer.frozen
    optimizer.synchronize_weights()
    assert alike(comm, model)


@behaviour(2)
def a_group_added_later_warms_up_on_its_own_or_is_refused(comm: Communicator, subject: Subject) -> None:
    model = make_model()
    optimizer = subject.build_on(model[0].named_parameters(), comm)
    train(model, optimizer, range(FREEZE + 2))
    model.zero_grad()
    group = {"params": model[2].named_parameters(prefix="2"), "lr": 1e-3}
    if subject.stage:
        with pytest.raises(RuntimeError, match="parameters cannot be added to a sharded optimizer: build a new one"):
            optimizer.add_param_group(group)
        assert len(optimizer.param_groups) == 1
        return
    optimizer.add_param_group(group)
    assert optimizer.frozen
    train(model, optimizer, range(FREEZE + 2, FREEZE + 6))
    assert optimizer.frozen == (subject.entry.freeze_option is None)
    # The first group's local steps, where there are any, go on beside the second's warmup, and then beside its own.
    train(model, optimizer, range(FREEZE + 6, FREEZE + LOCAL + 6))
    optimizer.synchronize_weights()
    assert optimizer.frozen
    assert [group.clock.frozen_at for group in optimizer._home.groups] == [optimizer.frozen_at] * 2
    assert alike(comm, model)


@behaviour(2)
def an_optimizer_built_later_is_the_one_that_sends(comm: Communicator, subject: Subject) -> None:
    if subject.stage:
        return  # its parameters lie in the first one's buckets
    model = make_model()
    first = subject.build(model, comm)
    train(model, first, range(FREEZE + 2))
    sent = first.bytes_sent
    train(model, subject.build(model, comm), range(FREEZE + 2))
    assert first.bytes_sent == sent
