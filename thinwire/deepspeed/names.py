"""DeepSpeed's names by module: where thinwire has each, or what to do instead. `module_tree` makes modules of it.

    "DeepSpeed's module": {"our module, a dot for this room": "Name Name Theirs=Ours module="}

`Theirs=Ours` has another name here, `module=` is our module itself, and ALL is whatever our module has. Modules and
packages that only lead to others need no line.
"""

from __future__ import annotations

from collections.abc import Mapping

ALL = "*"


class Instead(str):
    """What to do instead of using names that thinwire has no counterpart of."""

    __slots__ = ()


_NO_EXPERTS = Instead("it has no expert parallelism; use a mixture of experts of the model's own library")
_NO_GRID = Instead("engine.grid has this rank's place in each dimension, engine.mesh the ranks of each")
_NO_SCHEDULE = Instead('"pipeline": {"schedule": "1F1B"} names one of torch.distributed.pipelining\'s schedules')
_NO_PARTS = Instead("it is for pipelines; torch.distributed.tensor.distribute_tensor cuts a tensor")
_NO_COMET = Instead('use "tensorboard", "csv_monitor" or "wandb"')
_NO_LAYERS = Instead(
    "torch.nn.functional.scaled_dot_product_attention and torch.compile are as fast; use the model's own layers"
)
_NO_TILES = Instead(
    "use torch.nn.Linear; stage 3 gathers one layer at a time, and offload_param keeps the others in host memory"
)
_NO_HANDLES = Instead("a parameter is whole inside zero.GatheredParameters, which waits for it")
_NO_TIMERS = Instead('set "wall_clock_breakdown": true in the configuration, or use torch.profiler')
_NO_BACKENDS = Instead(
    "thinwire.compress.CompressedExchange is its compressed all-reduce, over any communicator of thinwire.comm"
)
_ENGINES_PRECISION = Instead(
    'precision is the engine\'s: "fp16" and "bf16" in the configuration; its optimizer is a thinwire.ShardedOptimizer'
)
_ENGINES_SHARDING = Instead(
    "sharding is the engine's, zero_optimization in the configuration; without it there is thinwire.ShardedOptimizer"
)
_NO_DROPPING = Instead("it drops no tokens; thinwire.pld drops whole layers")
_NO_INDEX = Instead("give the engine any torch data set as training_data, one of memory-mapped arrays say")
_NO_KERNEL = Instead("thinwire.deepspeed.ops.adam.FusedAdam steps, and has no kernel apart from that")
_NO_CORES = Instead("the launcher binds ranks to cores: numactl or taskset before python, or srun --cpu-bind")
_NO_OBJECTS = Instead("thinwire.deepspeed.comm has the calls, over torch.distributed")
_NO_AUTOCAST = Instead("gradients leave in communication_data_type, whatever casts a forward: use torch.autocast in it")
_PLAN = Instead("`thinwire plan --model MODEL` estimates memory and time of every stage")

_LAYOUTS = (
    "BSLongformerSparsityConfig BigBirdSparsityConfig DenseSparsityConfig FixedSparsityConfig "
    "LocalSlidingWindowSparsityConfig SparsityConfig VariableSparsityConfig"
)
_LEAVES = (
    "get_z3_leaf_modules set_z3_leaf_module set_z3_leaf_modules set_z3_leaf_modules_by_name "
    "set_z3_leaf_modules_by_suffix unset_z3_leaf_modules z3_leaf_module"
)
_OPTIMIZERS = "DeepSpeedOptimizer=SynchronizedOptimizer ZeROOptimizer=SynchronizedOptimizer"
_MONITORS = "MonitorMaster TensorBoardMonitor WandbMonitor csvMonitor=CsvMonitor"

_PROFILER = {".monitors": "FlopsProfiler=DeepSpeedFlopsProfiler", "thinwire.engine": "get_model_profile"}

NAMES: Mapping[str, Mapping[str, str]] = {
    "": {
        ".initialization": "add_config_arguments initialize=initialize_as_deepspeed",
        ".ranks": "init_distributed",
        ".errors": "NotOfferedError",
        ".devices": "get_accelerator",
        ".checkpointing": "checkpointing=",
        ".sections": "DeepSpeedConfig DeepSpeedConfigError",
        ".engine": "DeepSpeedEngine PipelineEngine=DeepSpeedEngine",
        ".schedules": "add_tuning_arguments",
        ".utilities": "OnDevice log_dist logger",
        ".pipe": "PipelineModule pipe=",
        ".runtime.zero": "zero=",
        ".ops.transformer": "DeepSpeedTransformerConfig DeepSpeedTransformerLayer",
        ".inference_engine": "DeepSpeedInferenceConfig InferenceEngine init_inference",
    },
    "accelerator": {".devices": "get_accelerator is_current_accelerator_supported"},
    "accelerator.real_accelerator": {".devices": "get_accelerator is_current_accelerator_supported"},
    "checkpoint": {".files.exporting": "UNIVERSAL_CHECKPOINT_INFO"},
    "checkpoint.constants": {
        ".files.exporting": "BASE_OPTIMIZER_STATE BUFFER_NAMES DS_VERSION FP32_FLAT_GROUPS FROZEN_PARAM_FRAGMENTS "
        "FROZEN_PARAM_SHAPES OPTIMIZER_STATE_DICT PARAM_SHAPES PARTITION_COUNT SINGLE_PARTITION_OF_FP32_GROUPS "
        "UNIVERSAL_CHECKPOINT_INFO ZERO_STAGE"
    },
    "checkpoint.ds_to_universal": {".files.exporting": "main=copy_universal"},
    "checkpoint.utils": {".files.exporting": "clone_tensors_for_torch_save get_model_ckpt_name_for_rank"},
    "comm": {
        ".ranks": "all_gather_into_tensor all_reduce allgather_fn=all_gather_into_tensor barrier broadcast "
        "get_local_rank get_rank get_world_group get_world_size "
        "inference_all_reduce=all_reduce init_distributed is_initialized log_summary",
        "torch.distributed": "P2POp ProcessGroup ReduceOp all_gather all_gather_object all_to_all all_to_all_single "
        "batch_isend_irecv broadcast_object_list destroy_process_group gather get_global_rank irecv is_available isend "
        "monitored_barrier new_group recv reduce reduce_scatter reduce_scatter_fn=reduce_scatter_tensor "
        "reduce_scatter_tensor scatter send",
    },
    "comm.torch": {_NO_OBJECTS: "StagedWork TorchBackend"},
    "git_version_info": {
        ".devices": "compatible_ops git_branch git_hash installed_ops torch_info",
        "thinwire.version": "version=__version__",
    },
    "inference": {".inference_engine": "DeepSpeedInferenceConfig InferenceEngine"},
    "inference.config": {".inference_engine": "DeepSpeedInferenceConfig DeepSpeedTPConfig"},
    "inference.engine": {".inference_engine": "InferenceEngine _validate_keep_module_on_host"},
    "moe": {".moe.layer": "MoE"},
    "moe.layer": {_NO_EXPERTS: "MoE"},
    "moe.utils": {".utilities": "has_moe_layers is_moe_param split_params_into_different_moe_groups_for_optimizer"},
    "monitor.comet": {_NO_COMET: "CometMonitor"},
    "monitor.config": {
        ".monitors": "DeepSpeedMonitorConfig get_monitor_config",
        "thinwire.engine.config.models": "CSVConfig=MonitorConfig TensorBoardConfig=MonitorConfig WandbConfig",
    },
    "monitor.constants": {
        ".monitors": "CSV_MONITOR_ENABLED_DEFAULT CSV_MONITOR_JOB_NAME_DEFAULT CSV_MONITOR_OUTPUT_PATH_DEFAULT "
        "TENSORBOARD_ENABLED_DEFAULT TENSORBOARD_JOB_NAME_DEFAULT TENSORBOARD_OUTPUT_PATH_DEFAULT "
        "WANDB_ENABLED_DEFAULT WANDB_GROUP_NAME_DEFAULT WANDB_PROJECT_NAME_DEFAULT WANDB_TEAM_NAME_DEFAULT"
    },
    "monitor.csv_monitor": {".monitors": "csvMonitor=CsvMonitor"},
    "monitor.monitor": {".monitor.comet": "CometMonitor", ".monitors": _MONITORS, "thinwire.engine": "Monitor"},
    "monitor.tensorboard": {".monitors": "TensorBoardMonitor"},
    "monitor.trackio": {_NO_COMET: "TrackioMonitor"},
    "monitor.wandb": {".monitors": "WandbMonitor"},
    "ops": {".devices": "__compatible_ops__=compatible_ops"},
    "ops.adagrad": {"torch.optim": "DeepSpeedCPUAdagrad=Adagrad"},
    "ops.adam": {".optimizers": "DeepSpeedCPUAdam FusedAdam"},
    "ops.adam.cpu_adam": {".optimizers": "DeepSpeedCPUAdam"},
    "ops.adam.fused_adam": {".optimizers": "FusedAdam", _NO_KERNEL: "multi_tensor_applier"},
    "ops.aio": {".devices": "AsyncIOBuilder"},
    "ops.lamb": {"thinwire.optim": "FusedLamb=Lamb"},
    "ops.lion": {".optimizers": "DeepSpeedCPULion=FusedLion FusedLion"},
    "ops.op_builder": {
        ".devices": "AsyncIOBuilder CPUAdagradBuilder CPUAdamBuilder CPULionBuilder EvoformerAttnBuilder "
        "FPQuantizerBuilder FusedAdamBuilder FusedLambBuilder FusedLionBuilder InferenceBuilder OpBuilder "
        "QuantizerBuilder SparseAttnBuilder TransformerBuilder"
    },
    "ops.sparse_attention": {
        ".ops.sparse_attention.sparsity_config": _LAYOUTS,
        ".sparse_attention": "MatMul Softmax SparseAttentionUtils",
        "thinwire.sparse_attn": "BertSparseSelfAttention SparseSelfAttention",
    },
    "ops.sparse_attention.bert_sparse_self_attention": {"thinwire.sparse_attn": "BertSparseSelfAttention"},
    "ops.sparse_attention.matmul": {".sparse_attention": "MatMul"},
    "ops.sparse_attention.softmax": {".sparse_attention": "Softmax"},
    "ops.sparse_attention.sparse_attention_utils": {".sparse_attention": "SparseAttentionUtils"},
    "ops.sparse_attention.sparse_self_attention": {"thinwire.sparse_attn": "SparseSelfAttention"},
    "ops.sparse_attention.sparsity_config": {
        ".sparse_attention": "LocalSlidingWindowSparsityConfig",
        "thinwire.sparse_attn": "BSLongformerSparsityConfig=BSLongformer BigBirdSparsityConfig=BigBird "
        "DenseSparsityConfig=Dense FixedSparsityConfig=Fixed SparsityConfig VariableSparsityConfig=Variable",
    },
    "ops.transformer": {_NO_LAYERS: "DeepSpeedTransformerConfig DeepSpeedTransformerLayer"},
    "profiling.flops_profiler": _PROFILER,
    "profiling.flops_profiler.profiler": {
        **_PROFILER,
        ".monitors": _PROFILER[".monitors"] + " module_flop_count module_mac_count",
    },
    "runtime.activation_checkpointing.checkpointing": {".checkpointing": ALL},
    "runtime.base_optimizer": {"thinwire.zero.synchronized_optimizer": _OPTIMIZERS},
    "runtime.bf16_optimizer": {_ENGINES_PRECISION: "BF16_Optimizer"},
    "runtime.chunked_cross_entropy": {
        ".chunked_cross_entropy": "ChunkedCausalLMLoss chunked_cross_entropy install_chunked_causal_lm_loss "
        "triton_backend_available"
    },
    "runtime.comm.mpi": {_NO_BACKENDS: "MpiBackend"},
    "runtime.comm.nccl": {_NO_BACKENDS: "NcclBackend"},
    "runtime.config": {
        ".sections": "ADAGRAD_OPTIMIZER ADAMW_OPTIMIZER ADAM_OPTIMIZER DeepSpeedConfig DeepSpeedConfigError "
        "LAMB_OPTIMIZER LION_OPTIMIZER MUON_OPTIMIZER ONEBIT_ADAM_OPTIMIZER ONEBIT_LAMB_OPTIMIZER "
        "ZERO_ONE_ADAM_OPTIMIZER get_gradient_clipping get_log_level"
    },
    "runtime.config_utils": {".sections": "DeepSpeedConfigModel"},
    "runtime.constants": {".sections": "GRADIENT_CLIPPING_DEFAULT LOG_LEVEL_DEFAULT"},
    "runtime.data_pipeline.curriculum_scheduler": {".data_pipeline": "CurriculumScheduler"},
    "runtime.data_pipeline.data_routing.scheduler": {_NO_DROPPING: "RandomLTDScheduler"},
    "runtime.data_pipeline.data_sampling.indexed_dataset": {_NO_INDEX: "MMapIndexedDataset MMapIndexedDatasetBuilder"},
    "runtime.data_pipeline.data_sampling.variable_batch_size_and_lr": {".data_pipeline": "batch_by_seqlens"},
    "runtime.dataloader": {"thinwire.engine": "DeepSpeedDataLoader=ResumableLoader RepeatingLoader"},
    "runtime.engine": {".engine": "DeepSpeedEngine", ".sections": "ADAM_OPTIMIZER LAMB_OPTIMIZER"},
    "runtime.fp16.fused_optimizer": {_ENGINES_PRECISION: "FP16_Optimizer"},
    "runtime.fp16.loss_scaler": {
        "thinwire.engine.loss_scale": "DynamicLossScaler=DynamicLossScale LossScaler=FixedLossScale",
        ".sections": "CONSECUTIVE_HYSTERESIS DELAYED_SHIFT INITIAL_LOSS_SCALE MIN_LOSS_SCALE SCALE_WINDOW",
        _ENGINES_PRECISION: "LossScaleConfig LossScaleProfile",
    },
    "runtime.fp16.onebit": {"thinwire.optim": "OnebitAdam=OneBitAdam OnebitLamb=OneBitLamb ZeroOneAdam"},
    "runtime.fp16.onebit.adam": {"thinwire.optim": "OnebitAdam=OneBitAdam"},
    "runtime.fp16.onebit.lamb": {"thinwire.optim": "OnebitLamb=OneBitLamb"},
    "runtime.fp16.onebit.zoadam": {"thinwire.optim": "ZeroOneAdam"},
    "runtime.fp16.unfused_optimizer": {_ENGINES_PRECISION: "FP16_UnfusedOptimizer"},
    "runtime.lr_schedules": {
        ".schedules": ALL,
        "thinwire.engine.schedules": "LRRangeTest OneCycle WarmupCosineLR WarmupDecayLR WarmupLR",
    },
    "runtime.pipe": {".pipe": "LayerSpec PipelineModule ProcessTopology TiedLayerSpec"},
    "runtime.pipe.engine": {".engine": "PipelineEngine=DeepSpeedEngine"},
    "runtime.pipe.module": {".pipe": "LayerSpec PipelineModule TiedLayerSpec"},
    "runtime.pipe.schedule": {
        _NO_SCHEDULE: "BackwardPass BufferOpInstruction DataParallelSchedule ForwardPass InferenceSchedule "
        "LoadMicroBatch OptimizerStep PipeInstruction PipeSchedule RecvActivation RecvGrad ReduceGrads ReduceTiedGrads "
        "SendActivation SendGrad TrainSchedule"
    },
    "runtime.pipe.topology": {
        ".pipe": "PipeDataParallelTopology PipeModelDataParallelTopology ProcessTopology",
        _NO_GRID: "PipelineParallelGrid",
    },
    "runtime.precision_config": {
        ".sections": "DeepSpeedFP16Config get_bfloat16_config get_float16_config",
        "thinwire.engine.config.models": "DeepSpeedBF16Config=Bf16Config",
    },
    "runtime.progressive_layer_drop": {"thinwire.pld": "ProgressiveLayerDrop"},
    "runtime.swap_tensor": {".sections": "MIN_SWAPPABLE_BYTES"},
    "runtime.torch_autocast": {_NO_AUTOCAST: "get_comm_dtype has_comm_dtype"},
    "runtime.utils": {
        "torch.nn.utils": "clip_grad_norm_",
        ".utilities": "call_to_str check_internal_apis_for_count_used_parameters combine_grad_norm_groups "
        "count_used_parameters_in_backward empty_cache ensure_directory_exists get_global_norm "
        "mask_nan_or_inf_with_val_inplace partition_balanced partition_uniform prefix_sum_inc see_memory_usage "
        "set_random_seed",
        _NO_PARTS: "PartitionedTensor",
    },
    "runtime.zero": {
        ".runtime.zero.partition_parameters": "GatheredParameters Init ZeroParamStatus register_external_parameter "
        "unregister_external_parameter",
        ".runtime.zero.tiling": "TiledLinear TiledLinearReturnBias",
        ".parameters.gathering": "unwrap_model_for_generation",
    },
    "runtime.zero.config": {
        ".sections": "DeepSpeedZeroConfig DeepSpeedZeroOffloadOptimizerConfig DeepSpeedZeroOffloadParamConfig "
        "ZeroStageEnum"
    },
    "runtime.zero.leaf_module_config": {
        ".sections": "DEFAULT_LEAF_MODULE_CLASSES DEFAULT_LEAF_MODULE_NAMES DEFAULT_LEAF_MODULE_NAME_SUFFIXES",
        "thinwire.engine.config.models": "DeepSpeedZeroLeafModuleConfig=LeafModuleConfig",
    },
    "runtime.zero.offload_config": {
        ".sections": "DeepSpeedZeroOffloadOptimizerConfig DeepSpeedZeroOffloadParamConfig OffloadDeviceEnum "
        "OffloadStateTypeEnum"
    },
    "runtime.zero.offload_states": {".parameters.fragments": "get_state_devices"},
    "runtime.zero.partition_parameters": {
        ".parameters.gathering": "GatheredParameters",
        ".parameters.building": "Init",
        ".parameters.marks": "ZeroParamStatus register_external_parameter unregister_external_parameter",
        ".sections": "partitioned_param_data_shape",
        _NO_HANDLES: "MultipleAllGatherHandles",
    },
    "runtime.zero.stage3": {
        _ENGINES_SHARDING: "DeepSpeedZeroOptimizer_Stage3",
        _PLAN: "estimate_zero3_model_states_mem_needs_all_cold estimate_zero3_model_states_mem_needs_all_live",
    },
    "runtime.zero.stage_1_and_2": {
        _ENGINES_SHARDING: "DeepSpeedZeroOptimizer",
        ".utilities": "split_half_float_double",
        _PLAN: "estimate_zero2_model_states_mem_needs_all_cold estimate_zero2_model_states_mem_needs_all_live",
    },
    "runtime.zero.tensor_fragment": {".parameters.fragments": ALL},
    "runtime.zero.tiling": {_NO_TILES: "TiledLinear TiledLinearReturnBias"},
    "runtime.zero.utils": {
        ".parameters.marks": "is_zero_param",
        ".sections": "ZeRORuntimeException is_zero_supported_optimizer",
    },
    "utils": {
        ".parameters.sharded": _LEAVES,
        "thinwire.engine": "RepeatingLoader",
        ".utilities": "OnDevice instrument_w_nvtx log_dist log_dist_once logger set_log_level_from_string",
        ".parameters.fragments": ALL,
    },
    "utils.groups": {
        ".ranks": "get_data_parallel_group=get_world_group get_data_parallel_rank=get_rank "
        "get_data_parallel_world_size=get_world_size get_model_parallel_rank get_model_parallel_world_size",
        _NO_EXPERTS: "initialize",
    },
    "utils.init_on_device": {".utilities": "OnDevice"},
    "utils.logging": {".utilities": "log_dist log_dist_once logger print_dist set_log_level_from_string"},
    "utils.numa": {_NO_CORES: "get_numa_cores get_numactl_cmd parse_range_list"},
    "utils.nvtx": {".utilities": "instrument_w_nvtx"},
    "utils.tensor_fragment": {".parameters.fragments": ALL},
    "utils.timer": {".monitors": "ThroughputTimer", _NO_TIMERS: "SynchronizedWallClockTimer"},
    "utils.torch": {".utilities": "required_torch_version"},
    "utils.z3_leaf_module": {".parameters.sharded": _LEAVES},
    "utils.zero_to_fp32": {
        ".files.exporting": "convert_zero_checkpoint_to_fp32_state_dict get_fp32_state_dict_from_zero_checkpoint "
        "load_state_dict_from_zero_checkpoint"
    },
}
