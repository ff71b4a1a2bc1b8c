"""Global batches of ranks that hold all of a model; of parts: see `parts_job`."""

from functools import partial
from typing import Any

import torch
from torch import nn

from tests.engine.parts_job import CONFIG, entropy, layered, pairs
from tests.launching import on_threads
from tests.refusing import refused
from thinwire import initialize
from thinwire.comm import Communicator
from thinwire.deepspeed.pipe import LayerSpec, PipelineModule
from thinwire.deepspeed.runtime.pipe.topology import (
    PipeDataParallelTopology,
    PipeModelDataParallelTopology,
    ProcessTopology,
)


@on_threads(2)
def test_a_global_batch_of_whole_models_is_that_of_the_loop(comm: Communicator) -> None:
    engine, *_ = initialize(model=layered(1), config=CONFIG, comm=comm)
    looped, *_ = initialize(model=layered(1), config=CONFIG, comm=comm, loss_fn=entropy)
    stream, other = pairs(), pairs()
    for _ in range(3):
        loss, losses = engine.train_batch(stream), []
        for _ in range(engine.gradient_accumulation_steps()):
            given, labels = next(other)
            losses.append(entropy(looped(*given), labels))
            looped.backward(losses[-1])
            looped.step()
        assert torch.equal(loss, torch.stack(losses).mean())
    assert engine.micro_steps == looped.micro_steps == 12
    for one, another in zip(engine.module.parameters(), looped.module.parameters(), strict=True):
        assert torch.equal(one, another)
    refused(ValueError, "with loss_fn a micro-batch is a pair", engine.train_batch, iter([1, 2, 3, 4]))
    refused(ValueError, "an iterator, not a list", engine.train_batch, [])
    ended, told = (StopIteration, "^$") if comm.rank else (ValueError, "rank 1 could not read micro-batches")
    refused(ended, told, engine.train_batch, iter([]) if comm.rank else pairs())
    refused(NotImplementedError, "mean loss of 4 micro-batches", engine.eval_batch, stream, return_logits=True)
    plain, *_ = initialize(model=nn.Linear(2, 2), config=CONFIG, comm=comm)
    refused(ValueError, "a micro-batch is a tuple, and the model's loss", plain.train_batch, pairs())
    parted: Any = CONFIG | {"pipeline": {"stages": 2}}
    refused(ValueError, "needs processes, and these ranks", initialize, model=layered(2), config=parted, comm=comm)


def test_topologies_number_ranks_as_the_mesh_does() -> None:
    topology = PipeModelDataParallelTopology(num_pp=2, num_mp=3, num_dp=4)
    assert topology.world_size() == 24
    assert topology.get_axis_names() == ["pipe", "data", "model"]
    assert topology.get_rank(pipe=1, data=2, model=1) == 1 * 12 + 2 * 3 + 1
    assert topology.get_coord(19) == (1, 2, 1)
    assert topology.get_dim("model") == 3
    assert topology.get_axis_list("pipe", 1) == [*range(12, 24)]
    assert topology.get_axis_comm_lists("model")[:2] == [[0, 1, 2], [3, 4, 5]]
    assert topology.filter_match(pipe=0, model=2) == [2, 5, 8, 11]
    refused(NotImplementedError, "tensor_parallel", PipelineModule, [nn.Linear(1, 1)], topology=topology)
    assert PipelineModule([nn.Linear(1, 1)] * 2, topology=PipeDataParallelTopology(2, 4)).num_stages == 2
    assert topology.get_rank_repr(19) == "model_01"
    assert topology.get_rank_repr(19, omit_axes=[], inner_sep="=", outer_sep=" ") == "pipe=01 data=02 model=01"
    turned = ProcessTopology(["data", "pipe"], [2, 1])
    refused(NotImplementedError, "axes are .pipe. and .data., in order", PipelineModule, [], topology=turned)


def test_a_module_of_layers_refuses_what_it_cannot_take() -> None:
    refused(RuntimeError, "must provide num_stages or topology", PipelineModule, [nn.Linear(1, 1)])
    refused(RuntimeError, "at least 1, not 0", PipelineModule, [nn.Linear(1, 1)], num_stages=0)
    for told, strange in (
        ("layers is an iterable .*, not None", {"layers": None}),
        ("or a function, not <class '.*Linear'>", {"layers": [nn.Linear]}),
        ("topology is a ProcessTopology, not 'pipe'", {"topology": "pipe"}),
        ("loss_fn is .*, not 'mse'", {"loss_fn": "mse"}),
        ("partition_method is a text, not 3", {"partition_method": 3}),
        ("0 for none, not -1", {"activation_checkpoint_interval": -1}),
        ("activation_checkpoint_func is a function", {"activation_checkpoint_func": None}),
        ("checkpointable_layers is a list", {"checkpointable_layers": "Linear"}),
    ):
        refused(TypeError, told, partial(PipelineModule, **{"layers": [], "num_stages": 1} | strange))
    refused(NotImplementedError, "use engine.grid after it", PipelineModule([], 1).mpu)
    silent = PipelineModule([lambda given: None], num_stages=1)
    refused(TypeError, "a layer, _Called, returned None", silent, torch.ones(1))


def test_stages_get_equally_many_layers_of_a_class() -> None:
    layers = [nn.ReLU(), *[nn.Linear(1, 1) for _ in range(5)]]
    assert PipelineModule(layers, 4, partition_method="type:linear").split() == ["3", "4", "5"]
    for method, told in (("type:conv", "matches 0 of the layers.*ReLU, Linear"), ("type:[", "no regular expression")):
        refused(RuntimeError, told, PipelineModule(layers, 4, partition_method=method).split)
    refused(RuntimeError, "only supports torch.nn.Module types", LayerSpec, len)
    refused(NotImplementedError, "'profile' is not offered", PipelineModule([], 1, partition_method="profile").split)
