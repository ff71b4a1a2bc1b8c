"""1-bit Adam by name: the engine trains with it, clips, skips, saves and resumes as with any other optimizer."""

from __future__ import annotations

import math

import pytest
import torch

from tests.engine.test_engine_checkpoints import train_same_data
from tests.engine.tiny import make_engine, make_model, settings, train
from thinwire import initialize
from thinwire.comm import threads
from thinwire.engine import NonFiniteError

ONEBIT = {"type": "OneBitAdam", "params": {"lr": 3e-3, "freeze_step": 8, "block_size": 64}}


def onebit(stage: int, **changes):
    return settings(stage, optimizer=ONEBIT, thinwire={"resync_interval": 5}, **changes)


@pytest.mark.parametrize(
    ("stage", "precision"), [(0, {"bf16": {"enabled": True}}), (1, {}), (2, {"bf16": {"enabled": True}})]
)
def test_it_trains(stage, precision) -> None:
    def body(comm):
        engine = make_engine(comm, onebit(stage, gradient_clipping=1.0, gradient_accumulation_steps=2, **precision))
        warmup = train(engine, range(8))
        assert engine.optimizer.frozen
        frozen = train(engine, range(8, 30))
        assert sum(frozen[-5:]) < sum(warmup[:5])
        return engine.module.state_dict()

    weights = threads.run(body, 3)
    assert all(torch.equal(weights[0][name], other[name]) for other in weights for name in other)


def test_a_loss_that_is_not_finite_once_frozen() -> None:
    def body(comm):
        engine = make_engine(comm, onebit(1, gradient_clipping=1.0))
        train(engine, range(10))
        inputs = torch.ones(6, 16)
        engine.backward(engine(inputs).mean() * (math.nan if comm.rank == 1 else 1))
        with pytest.raises(NonFiniteError, match="step 11: the loss was not finite on rank 1"):
            engine.step()
        assert all(math.isfinite(loss) for loss in train(engine, range(11, 14)))

    threads.run(body, 2)


def test_the_norm_is_told_where_it_is_known() -> None:
    def body(comm, clipping):
        engine = make_engine(comm, onebit(1, gradient_clipping=clipping))
        norms = []
        for step in range(10):
            train(engine, [step])
            norms.append(engine.get_global_grad_norm())
        return norms

    for clipping, known in ((0.0, 8), (1.0, 10)):
        norms = threads.run(lambda comm, clipping=clipping: body(comm, clipping), 2)[0]
        assert [norm is not None for norm in norms] == [True] * known + [False] * (10 - known)
        assert all(math.isfinite(norm) for norm in norms[:known])


def test_stage_3_is_refused() -> None:
    with pytest.raises(ValueError, match="3 does not go with OneBitAdam"):
        make_engine(None, onebit(3))


def test_resume_while_auto_is_looking(tmp_path) -> None:
    auto = {"type": "OneBitAdam", "params": {"lr": 3e-3, "freeze_step": "auto", "block_size": 64}}

    def save(comm):
        engine = make_engine(comm, settings(1, optimizer=auto))
        train(engine, range(25))
        engine.save_checkpoint(tmp_path)
        return train_same_data(engine, range(25, 45))

    def resume(comm):
        engine = make_engine(comm, settings(1, optimizer=auto), seed=1)
        engine.load_checkpoint(tmp_path)
        return train_same_data(engine, range(25, 45))

    expected = threads.run(save, 2)
    assert threads.run(resume, 2) == expected


def test_beginning_the_optimizer_anew(tmp_path) -> None:
    def body(comm):
        engine = make_engine(comm, onebit(1))
        train(engine, range(12))
        engine.save_checkpoint(tmp_path)
        assert engine.optimizer.frozen
        engine.load_checkpoint(tmp_path, load_optimizer_states=False)
        assert not engine.optimizer.frozen
        fresh = make_engine(comm, onebit(1), seed=1)
        fresh.load_checkpoint(tmp_path, load_optimizer_states=False)
        assert train_same_data(engine, range(12, 30)) == train_same_data(fresh, range(12, 30))

    threads.run(body, 2)


def test_a_group_with_a_mask_is_saved(tmp_path) -> None:
    def body(comm):
        engine = make_engine(comm, onebit(1))
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
            return initialize(model=model, comm=comm, config=onebit(stage), model_parameters=[masked, rest])[0]

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
