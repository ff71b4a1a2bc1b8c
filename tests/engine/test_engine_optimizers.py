"""Optimizers by name: the engine trains with each, clips, skips, saves and resumes as with any other."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

from tests.engine.test_engine_checkpoints import train_same_data
from tests.engine.tiny import loss_of, make_engine, make_model, settings, train
from tests.optim.zero_one.reference import SCHEDULE
from thinwire import initialize
from thinwire.comm import Communicator, threads
from thinwire.engine import NonFiniteError
from thinwire.optim import Lamb, Lion, Muon
from thinwire.zero.memory import live_tensor_bytes
from thinwire.zero.optimizer import AdamW

BF16 = {"bf16": {"enabled": True}}
PRECISIONS = {"fp32": {}, "bf16": BF16, "fp16": {"fp16": {"enabled": True, "loss_scale": 64}}}
COMPRESSED: dict[str, dict[str, Any]] = {
    "OneBitAdam": {"lr": 3e-3, "freeze_step": 8, "block_size": 64},
    "OneBitLamb": {"lr": 1e-2, "freeze_step": 8, "block_size": 64, "max_coeff": 0.5, "factor_threshold": 0.2},
}
EXACT: dict[str, dict[str, Any]] = {
    "Lamb": {"lr": 1e-2, "weight_decay": 0.1, "max_coeff": 5.0, "bias_correction": False},
    "Lion": {"lr": 1e-3, "weight_decay": 0.1},
    "Muon": {"lr": 2e-2, "momentum": 0.9, "adam_lr": 3e-3},
}


def compressed(name: str, stage: int, **changes: Any) -> dict[str, Any]:
    optimizer = {"type": name, "params": COMPRESSED[name]}
    return settings(stage, optimizer=optimizer, thinwire={"resync_interval": 5}, **changes)


def exact(name: str, stage: int, **changes: Any) -> dict[str, Any]:
    return settings(stage, optimizer={"type": name.lower(), "params": EXACT[name]}, gradient_clipping=0.5, **changes)


@pytest.mark.parametrize(
    ("name", "stage", "precision"),
    [
        ("OneBitAdam", 0, BF16),
        ("OneBitAdam", 1, {}),
        ("OneBitAdam", 2, BF16),
        ("OneBitLamb", 0, {}),
        ("OneBitLamb", 1, {}),
        ("OneBitLamb", 1, BF16),
    ],
)
def test_compressed_optimizers_train(name, stage, precision) -> None:
    def body(comm):
        engine = make_engine(
            comm, compressed(name, stage, gradient_clipping=1.0, gradient_accumulation_steps=2, **precision)
        )
        warmup = train(engine, range(8))
        if name == "OneBitLamb":
            without = 3 if stage == 0 else 2  # have no gradients; stage 0 counts the one that does not train too
            assert max(engine.optimizer.get_lamb_coeffs()[without:]) <= 0.5
        frozen = train(engine, range(8, 28))
        assert engine.optimizer.frozen
        assert sum(frozen[-5:]) < 0.9 * sum(warmup[:5])
        return engine.module.state_dict()

    weights = threads.run(body, 3)
    assert all(torch.equal(weights[0][name], other[name]) for other in weights for name in other)


@pytest.mark.parametrize("name", COMPRESSED)
def test_a_loss_that_is_not_finite_once_frozen(name) -> None:
    def body(comm):
        engine = make_engine(comm, compressed(name, 1, gradient_clipping=1.0))
        train(engine, range(10))
        engine.backward(engine(torch.ones(6, 16)).mean() * (math.nan if comm.rank == 1 else 1))
        with pytest.raises(NonFiniteError, match="step 11: the loss was not finite on rank 1"):
            engine.step()
        assert all(math.isfinite(loss) for loss in train(engine, range(11, 14)))

    threads.run(body, 2)


def test_the_norm_is_told_where_it_is_known() -> None:
    def body(comm, clipping):
        engine = make_engine(comm, compressed("OneBitAdam", 1, gradient_clipping=clipping))
        norms = []
        for step in range(10):
            train(engine, [step])
            norms.append(engine.get_global_grad_norm())
        return norms

    for clipping, known in ((0.0, 8), (1.0, 10)):
        norms = threads.run(lambda comm, clipping=clipping: body(comm, clipping), 2)[0]
        assert [norm is not None for norm in norms] == [True] * known + [False] * (10 - known)
        assert all(math.isfinite(norm) for norm in norms[:known])


def test_resume_while_auto_is_looking(tmp_path) -> None:
    auto = {"type": "OneBitAdam", "params": {"lr": 3e-3, "freeze_step": "auto", "block_size": 64}}

    def run(comm, resumes):
        engine = make_engine(comm, settings(1, optimizer=auto), seed=int(resumes))
        if resumes:
            engine.load_checkpoint(tmp_path)
        else:
            train(engine, range(25))
            engine.save_checkpoint(tmp_path)
        return train_same_data(engine, range(25, 45))

    expected = threads.run(lambda comm: run(comm, False), 2)
    assert threads.run(lambda comm: run(comm, True), 2) == expected


def test_beginning_the_optimizer_anew(tmp_path) -> None:
    def body(comm):
        engine = make_engine(comm, compressed("OneBitAdam", 1))
        train(engine, range(12))
        engine.save_checkpoint(tmp_path)
        assert engine.optimizer.frozen
        engine.load_checkpoint(tmp_path, load_optimizer_states=False)
        assert not engine.optimizer.frozen
        fresh = make_engine(comm, compressed("OneBitAdam", 1), seed=1)
        fresh.load_checkpoint(tmp_path, load_optimizer_states=False)
        assert train_same_data(engine, range(12, 30)) == train_same_data(fresh, range(12, 30))
        engine.optimizer.param_groups[0]["exp_avg_mask"] = torch.ones(3, 1)
        assert engine.save_checkpoint(tmp_path)

    threads.run(body, 2)


@pytest.mark.parametrize("stage", [0, 1])
def test_flat_masks_in_groups(tmp_path, stage) -> None:
    """DeepSpeed's form; a checkpoint is loaded under the masks of the job that loads it."""

    def body(comm):
        def start(flat):
            model = make_model()
            masked = {"params": [model.mix.weight], "weight_decay": 0.0}
            if flat is not None:
                masked["exp_avg_mask"] = flat
            rest = {"params": [one for one in model.parameters() if one is not model.mix.weight]}
            config = compressed("OneBitAdam", stage)
            return initialize(model=model, comm=comm, config=config, model_parameters=[masked, rest])[0]

        rows = torch.arange(256) // 16
        engine = start((rows < 3).float())
        train(engine, range(12))
        assert torch.equal(engine.optimizer.param_groups[0]["exp_avg_mask"], (rows < 3).float())
        engine.save_checkpoint(tmp_path)
        for flat, moving in (((rows < 2).float(), 2), (None, 3)):
            again = start(flat)
            again.load_checkpoint(tmp_path)
            assert again.optimizer.frozen
            found = again.optimizer.param_groups[0].get("exp_avg_mask")
            assert found is None if flat is None else torch.equal(found, flat)
            before = again.module.mix.weight.detach().clone()
            train(again, range(12, 18))
            moved = (again.module.mix.weight != before).any(dim=1).tolist()
            assert moved == [True] * moving + [False] * (16 - moving)
            again.close()

    threads.run(body, 2)


def test_lamb_at_stage_1_holds_less_than_at_stage_0() -> None:
    def body(comm, stage, steps):
        engine = make_engine(comm, compressed("OneBitLamb", stage, **BF16))
        train(engine, range(steps))
        return sum(live_tensor_bytes(engine.module, engine.optimizer).values())

    for steps in (2, 10):
        whole, sharded = (
            max(threads.run(lambda comm, stage=stage, steps=steps: body(comm, stage, steps), 4)) for stage in (0, 1)
        )
        assert sharded < 0.8 * whole


# Local steps

ZERO_ONE = (
    {"lr": 3e-3, "block_size": 64, "weight_decay": 0.01} | SCHEDULE | {"var_freeze_step": 10, "local_step_scaler": 4}
)
"""Frozen after step 10; from step 15 on local steps between syncs, at even steps, then at 20, 24, 30, ..."""


def zero_one(stage: int = 1, **changes):
    optimizer = {"type": "zerooneadam", "params": ZERO_ONE}
    return settings(stage, optimizer=optimizer, **changes)


@pytest.mark.parametrize(
    ("stage", "precision"),
    [(0, {}), (1, {}), (1, {"bf16": {"enabled": True}}), (1, {"fp16": {"enabled": True, "initial_scale_power": 8}})],
)
def test_zero_one_adam_trains_and_evaluates_on_weights_in_sync(stage: int, precision: dict) -> None:
    def body(comm):
        engine = make_engine(comm, zero_one(stage, gradient_accumulation_steps=2, **precision))
        first = train(engine, range(5))
        train(engine, range(5, 17))
        assert engine.optimizer.frozen
        assert not engine.optimizer.in_sync
        own = {name: value.clone() for name, value in engine.module.state_dict().items()}
        assert engine.eval() is engine.module
        assert not engine.module.training
        common = {name: value.clone() for name, value in engine.module.state_dict().items()}
        engine.train()
        assert engine.module.training
        last = train(engine, range(17, 45))
        assert sum(last[-5:]) < 0.8 * sum(first)
        return own, common

    outcomes = threads.run(body, 2)
    for name, expected in outcomes[0][1].items():
        assert all(torch.equal(common[name], expected) for _, common in outcomes)
    assert any(not torch.equal(own[name], outcomes[0][0][name]) for own, _ in outcomes for name in own)


def test_what_is_exported_between_two_syncs_is_what_all_ranks_have(tmp_path) -> None:
    def body(comm):
        engine = make_engine(comm, zero_one())
        train(engine, range(17))
        engine.save_16bit_model(tmp_path, "model.safetensors")
        return {name: value.clone() for name, value in engine.module.state_dict().items()}

    exported = None
    for weights in threads.run(body, 2):
        exported = exported or safetensors.torch.load_file(tmp_path / "model.safetensors")
        assert all(torch.equal(weights[name].bfloat16(), value) for name, value in exported.items())


def test_losses_of_zero_one_adam_that_are_not_finite() -> None:
    """In a step that sends, an error on every rank; in a local step that rank's own affair."""

    def body(comm):
        engine = make_engine(comm, zero_one())
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

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        threads.run(body, 2)
    assert sum("adds nothing on rank 1" in str(one.message) for one in caught) == 1


# Gradients sent exactly


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_exact_optimizers_learn_alike_at_every_stage(name: str, precision: str) -> None:
    def rank(comm: Communicator, stage: int) -> list[float]:
        return train(make_engine(comm, exact(name, stage, **PRECISIONS[precision])), range(8))

    of_stage = [threads.run(lambda comm, stage=stage: rank(comm, stage), 2) for stage in (0, 1, 2)]
    assert all(losses == of_stage[0][0] for of_rank in of_stage for losses in of_rank)
    assert of_stage[0][0][-1] < 0.9 * of_stage[0][0][0]


@pytest.mark.parametrize("name", ["Lamb", "Muon"])
def test_checkpoints_cross_stages_and_numbers_of_ranks(name: str, tmp_path) -> None:
    def rank(comm: Communicator) -> list[float]:
        engine = make_engine(comm, exact(name, 2, **BF16))
        train(engine, range(4))
        engine.save_checkpoint(tmp_path)
        return train(engine, range(4, 7))

    expected = threads.run(rank, 2)[0]

    def again(comm: Communicator, stage: int) -> list[float]:
        engine = make_engine(comm, exact(name, stage, **BF16), seed=1)
        assert engine.load_checkpoint(tmp_path)[0] is not None
        return train(engine, range(4, 7))

    for stage in (0, 1):
        assert threads.run(lambda comm, stage=stage: again(comm, stage), 2)[1] == expected
    for ranks in (1, 3):
        assert len(set(map(tuple, threads.run(lambda comm: again(comm, 1), ranks)))) == 1


def test_muon_takes_matrices_by_deepspeeds_rule_and_a_schedule_steers_both_groups() -> None:
    schedule = {"type": "WarmupLR", "params": {"warmup_max_lr": [0.2, 0.1], "warmup_num_steps": 4}}
    assert make_engine(None, exact("Muon", 1)).get_lr() == [2e-2, 3e-3]
    engine = make_engine(None, exact("Muon", 1, scheduler=schedule))
    matrices, rest = engine.optimizer.param_groups
    assert {one.dim() for one in matrices["params"]} == {2}
    assert {one.dim() for one in rest["params"]} == {1}
    train(engine, range(6))
    assert engine.get_lr() == pytest.approx([0.2, 0.1])


@pytest.mark.parametrize(("name", "cls"), [("Lamb", Lamb), ("Lion", Lion), ("Muon", Muon)])
def test_one_that_is_passed_trains_as_one_that_is_named(name: str, cls: type[torch.optim.Optimizer]) -> None:
    def rank(comm: Communicator) -> None:
        model = make_model()
        given = cls(model.parameters(), **EXACT[name])
        plain = {key: value for key, value in exact(name, 1).items() if key != "optimizer"}
        engine = initialize(model=model, optimizer=given, config=plain, comm=comm)[0]
        assert train(engine, range(4)) == train(make_engine(comm, exact(name, 2)), range(4))

    threads.run(rank, 2)


def test_torchs_own_muon_is_an_error_that_names_ours() -> None:
    model = nn.Linear(3, 2, bias=False)
    muon = torch.optim.Muon(model.parameters())
    with pytest.raises(ValueError, match=r"pass thinwire\.optim.Muon, which has AdamW for the rest"):
        initialize(model=model, optimizer=muon, config={"train_batch_size": 2}, comm=threads.single(60.0))


# Adam without bias correction


def adam(stage: int, corrects: bool, kind: str = "AdamW") -> dict[str, Any]:
    params = {"lr": 1e-2, "weight_decay": 0.1, "bias_correction": corrects}
    return settings(stage, optimizer={"type": kind, "params": params})


def by_one_process(ranks: int, steps: int) -> list[float]:
    model = make_model()
    optimizer = AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    losses = []
    for step in range(steps):
        total = 0.0
        for rank in range(ranks):
            loss = loss_of(model, rank, step) / ranks
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


@pytest.mark.parametrize(("stage", "kind"), [(0, "AdamW"), (1, "Adam"), (2, "AdamW")])
def test_the_configuration_says_whether_moments_are_corrected(stage: int, kind: str, tmp_path) -> None:
    """And a checkpoint goes on without correction."""

    def body(comm: Communicator, corrects: bool) -> list[float]:
        engine = make_engine(comm, adam(stage, corrects, kind))
        losses = train(engine, range(3))
        engine.save_checkpoint(tmp_path / f"{corrects}")
        return losses + train(engine, range(3, 8))

    found = threads.run(lambda comm: body(comm, False), 2)[0]
    assert found == pytest.approx(by_one_process(2, 8), rel=1e-5)
    assert threads.run(lambda comm: body(comm, True), 2)[0] != pytest.approx(found, rel=1e-3)

    def resume(comm: Communicator) -> list[float]:
        engine = make_engine(comm, adam(1, False, kind), seed=5)
        engine.load_checkpoint(tmp_path / "False")
        return train(engine, range(3, 8))

    assert threads.run(resume, 2)[0] == pytest.approx(found[3:], rel=1e-6)
