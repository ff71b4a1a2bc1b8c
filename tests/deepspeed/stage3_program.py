"""What every rank of a stage 3 job runs: parameters are read, set and gathered, and models built shard by shard."""

import copy
import inspect
import math
from collections.abc import Callable
from typing import Generic, TypeVar

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.utils import skip_init

from experiments.common.peak_memory import process_tensor_bytes
from tests.deepspeed import parameter_access, stage3_access
from tests.deepspeed.parameter_access import trained
from tests.engine.tiny import FEATURES, Layer, Tiny, settings, train
from tests.refusing import refused
from thinwire import comm as communication
from thinwire import initialize
from thinwire.comm import Communicator
from thinwire.deepspeed import utils, zero

T = TypeVar("T")  # whose classes hear of their subclasses too
BF16 = {"bf16": {"enabled": True}}


def main() -> None:
    torch.set_num_threads(1)
    comm = communication.init(quiet=True)
    parameter_access.what_was_set_is_what_is_stepped(comm, 3, fp16={"enabled": True, "initial_scale_power": 8})
    parameter_access.gradients_are_averages(comm, 3)
    for changes in ({"gradient_allreduce_op": "sum"}, {"own": True}, {"gradient_predivide_factor": 3.0, "own": True}):
        parameter_access.what_is_shown_is_what_is_stepped(comm, 3, **changes)
    parameter_access.bad_values(comm, 3)
    parameter_access.one_rank_changes_gathered_weights(comm, 3, **BF16)
    for body in [*vars(stage3_access).values(), *globals().values()]:
        if inspect.isfunction(body) and list(inspect.signature(body).parameters) == ["comm"]:
            body(comm)
    comm.barrier()
    if comm.rank == 0:
        print(f"all held on {comm.backend} with {comm.size} ranks", flush=True)


def random_model(seed: int, kind: type[nn.Module] = Tiny) -> nn.Module:
    torch.manual_seed(seed)
    return kind()


class Deep(nn.Module):
    def __init__(self, layers: int, build: Callable[[], nn.Module] = Layer) -> None:
        super().__init__()
        self.layers = nn.ModuleList([build() for _ in range(layers)])

    def forward(self, inputs: Tensor) -> Tensor:
        for layer in self.layers:
            inputs = layer(inputs)
        return inputs


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
        config = settings(stage, **changes)
        mine, theirs = (initialize(model=m, comm=comm, config=config)[0] for m in (model, copy.deepcopy(plain)))
        assert mine.module.mix.weight is mine.module.unmix.weight
        for name in trained(mine):
            found, expected = (utils.safe_get_full_fp32_param(one.module.get_parameter(name)) for one in (mine, theirs))
            assert torch.equal(found, expected)
        assert train(mine, range(2)) == train(theirs, range(2))


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
    for options, error, message in (
        ({"zero_quantized_weights": True}, ValueError, "how initialize has weights gathered: set it under"),
        ({"sequence_data_parallel_group": 1}, ValueError, r"zero\.Init does not offer sequence_data_parallel_group"),
        ({"quantum": True}, TypeError, r"zero\.Init takes no quantum"),
        ({"dtype": torch.int8}, ValueError, "dtype must be a floating-point dtype"),
        ({"remote_device": "nvme"}, ValueError, 'remote_device is None, "cpu" or a GPU'),
        ({"config": 3}, ValueError, "config is a dict or the path of a JSON file"),
    ):
        refused(error, message, zero.Init, **options)
    zero.Init(zero_quantized_weights=True, config={"zero_optimization": {"zero_quantized_weights": True}})


def a_parameter_of_another_layer(comm: Communicator) -> None:
    class Borrows(Tiny):
        """Uses a layer's weight outside of the layer."""

        def __init__(self) -> None:
            super().__init__()
            zero.register_external_parameter(self, self.layers[1].up.bias)

        def forward(self, inputs: Tensor) -> Tensor:
            return super().forward(inputs) + self.layers[1].up.bias[:FEATURES]

    expected, engine = (
        initialize(model=random_model(1, Borrows), comm=comm, config=settings(stage))[0] for stage in (0, 3)
    )
    assert [isinstance(layer, FSDPModule) for layer in engine.module.layers] == [True, False, True]
    assert train(engine, range(3)) == pytest.approx(train(expected, range(3)), rel=1e-5)
    zero.register_external_parameter(engine.module, engine.module.layers[1].up.bias)  # it is gathered with the rest
    with pytest.raises(RuntimeError, match="belongs to a layer that stage 3 gathers apart"):
        zero.register_external_parameter(engine.module, engine.module.layers[0].up.bias)
    linear = nn.Linear(2, 2)
    zero.register_external_parameter(linear, linear.bias)
    zero.unregister_external_parameter(linear, linear.bias)
    refused(RuntimeError, "is not registered with this module", zero.unregister_external_parameter, linear, linear.bias)
    with pytest.raises(TypeError, match=r"takes a torch\.nn\.Module and a torch\.nn\.Parameter, got Linear and Tensor"):
        zero.register_external_parameter(linear, torch.ones(2))


if __name__ == "__main__":
    main()
