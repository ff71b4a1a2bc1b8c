"""1-bit optimizers by name whose workers come and go: each a process with an engine of its own."""

from typing import Any

import pytest
import torch

from tests.engine.tiny import equal, loss_of, make_engine, settings, weights
from tests.optim.diloco.tower import meeting, together
from thinwire.comm import Communicator, threads

__all__ = ["meeting"]

ELASTIC = {"workers": 2, "address": "here:1", "timeout": 60.0, "join_timeout": 60.0, "silence": 20.0}
SCHEDULE = {"type": "StepLR", "params": {"step_size": 6, "gamma": 0.5}}


def make(job: str = "job", comm: Communicator | None = None, **changes: Any) -> Any:
    params = {"lr": 3e-3, "freeze_step": 6, "block_size": 64, "elastic": {**ELASTIC, "job": job}}
    config = settings(0, optimizer={"type": "OneBitAdam", "params": params}, scheduler=SCHEDULE, **changes)
    return make_engine(comm or threads.single(60.0), config)


def go_on(engine: Any, data: int, until: int) -> None:
    while engine.global_steps < until:
        engine.backward(loss_of(engine, data, engine.global_steps))
        engine.step()


def test_workers_go_on_from_folders_of_their_own_bit_for_bit(tmp_path: Any) -> None:
    def run(worker: int, job: str) -> Any:
        engine = make(job, gradient_clipping=0.5)
        place = engine.optimizer._home.workers.dealt_to.index(engine.optimizer._home.workers.membership.name)
        if job == "resumed":
            assert engine.load_checkpoint(tmp_path / str(place))[0]
            assert engine.global_steps == engine.optimizer.steps == 10
        go_on(engine, place, 10)
        if job == "saving":
            engine.eval()
            assert torch.equal(engine.whole_state_dict()["mix.weight"], engine.module.mix.weight)
            engine.train()
            engine.save_checkpoint(tmp_path / str(place))
        go_on(engine, place, 18)
        engine.optimizer.synchronize_weights()
        return weights(engine.module), engine.get_lr(), engine.global_steps

    wanted, *others = together([lambda: run(0, "saving"), lambda: run(1, "saving")])
    for one in others + together([lambda: run(1, "resumed"), lambda: run(0, "resumed")]):
        assert equal(one[0], wanted[0])
        assert one[1:] == wanted[1:]


def test_a_worker_is_one_process() -> None:
    def body(comm: Communicator) -> str:
        with pytest.raises(ValueError, match="an elastic worker of OneBitAdam is one process") as caught:
            make(comm=comm)
        return str(caught.value)

    assert len(set(threads.run(body, 2))) == 1
