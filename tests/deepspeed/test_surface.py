"""What an engine says of itself by DeepSpeed's names is what its configuration, ranks and optimizer are."""

import inspect
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR

from tests.engine.tiny import FEATURES, MICRO, batch, loss_of, make_engine, make_model, settings, train
from tests.launching import on_threads
from tests.refusing import refused
from thinwire import deepspeed, initialize
from thinwire.comm import threads
from thinwire.deepspeed.getters import why_foreign
from thinwire.deepspeed.monitors import ThroughputTimer
from thinwire.deepspeed.runtime.base_optimizer import ZeROOptimizer
from thinwire.deepspeed.runtime.zero.offload_config import OffloadDeviceEnum, OffloadStateTypeEnum
from thinwire.deepspeed.utils import safe_get_full_fp32_param
from thinwire.engine import CallError, Engine


def says(engine, **expected) -> None:
    for name, value in expected.items():
        found = getattr(engine, name)
        assert (found() if callable(found) else found) == value, name


@on_threads(2)
def test_getters_follow_the_configuration(comm) -> None:
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
    says(engine, get_batch_info=(6 * MICRO, MICRO, 3), world_size=2, dp_world_size=2, mp_world_size=1, local_rank=0)
    says(engine, global_rank=comm.rank, get_data_parallel_rank=comm.rank)
    says(engine, get_data_parallel_world_size=2)
    for kind in ("model", "tensor", "pipeline", "sequence"):
        says(engine, **{f"get_{kind}_parallel_rank": 0, f"get_{kind}_parallel_world_size": 1})
    says(engine, zero_optimization=True, zero_optimization_stage=2, zero_optimization_partition_gradients=True)
    says(engine, zero_optimization_partition_weights=False, zero_reduce_bucket_size=6000, zero_overlap_comm=False)
    says(engine, zero_cpu_offload=False, zero_offload_optimizer=None, zero_offload_param=None)
    says(engine, fp16_enabled=True, bfloat16_enabled=False, amp_enabled=False, communication_data_type=torch.float16)
    says(engine, loss_scale=0, dynamic_loss_scale=True, initial_dynamic_scale=32)
    says(engine, gradient_clipping=0.5, steps_per_print=7, wall_clock_breakdown=False, memory_breakdown=False)
    says(engine, optimizer_name="AdamW", scheduler_name="WarmupLR", dataloader_drop_last=True)
    says(engine, pld_enabled=True, pld_theta=0.25, pld_gamma=0.01, pld_params={"theta": 0.25, "gamma": 0.01})
    says(engine, get_pld_theta=1.0, get_mom=[(0.9, 0.999)], get_type=[0.0])
    assert engine.dynamic_loss_scale_args().items() >= {"scale_window": 11, "delayed_shift": 3}.items()
    assert engine.optimizer.loss_scale == engine.optimizer.cur_scale == engine.loss_scaler.value == 32
    assert not engine.optimizer.overflow
    assert engine.optimizer.needs_scaler()
    assert isinstance(engine.optimizer, ZeROOptimizer)
    assert (engine.optimizer_params()["lr"], engine.scheduler_params()["warmup_num_steps"]) == (1e-2, 4)
    assert engine.config["zero_optimization"]["stage"] == 2
    assert initialize(model=make_model(), comm=comm, config=engine.config)[0].config == engine.config


def test_getters_of_a_plain_configuration() -> None:
    config = {key: value for key, value in settings(0).items() if key != "optimizer"}
    client = partial(torch.optim.SGD, momentum=0.7)
    engine = initialize(model=make_model(), config=config, optimizer=client)[0]
    says(engine, optimizer_name="SGD", optimizer_params=None, scheduler_name=None, get_mom=[0.7], get_pld_theta=None)
    says(engine, pld_params=False, zero_optimization=False, communication_data_type=torch.float32, loss_scaler=None)
    assert not engine.optimizer.needs_scaler()
    says(engine, gradient_average=True, postscale_gradients=True, gradient_predivide_factor=1)
    beside = settings(
        0,
        scheduler={"type": "WarmupLR", "params": {}},
        communication_data_type="bf16",
        gradient_allreduce_op="sum",
        prescale_gradients=True,
        checkpoint={"tag_validation": "Fail"},
        flops_profiler={"enabled": True, "profile_step": 3},
    )
    schedule = partial(StepLR, step_size=1)
    engine = initialize(model=make_model(), config=beside, optimizer=client, lr_scheduler=schedule)[0]
    says(engine, optimizer_name="SGD", scheduler_name="StepLR", optimizer_params=None, scheduler_params=None)
    says(engine, communication_data_type=torch.bfloat16, gradient_average=False, postscale_gradients=False)
    says(engine, checkpoint_tag_validation_enabled=True, checkpoint_tag_validation_fail=True)
    says(engine, flops_profiler_enabled=True, flops_profiler_profile_step=3)


def test_names_that_mean_nothing_here_say_so() -> None:
    engine = make_engine(None, settings())
    with pytest.raises(AttributeError, match=r"'TrainingEngine' .*'data_parallel_group': .*engine.comm has them"):
        _ = engine.data_parallel_group
    with pytest.raises(AttributeError, match=r"'zero_sub_group_size': .*zero_reduce_bucket_size\(\)"):
        engine.zero_sub_group_size()
    with pytest.raises(AttributeError, match=r"'TrainingEngine' .* 'nowhere': 'Tiny' object has no"):
        _ = engine.nowhere
    with pytest.raises(AttributeError, match=r"'TrainingEngine' object .*'to': .*would not follow"):
        _ = engine.to
    assert not [name for name in dir(Engine) if why_foreign(name)]
    own = nn.Linear(2, 2)
    own.mpu = "the model's"
    assert initialize(model=own, config=settings())[0].mpu == "the model's"


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
@on_threads(2)
def test_a_step_of_other_micro_batches(comm, stage) -> None:
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
    for first in (3, 6):
        plain.backward(sum(loss_of(plain, comm.rank, first + micro) for micro in range(3)) / 3)
        plain.step()
    torch.testing.assert_close(plain.module.mix.weight, changing.module.mix.weight)
    with pytest.raises(ValueError, match=r"nearest train_batch_size that works"):
        changing.set_train_batch_size(3 * MICRO * comm.size + 1)
    changing.set_train_micro_batch_size(2)
    assert changing.get_batch_info() == (6 * comm.size, 2, 3)
    for wrong in (0, 2.0, True):
        refused(ValueError, "whole number of samples, at least 1", changing.set_train_micro_batch_size, wrong)


def test_batches_do_not_change_in_mid_step() -> None:
    engine = make_engine(None, settings(gradient_accumulation_steps=2))
    for begin in (lambda: engine.backward(loss_of(engine, 0, 0)), engine.step):
        begin()
        for change in (engine.set_train_batch_size, engine.set_train_micro_batch_size):
            refused(CallError, "in mid-step", change, 4 * MICRO)
    engine.zero_grad()
    engine.set_train_batch_size(4 * MICRO)
    assert engine.gradient_accumulation_steps() == 4


def test_loaders_of_the_engine() -> None:
    data = [(torch.full((FEATURES,), float(n)), n) for n in range(21)]

    def collate(samples):
        return torch.tensor([n for _, n in samples])

    def body(comm):
        given = {"training_data": data, "collate_fn": collate}
        engine, _, training, _ = initialize(model=make_model(), comm=comm, config=settings(), **given)
        assert len(training) == -(-21 // (MICRO * comm.size))
        evaluation = engine.deepspeed_io(data, batch_size=2, route="eval")
        first = next(iter(evaluation))
        assert first.tolist() == [2 * comm.rank, 2 * comm.rank + 1]
        inputs, numbers = next(iter(engine.deepspeed_io(data, collate_fn=torch.utils.data.default_collate)))
        assert inputs.shape == (MICRO, FEATURES)
        assert torch.equal(inputs[:, 0].long(), numbers)
        for bad in ({"route": "test"}, {"data_sampler": [1]}):
            refused(ValueError, r'route is "train"|got a data_sampler', engine.deepspeed_io, data, **bad)
        return [number for one in training for number in one.tolist()]

    first, second = threads.run(body, 2)
    assert set(first) | set(second) == set(range(21))


def test_a_loader_takes_the_place_of_another(tmp_path) -> None:
    data = [(torch.full((FEATURES,), float(n)), n) for n in range(4 * MICRO)]
    engine = make_engine(None, settings(), training_data=data)
    engine.set_dataloader(engine.deepspeed_io(data, batch_size=2))
    next(iter(engine.training_dataloader))
    engine.save_checkpoint(tmp_path)
    engine.set_dataloader(engine.deepspeed_io(data, batch_size=2))
    engine.load_checkpoint(tmp_path)
    assert engine.training_dataloader.consumed == 2
    engine.set_dataloader([data])
    train(engine, range(1))
    assert next(iter(engine.training_dataloader)) is data


@pytest.mark.parametrize("stage", [0, 1, 2])
@on_threads(2)
def test_master_weights_follow_a_state_dict_that_is_loaded(comm, stage) -> None:
    """In the next step: they have more bits than the parameters."""
    engine, other = (make_engine(comm, settings(stage, bf16={"enabled": True}), seed) for seed in (0, 1))
    train(other, range(2))
    given = {name: one.clone() for name, one in other.module_state_dict().items()}
    assert given.keys() - other.module_state_dict(exclude_frozen_parameters=True).keys() == {"frozen"}
    train(engine, range(1))
    refused(ValueError, '"module": the model', engine.load_module_state_dict, given)
    refused(RuntimeError, "Missing key", engine.load_module_state_dict, {"module": {}})
    engine.load_module_state_dict({"module": {}}, strict=False)
    rank_1s = {name: one + comm.rank for name, one in given.items()}
    engine.load_module_state_dict({"module": rank_1s})
    for name, one in engine.module.named_parameters():
        assert torch.equal(one, given[name])
        if one.requires_grad:
            assert torch.equal(safe_get_full_fp32_param(one), given[name].float())
    seen = []
    engine.load_module_state_dict({"module": given}, custom_load_fn=lambda src, dst: seen.append((src, dst)))
    assert seen == [(given, engine.module)]
    assert train(engine, range(1))


def test_what_is_offloaded_on_a_cpu_is_there() -> None:
    engine = make_engine(None, settings(1))
    engine.offload_states(include=[OffloadStateTypeEnum.optim_states], device=OffloadDeviceEnum.cpu)
    engine.reload_states(non_blocking=True)
    refused(ValueError, "moves optim_states, hp_params", engine.offload_states, include=["moments"])
    refused(ValueError, "to the cpu", engine.offload_states, device=OffloadDeviceEnum.nvme)
    refused(AssertionError, "stages 1, 2 and 3", make_engine(None, settings(0)).offload_states)
    engine.device = torch.device("cuda")
    refused(NotImplementedError, "offload_optimizer", engine.offload_states)


@on_threads(2)
def test_the_summary_of_collectives_is_the_last_engines(comm, capsys) -> None:
    engine = make_engine(comm, settings(comms_logger={"enabled": True}))
    train(engine, range(1))
    assert "all_gather" in deepspeed.comm.log_summary(return_dict=True)["summary"]
    assert comm.rank == 1 or "collective" in capsys.readouterr().out
    other = make_engine(comm, settings())
    told = pytest.warns(RuntimeWarning, match="comms_logger") if comm.rank == 0 else nullcontext()
    with told:
        assert deepspeed.comm.log_summary() is None
    other.close()


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


@on_threads(2)
def test_a_checkpoint_within_no_sync_is_that_of_the_last_step(comm, tmp_path) -> None:
    engine = make_engine(comm, settings(1))
    train(engine, range(2))
    saved = engine.module.mix.weight.clone()
    with engine.no_sync():
        engine.backward(loss_of(engine, comm.rank, 2))
        told = pytest.warns(RuntimeWarning, match="in mid-step")
        with told if comm.rank == 0 else nullcontext():
            assert engine.save_checkpoint(tmp_path, "inside")
    engine.backward(loss_of(engine, comm.rank, 3))
    engine.step()
    assert engine.global_steps == 3
    other = make_engine(comm, settings(0), seed=2)
    other.load_checkpoint(tmp_path)
    assert torch.equal(other.module.mix.weight, saved)


def test_evaluation_reads_like_the_model() -> None:
    engine = make_engine(None, settings())
    assert dict(engine.named_parameters()).keys() == dict(engine.module.named_parameters()).keys()
    assert engine.state_dict().keys() == engine.module.state_dict().keys()
    assert engine(batch(0, 0)[0]).shape == (MICRO, FEATURES)
    engine.empty_partition_cache()
    assert not isinstance(engine, nn.Module)


def test_a_timer_counts_what_a_script_starts_and_stops() -> None:
    """Steps of two micro-batches, the first two of which are not timed."""
    timer = make_engine(None, settings(0)).tput_timer
    timer.stop()
    assert (timer.initialized, timer.avg_samples_per_sec()) == (False, -1)
    elapsed = []
    for micro_batch in range(6):
        timer.start()
        timer.stop(global_step=micro_batch % 2 == 1)
        elapsed.append(timer.total_elapsed_time)
    assert (timer.micro_step_count, timer.global_step_count, timer.step_elapsed_time) == (6, 3, 0)
    assert elapsed[3] == 0 < elapsed[4] < elapsed[5]
    assert timer.avg_samples_per_sec() == timer.batch_size / elapsed[5]
    timer.update_epoch_count()
    assert (timer.epoch_count, timer.micro_step_count) == (1, 0)
    for wrong in (0, 1.5, True):
        refused(ValueError, "greater than 0|positive integer or None", ThroughputTimer, steps_per_output=wrong)
    lines: list[str] = []
    timer = ThroughputTimer(None, batch_size=4, start_step=0, steps_per_output=2, logging_fn=lines.append)
    for _ in range(4):
        timer.start()
        timer.stop(global_step=True)
    assert [line.partition(",")[0] for line in lines] == [
        "epoch=0/micro_step=2/global_step=2",
        "epoch=0/micro_step=4/global_step=4",
    ]
