"""What an engine saves, an engine goes on from: on other ranks, at another stage, as if nothing had happened."""

from __future__ import annotations

import json
import math
import random

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from tests.engine.tiny import Tiny, loss_of, make_engine, make_model, settings, train
from tests.optim.zero_one.training import SCHEDULE as ZERO_ONE_SCHEDULE
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


def train_same_data(engine, steps) -> list[float]:
    """Mean losses of steps in which all ranks take the same data, whose average does not depend on their number."""
    losses = []
    for step in steps:
        loss = loss_of(engine, 0, step)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    ("precision", "saved_stage", "stage"),
    [({}, 1, 1), ({}, 0, 2), ({"bf16": {"enabled": True}}, 2, 0), ({"bf16": {"enabled": True}}, 1, 2)],
)
def test_resume_on_other_ranks_and_stages(tmp_path, precision, saved_stage, stage) -> None:
    expected = save_after(tmp_path, 4, saved_stage, 8, **precision)

    def body(comm):
        engine = make_engine(comm, settings(stage, scheduler=SCHEDULE, gradient_clipping=0.5, **precision), seed=1)
        path, client_state = engine.load_checkpoint(tmp_path)
        assert path.endswith("global_step8")
        assert client_state == {"note": ["a", 1, None]}
        assert (engine.global_steps, engine.micro_steps) == (8, 8)
        assert float(engine.module.calls) == 8
        return train_same_data(engine, range(8, 14)), engine.get_lr()

    tolerance = 1e-5 if not precision else 2e-2
    for world in (1, 3, 8) if saved_stage else (4,):
        for losses, _ in threads.run(body, world):
            torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=tolerance, atol=0)


BF16 = {"bf16": {"enabled": True}}
LAMB = {"lr": 1e-2, "freeze_step": 8, "block_size": 64, "max_coeff": 0.5, "factor_threshold": 0.2}
ZERO_ONE = {"lr": 3e-3, "block_size": 64, "weight_decay": 0.01, **ZERO_ONE_SCHEDULE}
ZERO_ONE |= {"var_freeze_step": 10, "local_step_scaler": 4}


@pytest.mark.parametrize(
    ("kind", "params", "steps", "precision"),
    [
        ("OneBitAdam", {"lr": 3e-3, "freeze_step": 8, "block_size": 64}, 14, BF16),
        ("OneBitLamb", LAMB, 5, BF16),
        ("ZeroOneAdam", ZERO_ONE, 17, BF16),
    ],
)
def test_compressed_optimizers_resume_before_and_after_their_freeze(tmp_path, kind, params, steps, precision) -> None:
    """To the last bit on as many ranks, between two syncs too, and closely on others."""
    chosen = settings(1, optimizer={"type": kind, "params": params}, **precision)

    def go_on(engine):
        following = range(steps, steps + 8)
        return train_same_data(engine, following), getattr(engine.optimizer, "get_lamb_coeffs", list)()

    def save(comm):
        engine = make_engine(comm, chosen)
        train(engine, range(steps))
        engine.save_checkpoint(tmp_path)
        return go_on(engine)

    def resume(comm):
        engine = make_engine(comm, chosen, seed=1)
        assert engine.load_checkpoint(tmp_path)[0]
        assert engine.global_steps == steps
        return go_on(engine)

    expected = threads.run(save, 4)
    assert threads.run(resume, 4) == expected
    for world in (1, 3):
        assert sum(threads.run(resume, world)[0][0]) == pytest.approx(sum(expected[0][0]), rel=0.05)


def test_fp16_continues_with_its_scale(tmp_path) -> None:
    fp16 = {"enabled": True, "initial_scale_power": 8, "hysteresis": 2, "loss_scale_window": 3}

    def body(comm):
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

    threads.run(body, 2)


def draw() -> tuple[float, ...]:
    return float(torch.randn(1)), random.gauss(0, 1), float(np.random.randn())


def test_random_numbers_and_data_go_on(tmp_path) -> None:
    data = torch.utils.data.TensorDataset(torch.arange(40.0).reshape(20, 2))

    def make():
        model = torch.nn.Linear(2, 1)
        return initialize(
            model=model, training_data=data, config=settings(train_micro_batch_size_per_gpu=3), model_parameters=None
        )

    engine, _, loader, _ = make()
    batches = loader.repeat()
    for _ in range(9):
        engine.backward(engine(next(batches)[0]).mean())
        engine.step()
    draw()  # an odd number leaves half of a pair of normal numbers behind
    engine.save_checkpoint(tmp_path)
    drawn = [draw() for _ in range(4)]
    following = [next(batches)[0] for _ in range(4)]
    resumed, _, loader, _ = make()
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


def test_parts_of_a_checkpoint(tmp_path) -> None:
    def body(comm):
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
        with pytest.raises(ValueError, match="saved by AdamW"):
            sgd.load_checkpoint(tmp_path)
        assert sgd.load_checkpoint(tmp_path, load_optimizer_states=False)[0]

    threads.run(body, 2)


def test_going_on_with_other_data(tmp_path) -> None:
    def make(samples):
        data = torch.utils.data.TensorDataset(torch.arange(2.0 * samples).reshape(samples, 2))
        config = settings(train_micro_batch_size_per_gpu=3)
        return initialize(model=torch.nn.Linear(2, 1), training_data=data, config=config)

    engine, _, loader, _ = make(20)
    for batch in loader:
        engine.backward(engine(batch[0]).mean())
        engine.step()
    engine.save_checkpoint(tmp_path)
    tuned, _, others, _ = make(9)
    before = tuned.module.weight.clone()
    with pytest.raises(ValueError, match=r"saved with samples 20, this loader has 9.*load_data_position=False"):
        tuned.load_checkpoint(tmp_path)
    assert torch.equal(tuned.module.weight, before)
    assert tuned.load_checkpoint(tmp_path, load_data_position=False)[0]
    assert torch.equal(tuned.module.weight, engine.module.weight)
    assert (others.epoch, others.consumed) == (0, 0)


def test_there_is_none(tmp_path) -> None:
    engine = make_engine(None, settings())
    assert engine.load_checkpoint(tmp_path) == (None, {})
    with pytest.raises(CheckpointError):
        engine.load_checkpoint(tmp_path, "best")


def test_another_model(tmp_path) -> None:
    make_engine(None, settings()).save_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="bfloat16"):
        make_engine(None, settings(bf16={"enabled": True})).load_checkpoint(tmp_path)
    engine, *_ = initialize(model=torch.nn.Linear(2, 3), config=settings())
    with pytest.raises(CheckpointError, match="'weight'"):
        engine.load_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"best": nn.Linear(1, 1)}, r"client_state\['best'\] is a Linear"),
        ({"a": {"b": [1, {2}]}}, r"client_state\['a'\]\['b'\]\[1\] is a set"),
        ({"a": torch.ones(2).to_sparse()}, r"client_state\['a'\] is a tensor of float32, layout torch.sparse_coo"),
        ({"a": np.array(["x"])}, r"client_state\['a'\] is of numpy's <U1"),
        ({"a": {nn.Linear: 2}}, r"client_state\['a'\] has the key <class"),
        ([1], "must be a dict, got list"),
    ],
)
def test_bad_client_states(tmp_path, state, message) -> None:
    def body(comm):
        engine = make_engine(comm, settings())
        with pytest.raises((TypeError, ValueError), match=message):
            engine.save_checkpoint(tmp_path, client_state=state if comm.rank == 1 else {})
        assert engine.load_checkpoint(tmp_path) == (None, {})

    threads.run(body, 2)


@pytest.mark.parametrize(("stage", "optimizer"), [(0, "OneBitAdam"), (1, "AdamW"), (2, "OneBitAdam")])
def test_in_the_middle_of_a_step(tmp_path, stage, optimizer) -> None:
    """The checkpoint is that of the last step; the job that saved goes on with its gradients."""
    params = {"lr": 1e-2, "freeze_step": 2} if optimizer == "OneBitAdam" else {"lr": 1e-2}
    chosen = settings(stage, gradient_accumulation_steps=2, optimizer={"type": optimizer, "params": params})

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
    def make():
        data = torch.utils.data.TensorDataset(torch.arange(40.0).reshape(20, 2))
        config = settings(train_micro_batch_size_per_gpu=4, gradient_accumulation_steps=2)
        return initialize(model=torch.nn.Linear(2, 1), training_data=data, config=config)

    engine, _, loader, _ = make()
    for batch in loader:  # five micro-batches: the epoch ends in the middle of a step
        last = batch[0]
        engine.backward(engine(last).mean())
        engine.step()
    with pytest.warns(RuntimeWarning, match="called in mid-step"):
        assert engine.save_checkpoint(tmp_path)
    resumed, _, loader, _ = make()
    resumed.load_checkpoint(tmp_path)
    assert torch.equal(next(iter(loader))[0], last)


@pytest.mark.parametrize(("folder", "error"), [("", ValueError), (None, TypeError), (b"x", TypeError), (7, TypeError)])
def test_no_folder_is_a_clear_error_on_every_rank(folder, error) -> None:
    def body(comm):
        engine = make_engine(comm, settings())
        given = folder if comm.rank == 1 else "/nowhere"
        expected = error if comm.rank == 1 else ValueError
        for call in (engine.save_checkpoint, engine.load_checkpoint, engine.save_16bit_model):
            with pytest.raises(expected, match="must be a folder's path"):
                call(given)

    threads.run(body, 2)


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
        before = engine.module.mix.weight.clone()
        for keys, value in WRONG:
            comm.barrier()
            if comm.rank == 0:
                (tmp_path / "newer" / "manifest.json").write_bytes(whole)
                change(tmp_path / "newer", *keys, to=value)
            comm.barrier()
            with pytest.raises(CheckpointError, match=r"manifest\.json .*(hold|every)"):
                engine.load_checkpoint(tmp_path, "newer")
            assert torch.equal(engine.module.mix.weight, before)
        assert engine.load_checkpoint(tmp_path)[0].endswith("older")
        assert engine.global_steps == 1

    with pytest.warns(RuntimeWarning, match=r"'newer' .* cannot be loaded: .*manifest\.json.*Loading 'older'"):
        threads.run(body, 2)


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


def test_keep_last(tmp_path) -> None:
    engine = make_engine(None, settings(checkpoint={"keep_last": 3}))
    for step in range(5):
        train(engine, [step])
        engine.save_checkpoint(tmp_path)
    kept = sorted(path.name for path in tmp_path.iterdir() if path.is_dir())
    assert kept == ["global_step3", "global_step4", "global_step5"]


def test_client_state_comes_back_as_it_was(tmp_path) -> None:
    generator = torch.Generator().manual_seed(3)
    state = {
        "best": torch.randn(3, 5, generator=generator).to(torch.bfloat16),
        "nested": {"a": [1, (torch.tensor(7), None), {"b": torch.empty(0, 2)}], "": "x"},
        "loss": math.inf,
        "losses": [math.nan, -math.inf, 0.5],
        "by epoch": {0: "first", (1, 2): torch.ones(1), True: None},
        "numpy": [np.float32(1.5), np.arange(6).reshape(2, 3)[:, ::-1], np.bool_(True)],
    }

    def body(comm):
        engine = make_engine(comm, settings())
        # Rank 0's is saved.
        assert engine.save_checkpoint(tmp_path, client_state=state if comm.rank == 0 else {"other": torch.ones(1)})
        return make_engine(comm, settings(), seed=1).load_checkpoint(tmp_path)[1]

    for world in (1, 2):
        for found in threads.run(body, world):
            assert torch.equal(found.pop("best"), state["best"])
            nested = found.pop("nested")
            assert nested[""] == "x"
            assert nested["a"][0] == 1
            assert isinstance(nested["a"][1], tuple)
            assert int(nested["a"][1][0]) == 7
            assert nested["a"][2]["b"].shape == (0, 2)
            assert math.isnan(found["losses"][0])
            assert (found.pop("loss"), *found.pop("losses")[1:]) == (math.inf, -math.inf, 0.5)
            by_epoch = found.pop("by epoch")
            assert (by_epoch[0], float(by_epoch[1, 2]), by_epoch[True]) == ("first", 1.0, None)
            number, array, flag = found.pop("numpy")
            assert (type(number), number, type(flag)) == (np.float32, 1.5, np.bool_)
            assert np.array_equal(array, state["numpy"][1])
            assert not found
    engine = make_engine(None, settings())
    engine.save_checkpoint(tmp_path / "keyed", client_state={3: {4: (5,)}})
    assert engine.load_checkpoint(tmp_path / "keyed")[1] == {3: {4: (5,)}}


@pytest.mark.parametrize("precision", [{}, {"bf16": {"enabled": True}}])
def test_the_model_in_one_file(tmp_path, precision) -> None:
    def body(comm):
        engine = make_engine(comm, settings(2, **precision))
        train(engine, range(3))
        assert engine.save_16bit_model(tmp_path, "model.safetensors")
        assert engine.save_fp16_model(tmp_path)
        assert engine.save_16bit_model(tmp_path, "trained.pt", exclude_frozen_parameters=True)
        whole = engine.whole_state_dict()
        assert (len(whole) > 0) == (comm.rank == 0)
        assert all(torch.equal(one, engine.module.state_dict()[name]) for name, one in whole.items())
        return {name: value.clone() for name, value in engine.module.state_dict().items()}

    expected = {
        name: one.bfloat16() if one.is_floating_point() else one for name, one in threads.run(body, 2)[0].items()
    }
    pickled = torch.load(tmp_path / "pytorch_model.bin", weights_only=True)
    assert pickled.keys() == expected.keys()
    assert all(torch.equal(pickled[name], expected[name]) for name in pickled)
    assert pickled["unmix.weight"].data_ptr() == pickled["mix.weight"].data_ptr()
    assert torch.load(tmp_path / "trained.pt", weights_only=True).keys() == expected.keys() - {"frozen"}
    found = load_file(tmp_path / "model.safetensors")
    assert found.keys() == expected.keys() - {"unmix.weight"}  # the tied one is there once
    assert all(torch.equal(found[name], expected[name]) for name in found)
    model = make_model(1).to(torch.bfloat16)
    assert model.load_state_dict(found, strict=False).missing_keys == ["unmix.weight"]
    assert isinstance(model, Tiny)


def test_a_buffer_of_another_shape_is_refused_before_anything_moves(tmp_path) -> None:
    class Counting(torch.nn.Linear):
        def __init__(self, slots: int) -> None:
            super().__init__(2, 2)
            self.register_buffer("seen", torch.zeros(slots))

    initialize(model=Counting(3), config=settings())[0].save_checkpoint(tmp_path)
    other = initialize(model=Counting(1), config=settings())[0]
    before = other.module.weight.clone()
    with pytest.raises(ValueError, match=r"buffer 'seen' has shape \(1,\), checkpoint 'global_step0' holds \(3,\)"):
        other.load_checkpoint(tmp_path)
    assert torch.equal(other.module.weight, before)


def test_schedules_whose_state_json_cannot_hold(tmp_path) -> None:
    def make():
        optimizer = torch.optim.SGD([weight := torch.nn.Parameter(torch.ones(2))], lr=0.1)
        model = torch.nn.Module()
        model.weight = weight
        model.forward = lambda: model.weight.square().sum()
        parts = [
            torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 3]),
            torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5),
        ]
        schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, parts, milestones=[5])
        config = {key: value for key, value in settings().items() if key != "optimizer"}
        return initialize(model=model, optimizer=optimizer, lr_scheduler=schedule, config=config)[0]

    def rates(engine, steps):
        found = []
        for _ in range(steps):
            engine.backward(engine())
            engine.step()
            found.append(engine.get_lr())
        return found

    engine = make()
    rates(engine, 3)
    engine.save_checkpoint(tmp_path)
    resumed = make()
    resumed.load_checkpoint(tmp_path)
    assert rates(resumed, 5) == rates(engine, 5)
    fresh, again = make(), make()
    again.load_checkpoint(tmp_path, load_lr_scheduler_states=False)
    assert rates(again, 5) == rates(fresh, 5)
