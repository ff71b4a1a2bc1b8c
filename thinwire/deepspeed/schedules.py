"""deepspeed.runtime.lr_schedules: the schedules, the names of their settings, and those settings on a command line."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from functools import partial
from typing import Any

LR_SCHEDULE = "lr_schedule"
LR_RANGE_TEST, ONE_CYCLE = "LRRangeTest", "OneCycle"
WARMUP_LR, WARMUP_DECAY_LR, WARMUP_COSINE_LR = "WarmupLR", "WarmupDecayLR", "WarmupCosineLR"
VALID_LR_SCHEDULES = [LR_RANGE_TEST, ONE_CYCLE, WARMUP_LR, WARMUP_DECAY_LR, WARMUP_COSINE_LR]

LR_RANGE_TEST_MIN_LR = "lr_range_test_min_lr"
LR_RANGE_TEST_STEP_RATE = "lr_range_test_step_rate"
LR_RANGE_TEST_STEP_SIZE = "lr_range_test_step_size"
LR_RANGE_TEST_STAIRCASE = "lr_range_test_staircase"

CYCLE_FIRST_STEP_SIZE, CYCLE_SECOND_STEP_SIZE = "cycle_first_step_size", "cycle_second_step_size"
CYCLE_FIRST_STAIR_COUNT, CYCLE_SECOND_STAIR_COUNT = "cycle_first_stair_count", "cycle_second_stair_count"
CYCLE_MIN_LR, CYCLE_MAX_LR = "cycle_min_lr", "cycle_max_lr"
CYCLE_MOMENTUM, CYCLE_MIN_MOM, CYCLE_MAX_MOM = "cycle_momentum", "cycle_min_mom", "cycle_max_mom"
DECAY_LR_RATE, DECAY_MOM_RATE, DECAY_STEP_SIZE = "decay_lr_rate", "decay_mom_rate", "decay_step_size"

WARMUP_MIN_LR, WARMUP_MAX_LR = "warmup_min_lr", "warmup_max_lr"
WARMUP_NUM_STEPS, WARMUP_TYPE = "warmup_num_steps", "warmup_type"
WARMUP_LOG_RATE, WARMUP_LINEAR_RATE = "log", "linear"
WARMUP_MIN_RATIO, COS_MIN_RATIO = "warmup_min_ratio", "cos_min_ratio"
TOTAL_NUM_STEPS = "total_num_steps"

# Of DeepSpeed's command line: name, and default. A negative count or size stands for the schedule's own.
_RANGE_TEST = {
    LR_RANGE_TEST_MIN_LR: 0.001,
    LR_RANGE_TEST_STEP_RATE: 1.0,
    LR_RANGE_TEST_STEP_SIZE: 1000,
    LR_RANGE_TEST_STAIRCASE: False,
}
_CYCLE = {
    CYCLE_FIRST_STEP_SIZE: 1000,
    CYCLE_FIRST_STAIR_COUNT: -1,
    CYCLE_SECOND_STEP_SIZE: -1,
    CYCLE_SECOND_STAIR_COUNT: -1,
    DECAY_STEP_SIZE: 1000,
    CYCLE_MIN_LR: 0.01,
    CYCLE_MAX_LR: 0.1,
    DECAY_LR_RATE: 0.0,
    CYCLE_MOMENTUM: False,
    CYCLE_MIN_MOM: 0.8,
    CYCLE_MAX_MOM: 0.9,
    DECAY_MOM_RATE: 0.0,
}
_WARMUP = {WARMUP_MIN_LR: 0.0, WARMUP_MAX_LR: 0.001, WARMUP_NUM_STEPS: 1000, WARMUP_TYPE: WARMUP_LOG_RATE}
_COSINE = {WARMUP_MIN_RATIO: 0.01, COS_MIN_RATIO: 0.01}


def add_tuning_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """The schedules' settings as options of a command line, with DeepSpeed's names and defaults."""
    group = parser.add_argument_group("Convergence Tuning", "the learning rate's schedule")
    group.add_argument(f"--{LR_SCHEDULE}", choices=VALID_LR_SCHEDULES, help="which schedule")
    for name, default in {**_RANGE_TEST, **_CYCLE, **_WARMUP, **_COSINE}.items():
        if isinstance(default, bool):
            group.add_argument(f"--{name}", nargs="?", const=True, default=default, type=_truth)
        else:
            group.add_argument(f"--{name}", type=type(default), default=default, help=f"default {default}")
    return parser


def get_config_from_args(args: argparse.Namespace) -> tuple[dict[str, Any] | None, str | None]:
    """The "scheduler" section that a command line asks for, and None; or None, and why there is none."""
    kind = getattr(args, LR_SCHEDULE, None)
    if kind is None:
        return None, f"--{LR_SCHEDULE} not specified on command line"
    if kind not in VALID_LR_SCHEDULES:
        return None, f"{kind} is not supported LR schedule"
    params: dict[str, Any] = {}
    _override(
        {LR_RANGE_TEST: _RANGE_TEST, ONE_CYCLE: _CYCLE, WARMUP_COSINE_LR: _COSINE}.get(kind, _WARMUP), args, params
    )
    return {"type": kind, "params": params}, None


def _override(settings: Mapping[str, Any], args: argparse.Namespace, params: dict[str, Any]) -> None:
    """Take into a schedule's `params` what a command line says of these settings."""
    given = {name: value for name in settings if (value := getattr(args, name, None)) is not None}
    params.update({name: value for name, value in given.items() if isinstance(value, bool | str) or value >= 0})


override_lr_range_test_params = partial(_override, _RANGE_TEST)
override_1cycle_params = partial(_override, _CYCLE)


def get_lr_from_config(config: dict[str, Any]) -> tuple[float | None, str]:
    """The highest rate of a "scheduler" section, the lowest of a range test, and ""; or None, and why there is none."""
    for key in ("type", "params"):
        if key not in config:
            return None, f"LR schedule {key} not defined in config"
    kind = config["type"]
    if kind not in VALID_LR_SCHEDULES:
        return None, f"{kind} is not a valid LR schedule"
    if kind == WARMUP_COSINE_LR:
        return None, f"{kind} holds no rate: it scales that of each parameter group"
    key = {LR_RANGE_TEST: LR_RANGE_TEST_MIN_LR, ONE_CYCLE: CYCLE_MAX_LR}.get(kind, WARMUP_MAX_LR)
    return config["params"][key], ""


def _truth(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false")
    return text.lower() == "true"
