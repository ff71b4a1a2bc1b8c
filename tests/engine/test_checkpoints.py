"""What an engine saves, an engine goes on from: on other ranks, at another stage, as if nothing had happened."""

import json
import math
import random

import numpy as np
import pytest
import torch
from torch import nn

from tests.engine.tiny import BF16, equal, loss_of, make_engine, make_model, settings, train, train_same_data, weights
from tests.launching import on_threads
from tests.refusing import refused
from thinwire import initialize
from thinwire.comm import threads
from thinwire.engine import CheckpointError
from thinwire.engine.checkpoint.manifest import _sealed
from thinwire.engine.saved_job import reseed

SCHEDULE = {"type": "WarmupCosineLR", "params": {"total_num_steps": 30, "warmup_num_steps": 5}}


def save_after(path, world: int, stage: int, steps: int, **changes) -> list[float]:
    """Train, save, train on: the losses after the save."""

    def body(comm):
        engine = make_engine(comm, settings(stage, scheduler=SCHEDULE, gradient_clipping=0.5, **changes))
        train(engine, range(steps))
        assert engine.save_checkpoint(path, client_state={"note": ["a", 1, None]})
        return train_same_data(engine, range(steps, steps + 6))

    return threads.run(body, world)[0]


@pytest.mark.parametrize(("precision", "saved_stage", "stage"), [({}, 1, 1), ({}, 0, 2), (BF16, 2, 0), (BF16, 1, 2)])
def test_resume_on_other_ranks_and_stages(tmp_path, precision, saved_stage, stage) -> None:
    expected = save_after(tmp_path, 4, saved_stage, 8, **precision)

    def body(comm):
        engine = make_engine(comm, settings(stage, scheduler=SCHEDULE, gradient_clipping=0.5, **precision), seed=1)
        path, client_state = engine.load_checkpoint(tmp_path)
        assert path.endswith("global_step8")
        assert client_state == {"note": ["a", 1, None]}
        assert (engine.global_steps, engine.micro_steps) == (8, 8)
        assert float(engine.module.calls) == 8
        return train_same_data(engine, range(8, 14))

    tolerance = 1e-5 if not precision else 2e-2
    for world in (1, 6) if saved_stage else (4,):
        for losses in threads.run(body, world):
            torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=tolerance, atol=0)


@on_threads(2)
def test_fp16_continues_with_its_scale(comm, tmp_path) -> None:
    fp16 = {"enabled": True, "initial_scale_power": 8, "hysteresis": 2, "loss_scale_window": 3}
    engine = make_engine(comm, settings(fp16=fp16))
    train(engine, range(2))
    engine.backward(loss_of(engine, comm.rank, 2) * math.inf)
    engine.step()
    assert engine.save_checkpoint(tmp_path, "one")
    resumed = make_engine(comm, settings(fp16=fp16), seed=1)
    resumed.load_checkpoint(tmp_path, "one")
    assert resumed.skipped_steps == 1
    expected = train(engine, range(3, 9))
    assert train(resumed, range(3, 9)) == expected
    assert resumed.optimizer.loss_scale == engine.optimizer.loss_scale == 512


def draw() -> tuple[float, ...]:
    return float(torch.randn(1)), random.gauss(0, 1), float(np.random.randn())


def make_with_data(samples: int = 20, **changes):
    data = torch.utils.data.TensorDataset(torch.arange(2.0 * samples).reshape(samples, 2))
    engine, _, loader, _ = initialize(model=nn.Linear(2, 1), training_data=data, config=settings(**changes))
    return engine, loader


def test_random_numbers_and_data_go_on(tmp_path) -> None:
    engine, loader = make_with_data(train_micro_batch_size_per_gpu=3)
    batches = loader.repeat()
    for _ in range(9):
        engine.backward(engine(next(batches)[0]).mean())
        engine.step()
    draw()  # an odd number leaves half of a pair of normal numbers behind
    engine.save_checkpoint(tmp_path)
    drawn = [draw() for _ in range(4)]
    following = [next(batches)[0] for _ in range(4)]
    resumed, loader = make_with_data(train_micro_batch_size_per_gpu=3)
    draw()
    assert resumed.load_checkpoint(tmp_path)[0]
    assert [draw() for _ in range(4)] == drawn
    batches = loader.repeat()
    for expected in following:
        assert torch.equal(next(batches)[0], expected)


def test_another_number_of_ranks_draws_what_follows_from_the_seed(tmp_path) -> None:
    threads.run(lambda comm: make_engine(comm, settings()).save_checkpoint(tmp_path), 2)

    def drawn(seed: int):
        make_engine(None, settings(seed=seed), seed=1).load_checkpoint(tmp_path)
        return draw()

    assert drawn(3) == drawn(3)
    assert all(one != other for one, other in zip(drawn(3), drawn(4), strict=True))
    apart = set()
    for entropy in ((1, 2, 3), (1, 2, 4), (2, 1, 3)):  # seed, step and rank
        reseed(*entropy)
        apart.add(draw())
    assert len(apart) == 3


@on_threads(2)
def test_parts_of_a_checkpoint(comm, tmp_path) -> None:
    engine = make_engine(comm, settings(scheduler=SCHEDULE))
    train(engine, range(7))
    engine.save_checkpoint(tmp_path)
    weights = make_engine(comm, settings(), seed=1)
    assert weights.load_checkpoint(tmp_path, load_module_only=True)[0]
    assert weights.global_steps == 0
    assert torch.equal(weights.module.mix.weight, engine.module.mix.weight)
    fresh = make_engine(comm, settings(scheduler=SCHEDULE), seed=1)
    fresh.load_checkpoint(tmp_path, load_optimizer_states=False)
    assert (fresh.global_steps, fresh.get_lr()) == (7, engine.get_lr())
    assert {saved_slice.kind for saved_slice in fresh.optimizer.saved_slices()} == {"weight"}
    other = make_engine(comm, settings(scheduler={"type": "WarmupLR", "params": {}}), seed=1)
    with pytest.raises(ValueError, match="saved with the schedule WarmupCosineLR, this job has WarmupLR"):
        other.load_checkpoint(tmp_path)
    assert other.load_checkpoint(tmp_path, load_lr_scheduler_states=False)[0]
    sgd = make_engine(comm, settings(optimizer={"type": "SGD", "params": {"lr": 0.1}}))
    refused(ValueError, "saved by AdamW", sgd.load_checkpoint, tmp_path)
    assert sgd.load_checkpoint(tmp_path, load_optimizer_states=False)[0]


def test_going_on_with_other_data(tmp_path) -> None:
    engine, loader = make_with_data(20)
    for batch in loader:
        engine.backward(engine(batch[0]).mean())
        engine.step()
    engine.save_checkpoint(tmp_path)
    tuned, others = make_with_data(9)
    before = weights(tuned.module)
    with pytest.raises(ValueError, match=r"saved with samples 20, this loader has 9.*load_data_position=False"):
        tuned.load_checkpoint(tmp_path)
    assert equal(weights(tuned.module), before)
    assert tuned.load_checkpoint(tmp_path, load_data_position=False)[0]
    assert equal(weights(tuned.module), weights(engine.module))
    assert (others.epoch, others.consumed) == (0, 0)


def test_another_model_is_refused_before_anything_moves(tmp_path) -> None:
    class Counting(nn.Linear):
        def __init__(self, slots: int) -> None:
            super().__init__(2, 2)
            self.register_buffer("seen", torch.zeros(slots))

    make_engine(None, settings(), model=Counting(3)).save_checkpoint(tmp_path)
    for model, precision, message in (
        (Counting(3), BF16, "bfloat16"),
        (nn.Linear(2, 3), {}, "'weight'"),
        (Counting(1), {}, r"buffer 'seen' has shape \(1,\), checkpoint 'global_step0' holds \(3,\)"),
    ):
        engine = make_engine(None, settings(**precision), model=model)
        before = weights(engine.module)
        refused((CheckpointError, ValueError), message, engine.load_checkpoint, tmp_path)
        assert equal(weights(engine.module), before)


LOCAL = {"var_freeze_step": 1, "local_step_scaler": 1, "local_step_clipper": 4}  # the third step is one


@pytest.mark.parametrize(
    ("stage", "optimizer", "params"),
    [
        (0, "OneBitAdam", {"freeze_step": 2}),
        (1, "AdamW", {}),
        (2, "OneBitAdam", {"freeze_step": 2}),
        (1, "OneBitLamb", {"freeze_step": 2}),
        (1, "ZeroOneAdam", LOCAL),
    ],
)
def test_in_the_middle_of_a_step(tmp_path, stage, optimizer, params) -> None:
    """The checkpoint is that of the last step; the job that saved goes on with its gradients."""
    chosen = {"type": optimizer, "params": {"lr": 1e-2, "block_size": 64, **params} if params else {"lr": 1e-2}}
    chosen = settings(stage, gradient_accumulation_steps=2, optimizer=chosen)

    def body(comm):
        whole = make_engine(comm, chosen)
        expected = train(whole, range(6))
        engine = make_engine(comm, chosen)
        assert train(engine, range(3)) == expected[:3]
        loss = loss_of(engine, comm.rank, 6)
        engine.backward(loss)
        engine.step()
        assert engine.save_checkpoint(tmp_path)
        engine.backward(loss_of(engine, comm.rank, 7))
        engine.step()
        assert train(engine, range(4, 6)) == expected[4:]
        resumed = make_engine(comm, chosen, seed=1)
        resumed.load_checkpoint(tmp_path)
        assert resumed.global_steps == 3
        assert train(resumed, range(3, 6)) == expected[3:]

    with pytest.warns(RuntimeWarning, match=r"called in mid-step, after 1 backward\(\) since step 3,"):
        threads.run(body, 2)


def test_data_since_the_last_step_come_again(tmp_path) -> None:
    sizes = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2}
    engine, loader = make_with_data(**sizes)
    for batch in loader:  # five micro-batches: the epoch ends in the middle of a step
        last = batch[0]
        engine.backward(engine(last).mean())
        engine.step()
    with pytest.warns(RuntimeWarning, match="called in mid-step"):
        assert engine.save_checkpoint(tmp_path)
    resumed, loader = make_with_data(**sizes)
    resumed.load_checkpoint(tmp_path)
    assert torch.equal(next(iter(loader))[0], last)


def change(path, *keys, to) -> None:
    """Put another value into a manifest, and seal it well."""
    body = json.loads((path / "manifest.json").read_bytes())
    del body["sha256"]
    inner = body
    for key in keys[:-1]:
        inner = inner[key]
    inner[keys[-1]] = to
    (path / "manifest.json").write_bytes(_sealed(body))


WRONG = [
    (("serial",), "x"),
    (("tag",), [None]),
    (("files", 0, "slices", 0, "start"), "x"),
    (("files", 0, "rank_tensors"), [None]),
    (("files", 1, "values"), "x"),
    (("files", 1, "values", "random", "python"), {"a": 1}),
    (("shared", "progress", "global_steps"), "x"),
    (("shared", "optimizer", "groups", 0, "lr"), [None]),
    (("shared", "optimizer", "groups", 0, "betas"), "x"),
    (("shared", "optimizer", "freeze_groups", 0, "steps"), None),
    (("shared", "optimizer", "freeze_groups", 0, "buckets"), [["stranger"]]),
    (("shared", "optimizer", "freeze_groups", 0, "frozen_at"), 1),  # of which state nothing was saved
    (("shared", "schedule", "state"), "x"),
    (("shared", "schedule", "state", "last_epoch"), {"a": 1}),
    (("shared", "client_state"), [None]),
]


def test_a_sealed_manifest_of_other_types_is_passed_over(tmp_path) -> None:
    """On all ranks alike, before any weight has moved."""
    chosen = settings(0, scheduler=SCHEDULE, optimizer={"type": "OneBitAdam", "params": {"lr": 1e-2}})

    def body(comm):
        engine = make_engine(comm, chosen)
        for step, tag in enumerate(("older", "newer")):
            train(engine, [step])
            engine.save_checkpoint(tmp_path, tag)
        whole = (tmp_path / "newer" / "manifest.json").read_bytes()
        train(engine, [2])  # to other weights than those that were saved
        before = engine.module.mix.weight.clone()
        for keys, value in WRONG:
            comm.barrier()
            if comm.rank == 0:
                (tmp_path / "newer" / "manifest.json").write_bytes(whole)
                change(tmp_path / "newer", *keys, to=value)
            comm.barrier()
            refused(CheckpointError, r"manifest\.json .*(hold|every)", engine.load_checkpoint, tmp_path, "newer")
            assert torch.equal(engine.module.mix.weight, before)
        assert engine.load_checkpoint(tmp_path)[0].endswith("older")
        assert engine.global_steps == 1

    with pytest.warns(RuntimeWarning, match=r"'newer' .* cannot be loaded: .*manifest\.json.*Loading 'older'"):
        threads.run(body, 2)


@pytest.mark.parametrize(
    ("stage", "kind", "params"),
    [
        (0, "OneBitAdam", {"freeze_step": 1}),
        (1, "OneBitLamb", {"freeze_step": 1}),
        (1, "ZeroOneAdam", {"var_freeze_step": 1}),
        (1, "AdamW", {}),
        (0, "DiLoCo", {"every": 2, "fragments": 2, "overlap": 1, "codec": "int8", "block_size": 64}),
    ],
)
def test_what_lies_under_another_name_is_refused_before_anything_moves(tmp_path, stage, kind, params) -> None:
    """Every kind of slice, of a rank's own values, and of buffers; without a tag the checkpoint before it is loaded."""
    engine = make_engine(None, settings(stage, optimizer={"type": kind, "params": {"lr": 1e-3, **params}}))
    for step, tag in enumerate(("older", "newer")):
        train(engine, [step, step + 1])
        engine.save_checkpoint(tmp_path, tag)
    path = tmp_path / "newer" / "manifest.json"
    whole = path.read_bytes()
    file = json.loads(whole)["files"][0]
    places = {one["kind"]: ("slices", number, "kind") for number, one in enumerate(file["slices"])}
    named = {name: (table, name) for table in ("rank_tensors", "buffers") for name in file[table]}
    train(engine, [4])  # to other weights than those that were saved
    before = weights(engine.module)
    for what, place in (places | named).items():
        if place[0] == "slices":
            change(path.parent, "files", 0, *place, to="other")
        else:
            change(
                path.parent,
                "files",
                0,
                place[0],
                to={f"{name}x"[: len(name) + (name == what)]: key for name, key in file[place[0]].items()},
            )
        refused(CheckpointError, "newer", engine.load_checkpoint, tmp_path, "newer")
        assert equal(before, weights(engine.module)), what
        path.write_bytes(whole)
    engine.load_checkpoint(tmp_path, "newer")
    change(path.parent, "files", 0, "slices", 0, "kind", to="other")
    with pytest.warns(RuntimeWarning, match="Loading 'older'"):
        assert engine.load_checkpoint(tmp_path)[0].endswith("older")


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_save_that_fails_is_a_warning(tmp_path, asynchronous) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    engine = make_engine(None, settings(checkpoint={"async_save": asynchronous}))
    train(engine, range(1))
    with pytest.warns(RuntimeWarning, match="was not saved"):
        assert not engine.save_checkpoint(blocked / "checkpoints")
    with pytest.warns(RuntimeWarning, match="could not be written"):
        assert not engine.save_16bit_model(blocked / "model")
    assert train(engine, range(1, 3))
    assert engine.save_checkpoint(tmp_path / "good")
    engine.close()
    assert make_engine(None, settings()).load_checkpoint(tmp_path / "good")[0]


def test_schedules_whose_state_json_cannot_hold(tmp_path) -> None:
    def make():
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        parts = [
            torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 3]),
            torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5),
        ]
        schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, parts, milestones=[5])
        given = {"model": model, "optimizer": optimizer, "lr_scheduler": schedule}
        return make_engine(None, settings(optimizer=None), **given)

    def rates(engine, steps):
        return [(train(engine, [0]), engine.get_lr())[1] for _ in range(steps)]

    engine = make()
    rates(engine, 3)
    engine.save_checkpoint(tmp_path)
    resumed = make()
    resumed.load_checkpoint(tmp_path)
    assert rates(resumed, 5) == rates(engine, 5)
    fresh, again = make(), make()
    again.load_checkpoint(tmp_path, load_lr_scheduler_states=False)
    assert rates(again, 5) == rates(fresh, 5)
