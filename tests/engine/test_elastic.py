"""Optimizers by name whose workers come and go: each a process with an engine of its own."""

import threading
from typing import Any

import pytest
import torch

from tests.engine.tiny import equal, loss_of, make_engine, settings, weights
from tests.optim.diloco.tower import meeting, quick, together
from thinwire.comm import Communicator, threads

__all__ = ["meeting", "quick"]

ELASTIC = {"address": "here:1", "timeout": 60.0, "join_timeout": 60.0, "silence": 20.0}
SCHEDULE = {"type": "StepLR", "params": {"step_size": 6, "gamma": 0.5}}


EXACT: dict[str, Any] = {"type": "AdamW", "params": {"lr": 3e-3}}
KINDS: dict[str, dict[str, Any]] = {
    "1-bit": {"optimizer": {"type": "OneBitAdam", "params": {"lr": 3e-3, "freeze_step": 6, "block_size": 64}}},
    "int4": {"optimizer": EXACT, "communication_codec": "int4"},
    "1-bit muon": {
        "optimizer": {"type": "OneBitMuon", "params": {"lr": 3e-3, "block_size": 64}},
        "zero_optimization": {"stage": 1},
    },
    "stage 1": {"optimizer": EXACT, "zero_optimization": {"stage": 1, "overlap_comm": True}},
}


def make(kind: str, job: str = "job", comm: Communicator | None = None, workers: int = 2, seed: int = 0) -> Any:
    config = settings(0, scheduler=SCHEDULE, gradient_clipping=0.5) | KINDS[kind]
    optimizer = config["optimizer"]
    elastic = {"elastic": {**ELASTIC, "workers": workers, "job": job}}
    config["optimizer"] = {"type": optimizer["type"], "params": optimizer["params"] | elastic}
    return make_engine(comm or threads.single(60.0), config, seed)


def place_of(engine: Any) -> int:
    workers = engine.optimizer._home.workers
    return workers.dealt_to.index(workers.membership.name)


def go_on(engine: Any, data: int, until: int) -> None:
    while engine.global_steps < until:
        engine.backward(loss_of(engine, data, engine.global_steps))
        engine.step()


@pytest.mark.parametrize("kind", KINDS)
def test_workers_go_on_from_folders_of_their_own_bit_for_bit(kind: str, tmp_path: Any) -> None:
    def run(job: str) -> Any:
        engine = make(kind, job)
        place = place_of(engine)
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

    wanted, *others = together([lambda: run("saving")] * 2)
    for one in others + together([lambda: run("resumed")] * 2):
        assert equal(one[0], wanted[0])
        assert one[1:] == wanted[1:]


@pytest.mark.parametrize("kind", KINDS)
def test_one_dies_and_another_joins_at_the_jobs_step_and_rate(kind: str) -> None:
    """Of three, and all end with the same bits, at the same step and rate."""
    come, last = threading.Event(), list[int]()

    def end(engine: Any) -> Any:
        assert engine.get_global_grad_norm() > 0
        engine.optimizer.synchronize_weights()
        return weights(engine.module), engine.get_lr(), engine.global_steps

    def begins() -> Any:
        engine = make(kind, workers=3)
        workers, place = engine.optimizer._home.workers, place_of(engine)
        go_on(engine, place, 5)
        if place == 2:
            workers.membership.heart.stop(gone=True)
            workers._part()
            return None
        go_on(engine, place, 8)
        assert engine.optimizer.workers == 2
        come.set()
        while not last or engine.global_steps < last[0]:
            go_on(engine, place, engine.global_steps + 1)
        return end(engine)

    def joins() -> Any:
        assert come.wait(60)
        engine = make(kind, seed=1)
        assert engine.global_steps == engine.optimizer.steps >= 8
        assert all(rate == pytest.approx(3e-3 * 0.5 ** (engine.global_steps // 6)) for rate in engine.get_lr())
        last.append(engine.global_steps + 8)
        go_on(engine, 3, last[0])
        return end(engine)

    first, *others = [one for one in together([begins] * 3 + [joins]) if one is not None]
    assert len(others) == 2
    for other in others:
        assert equal(other[0], first[0])
        assert other[1:] == first[1:]


@pytest.mark.parametrize("kind", KINDS)
def test_a_worker_is_one_process(kind: str) -> None:
    def body(comm: Communicator) -> str:
        with pytest.raises(ValueError, match="an elastic worker is one process") as caught:
            make(kind, comm=comm)
        return str(caught.value)

    assert len(set(threads.run(body, 2))) == 1
