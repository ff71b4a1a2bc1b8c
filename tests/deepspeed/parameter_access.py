"""What reading and setting by parameter must do at every stage; on threads and on real processes alike."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.engine.tiny import loss_of, make_engine, make_model, settings, train
from tests.refusing import refused
from thinwire.comm import Communicator
from thinwire.deepspeed import utils, zero
from thinwire.engine import Engine

CLIP = 0.7


def trained(engine: Engine) -> dict[str, nn.Parameter]:
    """The engine's parameters that an optimizer steps and a backward reaches."""
    return {
        name: one for name, one in engine.module.named_parameters() if one.requires_grad and name not in ("unused",)
    }


def values(parameter: Tensor, seed: int, scale: float = 1.0) -> Tensor:
    shape = parameter.ds_shape if hasattr(parameter, "ds_shape") else parameter.shape
    return scale * torch.rand(shape, generator=torch.Generator().manual_seed(seed))


def what_was_set_is_what_is_stepped(comm: Communicator, stage: int, **changes: Any) -> None:
    """Weights, moments and gradients that were set: the next step is that of torch's AdamW from there."""
    engine = make_engine(comm, settings(stage, gradient_clipping=CLIP, **changes))
    scale = 2.0**8 if "fp16" in changes else 1.0
    train(engine, range(2))
    engine.backward(loss_of(engine, comm.rank, 5))
    parameters = trained(engine)
    expected = {name: values(one, seed) for seed, (name, one) in enumerate(parameters.items())}
    reference = [nn.Parameter(one.clone()) for one in expected.values()]
    optimizer = torch.optim.AdamW(reference, lr=1e-2, weight_decay=0.1)
    for seed, (mine, (name, one)) in enumerate(zip(reference, parameters.items(), strict=True)):
        gradient, first, second = values(one, 100 + seed, 0.5), values(one, 200 + seed), values(one, 300 + seed)
        gradient = gradient.to(torch.bfloat16).float()  # the same in every precision
        utils.safe_set_full_grad(one, gradient * scale)
        assert torch.equal(utils.safe_get_full_grad(one), gradient * scale)
        utils.safe_set_full_fp32_param(one, expected[name])
        assert torch.equal(utils.safe_get_full_fp32_param(one), expected[name])
        for key, state in (("exp_avg", first), ("exp_avg_sq", second)):
            utils.safe_set_full_optimizer_state(one, state, key)
            assert torch.equal(utils.safe_get_full_optimizer_state(one, key), state)
        mine.grad = gradient
        optimizer.state[mine] = {"step": torch.tensor(2.0), "exp_avg": first.clone(), "exp_avg_sq": second.clone()}
    norm = nn.utils.clip_grad_norm_(reference, CLIP)
    optimizer.step()
    engine.step()
    # The unused parameter has no gradient on any rank.
    assert engine.get_global_grad_norm() == pytest.approx(float(norm), rel=1e-4)
    for mine, one in zip(reference, parameters.values(), strict=True):
        torch.testing.assert_close(utils.safe_get_full_fp32_param(one), mine.detach(), rtol=1e-5, atol=1e-6)
        if stage < 3:
            assert torch.equal(one, utils.safe_get_full_fp32_param(one).to(one.dtype))
        assert utils.safe_get_full_grad(one) is None
    assert torch.tensor(train(engine, range(3, 6))).isfinite().all()


def gradients_are_averages(comm: Communicator, stage: int) -> None:
    """After the last backward of a step, the average over ranks and micro-batches; before, something of this step."""
    engine = make_engine(comm, settings(stage, gradient_accumulation_steps=2))
    model = make_model()
    for micro in range(2):
        engine.backward(loss_of(engine, comm.rank, micro))
        assert all(utils.safe_get_full_grad(one) is not None for one in trained(engine).values())
        engine.step() if micro == 0 else None
        for rank in range(comm.size):
            (loss_of(model, rank, micro) / (2 * comm.size)).backward()
    for name, one in model.named_parameters():
        found = utils.safe_get_full_grad(engine.module.get_parameter(name))
        if one.grad is not None:
            torch.testing.assert_close(found, one.grad, rtol=1e-4, atol=1e-6)
    engine.step()
    frozen = engine.module.frozen
    assert utils.safe_get_full_fp32_param(frozen) is None
    assert utils.safe_get_full_optimizer_state(frozen, "exp_avg") is None
    # Never stepped, beside others that were.
    assert torch.equal(utils.safe_get_full_optimizer_state(engine.module.unused, "exp_avg"), torch.zeros(4))


def what_is_shown_is_what_is_stepped(comm: Communicator, stage: int, own: bool = False, **changes: Any) -> None:
    """By SGD, whatever gradients are divided by: what is read before a step, and what is set in its place."""
    accumulation = 4 if own else 2
    plain = {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "gradient_accumulation_steps": accumulation}
    engine = make_engine(comm, settings(stage, **plain, **changes))
    summed = comm.size if changes.get("gradient_allreduce_op") == "sum" else 1
    scale = 2.0**8 if "fp16" in changes else 1.0
    for step in range(2):
        model = make_model()
        for name, one in model.named_parameters():
            found = utils.safe_get_full_fp32_param(engine.module.get_parameter(name))
            one.data = one.data if found is None else found
        for micro in range(accumulation):
            loss = loss_of(engine, comm.rank, step * accumulation + micro)
            loss.backward() if own else engine.backward(loss)
            engine.step() if micro < accumulation - 1 else None
            for rank in range(comm.size):
                (loss_of(model, rank, step * accumulation + micro) * summed / (accumulation * comm.size)).backward()
        for name, one in trained(engine).items():
            expected = model.get_parameter(name).grad
            tolerance = {"rtol": 3e-2, "atol": 3e-2} if "fp16" in changes else {"rtol": 1e-4, "atol": 1e-5}
            torch.testing.assert_close(utils.safe_get_full_grad(one) / scale, expected, **tolerance)
            if step:
                new = expected.sign() * scale
                utils.safe_update_full_grad_vectorized([one], lambda *_, new=new: new)
                torch.testing.assert_close(utils.safe_get_full_grad(one), expected.sign() * scale)
                expected.sign_()
            if stage == 3:
                shard = utils.safe_get_local_grad(one)
                utils.safe_set_local_grad(one, shard)
                torch.testing.assert_close(utils.safe_get_local_grad(one), shard)
        engine.step()
        gradients = [model.get_parameter(name).grad for name in trained(engine)]
        assert engine.get_global_grad_norm() == pytest.approx(float(nn.utils.get_total_norm(gradients)), rel=1e-2)
        for name, one in trained(engine).items() if step else ():
            moved = model.get_parameter(name).detach() - 0.1 * model.get_parameter(name).grad
            torch.testing.assert_close(utils.safe_get_full_fp32_param(one), moved, rtol=1e-4, atol=1e-5)


def bad_values(comm: Communicator, stage: int) -> None:
    engine = make_engine(comm, settings(stage))
    weight = engine.module.mix.weight
    with pytest.raises(ValueError, match="none yet: an optimizer's state begins with its first step"):
        utils.safe_get_full_optimizer_state(weight, "momentum_buffer")
    # Adam's moments begin with zeros.
    assert torch.equal(utils.safe_get_full_optimizer_state(weight, "exp_avg_sq"), torch.zeros(16, 16))
    refused(ValueError, "the parameter has no gradient to set", utils.safe_set_full_grad, weight, torch.ones(16, 16))
    refused(ValueError, "has no gradient to set", utils.safe_update_full_grad_vectorized, [weight], torch.add)
    train(engine, range(1))
    # On every rank, whichever gave the other shape.
    with pytest.raises(ValueError, match=r"the value to set has shape \(3,\), and the parameter \(16, 16\)"):
        utils.safe_set_full_fp32_param(weight, torch.ones(3) if comm.rank == comm.size - 1 else torch.ones(16, 16))
    refused(TypeError, r"must be a torch.Tensor, got float", utils.safe_set_full_fp32_param, weight, 1.0)
    if stage == 3:
        refused(TypeError, r"give value.full_tensor\(\)", utils.safe_set_full_grad, weight, torch.ones_like(weight))
    with pytest.raises(ValueError, match="no optimizer state 'momentum' of this parameter; there is exp_avg, exp_avg_"):
        utils.safe_get_full_optimizer_state(weight, "momentum")
    with pytest.raises(ValueError, match="no weight to set: no optimizer of thinwire's holds it"):
        utils.safe_set_full_fp32_param(nn.Parameter(torch.ones(2)), torch.ones(2))


def one_rank_changes_gathered_weights(comm: Communicator, stage: int, **changes: Any) -> None:
    """Everybody has them from then on, master weights too; parameters that nobody changed keep all of their bits."""
    engine = make_engine(comm, settings(stage, **changes))
    train(engine, range(2))
    layer, other = engine.module.layers[0], engine.module.layers[1]
    before = utils.safe_get_full_fp32_param(other.up.weight)
    root = comm.size - 1
    with zero.GatheredParameters(engine.module.layers.parameters(), modifier_rank=root):
        assert layer.up.weight.detach().clone().shape == (130, 16)
        torch.testing.assert_close(other.up.weight.detach().float(), before, rtol=1e-2, atol=1e-2)
        with torch.no_grad():
            layer.up.weight.fill_(0.5 + comm.rank)
            if comm.rank == root:
                layer.up.bias.data[1:3] = 0.25
    assert torch.equal(utils.safe_get_full_fp32_param(layer.up.weight), torch.full((130, 16), 0.5 + root))
    assert torch.equal(utils.safe_get_full_fp32_param(layer.up.bias)[1:3], torch.full((2,), 0.25))
    assert torch.equal(utils.safe_get_full_fp32_param(other.up.weight), before)
    with pytest.raises(ValueError, match=f"modifier_rank must be a rank, 0 to {comm.size - 1}, or None, got 9"):
        zero.GatheredParameters(layer.parameters(), modifier_rank=9)

    def fail() -> None:
        with zero.GatheredParameters([layer.up.weight], modifier_rank=0):
            if comm.rank == root:
                raise ValueError("not this one")

    refused(ValueError, "not this one", fail)
    assert torch.tensor(train(engine, range(2, 4))).isfinite().all()
