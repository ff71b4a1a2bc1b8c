"""Scripts as DeepSpeed's users write them, the import's line changed, train on ranks that are threads and on one."""

import argparse
import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import thinwire.deepspeed as deepspeed
from tests.launching import on_threads
from tests.refusing import refused
from thinwire.comm import Communicator, threads
from thinwire.deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from thinwire.deepspeed.runtime.dataloader import RepeatingLoader

CONFIG = {
    "train_micro_batch_size_per_gpu": 3,
    "optimizer": {"type": "OneBitAdam", "params": {"lr": 0.1, "freeze_step": 8}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 3, "warmup_max_lr": 0.1}},
    "zero_optimization": {"stage": 1},
}


def script(arguments: list[str], folder: Path) -> list[float]:
    """A training script, from the command line to the checkpoint."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1)
    parser = deepspeed.add_config_arguments(parser)
    args = parser.parse_args(arguments)
    deepspeed.init_distributed()
    generator = torch.Generator().manual_seed(7)
    inputs = torch.randn(42, 5, generator=generator)
    data = torch.utils.data.TensorDataset(inputs, inputs @ torch.randn(5, 2, generator=generator))
    model = torch.nn.Linear(5, 2)
    engine, optimizer, loader, schedule = deepspeed.initialize(
        args=args, model=model, model_parameters=model.parameters(), training_data=data
    )
    assert isinstance(engine, deepspeed.DeepSpeedEngine)
    assert engine._config is engine.settings
    repeating = RepeatingLoader(loader)
    losses = []
    for _ in range(24):
        features, targets = next(repeating)
        loss = torch.nn.functional.mse_loss(engine(features), targets)
        engine.backward(loss)
        engine.step()
        total = loss.detach().clone()
        deepspeed.comm.all_reduce(total)
        losses.append(float(total) / deepspeed.comm.get_world_size())
    deepspeed.comm.barrier()
    engine.save_checkpoint(str(folder), client_state={"losses": len(losses)})
    path, client_state = engine.load_checkpoint(str(folder))
    assert path is not None
    assert client_state == {"losses": 24}
    assert optimizer.frozen
    assert schedule.get_last_lr() == [0.1]
    engine.close()
    return losses


def test_a_script_trains_on_two_ranks(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(CONFIG))

    def body(comm: Communicator) -> list[float]:
        assert deepspeed.comm.is_initialized()
        assert (deepspeed.comm.get_rank(), deepspeed.comm.get_world_size()) == (comm.rank, 2)
        return script(["--deepspeed", "--deepspeed_config", str(file)], tmp_path / "saved")

    first, second = threads.run(body, 2)
    assert first == second
    assert sum(first[-7:]) < 0.6 * sum(first[:7])


def test_one_process_initialises_torch_distributed(tmp_path: Path) -> None:
    store = tmp_path / "store"
    deepspeed.init_distributed("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    try:
        deepspeed.init_distributed()  # a second call does nothing
        assert dist.get_world_size() == deepspeed.comm.get_world_size() == 1
        gathered = torch.zeros(3)
        deepspeed.comm.all_gather_into_tensor(gathered, torch.arange(3.0))
        assert gathered.tolist() == [0, 1, 2]
        file = tmp_path / "config.json"
        file.write_text(json.dumps(CONFIG))
        losses = script(["--deepspeed_config", str(file)], tmp_path / "saved")
        assert sum(losses[-14:]) < 0.6 * sum(losses[:10])
    finally:
        dist.destroy_process_group()


@on_threads(3)
def test_without_torch_distributed_the_collectives_are_the_communicators(comm: Communicator) -> None:
    mine = torch.tensor([comm.rank + 1.0, 4.0])
    largest, mean, first = mine.clone(), mine.clone(), mine.clone()
    deepspeed.comm.all_reduce(largest, op=deepspeed.comm.ReduceOp.MAX)
    deepspeed.comm.all_reduce(mean, op=deepspeed.comm.ReduceOp.AVG)
    deepspeed.comm.broadcast(first, src=0)
    refused(ValueError, "init_distributed", deepspeed.comm.all_reduce, mine, op=deepspeed.comm.ReduceOp.PRODUCT)
    gathered = torch.zeros(6)
    deepspeed.comm.all_gather_into_tensor(gathered, mine)
    found = [largest.tolist(), mean.tolist(), first.tolist(), gathered.tolist()]
    assert found == [[3, 4], [2, 4], [1, 4], [1, 4, 2, 4, 3, 4]]


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"model": None}, AssertionError, "model"),
        ({"model": None}, ValueError, "model"),
        (
            {"mpu": SimpleNamespace(get_model_parallel_world_size=lambda: 2)},
            deepspeed.NotOfferedError,
            "splits it by itself",
        ),
        ({"dist_init_required": False}, AssertionError, "leave dist_init_required out"),
        ({"mesh_param": (2, 1)}, deepspeed.NotOfferedError, "leave mesh_param out"),
        ({"config_params": {"train_batch_size": 2}}, ValueError, "two configurations"),
        ({"no_such": 1}, TypeError, "no_such"),
    ],
)
def test_what_cannot_work_is_refused(given: dict[str, Any], error: type[Exception], message: str) -> None:
    config = {"train_batch_size": 2, "optimizer": {"type": "AdamW"}}
    refused(error, message, deepspeed.initialize, **{"model": torch.nn.Linear(2, 2), "config": config} | given)


def test_adam_by_deepspeeds_arguments() -> None:
    """FusedAdam is AdamW unless it is told otherwise, and what torch's Adam cannot do is refused."""
    for adam, options, plain in (
        (FusedAdam, {}, torch.optim.AdamW),
        (FusedAdam, {"adam_w_mode": False}, torch.optim.Adam),
        (DeepSpeedCPUAdam, {}, torch.optim.AdamW),
    ):
        mine, theirs = (torch.nn.Parameter(torch.ones(3)) for _ in range(2))
        both = adam([mine], weight_decay=0.1, **options), plain([theirs], lr=1e-3, weight_decay=0.1)
        for _ in range(3):
            mine.grad, theirs.grad = torch.arange(3.0), torch.arange(3.0)
            for one in both:
                one.step()
        assert torch.equal(mine, theirs)
    for name, value in (("bias_correction", False), ("amsgrad", True)):
        refused(deepspeed.NotOfferedError, name, FusedAdam, [torch.nn.Parameter(torch.ones(3))], **{name: value})


@pytest.mark.parametrize("adam", [FusedAdam, DeepSpeedCPUAdam])
@pytest.mark.parametrize("stage", [0, 2])
def test_an_engine_takes_such_an_adam_over(adam: type[FusedAdam], stage: int) -> None:
    """With its mode: the two decays differ."""

    def ones() -> torch.nn.Linear:
        model = torch.nn.Linear(3, 1)
        torch.nn.init.ones_(model.weight)
        return model

    def body(comm: Communicator, options: dict[str, Any]) -> torch.Tensor:
        model = ones()
        config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": stage}}
        optimizer = adam(model.parameters(), 0.1, **options)
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        for _ in range(3):
            engine.backward(engine(torch.ones(2, 3)).sum())
            engine.step()
        return model.weight.detach().clone()

    mode = "adam_w_mode" if adam is FusedAdam else "adamw_mode"
    for decoupled, plain in ((True, torch.optim.AdamW), (False, torch.optim.Adam)):
        first, second = threads.run(partial(body, options={"weight_decay": 0.3, mode: decoupled}), 2)
        reference = ones()
        optimizer = plain(reference.parameters(), lr=0.1, weight_decay=0.3)
        for _ in range(3):
            optimizer.zero_grad()
            reference(torch.ones(2, 3)).sum().backward()
            optimizer.step()
        assert torch.equal(first, second)
        torch.testing.assert_close(first, reference.weight.detach(), rtol=1e-6, atol=1e-6)
