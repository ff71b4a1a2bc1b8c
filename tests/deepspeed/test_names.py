"""DeepSpeed's names are where DeepSpeed has them, whatever is imported first, and what has no counterpart says so."""

import importlib
import pickle
import pkgutil
import subprocess
import sys
from functools import partial, reduce
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import thinwire
from tests.refusing import refused
from thinwire import deepspeed
from thinwire.deepspeed.names import NAMES

ALONE = """
import sys
import deepspeed, thinwire.deepspeed
assert deepspeed is thinwire.deepspeed and "torch" not in sys.modules
assert deepspeed.runtime.engine.DeepSpeedEngine is deepspeed.DeepSpeedEngine
assert deepspeed.zero.Init is deepspeed.runtime.zero.partition_parameters.Init
from deepspeed.runtime import lr_schedules
from deepspeed import comm as dist
assert dist.get_world_size() == 1 and not dist.is_initialized()
"""

# What most scripts import, in words that are not the table's: it would agree with itself.
IMPORTS = """
from thinwire.deepspeed import DeepSpeedEngine, OnDevice, PipelineModule, add_config_arguments, add_tuning_arguments
from thinwire.deepspeed import PipelineEngine
from thinwire.deepspeed import DeepSpeedTransformerConfig, DeepSpeedTransformerLayer
from thinwire.deepspeed import comm, get_accelerator, init_distributed, init_inference, initialize, log_dist, zero
from thinwire.deepspeed.accelerator import get_accelerator
from thinwire.deepspeed.accelerator.real_accelerator import get_accelerator
from thinwire.deepspeed.checkpoint import UNIVERSAL_CHECKPOINT_INFO, ds_to_universal
from thinwire.deepspeed.checkpointing import CheckpointFunction
from thinwire.deepspeed.comm import ReduceOp, all_gather, all_reduce, barrier, get_rank, log_summary, new_group
from thinwire.deepspeed.git_version_info import torch_info, version
from thinwire.deepspeed.moe.layer import MoE
from thinwire.deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from thinwire.deepspeed.monitor.config import DeepSpeedMonitorConfig, TensorBoardConfig, WandbConfig, get_monitor_config
from thinwire.deepspeed.monitor.monitor import MonitorMaster
from thinwire.deepspeed.ops import __compatible_ops__
from thinwire.deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
from thinwire.deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from thinwire.deepspeed.ops.adam.cpu_adam import DeepSpeedCPUAdam
from thinwire.deepspeed.ops.adam.fused_adam import multi_tensor_applier
from thinwire.deepspeed.ops.lamb import FusedLamb
from thinwire.deepspeed.ops.lion import DeepSpeedCPULion, FusedLion
from thinwire.deepspeed.ops.op_builder import CPUAdagradBuilder, CPUAdamBuilder, CPULionBuilder, QuantizerBuilder
from thinwire.deepspeed.ops.sparse_attention import BertSparseSelfAttention, FixedSparsityConfig, SparseSelfAttention
from thinwire.deepspeed.ops.sparse_attention.matmul import MatMul
from thinwire.deepspeed.ops.sparse_attention.softmax import Softmax
from thinwire.deepspeed.ops.sparse_attention.sparsity_config import BigBirdSparsityConfig
from thinwire.deepspeed.ops.transformer import DeepSpeedTransformerLayer
from thinwire.deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from thinwire.deepspeed.profiling.flops_profiler import FlopsProfiler, get_model_profile
from thinwire.deepspeed.runtime.activation_checkpointing import checkpointing
from thinwire.deepspeed.runtime.activation_checkpointing.checkpointing import checkpoint
from thinwire.deepspeed.runtime.base_optimizer import DeepSpeedOptimizer, ZeROOptimizer
from thinwire.deepspeed.runtime.config import ADAM_OPTIMIZER, DeepSpeedConfig, DeepSpeedConfigError
from thinwire.deepspeed.runtime.config_utils import DeepSpeedConfigModel
from thinwire.deepspeed.runtime.data_pipeline.curriculum_scheduler import CurriculumScheduler
from thinwire.deepspeed.runtime.data_pipeline.data_sampling.variable_batch_size_and_lr import batch_by_seqlens
from thinwire.deepspeed.runtime.dataloader import DeepSpeedDataLoader, RepeatingLoader
from thinwire.deepspeed.runtime.engine import DeepSpeedEngine
from thinwire.deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from thinwire.deepspeed.profiling.flops_profiler.profiler import FlopsProfiler
from thinwire.deepspeed.runtime.fp16.loss_scaler import INITIAL_LOSS_SCALE, DynamicLossScaler, LossScaler
from thinwire.deepspeed.runtime.fp16.onebit.adam import OnebitAdam
from thinwire.deepspeed.runtime.fp16.onebit.lamb import OnebitLamb
from thinwire.deepspeed.runtime.fp16.onebit.zoadam import ZeroOneAdam
from thinwire.deepspeed.runtime.lr_schedules import VALID_LR_SCHEDULES, WARMUP_LR, OneCycle, WarmupDecayLR, WarmupLR
from thinwire.deepspeed.runtime.pipe.engine import PipelineEngine
from thinwire.deepspeed.runtime.precision_config import get_bfloat16_config
from thinwire.deepspeed.runtime.progressive_layer_drop import ProgressiveLayerDrop
from thinwire.deepspeed.runtime.utils import clip_grad_norm_, see_memory_usage
from thinwire.deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from thinwire.deepspeed.runtime.zero import unwrap_model_for_generation
from thinwire.deepspeed.runtime.zero.leaf_module_config import DEFAULT_LEAF_MODULE_CLASSES
from thinwire.deepspeed.runtime.zero.offload_config import OffloadDeviceEnum, OffloadStateTypeEnum
from thinwire.deepspeed.runtime.zero.partition_parameters import GatheredParameters, Init, ZeroParamStatus
from thinwire.deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer, split_half_float_double
from thinwire.deepspeed.runtime.zero.tensor_fragment import safe_set_full_grad
from thinwire.deepspeed.runtime.zero.utils import is_zero_param
from thinwire.deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs_all_live
from thinwire.deepspeed.utils import set_z3_leaf_modules_by_name, set_z3_leaf_modules_by_suffix
from thinwire.deepspeed.utils import RepeatingLoader, instrument_w_nvtx, logger, safe_get_full_grad
from thinwire.deepspeed.utils import safe_update_full_grad_vectorized
from thinwire.deepspeed.utils.groups import get_data_parallel_world_size
from thinwire.deepspeed.utils.tensor_fragment import safe_get_full_fp32_param, safe_set_local_optimizer_state
from thinwire.deepspeed.utils.torch import required_torch_version
from thinwire.deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
""".strip()

NOT_OFFERED = {
    "comm.torch.TorchBackend": "comm has the calls",
    "monitor.trackio.TrackioMonitor": "tensorboard",
    "moe.layer.MoE": "no expert parallelism",
    "ops.adam.fused_adam.multi_tensor_applier": "FusedAdam steps",
    "ops.transformer.DeepSpeedTransformerLayer": "scaled_dot_product_attention",
    "runtime.comm.nccl.NcclBackend": "CompressedExchange",
    "runtime.data_pipeline.data_routing.scheduler.RandomLTDScheduler": "thinwire.pld",
    "runtime.data_pipeline.data_sampling.indexed_dataset.MMapIndexedDataset": "training_data",
    "runtime.fp16.fused_optimizer.FP16_Optimizer": "the engine's",
    "runtime.fp16.loss_scaler.LossScaleConfig": "the engine's",
    "runtime.pipe.schedule.TrainSchedule": "torch.distributed.pipelining's",
    "runtime.pipe.topology.PipelineParallelGrid": "engine.grid has this rank's place",
    "runtime.torch_autocast.has_comm_dtype": "torch.autocast in it",
    "runtime.zero.stage3.estimate_zero3_model_states_mem_needs_all_live": "thinwire plan",
    "runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer": "ShardedOptimizer",
    "utils.groups.initialize": "no expert parallelism",
    "utils.numa.get_numactl_cmd": "srun --cpu-bind",
    "utils.timer.SynchronizedWallClockTimer": "wall_clock_breakdown",
    "zero.TiledLinear": "offload_param",
}


def at(path: str) -> Any:
    """What stands at a dotted path below thinwire.deepspeed, reached as scripts do: by attributes."""
    return reduce(getattr, [part for part in path.split(".") if part], deepspeed)


@pytest.mark.parametrize("statement", IMPORTS.splitlines())
def test_a_script_imports(statement: str) -> None:
    exec(statement, {})


@pytest.mark.parametrize("path", NAMES)
def test_a_module_has_what_the_table_says(path: str) -> None:
    module = importlib.import_module(f"thinwire.deepspeed.{path}".rstrip("."))
    assert module is at(path) or path == "utils.z3_leaf_module"
    offered = {
        pair.partition("=")[0]: pair.endswith("=")
        for names in NAMES[path].values()
        for pair in names.split()
        if pair != "*"
    }
    assert set(offered) <= set(dir(module))
    for name, is_module in offered.items():
        assert isinstance(getattr(module, name), ModuleType) == is_module
    everything: dict[str, Any] = {}
    exec(f"from {module.__name__} import *", everything)
    assert set(module.__all__) <= set(everything)


@pytest.mark.parametrize("path", NOT_OFFERED)
def test_what_has_no_counterpart_says_what_to_do_when_it_is_used(path: str) -> None:
    stand_in = at(path)

    class Mine(stand_in):  # type: ignore[misc, valid-type]
        """Scripts derive classes from such names where they may never use them."""

        def __init__(self) -> None:
            super().__init__(layers=[])

    for use in (stand_in, lambda: stand_in(1, key=2), Mine):
        refused(deepspeed.NotOfferedError, f"no counterpart of deepspeed.*{NOT_OFFERED[path]}", use)
    assert not isinstance(torch.nn.Linear(1, 1), stand_in)


def test_modules_and_their_names_are_as_in_python_modules() -> None:
    found = {module.name for module in pkgutil.walk_packages(deepspeed.__path__, "thinwire.deepspeed.")}
    assert {f"thinwire.deepspeed.{path}" for path in NAMES if path} <= found
    assert {"comm", "initialize", "ops", "runtime", "zero"} <= set(dir(deepspeed))
    for one in (deepspeed.ops.adam.FusedAdam, deepspeed.runtime.fp16.onebit.adam.OnebitAdam, deepspeed.log_dist):
        assert pickle.loads(pickle.dumps(one)) is one
    importlib.import_module("thinwire.deepspeed.utils.z3_leaf_module")
    assert not isinstance(deepspeed.utils.z3_leaf_module, ModuleType)
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'thinwire.deepspeed.ops.no_such'"):
        importlib.import_module("thinwire.deepspeed.ops.no_such")
    for path in ("", "runtime", "utils", "zero", "ops.sparse_attention", "moe"):
        refused(AttributeError, "no_such_name", at, f"{path}.no_such_name")
    numbers = (deepspeed.__version_major__, deepspeed.__version_minor__, deepspeed.__version_patch__)
    assert ".".join(map(str, numbers)) == thinwire.__version__ == deepspeed.__version__
    assert torch.empty(at("runtime.zero.partition_parameters").partitioned_param_data_shape).shape == (0,)


STANDS_IN = """
import importlib.util, multiprocessing, pickle, subprocess, sys
import deepspeed.comm as dist
import deepspeed
import thinwire.deepspeed
from deepspeed.ops.adam import FusedAdam
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from deepspeed.utils.logging import logger

def same(_):
    import deepspeed.runtime.zero.partition_parameters as ours
    return ours.Init is deepspeed.zero.Init is thinwire.deepspeed.zero.Init

if __name__ == "__main__":
    assert deepspeed is thinwire.deepspeed and dist is thinwire.deepspeed.comm
    assert FusedAdam is thinwire.deepspeed.ops.adam.FusedAdam and importlib.util.find_spec("deepspeed.no_such") is None
    assert dist.__spec__.name == "thinwire.deepspeed.comm"
    subprocess.run([sys.executable, "alone.py"], check=True)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(sys.argv[1:], pool.map(same, [0]))
"""


@pytest.mark.programs
def test_a_script_that_cannot_be_edited_finds_thinwire_by_deepspeeds_name(tmp_path: Path) -> None:
    """Whose import costs no torch, and after which no other is needed."""
    (tmp_path / "alone.py").write_text(ALONE)
    (tmp_path / "deepspeed").mkdir()  # of another package beside the script, which does not come first
    (tmp_path / "script.py").write_text(STANDS_IN)
    run = partial(subprocess.run, capture_output=True, text=True, check=False, cwd=tmp_path)
    (tmp_path / "module.py").write_text("import sys, deepspeed; print(sys.argv[1:], [hasattr(deepspeed, 'zero')])")
    for what in (["script.py"], ["-m", "module"]):
        done = run([sys.executable, "-m", "thinwire.deepspeed", *what, "--lr", "1"])
        assert (done.returncode, done.stdout) == (0, "['--lr', '1'] [True]\n"), done.stderr
    for wrong, message in ((["nowhere.py"], "no file 'nowhere.py'"), ([], "usage:"), (["-m"], "usage:")):
        done = run([sys.executable, "-m", "thinwire.deepspeed", *wrong])
        assert done.returncode == 1
        assert message in done.stderr
