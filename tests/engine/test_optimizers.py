"""Optimizers by name: the engine trains with each, clips, skips, saves and resumes as with any other; how gradients are
averaged and what carries the bytes is the configuration's."""

import math
from typing import Any

import pytest
import safetensors.torch
import torch

from tests.engine import tiny
from tests.engine.tiny import BF16, at_stages, equal, make_engine, settings, speaking, train, train_same_data, weights
from tests.launching import on_threads
from tests.optim.zero_one.reference import SCHEDULE
from thinwire.comm import Communicator, threads
from thinwire.engine import NonFiniteError
from thinwire.engine.config.models import OffloadConfig, ZeroConfig
from thinwire.engine.optimizers import _stepped_on, communicator_of
from thinwire.optim.exact import AdamW

PRECISIONS = {"fp32": {}, "bf16": BF16, "fp16": {"fp16": {"enabled": True, "loss_scale": 64}}}
PARAMS: dict[str, dict[str, Any]] = {
    "OneBitAdam": {"lr": 3e-3, "freeze_step": 8, "block_size": 64},
    "OneBitLamb": {"lr": 1e-2, "freeze_step": 8, "block_size": 64, "max_coeff": 0.5, "factor_threshold": 0.2},
    # Frozen after step 10; from step 15 on local steps between syncs, at even steps, then at 20, 24, 30, ...
    "ZeroOneAdam": {"lr": 3e-3, "block_size": 64, "weight_decay": 0.01}
    | SCHEDULE
    | {"var_freeze_step": 10, "local_step_scaler": 4},
    "Lamb": {"lr": 1e-2, "weight_decay": 0.1, "max_coeff": 5.0, "bias_correction": False},
    "Lion": {"lr": 1e-3, "weight_decay": 0.1},
    "QHAdamW": {"lr": 3e-3, "omega": 0.8, "betas": [0.98, 0.99]},
    "Muon": {"lr": 2e-2, "momentum": 0.9, "adam_lr": 3e-3},
}


def named(name: str, stage: int, **changes: Any) -> dict[str, Any]:
    return settings(stage, optimizer={"type": name.lower(), "params": PARAMS[name]}, **changes)


def exact(name: str, stage: int, **changes: Any) -> dict[str, Any]:
    return named(name, stage, gradient_clipping=0.5, **changes)


@pytest.mark.parametrize(
    ("name", "stage", "precision"),
    [("OneBitAdam", 0, BF16), ("OneBitAdam", 2, {}), ("OneBitLamb", 0, {}), ("OneBitLamb", 1, BF16)],
)
def test_compressed_optimizers_train(name, stage, precision) -> None:
    def body(comm):
        changes = {"gradient_clipping": 1.0, "gradient_accumulation_steps": 2, "thinwire": {"resync_interval": 5}}
        engine = make_engine(comm, named(name, stage, **changes, **precision))
        warmup = train(engine, range(8))
        if name == "OneBitLamb":
            without = 3 if stage == 0 else 2  # have no gradients; stage 0 counts the one that does not train too
            assert max(engine.optimizer.get_lamb_coeffs()[without:]) <= 0.5
        frozen = train(engine, range(8, 20))
        assert engine.optimizer.frozen
        assert sum(frozen[-5:]) < 0.9 * sum(warmup[:5])
        return weights(engine.module)

    first, *others = threads.run(body, 3)
    assert all(equal(first, other) for other in others)


@pytest.mark.parametrize(("clipping", "known"), [(0.0, 8), (1.0, 10)])
def test_the_norm_is_told_where_it_is_known(clipping: float, known: int) -> None:
    def body(comm):
        engine = make_engine(comm, named("OneBitAdam", 1, gradient_clipping=clipping))
        return [(train(engine, [step]), engine.get_global_grad_norm())[1] for step in range(10)]

    norms = threads.run(body, 2)[0]
    assert [norm is not None for norm in norms] == [True] * known + [False] * (10 - known)
    assert all(math.isfinite(norm) for norm in norms[:known])


@on_threads(2)
def test_beginning_the_optimizer_anew(comm, tmp_path) -> None:
    engine = make_engine(comm, named("OneBitAdam", 1))
    train(engine, range(12))
    engine.save_checkpoint(tmp_path)
    assert engine.optimizer.frozen
    engine.load_checkpoint(tmp_path, load_optimizer_states=False)
    assert not engine.optimizer.frozen
    fresh = make_engine(comm, named("OneBitAdam", 1), seed=1)
    fresh.load_checkpoint(tmp_path, load_optimizer_states=False)
    assert train_same_data(engine, range(12, 24)) == train_same_data(fresh, range(12, 24))
    engine.optimizer.param_groups[0]["exp_avg_mask"] = torch.ones(3, 1)
    assert engine.save_checkpoint(tmp_path)


@pytest.mark.parametrize(("stage", "precision"), [(0, {}), (1, BF16)])
def test_zero_one_adam_evaluates_and_exports_weights_in_sync(tmp_path, stage: int, precision: dict) -> None:
    def body(comm):
        engine = make_engine(comm, named("ZeroOneAdam", stage, gradient_accumulation_steps=2, **precision))
        first = train(engine, range(5))
        train(engine, range(5, 17))
        assert engine.optimizer.frozen
        assert not engine.optimizer.in_sync
        own = weights(engine.module)
        assert engine.eval() is engine.module
        assert not engine.module.training
        common = weights(engine.module)
        engine.train()
        assert engine.module.training
        engine.save_16bit_model(tmp_path, "model.safetensors")
        exported = safetensors.torch.load_file(tmp_path / "model.safetensors")
        shown = weights(engine.module)
        assert all(torch.equal(shown[name].bfloat16(), value) for name, value in exported.items() if name != "calls")
        assert sum(train(engine, range(17, 30))[-5:]) < 0.8 * sum(first)
        return own, common

    (first_own, first), (own, second) = threads.run(body, 2)
    assert equal(first, second)
    assert not equal(own, first)
    assert not equal(own, first_own)


def test_losses_of_zero_one_adam_that_are_not_finite() -> None:
    """In a step that sends, an error on every rank; in a local step that rank's own affair."""

    def body(comm):
        engine = make_engine(comm, named("ZeroOneAdam", 1))
        train(engine, range(15))
        for expected in (True, False):
            engine.backward(engine(torch.ones(6, 16)).mean() * (math.nan if comm.rank == 1 else 1))
            if expected:
                with pytest.raises(NonFiniteError, match="step 16: the loss was not finite on rank 1"):
                    engine.step()
            train(engine, [15]) if expected else engine.step()
            assert engine.was_step_applied()
            assert engine.get_global_grad_norm() is None
        assert engine.optimizer.left_out_steps == comm.rank
        assert all(math.isfinite(loss) for loss in train(engine, range(18, 22)))

    with pytest.warns(RuntimeWarning, match="adds nothing on rank 1") as told:
        threads.run(body, 2)
    assert sum("adds nothing on rank 1" in str(one.message) for one in told) == 1


# Gradients sent exactly


@pytest.mark.parametrize(
    ("name", "precision"), [("Lamb", "fp32"), ("Lion", "bf16"), ("Muon", "fp16"), ("QHAdamW", "bf16")]
)
def test_exact_optimizers_learn_alike_at_every_stage(name: str, precision: str) -> None:
    def rank(comm: Communicator, stage: int) -> list[float]:
        return train(make_engine(comm, exact(name, stage, **PRECISIONS[precision])), range(8))

    of_stage = at_stages(rank)
    assert all(losses == of_stage[0][0] for of_rank in of_stage for losses in of_rank)
    assert of_stage[0][0][-1] < 0.9 * of_stage[0][0][0]


def test_muon_takes_matrices_by_deepspeeds_rule_and_a_schedule_steers_both_groups() -> None:
    schedule = {"type": "WarmupLR", "params": {"warmup_max_lr": [0.2, 0.1], "warmup_num_steps": 4}}
    assert make_engine(None, exact("Muon", 1)).get_lr() == [2e-2, 3e-3]
    engine = make_engine(None, exact("Muon", 1, scheduler=schedule))
    matrices, rest = engine.optimizer.param_groups
    assert {one.dim() for one in matrices["params"]} == {2}
    assert {one.dim() for one in rest["params"]} == {1}
    train(engine, range(6))
    assert engine.get_lr() == pytest.approx([0.2, 0.1])


@pytest.mark.parametrize(("stage", "kind"), [(0, "AdamW"), (1, "Adam")])
def test_the_configuration_says_whether_moments_are_corrected(stage: int, kind: str, tmp_path) -> None:
    """And a checkpoint goes on without correction."""

    def config(stage: int, corrects: bool) -> dict[str, Any]:
        params = {"lr": 1e-2, "weight_decay": 0.1, "bias_correction": corrects}
        return settings(stage, optimizer={"type": kind, "params": params})

    def body(comm: Communicator, corrects: bool) -> list[float]:
        engine = make_engine(comm, config(stage, corrects))
        losses = train(engine, range(3))
        engine.save_checkpoint(tmp_path / f"{corrects}")
        return losses + train(engine, range(3, 8))

    def resume(comm: Communicator) -> list[float]:
        engine = make_engine(comm, config(1, False), seed=5)
        engine.load_checkpoint(tmp_path / "False")
        return train(engine, range(3, 8))

    found = threads.run(lambda comm: body(comm, False), 2)[0]
    assert found == pytest.approx(tiny.reference(2, 8, kind=AdamW), rel=1e-5)
    assert threads.run(lambda comm: body(comm, True), 2)[0] != pytest.approx(found, rel=1e-3)
    assert threads.run(resume, 2)[0] == pytest.approx(found[3:], rel=1e-6)


# How gradients are averaged, where state lies, and what carries the bytes

ADAMW = {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}}
ONE_BIT = {"type": "OneBitAdam", "params": {"lr": 1e-2, "freeze_step": 2}}


@pytest.mark.parametrize(("stage", "optimizer"), [(0, ADAMW), (0, ONE_BIT), (1, ONE_BIT), (2, ADAMW)])
def test_every_key_of_averaging_trains_as_without_it_up_to_rounding(stage: int, optimizer: dict[str, Any]) -> None:
    def losses(**changes: Any) -> torch.Tensor:
        config = settings(stage, gradient_accumulation_steps=2, optimizer=optimizer, **changes)
        return torch.tensor(threads.run(lambda comm: train(make_engine(comm, config), range(4)), 2)[0])

    expected = losses()
    tolerance = 1e-5 if optimizer is ADAMW else 2e-3  # signs turn a last bit into one of a step
    for changes in (
        {"prescale_gradients": True},
        {"gradient_predivide_factor": 3.0},
        {"gradient_allreduce_op": "avg"},
        {"communication_data_type": "fp32"},
        {"data_types": {"grad_accum_dtype": "fp32"}},
        {"gradient_allreduce_op": "sum"},  # Adam does not care by what its gradient is multiplied
    ):
        torch.testing.assert_close(losses(**changes), expected, rtol=tolerance, atol=0)
    for dtype in ("bf16", "fp16"):
        narrow = losses(communication_data_type=dtype)
        torch.testing.assert_close(narrow, expected, rtol=0.05, atol=0)
        assert not torch.equal(narrow, expected)


def test_state_on_a_disk_learns_and_resumes_alike(tmp_path) -> None:
    offload = {"device": "nvme", "nvme_path": str(tmp_path / "disk")}
    nvme = {"zero_optimization": {"stage": 2, "reduce_bucket_size": 6000, "offload_optimizer": offload}}

    def rank(comm: Communicator) -> None:
        memory, disk = (make_engine(comm, settings(2, gradient_clipping=0.5, **more, **BF16)) for more in ({}, nvme))
        assert train(disk, range(4)) == train(memory, range(4))
        assert disk.save_checkpoint(tmp_path / "saved")
        expected = train(memory, range(4, 7))
        disk.optimizer.close()
        for more in (nvme, {}):
            resumed = make_engine(comm, settings(2, gradient_clipping=0.5, **more, **BF16), seed=1)
            resumed.load_checkpoint(tmp_path / "saved")
            assert train(resumed, range(4, 7)) == expected
            assert equal(weights(resumed), weights(memory))
            resumed.optimizer.close()

    threads.run(rank, 2)


def test_buckets_of_one_element_of_16_bits() -> None:
    zero = {"zero_optimization": {"stage": 1, "reduce_bucket_size": 1}}
    small, usual = (train(make_engine(threads.single(60.0), settings(**more, **BF16)), range(3)) for more in (zero, {}))
    assert small == usual


NONE, CPU, NVME = OffloadConfig(), OffloadConfig(device="cpu"), OffloadConfig(device="nvme", nvme_path="/nvme")


@pytest.mark.parametrize(
    ("state", "shards", "expected"),
    [(NONE, NONE, None), (CPU, CPU, None), (CPU, NONE, "cpu"), (NONE, CPU, "cuda:0"), (NVME, CPU, None)],
)
def test_state_lies_apart_where_one_of_the_two_is_offloaded(state, shards, expected: str | None) -> None:
    zero = ZeroConfig(stage=3, offload_optimizer=state, offload_param=shards)
    assert _stepped_on(zero, torch.device("cuda", 0)) == (None if expected is None else torch.device(expected))
    assert _stepped_on(zero, torch.device("cpu")) is None


def test_every_kind_of_backend_trains_on_threads_as_none_does() -> None:
    def losses(**params):
        optimizer = {"type": "OneBitAdam", "params": {"lr": 1e-3, "freeze_step": 1, **params}}
        return threads.run(lambda comm: train(make_engine(comm, settings(0, optimizer=optimizer)), range(2)), 2)

    expected = losses()
    for backend in ("nccl", "mpi", "gloo", "compressed", "hccl"):
        assert losses(comm_backend_name=backend) == expected, backend


@pytest.mark.parametrize(("backend", "lack"), [("nccl", "not on a GPU"), ("mpi", "not started by mpirun or srun")])
def test_a_backend_that_the_job_lacks_gives_way_and_rank_0_says_so(backend, lack, capsys, monkeypatch) -> None:
    for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    comm = speaking()
    assert communicator_of(backend, comm, torch.device("cpu")) is comm
    told = capsys.readouterr().err
    assert f'"optimizer.params.comm_backend_name" is "{backend}", and ' in told
    assert lack in told
