"""What every rank of a stage 3 job runs: parameters are read, set and gathered, and models built shard by shard."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Generic, TypeVar

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.utils import skip_init

from tests.deepspeed import parameter_access as behaviours
from tests.deepspeed import stage3_calls as calls
from tests.engine.tiny import FEATURES, Layer, Tiny, batch, loss_of, make_engine, make_model, settings, train
from thinwire import comm as communication
from thinwire import initialize
from thinwire.comm import Communicator
from thinwire.deepspeed import utils, zero
from thinwire.zero.fsdp import local_run
from thinwire.zero.memory import process_tensor_bytes

T = TypeVar("T")  # whose classes hear of their subclasses too
BF16 = {"bf16": {"enabled": True}}


def main() -> None:
    torch.set_num_threads(1)
    comm = communication.init(quiet=True)
    behaviours.what_was_set_is_what_is_stepped(comm, 3, fp16={"enabled": True, "initial_scale_power": 8})
    behaviours.gradients_are_averages(comm, 3)
    behaviours.bad_values(comm, 3)
    behaviours.one_rank_changes_gathered_weights(comm, 3, **BF16)
    every_rank_sets_its_shard(comm)
    what_scripts_ask_of_parameters(comm)
    gathered_parameters_are_plain_tensors(comm)
    shards_are_compared(comm)
    what_a_forward_has_left_gathered(comm)
    changes_that_nobody_keeps(comm)
    calls.parameters_are_whole_from_the_first_forward_on(comm)
    calls.averages_of_several_backwards_add_up(comm)
    calls.a_checkpoint_is_loaded_into_gathered_parameters(comm)
    calls.the_torch_optimizer_is_shown(comm)
    calls.leaf_modules_average_what_ranks_use_apart(comm)
    calls.sixteen_bit_weights_are_those_of_the_file(comm)
    built_models_train_as_others_do(comm)
    a_built_model_takes_the_memory_of_its_shards(comm)
    parents_initialize_their_children(comm)
    classes_are_as_before(comm)
    built_from_a_model(comm)
    built_without_values(comm)
    what_init_refuses(comm)
    a_parameter_of_another_layer(comm)
    comm.barrier()
    if comm.rank == 0:
        print(f"all held on {comm.backend} with {comm.size} ranks", flush=True)


def shards_are_compared(comm: Communicator) -> None:
    first, second = (list(make_engine(comm, settings(3)).module.parameters()) for _ in range(2))
    assert all(map(torch.allclose, first, second))
    _, values = local_run(second[0])
    if comm.rank == comm.size - 1:  # the others see what one rank finds
        values.add_(1e-3)
    assert not torch.allclose(first[0], second[0])
    assert torch.allclose(first[0], second[0], atol=2e-3)
    with pytest.raises(ValueError, match="whole or cut otherwise"):
        torch.allclose(first[0], torch.zeros(first[0].shape))


def every_rank_sets_its_shard(comm: Communicator) -> None:
    engine = make_engine(comm, settings(3, **BF16))
    train(engine, range(2))
    engine.backward(loss_of(engine, comm.rank, 3))
    for seed, one in enumerate(behaviours.trained(engine).values()):
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


def what_scripts_ask_of_parameters(comm: Communicator) -> None:
    engine = make_engine(comm, settings(3))
    whole = make_model()
    for name, one in engine.module.named_parameters():
        expected = whole.get_parameter(name)
        assert hasattr(one, "ds_id")
        assert one.ds_shape == expected.shape
        assert one.ds_numel == expected.numel()
        assert one.ds_status is zero.ZeroParamStatus.NOT_AVAILABLE
    assert len({one.ds_id for one in engine.module.parameters()}) == len(list(engine.module.parameters()))
    assert not hasattr(make_engine(comm, settings(1)).module.mix.weight, "ds_id")


def gathered_parameters_are_plain_tensors(comm: Communicator) -> None:
    """The objects that the script held before, by whatever name."""
    engine = make_engine(comm, settings(3))
    expected = make_model()
    held = dict(engine.module.named_parameters())
    weight = held["layers.1.up.weight"]
    with zero.GatheredParameters(engine.module.parameters()):
        assert weight is engine.module.layers[1].up.weight
        assert weight.ds_status is zero.ZeroParamStatus.AVAILABLE
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
    assert weight.ds_status is zero.ZeroParamStatus.NOT_AVAILABLE
    assert weight is engine.module.layers[1].up.weight
    with zero.GatheredParameters([weight]):
        assert torch.equal(weight, expected.layers[1].up.weight + 1)
    with zero.GatheredParameters(weight, enabled=False):
        assert weight.ds_status is zero.ZeroParamStatus.NOT_AVAILABLE
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


def what_a_forward_has_left_gathered(comm: Communicator) -> None:
    engine = make_engine(comm, settings(3))
    train(engine, range(1))
    with torch.no_grad():
        engine(batch(0, 0)[0])
    shown = engine.module.mix.weight
    assert type(shown.data) is Tensor
    assert shown.ds_status is zero.ZeroParamStatus.AVAILABLE
    assert torch.equal(utils.safe_get_full_fp32_param(shown), shown)
    with zero.GatheredParameters(shown, modifier_rank=0), torch.no_grad():
        shown.fill_(comm.rank + 3.0)
    assert torch.equal(utils.safe_get_full_fp32_param(engine.module.mix.weight), torch.full((16, 16), 3.0))
    train(engine, range(1, 2))


def changes_that_nobody_keeps(comm: Communicator) -> None:
    engine = make_engine(comm, settings(3))
    weight = engine.module.mix.weight
    before = utils.safe_get_full_fp32_param(weight)
    dropped = pytest.warns(RuntimeWarning, match=r"a change of 1 parameters .* is dropped")
    with dropped, zero.GatheredParameters(weight), torch.no_grad():
        weight.zero_()
    assert torch.equal(utils.safe_get_full_fp32_param(weight), before)

    checks = {"zero_optimization": {"stage": 3, "enable_sanity_checks": True}}
    with zero.Init(config_dict_or_path=checks):
        linear = nn.Linear(5, 3)
    refused = pytest.raises(RuntimeError, match="in-place modification")
    with refused, zero.GatheredParameters(linear.parameters()), torch.no_grad():
        linear.weight.add_(0.0 if comm.rank == 0 else 1.0)
    assert linear.weight.numel() == 0


def built_models_train_as_others_do(comm: Communicator) -> None:
    """The same bits as the model constructed whole on rank 0, at every stage."""
    plain = random_model(0)
    for stage, changes in ((3, BF16), (1, {})):
        with zero.Init(config_dict_or_path=settings(stage, **changes)):
            model = random_model(comm.rank)
            with zero.Init():  # as a model that is built of others does
                inner = nn.Linear(3, 2)
        assert hasattr(inner.weight, "ds_id")
        shapes = {name: tuple(one.shape) for name, one in plain.named_parameters()}
        assert {name: tuple(one.ds_shape) for name, one in model.named_parameters()} == shapes
        assert all(one.numel() == 0 for one in model.parameters())
        for one in model.parameters():
            assert one.ds_tensor.numel() == max(1, math.ceil(one.ds_numel / comm.size))
        assert model.mix.weight is model.unmix.weight
        engines = [
            initialize(model=one, comm=comm, config=settings(stage, **changes))[0]
            for one in (model, copy.deepcopy(plain))
        ]
        assert engines[0].module.mix.weight is engines[0].module.unmix.weight
        mine, theirs = (dict(engine.module.named_parameters()) for engine in engines)
        for name in behaviours.trained(engines[0]):
            found, expected = (utils.safe_get_full_fp32_param(one[name]) for one in (mine, theirs))
            assert torch.equal(found, expected)
        assert train(engines[0], range(2)) == train(engines[1], range(2))


def random_model(seed: int) -> Tiny:
    torch.manual_seed(seed)
    return Tiny()


class Deep(nn.Module):
    def __init__(self, layers: int, build: Callable[[], nn.Module] = Layer) -> None:
        super().__init__()
        self.layers = nn.ModuleList([build() for _ in range(layers)])

    def forward(self, inputs: Tensor) -> Tensor:
        for layer in self.layers:
            inputs = layer(inputs)
        return inputs


def a_built_model_takes_the_memory_of_its_shards(comm: Communicator) -> None:
    """At every moment: the shards so far and one module, while it is built and while an engine takes it over."""
    layers = 8
    of_layer = 4 * sum(one.numel() for one in Layer().parameters())
    before = process_tensor_bytes().get("cpu", 0)
    highest = [0]

    def build() -> nn.Module:
        layer = Layer()
        highest[0] = max(highest[0], process_tensor_bytes().get("cpu", 0) - before)
        return layer

    with zero.Init():
        model = Deep(layers, build)
    shards = math.ceil(layers * of_layer / comm.size)
    assert highest[0] <= shards + of_layer
    assert process_tensor_bytes().get("cpu", 0) - before <= shards * 1.05 + 1000
    engine = initialize(model=model, comm=comm, config=settings(3))[0]
    # fp32 weights, of which FSDP2 pads the shards.
    held = process_tensor_bytes().get("cpu", 0) - before
    assert held <= shards * 1.2 + 20_000, (held, shards)
    train(engine, range(1))


def parents_initialize_their_children(comm: Communicator) -> None:
    class Parent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(FEATURES, FEATURES)
            self.own = nn.Parameter(torch.ones(5))
            self.own.data = self.own.data + comm.rank + 1  # whole until the outermost __init__ is over
            self.apply(self._fill)
            with zero.GatheredParameters(self.linear.bias, modifier_rank=comm.size - 1), torch.no_grad():
                self.linear.bias.fill_(comm.rank)

        def _fill(self, module: nn.Module) -> None:
            if isinstance(module, nn.Linear):
                module.weight.data.fill_(comm.rank + 0.5)

    class Child(Parent):
        def __init__(self) -> None:
            super().__init__()
            self.own.data = self.own.data + 1

    with zero.Init():
        model = Child()
    with zero.GatheredParameters(model.parameters()):
        assert (model.own == 3).all()
        assert (model.linear.weight == 0.5).all()
        assert (model.linear.bias == comm.size - 1).all()


def classes_are_as_before(comm: Communicator) -> None:
    before = nn.Linear.__init__, nn.Module.apply, nn.Module.__init__
    with zero.Init():

        class Inside(nn.Module, Generic[T]):
            def __init__(self, inputs: int = 4) -> None:
                super().__init__()
                self.linear = nn.Linear(inputs, 3, bias=False)

        assert Inside[int]().linear.weight.ds_status is zero.ZeroParamStatus.NOT_AVAILABLE
    with pytest.raises(TypeError), zero.Init():
        Inside(inputs="four")  # type: ignore[arg-type]
    assert (nn.Linear.__init__, nn.Module.apply, nn.Module.__init__) == before
    assert "__init_subclass__" not in vars(nn.Module)
    assert Inside().linear.weight.numel() == 12
    with zero.Init(enabled=False):
        assert nn.Linear(4, 3).weight.numel() == 12


def built_from_a_model(comm: Communicator) -> None:
    model = random_model(comm.rank)
    zero.Init(module=model, dtype=torch.bfloat16)
    weight = model.layers[0].up.weight
    assert weight.ds_tensor.dtype == weight.dtype == torch.bfloat16
    model.float()  # what they are gathered in
    with zero.GatheredParameters(weight):
        assert torch.equal(weight, random_model(0).layers[0].up.weight.bfloat16().float())
    engine = initialize(model=model, comm=comm, config=settings(3, **BF16))[0]
    train(engine, range(2))

    class Scaled(Tiny):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(2.0))

        def forward(self, inputs: Tensor) -> Tensor:
            return super().forward(inputs) * self.scale

    with zero.Init():
        scaled = Scaled()
    with pytest.raises(ValueError, match="parameter 'scale' has no dimension to cut along"):
        initialize(model=scaled, comm=comm, config=settings(3))
    assert scaled.mix.weight.numel() == 0  # as it was, so that another stage can have it
    engine = initialize(model=scaled, comm=comm, config=settings(1))[0]
    assert utils.safe_get_full_fp32_param(scaled.scale) == 2
    assert not hasattr(scaled.scale, "ds_id")
    train(engine, range(2))


def built_without_values(comm: Communicator) -> None:
    """Cut when they get their memory, and trained from rank 0's values."""

    class Skipping(nn.Module):
        def __init__(self, device: str | None = None) -> None:
            super().__init__()
            self.first = nn.Linear(FEATURES, 7, device=device)
            self.second = skip_init(nn.Linear, 7, FEATURES)

        def forward(self, inputs: Tensor) -> Tensor:
            return self.second(self.first(inputs))

    with zero.Init():
        model = Skipping()
        other = skip_init(nn.Linear, 5, 3)
    assert nn.Module.to_empty.__module__ == "torch.nn.modules.module"
    cut = [*model.parameters(), *other.parameters()]
    assert all(one.numel() == 0 for one in cut)
    assert [one.ds_tensor.numel() for one in cut] == [math.ceil(one.ds_numel / comm.size) for one in cut]
    for one in other.parameters():
        with zero.GatheredParameters(one):
            assert not one.any()
    for one in model.parameters():
        with zero.GatheredParameters(one, modifier_rank=0), torch.no_grad():
            one.fill_(0.1 + comm.rank)
    engine = initialize(model=model, comm=comm, config=settings(3))[0]
    assert torch.equal(utils.safe_get_full_fp32_param(model.second.weight), torch.full((FEATURES, 7), 0.1))
    train(engine, range(1))


def what_init_refuses(comm: Communicator) -> None:
    with pytest.raises(ValueError, match=r"zero\.Init does not offer zero_quantized_weights"):
        zero.Init(zero_quantized_weights=True)
    with pytest.raises(TypeError, match=r"zero\.Init takes no quantum"):
        zero.Init(quantum=True)
    with pytest.raises(ValueError, match="dtype must be a floating-point dtype"):
        zero.Init(dtype=torch.int8)
    with pytest.raises(ValueError, match='remote_device is None, "cpu" or a GPU'):
        zero.Init(remote_device="nvme")
    with pytest.raises(ValueError, match="config is a dict or the path of a JSON file"):
        zero.Init(config=3)


def a_parameter_of_another_layer(comm: Communicator) -> None:
    class Borrows(Tiny):
        """Uses a layer's weight outside of the layer."""

        def __init__(self, registers: bool) -> None:
            super().__init__()
            if registers:
                zero.register_external_parameter(self, self.layers[1].up.bias)

        def forward(self, inputs: Tensor) -> Tensor:
            return super().forward(inputs) + self.layers[1].up.bias[:FEATURES]

    def seeded(registers: bool) -> nn.Module:
        torch.manual_seed(1)
        return Borrows(registers)

    expected, engine = (initialize(model=seeded(True), comm=comm, config=settings(stage))[0] for stage in (0, 3))
    assert [isinstance(layer, FSDPModule) for layer in engine.module.layers] == [True, False, True]
    assert train(engine, range(3)) == pytest.approx(train(expected, range(3)), rel=1e-5)
    zero.register_external_parameter(engine.module, engine.module.layers[1].up.bias)  # it is gathered with the rest
    with pytest.raises(RuntimeError, match="belongs to a layer that stage 3 gathers apart"):
        zero.register_external_parameter(engine.module, engine.module.layers[0].up.bias)
    linear = nn.Linear(2, 2)
    zero.register_external_parameter(linear, linear.bias)
    zero.unregister_external_parameter(linear, linear.bias)
    with pytest.raises(RuntimeError, match="is not registered with this module"):
        zero.unregister_external_parameter(linear, linear.bias)
    with pytest.raises(TypeError, match=r"takes a torch\.nn\.Module and a torch\.nn\.Parameter, got Linear and Tensor"):
        zero.register_external_parameter(linear, torch.ones(2))


if __name__ == "__main__":
    main()
