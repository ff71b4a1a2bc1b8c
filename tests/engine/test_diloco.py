"""DiLoCo by name: workers that train by themselves under the engine, what they evaluate, skip, save and export."""

import math
import threading
import time
from typing import Any

import pytest
import safetensors.torch
import torch

import thinwire
from tests.engine import tiny
from tests.engine.test_elastic import ELASTIC, go_on
from tests.engine.tiny import BF16, at_stages, equal, loss_of, make_engine, settings, train, train_same_data, weights
from tests.optim.diloco.tower import meeting, together
from thinwire.comm import Communicator, threads
from thinwire.engine import Engine

__all__ = ["meeting"]

FP16 = {"fp16": {"enabled": True, "initial_scale_power": 8}}
PARAMS: dict[str, Any] = {
    "lr": 3e-3,
    "inner": {"type": "AdamW", "params": {"weight_decay": 0.1}},
    "every": 4,
    "fragments": 2,
    "overlap": 1,
    "codec": "int8",
    "block_size": 64,
    "nodes": "flat",
}


def diloco(stage: int = 0, params: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    return settings(stage, optimizer={"type": "diloco", "params": PARAMS | (params or {})}, **changes)


@pytest.mark.parametrize(("name", "inner"), [("AdamW", torch.optim.AdamW), ("muon", thinwire.optim.Muon)])
def test_it_is_the_optimizer_with_accumulation_clipping_and_a_schedule(name: str, inner: Any) -> None:
    schedule = {"type": "LinearLR", "params": {"start_factor": 0.1, "total_iters": 10}}
    share = {"exp_avg": 1} if name == "AdamW" else {"momentum_buffer": 2}
    params = {"inner": {"type": name, "params": {"weight_decay": 0.1}}, "share": share}
    config = diloco(0, params, gradient_accumulation_steps=2, gradient_clipping=0.5, scheduler=schedule)

    def by_engine(comm: Communicator) -> tuple[dict[str, torch.Tensor], int]:
        engine = make_engine(comm, config)
        train(engine, range(11))
        assert engine.get_global_grad_norm() is not None
        assert engine.optimizer_name() == "DiLoCo"
        return weights(engine.module), engine.optimizer.bytes_sent

    def by_hand(comm: Communicator) -> tuple[dict[str, torch.Tensor], int]:
        model = tiny.make_model()
        options = {name: value for name, value in PARAMS.items() if name != "inner"}
        options |= {"share": share, "weight_decay": 0.1, "max_norm": 0.5, "inside": {"bucket_bytes": 4 * 6000}}
        optimizer = thinwire.DiLoCo(model.named_parameters(), inner, comm=comm, **options)
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=10)
        for step in range(11):
            with optimizer.no_sync():
                (loss_of(model, comm.rank, 2 * step) / 2).backward()
            (loss_of(model, comm.rank, 2 * step + 1) / 2).backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        return weights(model), optimizer.bytes_sent

    outcomes = threads.run(by_engine, 2)
    for (ours, sent), (wanted, wanted_sent) in zip(outcomes, threads.run(by_hand, 2), strict=True):
        assert equal(ours, wanted)
        assert sent == wanted_sent
    assert not equal(outcomes[0][0], outcomes[1][0])  # gradients have not been averaged


@pytest.mark.parametrize("precision", [{}, BF16], ids=["fp32", "bf16"])
def test_it_learns_evaluates_on_the_outer_weights_and_exports_them(tmp_path, precision: dict[str, Any]) -> None:
    def body(comm: Communicator) -> Any:
        engine = make_engine(comm, diloco(params={"lr": 1e-2}, **precision))
        first = train(engine, range(5))
        train(engine, range(5, 19))
        own, sent = weights(engine.module), engine.optimizer.bytes_sent
        assert engine.eval() is engine.module
        common = weights(engine.module)
        engine.save_16bit_model(tmp_path, "evaluated.safetensors")
        engine.train()
        assert equal(weights(engine.module), own)
        assert not equal(own, common)
        assert engine.optimizer.bytes_sent == sent
        engine.save_16bit_model(tmp_path, "met.safetensors")  # takes an outer step first
        assert engine.optimizer.in_sync
        met = weights(engine.module)
        assert sum(train(engine, range(19, 30))[-5:]) < 0.8 * sum(first)
        return common, met

    (common, met), others = threads.run(body, 2)
    assert equal(common, others[0])
    assert not equal(common, met)
    for name, values in (("evaluated", common), ("met", met), ("met", others[1])):
        saved = safetensors.torch.load_file(tmp_path / f"{name}.safetensors")
        assert all(torch.equal(values[key].bfloat16(), one) for key, one in saved.items() if key != "calls")


@pytest.mark.parametrize("precision", [BF16, FP16], ids=["bf16", "fp16"])
def test_resume(tmp_path, precision: dict[str, Any]) -> None:
    config = diloco(scheduler={"type": "StepLR", "params": {"step_size": 3, "gamma": 0.9}}, **precision)

    def go_on(engine: Engine) -> Any:
        train_same_data(engine, range(7, 15))
        return weights(engine.module), engine.get_lr(), engine.loss_scaler.value if precision is FP16 else None

    def save(comm: Communicator) -> Any:
        engine = make_engine(comm, config)
        train(engine, range(6))
        if precision is FP16 and comm.rank == 1:  # as after overflows of its own
            engine.loss_scaler.value = 64.0
            engine.loss_scaler._steps_without_overflow = 2
            engine.optimizer.loss_scale = 64.0
        train(engine, range(6, 7))  # a fragment is under way
        engine.save_checkpoint(tmp_path)
        return go_on(engine)

    def resume(comm: Communicator) -> Any:
        engine = make_engine(comm, config, seed=1)
        assert engine.load_checkpoint(tmp_path)[0]
        assert engine.global_steps == engine.optimizer.steps == 7
        return go_on(engine)

    expected = threads.run(save, 2)
    for (ours, *others), (wanted, *wanted_others) in zip(threads.run(resume, 2), expected, strict=True):
        assert equal(ours, wanted)
        assert others == wanted_others

    def elsewhere(comm: Communicator) -> dict[str, torch.Tensor]:
        engine = make_engine(comm, config, seed=1)
        engine.load_checkpoint(tmp_path)
        engine.eval()
        return weights(engine.module)

    outer = threads.run(elsewhere, 2)[0]
    for world in (1, 3):
        assert all(equal(one, outer) for one in threads.run(elsewhere, world))


@pytest.mark.filterwarnings("ignore:step")
@pytest.mark.parametrize("precision", [{}, FP16], ids=["fp32", "fp16"])
def test_a_loss_that_is_not_finite_is_one_workers_affair(precision: dict[str, Any]) -> None:
    config = diloco(scheduler={"type": "StepLR", "params": {"step_size": 3, "gamma": 0.9}}, **precision)

    def body(comm: Communicator) -> tuple[int, int, list[float], float | None]:
        engine = make_engine(comm, config)
        train(engine, range(2))
        engine.backward(engine(torch.ones(6, 16)).float().mean() * (math.nan if comm.rank == 1 else 1))
        engine.step()
        assert engine.was_step_applied() == (comm.rank == 0)
        assert all(math.isfinite(loss) for loss in train(engine, range(3, 12)))
        scale = engine.loss_scaler.value if precision is FP16 else None
        return engine.skipped_steps, engine.global_steps, engine.get_lr(), scale

    first, second = threads.run(body, 2)
    assert (first[0], second[0]) == (0, 1)
    assert first[1:3] == second[1:3] == (12, [pytest.approx(3e-3 * 0.9**4)])
    if precision is FP16:
        assert second[3] == first[3] / 2


def test_nodes_shard_their_state() -> None:
    def body(comm: Communicator, stage: int) -> tuple[dict[str, torch.Tensor], int]:
        changes = {"gradient_allreduce_op": "sum", "gradient_accumulation_steps": 2}
        engine = make_engine(comm, diloco(stage, {"nodes": [0, 0, 1, 1], "codec": "none"}, **changes))
        train(engine, range(6))
        engine.eval()
        return weights(engine.module), engine.optimizer.bytes_sent_between_nodes

    whole, sharded = at_stages(body, 0, 1, ranks=4)
    for ours, sent in sharded:
        assert equal(ours, whole[0][0])
        assert sent == whole[0][1]


# Workers that come and go


SCHEDULE = {"type": "StepLR", "params": {"step_size": 5, "gamma": 0.5}}


def elastic_engine(seed: int = 0, **changes: Any) -> Any:
    params = {"elastic": {"workers": 2, **ELASTIC, **changes}, "fragments": 1, "overlap": 0}
    return make_engine(threads.single(60.0), diloco(params=params, scheduler=SCHEDULE), seed)


def end(engine: Any) -> Any:
    """What is trained, the rate and the step."""
    engine.optimizer.synchronize()
    trained = weights(engine.module)
    del trained["frozen"]
    return trained, engine.get_lr(), engine.global_steps


def test_a_worker_that_joins_begins_at_the_jobs_step_and_rate() -> None:
    """What another one exports before are the common weights, and it goes on."""
    come = threading.Event()

    def stays(data: int) -> Any:
        engine = elastic_engine()
        go_on(engine, data, 10)
        own = weights(engine.module)
        exported = engine.whole_state_dict()
        assert equal(weights(engine.module), own)
        assert not torch.equal(exported["mix.weight"], own["mix.weight"])
        go_on(engine, data, 11)
        come.set()
        while not engine.optimizer._home.membership.wanted:
            time.sleep(0.01)
        go_on(engine, data, 20)
        assert engine.optimizer.workers == 3
        return end(engine)

    def joins() -> Any:
        assert come.wait(60)
        engine = elastic_engine(seed=1)
        assert (engine.global_steps, engine.get_lr()) == (12, [pytest.approx(3e-3 * 0.5**2)])
        go_on(engine, 2, 20)
        return end(engine)

    first, *others = together([lambda: stays(0), lambda: stays(1), joins])
    assert first[1:] == ([pytest.approx(3e-3 * 0.5**4)], 20)
    for other in others:
        assert equal(other[0], first[0])
        assert other[1:] == first[1:]


def test_elastic_workers_go_on_from_folders_of_their_own_bit_for_bit(tmp_path) -> None:
    def run(worker: int, job: str) -> Any:
        engine = elastic_engine(seed=len(job), job=job)
        if job == "resumed":
            assert engine.load_checkpoint(tmp_path / str(worker))[0]
            assert engine.global_steps == engine.optimizer.steps == 10
        go_on(engine, worker, 10)
        if job == "saving":
            engine.save_checkpoint(tmp_path / str(worker))
        go_on(engine, worker, 18)
        return end(engine)

    wanted = together([lambda: run(0, "saving"), lambda: run(1, "saving")])
    for (ours, *others), (theirs, *expected) in zip(
        together([lambda: run(1, "resumed"), lambda: run(0, "resumed")]), reversed(wanted), strict=True
    ):
        assert equal(ours, theirs)
        assert others == expected


def test_samples_of_elastic_workers_are_not_dealt_by_a_loader() -> None:
    config = diloco(params={"elastic": {"workers": 2, **ELASTIC}})
    with pytest.raises(ValueError, match="ElasticSampler"):
        make_engine(threads.single(60.0), config, training_data=[torch.ones(16)] * 20)


def test_overlap_comm_has_no_effect() -> None:
    engine = make_engine(None, diloco(zero_optimization={"stage": 1, "overlap_comm": True}, **BF16))
    assert not engine.settings.zero_optimization.overlap_comm
    train(engine, range(2))
