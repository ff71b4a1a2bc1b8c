"""What scripts ask of an engine at stage 3: whole parameters, averaged gradients, weights of a checkpoint."""

from __future__ import annotations

import tempfile

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from tests.engine.tiny import FEATURES, loss_of, make_engine, make_model, settings, train
from thinwire import deepspeed, initialize
from thinwire.comm import Communicator
from thinwire.deepspeed import utils, zero
from thinwire.deepspeed.files.fp32_weights import (
    get_fp32_state_dict_from_zero_checkpoint,
    load_state_dict_from_zero_checkpoint,
)
from thinwire.deepspeed.utils import get_z3_leaf_modules, set_z3_leaf_modules
from thinwire.zero.fsdp import local_run


def parameters_are_whole_from_the_first_forward_on(comm: Communicator) -> None:
    engine = make_engine(comm, settings(3))
    found: list[zero.ZeroParamStatus] = []
    for module in (engine.module.mix, engine.module.layers[1].up):
        module.register_forward_pre_hook(lambda module, _: found.append(module.weight.ds_status))
    for step in range(2):
        engine.backward(loss_of(engine, comm.rank, step))
        engine.step()
    assert found == [zero.ZeroParamStatus.AVAILABLE] * 4
    assert engine.module.mix.weight.ds_status is zero.ZeroParamStatus.NOT_AVAILABLE


def averages_of_several_backwards_add_up(comm: Communicator) -> None:
    """A layer at a time, in the owners' shards: as the sum of the losses would."""
    engine, summed = (make_engine(comm, settings(3)) for _ in range(2))
    assert not any(engine.optimizer.averaged_gradients.values())
    for step in range(0, 4, 2):
        for one in (step, step + 1):
            engine.backward(loss_of(engine, comm.rank, one))
            engine.allreduce_gradients()
        summed.backward(loss_of(summed, comm.rank, step) + loss_of(summed, comm.rank, step + 1))
        both = [optimizer.averaged_gradients for optimizer in (engine.optimizer, summed.optimizer)]
        assert both[0].keys() == both[1].keys() == set(range(len(engine.optimizer.param_groups)))
        held = [one for group in both[0].values() for one in group]
        assert held
        torch.testing.assert_close(held, [one for group in both[1].values() for one in group])
        engine.step()
        summed.step()
    assert engine.global_steps == 2


def a_checkpoint_is_loaded_into_gathered_parameters(comm: Communicator) -> None:
    engine = make_engine(comm, settings(3, bf16={"enabled": True}))
    train(engine, range(2))
    with tempfile.TemporaryDirectory() as mine:
        folder = comm.all_gather_bytes(mine.encode(), "agree on a folder")[0].decode()
        engine.save_checkpoint(folder)
        comm.barrier()
        expected = get_fp32_state_dict_from_zero_checkpoint(folder)
        train(engine, range(2, 4))
        with pytest.raises(RuntimeError, match="are shards of stage 3"):
            load_state_dict_from_zero_checkpoint(engine.module, folder)
        with zero.GatheredParameters(engine.module.parameters(), modifier_rank=0):
            assert load_state_dict_from_zero_checkpoint(engine.module, folder) is engine.module
        comm.barrier()
    for name, one in engine.module.named_parameters():
        if one.requires_grad:
            assert torch.equal(utils.safe_get_full_fp32_param(one), expected[name]), name


def the_torch_optimizer_is_shown(comm: Communicator) -> None:
    """With what this rank holds of every parameter, flat, also between DeepSpeed's two calls around a look at it."""
    engine = make_engine(comm, settings(3))
    train(engine, range(2))
    engine.optimizer._set_fp32_optimizer_param_groups()
    shown = engine.optimizer.optimizer
    assert isinstance(shown, torch.optim.Adam)
    held = [one for group in shown.param_groups for one in group["params"]]
    trained = [one for group in engine.optimizer.param_groups for one in group["params"] if one.requires_grad]
    expected = [shard for one in trained if (shard := local_run(one)[1]).numel()]
    assert all(torch.equal(*pair) for pair in zip(held, expected, strict=True))
    stepped = [one for one in held if one in shown.state]
    assert stepped
    moments = [one["exp_avg"] for one in shown.state_dict()["state"].values()]
    assert [one.shape for one in moments] == [one.shape for one in stepped]
    engine.optimizer._clear_fp32_optimizer_param_groups()
    assert engine.optimizer.optimizer is shown
    train(engine, range(2, 3))


def sixteen_bit_weights_are_those_of_the_file(comm: Communicator) -> None:
    """With tied names, on rank 0, by the name that DeepSpeed's scripts call."""
    model = make_model()
    config = settings(3)
    engine = deepspeed.initialize(model=model, config=config)[0]
    found = engine._zero3_consolidated_16bit_state_dict()
    trained = engine._zero3_consolidated_16bit_state_dict(exclude_frozen_parameters=True)
    with tempfile.TemporaryDirectory() as mine:
        folder = comm.all_gather_bytes(mine.encode(), "agree on a folder")[0].decode()
        assert engine.save_16bit_model(folder)
        if comm.rank == 0:
            written = torch.load(f"{folder}/pytorch_model.bin")
            assert found is not None
            assert trained is not None
            assert found.keys() == written.keys() == trained.keys() | {"frozen"}
            assert "unmix.weight" in found
            assert found["mix.weight"].dtype is torch.bfloat16
            assert all(torch.equal(one, written[name]) for name, one in found.items())
        else:
            assert found is trained is None
        comm.barrier()
    engine.close()
    sharded_less = deepspeed.initialize(model=make_model(), config=settings(1))[0]
    with pytest.raises(ValueError, match="is for stage 3, and this engine is at stage 1"):
        sharded_less._zero3_consolidated_16bit_state_dict()
    sharded_less.close()


class Routed(nn.Module):
    """Every rank sends its data through another expert."""

    def __init__(self, expert: int) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(FEATURES, FEATURES) for _ in range(3)])
        self.expert = expert

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs + self.experts[self.expert](inputs)


class Model(nn.Module):
    def __init__(self, expert: int) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.before = nn.Linear(FEATURES, FEATURES)
        self.routed = Routed(expert)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.routed(self.before(inputs))


def leaf_modules_average_what_ranks_use_apart(comm: Communicator) -> None:
    """As stage 0 does, though ranks bring gradients of other experts; the module is gathered as one."""
    sharded, expected = Model(comm.rank), Model(comm.rank)
    assert set_z3_leaf_modules(sharded, ["Routed"]) == get_z3_leaf_modules(sharded) == [sharded.routed]
    engine, whole = (initialize(model=m, comm=comm, config=settings(s))[0] for m, s in ((sharded, 3), (expected, 0)))
    wrapped = [name for name, one in engine.module.named_modules() if isinstance(one, FSDPModule)]
    assert wrapped == ["", "routed"]
    for step in range(2):
        for one in (engine, whole):
            one.backward(loss_of(one, comm.rank, step))
            one.step()
    for name, one in engine.module.named_parameters():
        found = utils.safe_get_full_fp32_param(one)
        if any(f"experts.{rank}." in name for rank in range(comm.size)) or "experts" not in name:
            torch.testing.assert_close(found, expected.get_parameter(name).detach(), rtol=1e-5, atol=1e-6, msg=name)
    with pytest.raises(RuntimeError, match="no input of the leaf module Routed requires a gradient"):
        engine.module.routed(torch.ones(2, FEATURES))
    with torch.no_grad():
        engine.module.eval()(torch.ones(2, FEATURES))
