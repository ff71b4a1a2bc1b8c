"""The engine of `thinwire.deepspeed` refuses what DeepSpeed's does, by the errors that scripts catch there."""

import argparse
import copy
import logging
import math
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch

import thinwire.deepspeed as deepspeed
from tests.launching import on_threads
from tests.refusing import refused
from thinwire.comm import Communicator, threads
from thinwire.deepspeed.checkpoint import UNIVERSAL_CHECKPOINT_INFO, ds_to_universal
from thinwire.deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from thinwire.deepspeed.runtime import lr_schedules
from thinwire.deepspeed.runtime.config import get_gradient_clipping, get_log_level
from thinwire.deepspeed.runtime.constants import GRADIENT_CLIPPING_DEFAULT, LOG_LEVEL_DEFAULT
from thinwire.deepspeed.runtime.data_pipeline.curriculum_scheduler import CurriculumScheduler
from thinwire.deepspeed.runtime.data_pipeline.data_sampling.variable_batch_size_and_lr import batch_by_seqlens
from thinwire.deepspeed.runtime.utils import (
    call_to_str,
    combine_grad_norm_groups,
    count_used_parameters_in_backward,
    get_global_norm,
    mask_nan_or_inf_with_val_inplace,
    prefix_sum_inc,
)
from thinwire.deepspeed.runtime.zero.stage_1_and_2 import split_half_float_double
from thinwire.deepspeed.runtime.zero.utils import ZeRORuntimeException
from thinwire.deepspeed.utils import safe_get_full_fp32_param
from thinwire.deepspeed.utils.logging import logger
from thinwire.engine.checkpoint.manifest import MANIFEST, Manifest, manifest_bytes
from thinwire.engine.errors import CheckpointError

ADAM = {"type": "Adam", "params": {"lr": 0.01}}


def engine_of(optimizer_class: type[torch.optim.Optimizer] | None = None, **keys: Any) -> deepspeed.DeepSpeedEngine:
    """One that trains three features to one."""
    model = torch.nn.Linear(3, 1)
    config = {"train_micro_batch_size_per_gpu": 2, **({} if optimizer_class else {"optimizer": ADAM}), **keys}
    optimizer = optimizer_class(model.parameters()) if optimizer_class else None
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def on_two_ranks(body: Callable[[Communicator], None]) -> None:
    """Run `body` on two ranks that are threads."""
    threads.run(body, 2)


def refuses(context: AbstractContextManager[Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message), context:
        pytest.fail("it was entered")


@pytest.mark.parametrize("stage", [0, 1, 2])
@on_threads(2)
def test_no_sync_is_for_gradients_that_are_whole_and_does_not_nest(comm: Communicator, stage: int) -> None:
    engine = engine_of(zero_optimization={"stage": stage})
    inputs = torch.full((2, 3), 1.0 + comm.rank)
    if stage == 2:
        refuses(engine.no_sync(), AssertionError, "no_sync context manager is incompatible.*ZeRO stage 2")
    else:
        with engine.no_sync():
            engine.backward(engine(inputs).sum())
            refuses(engine.no_sync(), AssertionError, "no_sync context manager reentry is unsupported")
    engine.backward(engine(inputs).sum())
    engine.step()
    assert engine.global_steps == 1


@on_threads(2)
def test_sums_in_another_dtype_than_the_models_are_refused_at_stage_0(comm: Communicator) -> None:
    for model, sums in ((None, "bf16"), ("bf16", "fp32"), ("fp16", "bf16")):
        keys: dict[str, Any] = {"data_types": {"grad_accum_dtype": sums}}
        if model is not None:
            keys[model] = {"enabled": True}
        refused(NotImplementedError, f"grad_accum_dtype.*{sums}.*computes in {model or 'fp32'}", engine_of, **keys)
        engine_of(**keys, zero_optimization={"stage": 1}).close()
    engine_of(bf16={"enabled": True}, data_types={"grad_accum_dtype": "bfloat16"}).close()


def test_the_engines_adam_is_found_as_fused_adam() -> None:
    def body(_: Communicator) -> None:
        for kind, found in (("Adam", True), ("AdamW", True), ("SGD", False)):
            engine = engine_of(optimizer={"type": kind, "params": {"lr": 0.01}}, zero_optimization={"stage": 1})
            assert isinstance(engine.optimizer, FusedAdam) == found
            assert not isinstance(engine.optimizer, DeepSpeedCPUAdam)

    on_two_ranks(body)
    for offloads in (False, True):
        named = {"type": "Adam", "params": {"lr": 0.01, "adam_w_mode": offloads}}
        engine = engine_of(optimizer=named, zero_optimization={"stage": 2, "cpu_offload": offloads})
        inner = engine.optimizer.optimizer
        assert isinstance(inner, FusedAdam)
        assert isinstance(inner, DeepSpeedCPUAdam) == inner.adam_w_mode == offloads
    assert not isinstance(torch.optim.Adam([torch.zeros(1)]), FusedAdam)
    assert isinstance(DeepSpeedCPUAdam([torch.zeros(1)]), FusedAdam)


def test_a_rank_knows_the_file_that_holds_its_optimizer_state(tmp_path: Path) -> None:
    def body(comm: Communicator) -> None:
        engine = engine_of()
        engine.save_checkpoint(tmp_path, tag="first")
        path = Path(engine._get_optimizer_ckpt_name(os.fspath(tmp_path), "first"))
        manifest = Manifest.decode(manifest_bytes(tmp_path / "first"))
        assert path == tmp_path / "first" / manifest.files[comm.rank].name
        assert path.is_file()

    on_two_ranks(body)
    assert (tmp_path / "first" / MANIFEST).is_file()


def test_a_checkpoint_is_universal_as_it_is(tmp_path: Path) -> None:
    def body(comm: Communicator) -> None:
        engine = engine_of(zero_optimization={"stage": 1})
        engine.save_checkpoint(tmp_path, tag="first", client_state={UNIVERSAL_CHECKPOINT_INFO: {}})
        folders = argparse.Namespace(
            input_folder=os.fspath(tmp_path / "first"), output_folder=os.fspath(tmp_path / "first_universal")
        )
        if comm.rank == 0:
            ds_to_universal.main(folders)
            refused(FileExistsError, "give another output_folder", ds_to_universal.main, folders)
        comm.barrier()
        other = engine_of(zero_optimization={"stage": 1}, checkpoint={"load_universal": True})
        path, state = other.load_checkpoint(tmp_path, tag="first_universal")
        assert path == os.fspath(tmp_path / "first_universal")
        assert state == {UNIVERSAL_CHECKPOINT_INFO: {}}
        for mine, theirs in zip(engine.module.parameters(), other.module.parameters(), strict=True):
            assert torch.equal(mine, theirs)

    on_two_ranks(body)
    theirs = tmp_path / "theirs" / "global_step1"
    theirs.mkdir(parents=True)
    for source, fault in ((theirs, "no checkpoint"), (theirs, "thinwire checkpoint import .*theirs")):
        with pytest.raises(CheckpointError, match=fault):
            ds_to_universal.main(argparse.Namespace(input_folder=source, output_folder=tmp_path / "new"))
        (theirs / "mp_rank_00_model_states.pt").touch()
    assert not (tmp_path / "new").exists()


def test_a_script_that_cannot_be_made_executable_is_logged(tmp_path: Path) -> None:
    script = tmp_path / "zero_to_fp32.py"
    script.touch(0o600)
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    engine = engine_of()
    logger.addHandler(handler)
    try:
        for path in (script, tmp_path / "nowhere.py"):
            engine._change_recovery_script_permissions(os.fspath(path))
    finally:
        logger.removeHandler(handler)
        engine.close()
    assert os.access(script, os.X_OK)
    assert len(messages) == 1
    assert "nowhere.py cannot be made executable" in messages[0]
    assert call_to_str("step", 3, "fast", mode=None) == "step(3, 'fast', mode=None)"
    assert prefix_sum_inc([3, 4, 5]) == [3, 7, 12]


def test_a_configuration_sets_the_level_of_the_logger() -> None:
    before = logger.level
    logger.setLevel(logging.DEBUG)
    try:
        engine_of().close()
        assert logger.getEffectiveLevel() == logging.DEBUG
        engine = engine_of(log_level="error")
        assert (engine.log_level(), logger.getEffectiveLevel()) == ("ERROR", logging.ERROR)
        engine.close()
    finally:
        logger.setLevel(before)
    refused(ValueError, "log_level.*loud", engine_of, log_level="loud")
    assert get_log_level({}) is LOG_LEVEL_DEFAULT
    assert get_log_level({"log_level": "INFO"}) == "INFO"


@pytest.mark.parametrize("stage", [1, 2])
@on_threads(2)
def test_backwards_are_reduced_together(comm: Communicator, stage: int) -> None:
    torch.manual_seed(1)
    model = torch.nn.Linear(3, 1)
    sums = copy.deepcopy(model)
    config = {"train_micro_batch_size_per_gpu": 2, "optimizer": ADAM, "zero_optimization": {"stage": stage}}
    engine, summed = (deepspeed.initialize(model=one, config=config)[0] for one in (model, sums))
    for step in range(2):
        inputs = [torch.full((2, 3), comm.rank + 1.0 + step), torch.linspace(-4, 3 + comm.rank, 6).view(2, 3)]
        with engine.coalesce_grad_reduction():
            for one in inputs:
                engine.backward(engine(one).square().sum())
            refused(AssertionError, r"illegal to call Engine\.step", engine.step)
            refuses(engine.coalesce_grad_reduction(), AssertionError, "cannot be nested")
        engine.step()
        summed.backward(sum(summed(one).square().sum() for one in inputs))
        summed.step()
    assert engine.global_steps == 2
    torch.testing.assert_close(engine.module.state_dict(), summed.module.state_dict())


def test_steps_that_scripts_end_themselves() -> None:
    free = {"managed_gradient_accumulation": False, "gradient_accumulation_steps": 4}
    engine = engine_of(zero_optimization={"stage": 1}, **free)
    assert not engine.managed_gradient_accumulation()
    refuses(engine.coalesce_grad_reduction(), AssertionError, "coalesce_grad_reduction.*Leave it out")
    with pytest.raises(AssertionError, match="overlap_comm only with ZeRO stage 2"):
        engine_of(zero_optimization={"stage": 1, "overlap_comm": True}, **free)
    engine_of(zero_optimization={"stage": 2, "overlap_comm": True}, **free).close()


def test_stage_0_coalesces_nothing_and_takes_buckets_of_odd_size() -> None:
    engine = engine_of(zero_optimization={"stage": 0, "allgather_bucket_size": 1001})
    refuses(engine.coalesce_grad_reduction(), NotImplementedError, "requires ZeRO stage 1, 2 or 3")
    for stage in (1, 2):
        engine_of(zero_optimization={"stage": stage, "allgather_bucket_size": 1000}).close()
        with pytest.raises(AssertionError, match=r"is 1001: allgather_bucket_size must be a multiple of nccl_start"):
            engine_of(zero_optimization={"stage": stage, "allgather_bucket_size": 1001})


def test_offloaded_state_is_stepped_by_an_optimizer_for_it_where_that_is_forced() -> None:
    offloads, adamw = {"stage": 1, "offload_optimizer": {"device": "cpu"}}, torch.optim.AdamW
    with pytest.raises(ZeRORuntimeException, match='"zero_force_ds_cpu_optimizer" is true, and AdamW is not'):
        engine_of(adamw, zero_optimization=offloads, zero_force_ds_cpu_optimizer=True)
    for client, zero, forced in (
        (adamw, offloads, {"zero_force_ds_cpu_optimizer": False}),
        (adamw, offloads, {}),
        (adamw, {"stage": 1}, {"zero_force_ds_cpu_optimizer": True}),
        (DeepSpeedCPUAdam, offloads, {"zero_force_ds_cpu_optimizer": True}),
        (None, offloads, {"zero_force_ds_cpu_optimizer": True}),
    ):
        engine_of(client, zero_optimization=zero, **forced).close()


@pytest.mark.parametrize("stage", [0, 1, 2])
@on_threads(2)
def test_a_loss_that_fp16_did_not_scale_reaches_no_parameter(comm: Communicator, stage: int) -> None:
    """Every rank hears of it at once, and goes on as if the backward had not been called."""
    fp16 = {"enabled": True, "initial_scale_power": 8}
    engine = engine_of(zero_optimization={"stage": stage}, fp16=fp16)
    inputs = torch.full((2, 3), 1.0 + comm.rank)
    refused(RuntimeError, r"Loss scaling is required in fp16.*engine\.scale\(loss\)", engine(inputs).sum().backward)
    assert all(one.grad is None for one in engine.module.parameters())
    with torch.no_grad():
        assert not engine(inputs).requires_grad
    for backward in (engine.backward, lambda loss: engine.scale(loss).backward()):
        before = engine.module.weight.clone()
        backward(engine(inputs).float().sum())
        engine.step()
        assert not torch.equal(engine.module.weight, before)
    plain = engine_of(zero_optimization={"stage": stage})
    plain(inputs).sum().backward()
    plain.step()
    assert plain.global_steps == 1


def test_a_loss_is_one_value() -> None:
    engine = engine_of()
    refused(AssertionError, r"a scalar tensor, the loss, got \(2, 1\)", engine.scale, engine(torch.ones(2, 3)))


def test_tensors_are_sorted_masked_and_counted() -> None:
    dense = [torch.zeros(2, dtype=one) for one in (torch.half, torch.float, torch.double, torch.bfloat16)]
    others = [torch.ones(1).to_sparse(), torch.ones(1, 1).to_sparse_csr(), torch.ones(1, dtype=torch.long)]
    assert [len(bucket) for bucket in split_half_float_double([*others, *dense, *dense])] == [2, 2, 2, 2]
    assert [bucket[0] for bucket in split_half_float_double([dense[1], *others])] == [dense[1]]
    values = torch.tensor([float("nan"), float("inf"), 2.0])
    mask_nan_or_inf_with_val_inplace(values, device=values.device, val=1.5)
    assert values.tolist() == [1.5, 1.5, 2.0]
    for given, norm in (([3.0, 4.0], 5.0), *(([3.0, bad], math.inf) for bad in (-1.0, math.nan, math.inf))):
        assert get_global_norm(given) == norm == combine_grad_norm_groups([torch.tensor(one) for one in given])
    used, unused = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    counts: list[int] = []
    every = [*used.parameters(), *unused.parameters(), None]
    used.weight.register_hook(lambda _: counts.append(count_used_parameters_in_backward(every)))
    used(torch.ones(1, 2)).sum().backward()
    assert counts == [2]
    refused(RuntimeError, "must be called during backward execution", count_used_parameters_in_backward, every)


def test_master_weights_begin_as_what_the_model_computes_with() -> None:
    torch.manual_seed(0)
    weight = engine_of(bf16={"enabled": True}, zero_optimization={"stage": 1}).module.weight
    master = safe_get_full_fp32_param(weight)
    assert master.dtype == torch.float32
    assert torch.equal(master, weight.float())


def test_schedules_on_a_command_line() -> None:
    asked = ["--lr_schedule", "OneCycle", "--cycle_first_step_size", "4", "--cycle_momentum"]
    args = lr_schedules.add_tuning_arguments(argparse.ArgumentParser()).parse_args(asked)
    section, why = lr_schedules.get_config_from_args(args)
    params: dict[str, Any] = {}
    lr_schedules.override_1cycle_params(args, params)
    assert (section, why) == ({"type": "OneCycle", "params": params}, None)
    assert params["cycle_momentum"] is True
    assert "cycle_second_step_size" not in params
    assert lr_schedules.get_lr_from_config(section) == (params["cycle_max_lr"], "")
    lr_schedules.override_lr_range_test_params(args, params)
    assert params["lr_range_test_staircase"] is False
    rate, why = lr_schedules.get_lr_from_config({"type": "WarmupCosineLR", "params": {}})
    assert rate is None
    assert "holds no rate" in why


@pytest.mark.parametrize("order", ["dataloader", "random", "seqlen"])
@pytest.mark.parametrize(("width", "same"), [(1, False), (2, False), (2, True)])
def test_samples_are_packed_up_to_a_number_of_tokens(order: str, width: int, same: bool) -> None:
    lengths = [3, 7, 2, 8, 5, 5, 1, 9, 30, 4]
    packed, sizes, longest = batch_by_seqlens(
        lengths, 12, sequence_picking_order=order, effective_batch_size=width, required_microbatches_of_same_size=same
    )
    batches = [[samples for number, samples in packed if number == batch] for batch in range(len(sizes))]
    assert [sum(map(len, batch)) for batch in batches] == sizes
    assert [max(lengths[one] for samples in batch for one in samples) for batch in batches] == longest
    for batch in batches:
        assert len(batch) == width
        assert all(sum(lengths[one] for one in samples) <= 12 for samples in batch)
        assert not same or len({len(samples) for samples in batch}) == 1
    every = sorted(one for _, samples in packed for one in samples)
    assert len(set(every)) == len(every)
    if width == 1:
        assert every == [0, 1, 2, 3, 4, 5, 6, 7, 9]  # the one that is too long is left out


def test_packed_samples_are_few_enough_and_enough() -> None:
    assert batch_by_seqlens([5] * 4, 100, max_batch_size=3, verbose=True) == (
        [(0, [0, 1, 2]), (1, [3])],
        [3, 1],
        [5, 5],
    )
    assert batch_by_seqlens([5] * 4, 100, [2, 0], min_batch_size=2)[0] == [(0, [2, 0])]
    refused(AssertionError, "do not fill 3 micro-batches", batch_by_seqlens, [5] * 2, 5, effective_batch_size=3)
    refused(AssertionError, "sequence_picking_order", batch_by_seqlens, [5], 5, sequence_picking_order="longest")


def test_a_curriculum_rises_in_multiples_of_its_step() -> None:
    config = {"min_difficulty": 10, "max_difficulty": 100, "schedule_type": "fixed_linear"}
    section = {"total_curriculum_step": 10, "difficulty_step": 8, "root_degree": 2}
    linear = CurriculumScheduler({**config, "schedule_config": section})
    assert [linear.get_difficulty(step) for step in (0, 1, 5, 9, 10, 20)] == [16, 16, 48, 88, 96, 100]
    root = CurriculumScheduler({**config, "schedule_type": "fixed_root", "schedule_config": section})
    assert [root.get_difficulty(step) for step in (0, 2, 5)] == [16, 48, 72]
    assert root.update_difficulty(20) == root.update_difficulty(0) == 100
    discrete = {"difficulty": [1, 2, 3], "max_step": [5, 7]}
    steps = CurriculumScheduler({**config, "schedule_type": "fixed_discrete", "schedule_config": discrete})
    assert [steps.get_difficulty(step) for step in (0, 5, 6, 7, 8)] == [1, 1, 2, 2, 3]
    assert steps.update_difficulty(6) == 2
    again = CurriculumScheduler({**config, "schedule_type": "custom"})
    refused(AssertionError, "set_custom_get_difficulty", again.get_difficulty, 0)
    again.set_custom_get_difficulty(lambda step: 4 * step)
    assert again.get_difficulty(3) == 12
    again.set_state(steps.get_state())
    assert (again.get_current_difficulty(), again.get_difficulty(8)) == (2, 3)
    refused(AssertionError, "min_difficulty", CurriculumScheduler, {})
    refused(
        AssertionError,
        "needs difficulty_step",
        CurriculumScheduler,
        {**config, "schedule_config": {"total_curriculum_step": 1}},
    )
    refused(RuntimeError, "not 'steep'", CurriculumScheduler, {**config, "schedule_type": "steep"})


def test_the_configuration_clips_nothing_unless_it_says_so() -> None:
    assert get_gradient_clipping({}) == GRADIENT_CLIPPING_DEFAULT == engine_of().gradient_clipping()
    assert get_gradient_clipping({"gradient_clipping": 0.5}) == 0.5
