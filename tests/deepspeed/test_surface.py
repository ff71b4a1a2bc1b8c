"""What an engine says of itself by DeepSpeed's names is what its configuration, ranks and optimizer are."""

from __future__ import annotations

import inspect
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR

from tests.engine.tiny import FEATURES, MICRO, batch, loss_of, make_engine, make_model, settings, train
from thinwire import initialize
from thinwire.comm import threads
from thinwire.deepspeed.getters import why_foreign
from thinwire.engine import CallError, Engine


def test_getters_follow_the_configuration() -> None:
    def body(comm):
        config = settings(
            2,
            gradient_accumulation_steps=3,
            gradient_clipping=0.5,
            steps_per_print=7,
            fp16={"enabled": True, "initial_scale_power": 5, "loss_scale_window": 11, "hysteresis": 3},
            scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": 4}},
            progressive_layer_drop={"enabled": True, "theta": 0.25, "gamma": 0.01},
            dataloader_drop_last=True,
        )
        engine = make_engine(comm, config)
        assert engine.get_batch_info() == (6 * MICRO, MICRO, 3)
        assert (engine.world_size, engine.dp_world_size, engine.mp_world_size) == (2, 2, 1)
        assert engine.global_rank == engine.get_data_parallel_rank() == comm.rank
        assert (engine.local_rank, engine.get_model_parallel_rank(), engine.get_tensor_parallel_rank()) == (0, 0, 0)
        assert (engine.zero_optimization(), engine.zero_optimization_stage()) == (True, 2)
        assert engine.zero_optimization_partition_gradients()
        assert not engine.zero_optimization_partition_weights()
        assert (engine.zero_reduce_bucket_size(), engine.zero_overlap_comm()) == (6000, False)
        assert (engine.zero_cpu_offload(), engine.zero_offload_optimizer(), engine.zero_offload_param()) == (
            False,
            None,
            None,
        )
        assert (engine.fp16_enabled(), engine.bfloat16_enabled(), engine.amp_enabled()) == (True, False, False)
        assert (engine.loss_scale(), engine.dynamic_loss_scale(), engine.initial_dynamic_scale()) == (0, True, 32)
        assert engine.dynamic_loss_scale_args()["scale_window"] == 11
        assert engine.dynamic_loss_scale_args()["delayed_shift"] == 3
        assert engine.communication_data_type == torch.float16
        assert engine.optimizer.loss_scale == engine.optimizer.cur_scale == engine.loss_scaler.value == 32
        assert not engine.optimizer.overflow
        assert (engine.gradient_clipping(), engine.steps_per_print()) == (0.5, 7)
        assert (engine.wall_clock_breakdown(), engine.memory_breakdown()) == (False, False)
        assert (engine.optimizer_name(), engine.optimizer_params()["lr"]) == ("AdamW", 1e-2)
        assert (engine.scheduler_name(), engine.scheduler_params()["warmup_num_steps"]) == ("WarmupLR", 4)
        assert (engine.pld_enabled(), engine.pld_theta(), engine.pld_gamma()) == (True, 0.25, 0.01)
        assert (engine.get_pld_theta(), engine.pld_params()) == (1.0, {"theta": 0.25, "gamma": 0.01})
        assert (engine.get_mom(), engine.get_type()) == ([(0.9, 0.999)], [0.0])
        assert engine.dataloader_drop_last()
        assert engine.config["zero_optimization"]["stage"] == 2
        assert initialize(model=make_model(), comm=comm, config=engine.config)[0].config == engine.config

    threads.run(body, 2)


def test_getters_of_a_plain_configuration() -> None:
    config = {key: value for key, value in settings(0).items() if key != "optimizer"}
    client = partial(torch.optim.SGD, momentum=0.7)
    engine = initialize(model=make_model(), config=config, optimizer=client)[0]
    assert (engine.optimizer_name(), engine.optimizer_params(), engine.scheduler_name()) == ("SGD", None, None)
    assert (engine.get_mom(), engine.get_pld_theta(), engine.pld_params()) == ([0.7], None, False)
    assert not engine.zero_optimization()
    assert engine.communication_data_type == torch.float32
    assert engine.loss_scaler is None
    assert (engine.gradient_average, engine.postscale_gradients(), engine.gradient_predivide_factor()) == (
        True,
        True,
        1,
    )
    beside = settings(
        0,
        scheduler={"type": "WarmupLR", "params": {}},
        communication_data_type="bf16",
        gradient_allreduce_op="sum",
        prescale_gradients=True,
        checkpoint={"tag_validation": "Fail"},
        flops_profiler={"enabled": True, "profile_step": 3},
    )
    engine = initialize(
        model=make_model(), config=beside, optimizer=client, lr_scheduler=lambda held: StepLR(held, step_size=1)
    )[0]
    assert (engine.optimizer_name(), engine.scheduler_name()) == ("SGD", "StepLR")
    assert (engine.optimizer_params(), engine.scheduler_params()) == (None, None)
    assert engine.communication_data_type == torch.bfloat16
    assert (engine.gradient_average, engine.postscale_gradients()) == (False, False)
    assert (engine.checkpoint_tag_validation_enabled(), engine.checkpoint_tag_validation_fail()) == (True, True)
    assert (engine.flops_profiler_enabled(), engine.flops_profiler_profile_step()) == (True, 3)


def test_names_that_mean_nothing_here_say_so() -> None:
    engine = make_engine(None, settings())
    with pytest.raises(AttributeError, match=r"no data_parallel_group: .*engine.comm has them"):
        _ = engine.data_parallel_group
    with pytest.raises(AttributeError, match=r"no zero_sub_group_size: .*zero_reduce_bucket_size\(\)"):
        engine.zero_sub_group_size()
    assert not [name for name in dir(Engine) if why_foreign(name)]

    class Own(nn.Linear):
        mpu = "the model's"

    assert make_engine_of(Own(2, 2)).mpu == "the model's"


def make_engine_of(model):
    return initialize(model=model, config=settings())[0]


def test_the_call_of_deepspeed() -> None:
    """By position, by keyword, with what changes nothing, and with an iterator of some of the parameters."""
    order = ["args", "model", "optimizer", "model_parameters", "training_data", "lr_scheduler", "distributed_port"]
    order += ["mpu", "dist_init_required", "collate_fn", "config", "mesh_param", "config_params"]
    assert list(inspect.signature(initialize).parameters)[: len(order)] == order
    model = make_model()
    model.mix.weight.requires_grad_(False)
    held = filter(lambda parameter: parameter.requires_grad, model.parameters())
    given = [None, model, None, held, None, None, 29501, None, False, None, None, None, settings()]
    engine = initialize(*given)[0]
    before = model.mix.weight.clone()
    assert train(engine, range(2))
    assert torch.equal(model.mix.weight, before)
    assert not torch.equal(model.layers[0].up.weight, make_model().layers[0].up.weight)
    part = list(model.layers.parameters())
    model.unmix.bias.requires_grad_(False)
    model.unused.requires_grad_(False)
    model.nothing.requires_grad_(False)
    config = {key: value for key, value in settings().items() if key != "optimizer"}
    client = initialize(model=model, optimizer=torch.optim.Adam(part), model_parameters=iter(part), config=config)[0]
    assert train(client, range(2))


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_step_of_other_micro_batches(stage) -> None:
    def body(comm):
        changing = make_engine(comm, settings(stage))
        train(changing, range(2))
        changing.set_train_batch_size(3 * MICRO * comm.size)
        assert changing.get_batch_info() == (3 * MICRO * comm.size, MICRO, 3)
        assert changing.config["gradient_accumulation_steps"] == 3
        fixed = make_engine(comm, settings(stage, gradient_accumulation_steps=3))
        plain = make_engine(comm, settings(stage))
        train(plain, range(2))
        for mine, theirs in zip(plain.module.parameters(), changing.module.parameters(), strict=True):
            assert torch.equal(mine, theirs)
        assert fixed.train_batch_size() == changing.train_batch_size()
        samples = changing.global_samples
        train(changing, range(1, 3))
        assert changing.global_samples == samples + 2 * 3 * MICRO * comm.size
        # Three micro-batches of one mean each, or one of their mean.
        total = sum(loss_of(plain, comm.rank, 3 + micro) for micro in range(3)) / 3
        plain.backward(total)
        plain.step()
        total = sum(loss_of(plain, comm.rank, 6 + micro) for micro in range(3)) / 3
        plain.backward(total)
        plain.step()
        torch.testing.assert_close(plain.module.mix.weight, changing.module.mix.weight)
        with pytest.raises(ValueError, match=r"nearest train_batch_size that works"):
            changing.set_train_batch_size(3 * MICRO * comm.size + 1)
        changing.set_train_micro_batch_size(2)
        assert changing.get_batch_info() == (6 * comm.size, 2, 3)
        for wrong in (0, 2.0, True):
            with pytest.raises(ValueError, match="whole number of samples, at least 1"):
                changing.set_train_micro_batch_size(wrong)

    threads.run(body, 2)


def test_batches_do_not_change_in_mid_step() -> None:
    engine = make_engine(None, settings(gradient_accumulation_steps=2))
    engine.backward(loss_of(engine, 0, 0))
    for change in (engine.set_train_batch_size, engine.set_train_micro_batch_size):
        with pytest.raises(CallError, match="in mid-step"):
            change(4 * MICRO)
    engine.step()
    with pytest.raises(CallError, match="in mid-step"):
        engine.set_train_batch_size(4 * MICRO)
    engine.zero_grad()
    engine.set_train_batch_size(4 * MICRO)
    assert engine.gradient_accumulation_steps() == 4


def test_loaders_of_the_engine() -> None:
    data = [(torch.full((FEATURES,), float(n)), n) for n in range(21)]

    def collate(samples):
        return torch.tensor([n for _, n in samples])

    def body(comm):
        engine, _, training, _ = initialize(
            model=make_model(), comm=comm, config=settings(), training_data=data, collate_fn=collate
        )
        assert len(training) == -(-21 // (MICRO * comm.size))
        evaluation = engine.deepspeed_io(data, batch_size=2, route="eval")
        first = next(iter(evaluation))
        assert first.tolist() == [2 * comm.rank, 2 * comm.rank + 1]
        inputs, numbers = next(iter(engine.deepspeed_io(data, collate_fn=torch.utils.data.default_collate)))
        assert inputs.shape == (MICRO, FEATURES)
        assert torch.equal(inputs[:, 0].long(), numbers)
        for bad in ({"route": "test"}, {"data_sampler": [1]}):
            with pytest.raises(ValueError, match=r'route is "train"|got a data_sampler'):
                engine.deepspeed_io(data, **bad)
        return [number for one in training for number in one.tolist()]

    first, second = threads.run(body, 2)
    assert set(first) | set(second) == set(range(21))


def test_the_schedule_is_given_its_arguments() -> None:
    seen = []

    class Noted(torch.optim.lr_scheduler.LambdaLR):
        def step(self, epoch=None):
            seen.append(epoch)
            super().step()

    engine = make_engine(None, settings(), lr_scheduler=lambda optimizer: Noted(optimizer, lambda step: 1.0))
    seen.clear()
    engine.backward(loss_of(engine, 0, 0))
    engine.step(lr_kwargs={"epoch": 3})
    assert seen == [3]


def test_a_checkpoint_within_no_sync_is_that_of_the_last_step(tmp_path) -> None:
    def body(comm):
        engine = make_engine(comm, settings(1))
        train(engine, range(2))
        saved = engine.module.mix.weight.clone()
        with engine.no_sync():
            engine.backward(loss_of(engine, comm.rank, 2))
            with warnings_of_mid_step(comm.rank == 0):
                assert engine.save_checkpoint(tmp_path, "inside")
        engine.backward(loss_of(engine, comm.rank, 3))
        engine.step()
        assert engine.global_steps == 3
        other = make_engine(comm, settings(0), seed=2)
        other.load_checkpoint(tmp_path)
        assert torch.equal(other.module.mix.weight, saved)

    threads.run(body, 2)


def warnings_of_mid_step(expected):
    return pytest.warns(RuntimeWarning, match="in mid-step") if expected else nullcontext()


def test_evaluation_reads_like_the_model() -> None:
    engine = make_engine(None, settings())
    assert dict(engine.named_parameters()).keys() == dict(engine.module.named_parameters()).keys()
    assert engine.state_dict().keys() == engine.module.state_dict().keys()
    assert engine(batch(0, 0)[0]).shape == (MICRO, FEATURES)
    engine.empty_partition_cache()
    assert not isinstance(engine, nn.Module)
