"""The engine on a GPU: every stage, precision and offload that one GPU allows gives the CPU's losses."""

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_model

from tests.engine.tiny import BF16, Tiny, loss_of, make_model, settings
from thinwire import initialize
from thinwire.comm import Communicator, threads
from thinwire.engine import Engine

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]


FP16 = {"fp16": {"enabled": True, "initial_scale_power": 8}}  # no overflows, whose number differs from stage to stage


def make_engine(comm: Communicator | None, config, device: str, seed: int = 0) -> Engine:
    return initialize(model=make_model(seed).to(device), comm=comm, config=config)[0]


def train(engine: Engine, steps: int) -> list[float]:
    losses = []
    for step in range(steps):
        loss = loss_of(lambda inputs: engine(inputs).cpu(), 0, step)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("offload", ["none", "cpu"])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_threads_on_one_gpu(stage, offload, tmp_path) -> None:
    expected = train(make_engine(None, settings(0), "cpu"), 20)

    def body(comm):
        config = settings(stage)
        config["zero_optimization"] |= {"offload_optimizer": {"device": offload}}
        engine = make_engine(comm, config, "cuda")
        losses = train(engine, 20)
        engine.save_checkpoint(tmp_path)
        drawn = torch.rand(3, device="cuda")
        resumed = make_engine(comm, config, "cuda", seed=1)
        assert resumed.load_checkpoint(tmp_path)[0]
        if comm.size == 1:
            assert torch.equal(torch.rand(3, device="cuda"), drawn)
        assert train(resumed, 3) == pytest.approx(train(engine, 3), rel=1e-4)
        return losses

    for world in (1, 2):
        for losses in threads.run(body, world):
            assert losses == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("offload", ["none", "cpu", "optimizer", "param"])
@pytest.mark.parametrize("precision", [{}, BF16, FP16])
def test_stage_3_over_nccl(offload, precision) -> None:
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        losses = []
        for stage in (0, 3):
            config = settings(stage, **precision)
            if stage == 3:
                for part in ("optimizer", "param"):
                    if offload in ("cpu", part):
                        config["zero_optimization"][f"offload_{part}"] = {"device": "cpu", "pin_memory": True}
            losses.append(train(make_engine(None, config, "cuda"), 20))
        assert losses[1] == pytest.approx(losses[0], rel=0.05 if precision else 1e-4)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("offload", ["none", "cpu"])
def test_a_model_without_values_at_stage_3_over_nccl(offload, tmp_path) -> None:
    save_model(make_model(), str(tmp_path / "begin.safetensors"))
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        config = settings(3, initial_weights=str(tmp_path / "begin.safetensors"))
        config["zero_optimization"] |= {"offload_param": {"device": offload}}
        with torch.device("meta"):
            model = Tiny()
        engine = initialize(model=model, config=config)[0]
        assert {one.device.type for one in model.parameters() if one.numel()} == {"cpu" if offload == "cpu" else "cuda"}
        assert train(engine, 20) == pytest.approx(train(make_engine(None, settings(0), "cpu"), 20), rel=1e-3)
    finally:
        dist.destroy_process_group()
