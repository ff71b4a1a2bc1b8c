"""What reading, setting and gathering do at stage 3, and what else scripts ask of an engine there: averaged gradients,
weights of a checkpoint, leaf modules."""

import copy
import io
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from tests.deepspeed.parameter_access import trained
from tests.engine.tiny import FEATURES, Tiny, batch, loss_of, make_engine, make_model, settings, train
from tests.refusing import refused
from thinwire import deepspeed, initialize
from thinwire.comm import Communicator
from thinwire.deepspeed import utils, zero
from thinwire.deepspeed.files.exporting import get_fp32_state_dict_from_zero_checkpoint as fp32_weights
from thinwire.deepspeed.files.exporting import load_state_dict_from_zero_checkpoint
from thinwire.deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum
from thinwire.deepspeed.runtime.zero.offload_states import get_state_devices
from thinwire.deepspeed.runtime.zero.utils import is_zero_param
from thinwire.zero.fsdp import local_run

BF16 = {"bf16": {"enabled": True}}
AVAILABLE, NOT_AVAILABLE = zero.ZeroParamStatus.AVAILABLE, zero.ZeroParamStatus.NOT_AVAILABLE


def every_rank_sets_its_shard(comm: Communicator) -> None:
    engine = make_engine(comm, settings(3, **BF16))
    train(engine, range(2))
    engine.backward(loss_of(engine, comm.rank, 3))
    for seed, one in enumerate(trained(engine).values()):
        generator = torch.Generator().manual_seed(100 * seed + comm.rank)
        before = [utils.safe_get_local_fp32_param(one), utils.safe_get_local_grad(one)]
        assert all(found.shape == one.ds_tensor.shape for found in before)
        value = torch.rand(one.ds_tensor.shape, generator=generator)
        utils.safe_set_local_fp32_param(one, value)
        utils.safe_set_local_grad(one, value)
        for key in ("exp_avg", "exp_avg_sq"):
            utils.safe_set_local_optimizer_state(one, value, key)
            assert torch.equal(utils.safe_get_local_optimizer_state(one, key), value)
        assert torch.equal(utils.safe_get_local_fp32_param(one), value)
        assert torch.equal(utils.safe_get_local_grad(one), value)
        whole = utils.safe_get_full_fp32_param(one)
        assert torch.equal(utils.safe_get_full_grad(one), whole)
        assert torch.equal(utils.safe_get_full_optimizer_state(one, "exp_avg"), whole)
        with pytest.raises(ValueError, match="the value must be of shape"):
            utils.safe_set_local_fp32_param(one, torch.ones(one.ds_tensor.numel() + 1))
    assert utils.safe_get_local_fp32_param(engine.module.frozen) is None
    engine.step()
    train(engine, range(4, 6))


class Ending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(FEATURES, FEATURES)
        self.nothing = nn.Linear(FEATURES, 0, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.mix(inputs)
        return hidden.sum() + self.nothing(hidden).sum()


def parameters_without_elements_are_of_the_models_dtype(comm: Communicator) -> None:
    """They are not gathered, and rest in the dtype that forwards compute in, however the model was built."""
    for shards in (False, True):
        with zero.Init(enabled=shards):
            model = Ending()
        engine = initialize(model=model, config=settings(3, **BF16), comm=comm)[0]
        for step in range(2):
            engine.backward(engine(batch(comm.rank, step)[0]))
            engine.step()
        assert engine.global_steps == 2
        nothing = engine.module.nothing.weight
        assert (nothing.dtype, tuple(nothing.shape)) == (torch.bfloat16, (0, FEATURES))
        assert not hasattr(nothing, "ds_id")
        for kind in OffloadStateTypeEnum:
            held = kind not in (OffloadStateTypeEnum.lp_grads, OffloadStateTypeEnum.contiguous_grad_buffer)
            assert get_state_devices(engine, kind) == ({engine.device} if held else set()), kind
        with common_folder(comm) as folder:
            engine.save_checkpoint(folder)
            engine.load_checkpoint(folder)
            comm.barrier()


def gathered_parameters_are_plain_tensors(comm: Communicator) -> None:
    """The objects that the script held before, by whatever name."""
    engine, expected = make_engine(comm, settings(3)), make_model()
    held = dict(engine.module.named_parameters())
    for name, one in held.items():
        whole = expected.get_parameter(name)
        assert (one.ds_shape, one.ds_numel, one.ds_status) == (whole.shape, whole.numel(), NOT_AVAILABLE)
    numbers = [one.ds_id for one in held.values() if one.ds_numel]
    assert len(set(numbers)) == len(numbers)
    assert not hasattr(make_engine(comm, settings(1)).module.mix.weight, "ds_id")
    weight = held["layers.1.up.weight"]
    with zero.GatheredParameters(engine.module.parameters()):
        assert weight is engine.module.layers[1].up.weight
        assert weight.ds_status is AVAILABLE
        for name, one in held.items():
            assert type(one.detach()) is type(one.data) is Tensor
            assert torch.equal(one, expected.get_parameter(name))
            assert isinstance(one, nn.Parameter)
        assert weight.detach().numpy().shape == (130, 16)
        assert torch.allclose(weight.mean(), expected.layers[1].up.weight.mean())
        state = engine.module.layers.state_dict()
        assert all(torch.equal(state[name], one) for name, one in expected.layers.state_dict().items())
        # Forwards inside gather for themselves.
        with torch.no_grad():
            torch.testing.assert_close(engine(batch(0, 0)[0]), expected(batch(0, 0)[0]))
        with zero.GatheredParameters(weight, modifier_rank=0), torch.no_grad():
            weight += comm.rank + 1
    assert weight.ds_status is NOT_AVAILABLE
    assert weight is engine.module.layers[1].up.weight
    with zero.GatheredParameters([weight]):
        assert torch.equal(weight, expected.layers[1].up.weight + 1)
    with zero.GatheredParameters(weight, enabled=False):
        assert weight.ds_status is NOT_AVAILABLE
    # Loading into gathered modules, as scripts do.
    for module in engine.module.modules():
        with zero.GatheredParameters(list(module.parameters(recurse=False)), modifier_rank=0), torch.no_grad():
            for one in module.parameters(recurse=False) if comm.rank == 0 else ():
                one.copy_(torch.full(one.shape, 0.125))
    found = engine.whole_state_dict()
    assert comm.rank > 0 or all((one == 0.125).all() for name, one in found.items() if name != "calls")
    # Between backward and step, and the gradients stay.
    engine.backward(loss_of(engine, comm.rank, 0))
    before = utils.safe_get_full_grad(weight)
    with zero.GatheredParameters(weight, modifier_rank=0):
        pass
    assert torch.equal(utils.safe_get_full_grad(weight), before)
    engine.step()
    train(engine, range(1, 3))


def parameters_taken_before(comm: Communicator) -> None:
    """What a script holds of a model stands for its shards, however the model was built: read, set and averaged."""
    for shards in (False, True):
        with zero.Init(enabled=shards):
            model = make_model() if not shards else Tiny()
        held = dict(model.named_parameters())
        engine = initialize(model=model, config=settings(3), comm=comm)[0]
        now = dict(engine.module.named_parameters())
        train(engine, range(2))
        engine.backward(loss_of(engine, comm.rank, 2))
        assert held.keys() == now.keys()
        for name, one in held.items():
            for get in (utils.safe_get_full_fp32_param, utils.safe_get_full_grad, utils.safe_get_local_fp32_param):
                if name != "nothing" or get is not utils.safe_get_local_fp32_param:
                    torch.testing.assert_close(get(one), get(now[name]), rtol=0, atol=0)
            if one is not now[name]:
                assert (one.ds_shape, one.ds_status) == (now[name].shape, NOT_AVAILABLE)
                assert getattr(one, "ds_id", None) == getattr(now[name], "ds_id", None)
        weight, shown = held["mix.weight"], now["mix.weight"]
        utils.safe_set_full_grad(weight, torch.ones(16, 16))
        utils.safe_set_local_optimizer_state(weight, torch.ones(weight.ds_tensor.shape), "exp_avg")
        assert torch.equal(utils.safe_get_full_grad(shown), torch.ones(16, 16))
        assert torch.equal(utils.safe_get_full_optimizer_state(weight, "exp_avg"), torch.ones(16, 16))
        utils.safe_set_full_fp32_param(weight, torch.full((16, 16), 2.0))
        average = torch.zeros(16, 16)
        for wanted, parameters in enumerate(([weight], engine.module.parameters(), [weight, shown]), 2):
            with zero.GatheredParameters(parameters, modifier_rank=0), torch.no_grad():
                assert weight.ds_status is AVAILABLE
                assert torch.equal(shown, torch.full((16, 16), float(wanted)))
                average.lerp_(weight, 0.5)
                if wanted == 3:
                    weight.data = weight + 1
                else:
                    weight.add_(1 if comm.rank == 0 else 9)
            assert torch.equal(utils.safe_get_full_fp32_param(shown), torch.full((16, 16), wanted + 1.0))
            assert weight.numel() == 0
        assert torch.equal(average, torch.full((16, 16), 3.0))
        dropped = pytest.warns(RuntimeWarning, match=r"a change of 1 parameters .* is dropped")
        with dropped, zero.GatheredParameters(weight), torch.no_grad():
            weight.zero_()
        assert torch.equal(utils.safe_get_full_fp32_param(weight), torch.full((16, 16), 5.0))
        with torch.no_grad():
            engine(batch(0, 0)[0])  # which leaves it gathered
        with zero.GatheredParameters(weight, modifier_rank=0), torch.no_grad():
            weight.fill_(0.5)
        assert torch.equal(utils.safe_get_full_fp32_param(weight), torch.full((16, 16), 0.5))
        engine.step()
        train(engine, range(3, 5))


def shards_are_compared(comm: Communicator) -> None:
    first, second = (list(make_engine(comm, settings(3)).module.parameters()) for _ in range(2))
    assert all(map(torch.allclose, first, second))
    if comm.rank == comm.size - 1:  # the others see what one rank finds
        local_run(second[0])[1].add_(1e-3)
    assert not torch.allclose(first[0], second[0])
    assert torch.allclose(first[0], second[0], atol=2e-3)
    refused(ValueError, "whole or cut otherwise", torch.allclose, first[0], torch.zeros(first[0].shape))


def what_a_forward_has_left_gathered(comm: Communicator) -> None:
    engine = make_engine(comm, settings(3))
    train(engine, range(1))
    with torch.no_grad():
        engine(batch(0, 0)[0])
    shown = engine.module.mix.weight
    assert type(shown.data) is Tensor
    assert shown.ds_status is AVAILABLE
    assert torch.equal(utils.safe_get_full_fp32_param(shown), shown)
    with zero.GatheredParameters(shown, modifier_rank=0), torch.no_grad():
        shown.fill_(comm.rank + 3.0)
    assert torch.equal(utils.safe_get_full_fp32_param(engine.module.mix.weight), torch.full((16, 16), 3.0))
    train(engine, range(1, 2))


def a_change_that_nobody_keeps_is_refused_where_that_is_checked(comm: Communicator) -> None:
    checks = {"zero_optimization": {"stage": 3, "enable_sanity_checks": True}}
    with zero.Init(config_dict_or_path=checks):
        linear = nn.Linear(5, 3)
    refused = pytest.raises(RuntimeError, match="in-place modification")
    with refused, zero.GatheredParameters(linear.parameters()), torch.no_grad():
        linear.weight.add_(0.0 if comm.rank == 0 else 1.0)
    assert linear.weight.numel() == 0


def parameters_are_whole_from_the_first_forward_on(comm: Communicator) -> None:
    engine = make_engine(comm, settings(3))
    found: list[zero.ZeroParamStatus] = []
    for module in (engine.module.mix, engine.module.layers[1].up):
        module.register_forward_pre_hook(lambda module, _: found.append(module.weight.ds_status))
    for step in range(2):
        engine.backward(loss_of(engine, comm.rank, step))
        engine.step()
    assert found == [AVAILABLE] * 4
    assert engine.module.mix.weight.ds_status is NOT_AVAILABLE
    compiled, plain = (make_engine(comm, settings(3)) for _ in range(2))
    compiled.compile(backend="eager")
    assert train(compiled, range(2)) == train(plain, range(2))


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


@contextmanager
def common_folder(ranks: Communicator) -> Iterator[str]:
    with tempfile.TemporaryDirectory() as mine:
        yield ranks.all_gather_bytes(mine.encode(), "agree on a folder")[0].decode()
        ranks.barrier()


def a_checkpoint_is_loaded_into_gathered_parameters(comm: Communicator) -> None:
    engine = make_engine(comm, settings(3, bf16={"enabled": True}))
    train(engine, range(2))
    with common_folder(comm) as folder:
        engine.save_checkpoint(folder)
        comm.barrier()
        expected = fp32_weights(folder)
        train(engine, range(2, 4))
        refused(RuntimeError, "are shards of stage 3", load_state_dict_from_zero_checkpoint, engine.module, folder)
        with zero.GatheredParameters(engine.module.parameters(), modifier_rank=0):
            assert load_state_dict_from_zero_checkpoint(engine.module, folder) is engine.module
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
    with common_folder(comm) as folder:
        assert engine.save_16bit_model(folder)
        if comm.rank == 0:
            written = torch.load(f"{folder}/pytorch_model.bin")
            assert found.keys() == written.keys() == trained.keys() | {"frozen"}
            assert "unmix.weight" in found
            assert found["mix.weight"].dtype is torch.bfloat16
            assert all(torch.equal(one, written[name]) for name, one in found.items())
        else:
            assert found is trained is None
    sharded_less = deepspeed.initialize(model=make_model(), config=settings(1))[0]
    with pytest.raises(ValueError, match="is for stage 3, and this engine is at stage 1"):
        sharded_less._zero3_consolidated_16bit_state_dict()


def parameters_gather_and_partition_themselves(comm: Communicator) -> None:
    """Built shard by shard, and an engine's; what they are asked with is not saved with them."""
    with zero.Init():
        layer = nn.Linear(6, 3, bias=False)
    engine = make_engine(comm, settings(3))
    mix = engine.module.mix.weight
    for one, shape in ((layer.weight, (3, 6)), (mix, (FEATURES, FEATURES))):
        assert (one.ds_persist, one.ds_status) == (False, NOT_AVAILABLE)
        with torch.no_grad():
            for updated in (True, False):
                one.all_gather()
                assert (one.ds_status, tuple(one.shape)) == (AVAILABLE, shape)
                one.fill_(3.0 if updated else 4.0)
                one.partition(has_been_updated=updated)
                assert one.ds_status is NOT_AVAILABLE
            one.partition()
            one.all_gather(param_list=[one])
            assert one.eq(3.0).all()
            one.partition([one])
    assert utils.safe_get_full_fp32_param(mix).eq(3.0).all()
    assert layer.weight.numel() == 0
    layer.weight.all_gather()
    layer.weight.partition(free_data=False)
    assert (layer.weight.ds_status, layer.weight.numel()) == (NOT_AVAILABLE, 18)
    saved = io.BytesIO()
    torch.save(layer.weight, saved)
    assert train(engine, range(1))


def ranks_generate_by_themselves(comm: Communicator) -> None:
    """With whole weights, and no collective: rank 0 alone runs the model."""
    engine, other = (make_engine(comm, settings(3), seed) for seed in (0, 1))
    train(engine, range(2))
    inputs = batch(comm.rank, 0)[0]
    with torch.no_grad():
        expected = engine(inputs)
        with zero.unwrap_model_for_generation(engine) as given:
            assert given is engine
            if comm.rank == 0:
                for _ in range(2):
                    assert torch.equal(engine(inputs), expected)
                assert engine.module.mix.weight.shape == (FEATURES, FEATURES)
        assert torch.equal(engine(inputs), expected)
    assert all(is_zero_param(one) == bool(one.ds_numel) for one in engine.module.parameters())
    assert not is_zero_param(torch.nn.Parameter(torch.ones(1)))
    engine.load_module_state_dict({"module": make_model(1).state_dict()})
    assert train(engine, range(1)) == train(other, range(1))


class Routed(nn.Module):
    """Every rank sends its data through another expert."""

    def __init__(self, expert: int) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(FEATURES, FEATURES) for _ in range(3)])
        self.expert = expert

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs + self.experts[self.expert](inputs)


def leaf_modules_average_what_ranks_use_apart(comm: Communicator) -> None:
    """As stage 0 does, though ranks bring gradients of other experts; the module is gathered as one."""
    torch.manual_seed(3)
    sharded = nn.Sequential(nn.Linear(FEATURES, FEATURES), Routed(comm.rank))
    expected = copy.deepcopy(sharded)
    config = settings(3, zero_optimization={"stage": 3, "leaf_module": {"classes": "Routed"}})
    engine, whole = (
        initialize(model=m, comm=comm, config=one)[0] for m, one in ((sharded, config), (expected, settings(0)))
    )
    assert utils.get_z3_leaf_modules(sharded) == [sharded[1]]
    assert engine.optimizer.leaf_parameters == {sharded[1]: list(sharded[1].parameters())}
    wrapped = [name for name, one in engine.module.named_modules() if isinstance(one, FSDPModule)]
    assert wrapped == ["", "1"]
    for step in range(2):
        for one in (engine, whole):
            one.backward(loss_of(one, comm.rank, step))
            one.step()
    for name, one in engine.module.named_parameters():
        found = utils.safe_get_full_fp32_param(one)
        if any(f"experts.{rank}." in name for rank in range(comm.size)) or "experts" not in name:
            torch.testing.assert_close(found, expected.get_parameter(name).detach(), rtol=1e-5, atol=1e-6, msg=name)
    with pytest.raises(RuntimeError, match="no input of the leaf module Routed requires a gradient"):
        engine.module[1](torch.ones(2, FEATURES))
    with torch.no_grad():
        engine.module.eval()(torch.ones(2, FEATURES))
