"""Writes checkpoints as DeepSpeed lays them out, from a model and a torch optimizer that know nothing of it.

Written after the layout, with classes that are only called like DeepSpeed's: none of its code is here or is needed.
"""

import enum
import math
import sys
import types
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

MOMENTS = ("exp_avg", "exp_avg_sq")
FIXED_SCALE = {"dynamic_loss_scale": False, "cur_scale": 1.0, "cur_iter": 7}
DYNAMIC_SCALE = {"dynamic_loss_scale": True, "cur_scale": 128.0, "cur_iter": 7}
DYNAMIC_SCALE |= {"last_overflow_iter": 3, "scale_factor": 2.0, "scale_window": 100}


class LossScaler:
    def __init__(self, value: float) -> None:
        self.cur_scale = value
        self.dynamic = False


class DynamicLossScaler:
    def __init__(self, value: float) -> None:
        vars(self).update(DYNAMIC_SCALE, cur_scale=value, dynamic=True, cur_hysteresis=1, dtype=torch.float16)


class ZeroStageEnum(enum.IntEnum):
    disabled = 0
    optimizer_states = 1
    gradients = 2
    weights = 3


@dataclass
class fragment_address:  # noqa: N801 - DeepSpeed's name
    numel: int
    start: int


_CLASSES = {
    LossScaler: "deepspeed.runtime.fp16.loss_scaler",
    DynamicLossScaler: "deepspeed.runtime.fp16.loss_scaler",
    ZeroStageEnum: "deepspeed.runtime.zero.config",
    fragment_address: "deepspeed.utils.tensor_fragment",
}


@contextmanager
def deepspeeds_names() -> Iterator[None]:
    """Have these classes pickled under the modules that DeepSpeed has them in."""
    before = {one: one.__module__ for one in _CLASSES}
    made: dict[str, types.ModuleType] = {}
    for one, module in _CLASSES.items():
        one.__module__ = module
        parents = module.split(".")
        for depth in range(1, len(parents) + 1):
            name = ".".join(parents[:depth])
            made.setdefault(name, types.ModuleType(name))
        setattr(made[module], one.__name__, one)
    assert not made.keys() & sys.modules.keys(), "the real DeepSpeed is here"
    sys.modules.update(made)
    try:
        yield
    finally:
        for one, module in before.items():
            one.__module__ = module
        for module in made:
            del sys.modules[module]


@dataclass
class Trained:
    """A model in fp32, its optimizer, and the names of each of its groups' parameters."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    groups: list[list[str]]
    client_state: dict[str, Any] = field(default_factory=dict)

    def master(self, name: str) -> Tensor:
        return self.model.get_parameter(name).detach()

    def moment(self, kind: str, name: str) -> Tensor:
        value: Tensor = self.optimizer.state[self.model.get_parameter(name)][kind]
        return value

    def step_of(self, group: int) -> Tensor:
        return self.moment("step", self.groups[group][0])

    def value(self, kind: str, name: str) -> Tensor:
        return self.master(name) if kind == "fp32" else self.moment(kind, name)

    def flat(self, kind: str, names: Sequence[str]) -> Tensor:
        return torch.cat([self.value(kind, name).flatten() for name in names])


def write_sharded(
    folder: Path,
    trained: Trained,
    stage: int,
    world: int,
    dtype: torch.dtype = torch.float32,
    *,
    elastic: bool = False,
    sub_group: int = 10**9,
    tag: str = "global_step4",
) -> Path:
    """A checkpoint of ZeRO `stage` by `world` ranks; the folder of its tag."""
    prefix = "bf16_" if dtype == torch.bfloat16 else ""
    path = folder / tag
    path.mkdir(parents=True)
    groups = trained.groups
    if stage == 3:
        groups = [part for group in groups for part in _parts(trained, group, sub_group)]
    for rank in range(world):
        if stage == 3:
            optimizer = _partitioned(trained, groups, rank, world, dtype)
        else:
            optimizer = _flat_groups(trained, rank, world, stage, dtype, elastic)
        content = {"optimizer_state_dict": optimizer, "ds_config": config(stage, dtype), "ds_version": "0.19.3"}
        _save(content, path / f"{prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
        if stage == 3 or rank == 0:
            name = f"zero_pp_rank_{rank}_mp_rank_00" if stage == 3 else "mp_rank_00"
            _save(_model_states(trained, groups, stage, rank, world, dtype), path / f"{name}_model_states.pt")
    (folder / "latest").write_text(tag)
    return path


def write_unsharded(
    folder: Path,
    trained: Trained,
    dtype: torch.dtype = torch.float32,
    flat: bool = False,
    tag: str = "global_step4",
    *,
    version: str = "0.18.2",
    scale: dict[str, Any] | None = None,
) -> Path:
    """A checkpoint without ZeRO: the optimizer in the model's file, over fp32 copies where the model has 16 bits.

    `version`: DeepSpeed's; `scale`: what the file says of the loss scale. The moments are as `trained` has them.
    """
    path = folder / tag
    path.mkdir(parents=True)
    optimizer: dict[str, Any] = trained.optimizer.state_dict()
    if dtype != torch.float32:
        master_weights = [[trained.master(name).clone() for name in group] for group in trained.groups]
        held: dict[str, Any] = {"fp32_groups": master_weights}
        if flat:
            held = {"fp32_groups_flat": [trained.flat("fp32", group) for group in trained.groups]}
            state = {
                number: {"step": trained.step_of(number)} | {kind: trained.flat(kind, group) for kind in MOMENTS}
                for number, group in enumerate(trained.groups)
            }
            optimizer = {"state": state, "param_groups": _settings(trained)}
        if scale is None:
            scale = DYNAMIC_SCALE if dtype == torch.float16 else FIXED_SCALE
        optimizer = {**scale, "optimizer_state_dict": optimizer, **held}
    states = _model_states(trained, trained.groups, 0, 0, 1, dtype)
    states |= dict.fromkeys(("param_shapes", "shared_params"), None) | {"optimizer": optimizer, "ds_version": version}
    _save(states, path / "mp_rank_00_model_states.pt")
    (folder / "latest").write_text(tag)
    return path


def write_universal(folder: Path, trained: Trained, stage: int, dtype: torch.dtype = torch.float32) -> Path:
    """A universal checkpoint made of one of `stage`."""
    path = folder / "global_step4_universal"
    zero = path / "zero"
    for name in (name for group in trained.groups for name in group):
        for kind in ("fp32", *MOMENTS):
            whole = trained.value(kind, name).clone()
            _save({"cat_dim": 0, "param": whole} if stage < 3 else whole.flatten(), zero / name / f"{kind}.pt")
        if stage < 3:
            _save(trained.moment("step", name), zero / name / "step.pt")
    common: dict[str, Any] = {"param_groups": _settings(trained), "loss_scaler": LossScaler(1.0)}
    if stage == 3:
        common["optimizer_state_dict"] = {"state": {0: {"step": trained.step_of(0)}}}
    _save(common, zero / "optimizer_state.pt")
    for rank in range(2 if stage == 3 else 1):
        name = f"zero_pp_rank_{rank}_mp_rank_00" if stage == 3 else "mp_rank_00"
        _save(_model_states(trained, trained.groups, stage, rank, 2, dtype), path / f"{name}_model_states.pt")
    (folder / "latest_universal").write_text(path.name)
    return path


def config(stage: int, dtype: torch.dtype) -> dict[str, Any]:
    """What DeepSpeed was configured with."""
    section = {"bf16": {"enabled": True}} if dtype == torch.bfloat16 else {}
    section |= {"fp16": {"enabled": True}} if dtype == torch.float16 else {}
    return {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
        "zero_optimization": {"stage": stage},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}},
        **section,
    }


def _save(content: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with deepspeeds_names():
        torch.save(content, path)


def _scaler(dtype: torch.dtype) -> LossScaler | DynamicLossScaler:
    return DynamicLossScaler(128.0) if dtype == torch.float16 else LossScaler(1.0)


def _settings(trained: Trained, per_group: Sequence[int] | None = None) -> list[dict[str, Any]]:
    """Groups with as many parameters each as the optimizer was given flat tensors of them."""
    groups, number = [], 0
    for index, group in enumerate(trained.optimizer.param_groups):
        count = 1 if per_group is None else per_group[index]
        own = {key: value for key, value in group.items() if key != "params"}
        groups.append(own | {"params": list(range(number, number + count))})
        number += count
    return groups


def _parts(trained: Trained, names: Sequence[str], limit: int) -> list[list[str]]:
    """Stage 3's sub-groups: whole parameters, up to so many elements."""
    parts: list[list[str]] = [[]]
    for name in names:
        if parts[-1] and sum(trained.master(one).numel() for one in parts[-1]) >= limit:
            parts.append([])
        parts[-1].append(name)
    return parts


def _flat_groups(
    trained: Trained, rank: int, world: int, stage: int, dtype: torch.dtype, elastic: bool
) -> dict[str, Any]:
    """A rank's even run of every group's flat values."""
    weights, states, paddings = [], [], []
    for number, names in enumerate(trained.groups):
        run = {kind: _share(trained.flat(kind, names), rank, world, 2) for kind in ("fp32", *MOMENTS)}
        share, total = run["fp32"].numel(), trained.flat("fp32", names).numel()
        paddings.append(share * world - total if rank == world - 1 else 0)
        lean = share - paddings[-1]
        weights.append(run.pop("fp32")[:lean])
        kept = {kind: one[:lean] for kind, one in run.items()} if elastic else run
        states.append({"step": trained.step_of(number).clone()} | kept)
    base: Any = states
    if not elastic:
        base = {"state": dict(enumerate(states)), "param_groups": _settings(trained)}
    return {
        "loss_scaler": _scaler(dtype),
        "dynamic_loss_scale": dtype == torch.float16,
        "base_optimizer_state": base,
        "single_partition_of_fp32_groups": weights,
        "zero_stage": ZeroStageEnum(stage),
        "group_paddings": paddings,
        "partition_count": [world] * len(trained.groups),
        "ds_version": "0.19.3",
        "param_slice_mappings": [OrderedDict({names[0]: fragment_address(1, 0)}) for names in trained.groups],
    }


def _partitioned(
    trained: Trained, parts: Sequence[Sequence[str]], rank: int, world: int, dtype: torch.dtype
) -> dict[str, Any]:
    """Stage 3: this rank's share of every parameter, one after the other."""

    def run(kind: str, names: Sequence[str]) -> Tensor:
        return torch.cat([_share(trained.value(kind, name), rank, world) for name in names])

    owner = [number for number, group in enumerate(trained.groups) for part in parts if part[0] in group]
    counts = [owner.count(number) for number in range(len(trained.groups))]
    state = {
        number: {"step": trained.step_of(owner[number]).clone()} | {kind: run(kind, names) for kind in MOMENTS}
        for number, names in enumerate(parts)
    }
    return {
        "zero_stage": ZeroStageEnum.weights,
        "loss_scaler": _scaler(dtype),
        "dynamic_loss_scale": dtype == torch.float16,
        "partition_count": world,
        "optimizer_state_dict": {"state": state, "param_groups": _settings(trained, counts)},
        "fp32_flat_groups": [run("fp32", names) for names in parts],
    }


def _share(values: Tensor, rank: int, world: int, multiple: int = 1) -> Tensor:
    """A rank's run of flat values, which are padded to a run of a multiple for every rank."""
    share = math.ceil(values.numel() / (multiple * world)) * multiple
    padded = torch.cat([values.flatten(), torch.zeros(share * world - values.numel(), dtype=values.dtype)])
    return padded[rank * share : (rank + 1) * share].clone()


def _model_states(
    trained: Trained, groups: Sequence[Sequence[str]], stage: int, rank: int, world: int, dtype: torch.dtype
) -> dict[str, Any]:
    model = trained.model
    buffers = [name for name, _ in model.named_buffers()]
    tensors = {id(one): one.detach().to(dtype) for one in model.parameters()}
    module: OrderedDict[str, Tensor] = OrderedDict()
    for name, one in model.state_dict(keep_vars=True).items():
        module[name] = tensors.get(id(one), one) if stage < 3 or name in buffers else torch.empty(0, dtype=dtype)
    first = {id(one): name for name, one in model.named_parameters()}
    every = model.named_parameters(remove_duplicate=False)
    frozen = {name: one.detach().to(dtype) for name, one in model.named_parameters() if not one.requires_grad}
    shapes = parts = None
    if stage >= 2:
        shapes = OrderedDict((name, one.shape) for name, one in frozen.items())
        parts = OrderedDict((name, one if stage == 2 else _share(one, rank, world)) for name, one in frozen.items())
    return {
        "module": module,
        "buffer_names": buffers,
        "optimizer": None,
        "param_shapes": [OrderedDict((name, trained.master(name).shape) for name in group) for group in groups],
        "frozen_param_shapes": shapes,
        "shared_params": {name: first[id(one)] for name, one in every if first[id(one)] != name and rank == 0},
        "frozen_param_fragments": parts,
        "lr_scheduler": {"last_batch_iteration": 3},
        "data_sampler": None,
        "sparse_tensor_module_names": set(),
        "skipped_steps": 1,
        "global_steps": 4,
        "global_samples": 16,
        "dp_world_size": world,
        "mp_world_size": 1,
        "ds_config": config(stage, dtype),
        "ds_version": "0.19.3",
        **trained.client_state,
    }
