"""Every schedule against hand-computed rates and DeepSpeed's formulas; several groups, resume, bad parameters."""

import json
import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler
from torch.optim.lr_scheduler import LRScheduler

from tests.refusing import refused
from thinwire.engine.saved_job import load_schedule_state, schedule_state
from thinwire.engine.schedules import (
    LRRangeTest,
    OneCycle,
    WarmupCosineLR,
    WarmupDecayLR,
    WarmupLR,
    build_schedule,
    schedule_names,
)
from thinwire.optim.options import find_peak

# Parameters for every schedule a configuration can name, short enough that 25 steps pass through all of its phases.
PARAMS: dict[str, dict[str, Any]] = {
    "LRRangeTest": {"lr_range_test_step_size": 3, "lr_range_test_staircase": True},
    "OneCycle": {"cycle_min_lr": 0.01, "cycle_max_lr": 0.1, "cycle_first_step_size": 7, "cycle_second_step_size": 5},
    "WarmupLR": {"warmup_num_steps": 6},
    "WarmupDecayLR": {"total_num_steps": 17, "warmup_num_steps": 5, "warmup_type": "linear"},
    "WarmupCosineLR": {"total_num_steps": 17, "warmup_num_steps": 5},
    "ConstantLR": {},
    "CosineAnnealingLR": {"T_max": 9},
    "CosineAnnealingWarmRestarts": {"T_0": 4, "T_mult": 2},
    "CyclicLR": {"base_lr": 0.01, "max_lr": 0.1, "step_size_up": 3},
    "ExponentialLR": {"gamma": 0.9},
    "LinearLR": {},
    "MultiStepLR": {"milestones": [3, 3, 11]},
    "OneCycleLR": {"max_lr": 0.1, "total_steps": 40},
    "PolynomialLR": {"total_iters": 13, "power": 2.0},
    "StepLR": {"step_size": 4},
}


def make_optimizer(*rates: float, kind: str = "AdamW", **options: Any) -> torch.optim.Optimizer:
    groups = [{"params": [torch.zeros(1, requires_grad=True)], "lr": rate} for rate in rates]
    optimizer: torch.optim.Optimizer = getattr(torch.optim, kind)(groups, **options)
    return optimizer


def take(optimizer: torch.optim.Optimizer, schedule: LRScheduler, steps: int) -> list[list[float]]:
    """The groups' rates at each of the next `steps` steps."""
    rates = []
    for _ in range(steps):
        rates.append([float(group["lr"]) for group in optimizer.param_groups])
        optimizer.step()
        schedule.step()
    return rates


def first_group(optimizer: torch.optim.Optimizer, schedule: LRScheduler, steps: int) -> list[float]:
    return [rates[0] for rates in take(optimizer, schedule, steps)]


# DeepSpeed's formulas, with its own numbering: the iteration that follows step t is t - 1.


def deepspeed_warmup_gamma(iteration: int, warmup: int, kind: str) -> float:
    warmup = max(2, warmup)
    if iteration < 0:
        return 0.0
    if iteration >= warmup:
        return 1.0
    return math.log(iteration + 1) / math.log(warmup) if kind == "log" else iteration / warmup


def deepspeed_ratio(iteration: int, name: str, total: int, warmup: int, kind: str, least: float, last: float) -> float:
    """What the highest rate is multiplied by, from `least` on where the schedule has a lowest rate."""
    warmup = max(2, warmup)
    if iteration < warmup:
        ratio = deepspeed_warmup_gamma(iteration, warmup, kind)
    elif name == "WarmupLR":
        ratio = 1.0
    elif name == "WarmupDecayLR":
        ratio = max(0.0, (total - iteration) / (total - warmup))
    else:
        progress = min(1.0, (iteration - warmup + 1) / (total - warmup))
        return last + (1 - last) * (1 + math.cos(math.pi * progress)) / 2
    return least + (1 - least) * ratio


@pytest.mark.parametrize("kind", ["log", "linear"])
@pytest.mark.parametrize(
    ("name", "warmup"), [*(("WarmupLR", steps) for steps in (1, 2, 3, 10)), ("WarmupDecayLR", 6), ("WarmupCosineLR", 4)]
)
def test_warmups_follow_deepspeed(name: str, kind: str, warmup: int) -> None:
    options: dict[str, Any] = {"warmup_num_steps": warmup, "warmup_type": kind}
    options |= {"total_num_steps": 20} if name != "WarmupLR" else {}
    if name == "WarmupCosineLR":
        options |= {"warmup_min_ratio": 0.2, "cos_min_ratio": 0.05}
    else:
        options |= {"warmup_min_lr": 0.1, "warmup_max_lr": 0.5}
    optimizer = make_optimizer(0.5)
    schedule = build_schedule(name, options, optimizer)
    expected = [0.5 * deepspeed_ratio(step - 1, name, 20, warmup, kind, 0.2, 0.05) for step in range(30)]
    assert first_group(optimizer, schedule, 30) == pytest.approx(expected)


@pytest.mark.parametrize("schedule_type", [WarmupLR, WarmupDecayLR, WarmupCosineLR])
def test_no_warmup_starts_at_the_highest_rate(schedule_type: Any) -> None:
    optimizer = make_optimizer(0.3)
    options: dict[str, Any] = {} if schedule_type is WarmupLR else {"total_num_steps": 10}
    options |= {} if schedule_type is WarmupCosineLR else {"warmup_max_lr": None}
    rates = first_group(optimizer, schedule_type(optimizer, warmup_num_steps=0, **options), 14)
    assert rates[0] == pytest.approx(0.3)
    assert all(earlier >= later for earlier, later in pairwise(rates))


def test_range_test_rises_smoothly_or_in_stairs() -> None:
    for stairs, expected in ((False, [0.1, 0.125, 0.15, 0.175, 0.2]), (True, [0.1, 0.1, 0.15, 0.15, 0.2])):
        optimizer = make_optimizer(1.0)
        assert first_group(optimizer, LRRangeTest(optimizer, 0.1, 2, 0.5, stairs), 5) == pytest.approx(expected)


def deepspeed_cycle_scale(iteration: int, first: int, second: int) -> float:
    batch, total = iteration + 1, first + second
    ratio = first / total
    x = 1.0 + batch / total - math.floor(1 + batch / total)
    return x / ratio if x <= ratio else (x - 1) / (ratio - 1)


@pytest.mark.parametrize(("first", "second"), [(4, 4), (7, 3), (1, 9), (1, 1)])
def test_one_cycle_follows_deepspeed(first: int, second: int) -> None:
    optimizer = make_optimizer(1.0, betas=(0.5, 0.95))
    schedule = OneCycle(
        optimizer, 0.01, 0.09, 0.5, first, second, decay_step_size=3, cycle_min_mom=0.8, cycle_max_mom=0.9
    )
    total = first + second
    assert schedule.step_ratio == first / total
    for step in range(total + 9):
        iteration = step - 1
        if iteration < total:
            scale = deepspeed_cycle_scale(iteration, first, second)
            rate, momentum = 0.01 + 0.08 * scale, 0.9 - 0.1 * scale
        else:
            rate, momentum = 0.01 / (1 + 0.5 * (iteration - total + 1) / 3), 0.9
        assert optimizer.param_groups[0]["lr"] == pytest.approx(rate)
        assert schedule.get_mom() == [pytest.approx((momentum, 0.95))]
        # DeepSpeed builds the schedule with the lowest momentum.
        shown = momentum if step else 0.8
        assert optimizer.param_groups[0]["betas"] == pytest.approx((shown, 0.95))
        optimizer.step()
        schedule.step()


CYCLES: list[tuple[dict[str, Any], dict[str, Any], str, list[list[float]]]] = [
    (  # in stairs
        {},
        {"cycle_min_lr": 0.0, "cycle_max_lr": 1.0, "cycle_first_step_size": 6, "cycle_first_stair_count": 3},
        "lr",
        [[one / 3] * 2 for one in (0, 0, 1, 1, 2, 2, 3, 2, 2, 1, 1, 0, 0, 0)],
    ),
    (  # that falls at once
        {},
        {"cycle_min_lr": 0.1, "cycle_max_lr": 0.5, "cycle_first_step_size": 4, "cycle_second_step_size": 0},
        "lr",
        [[one] * 2 for one in (0.1, 0.2, 0.3, 0.4, 0.5, 0.1, 0.1)],
    ),
    (  # between bounds of each group
        {},
        {"cycle_min_lr": [0.0, 0.2], "cycle_max_lr": [0.4, 1.0], "decay_lr_rate": 1.0, "decay_step_size": 1}
        | {"cycle_first_step_size": 2, "cycle_second_step_size": 1},
        "lr",
        [[0, 0.2], [0.2, 0.6], [0.4, 1.0], [0, 0.2], [0, 0.1]],
    ),
    (  # between momenta of each group
        {},
        {"cycle_first_step_size": 2, "cycle_min_mom": [0.6, 0.7], "cycle_max_mom": [0.8, 0.9]},
        "betas",
        [[0.6, 0.7], [0.7, 0.8], [0.6, 0.7], [0.7, 0.8], [0.8, 0.9]],
    ),
    (  # the momentum of SGD, which stops below one
        {"kind": "SGD", "momentum": 0.5},
        {"cycle_first_step_size": 2, "decay_step_size": 1, "decay_mom_rate": 1.0},
        "momentum",
        [[one] * 2 for one in (0.8, 0.85, 0.8, 0.85, 0.9, 0.9999, 0.9999)],
    ),
]


@pytest.mark.parametrize(("built", "options", "key", "expected"), CYCLES)
def test_one_cycle_by_hand(built: Any, options: dict[str, Any], key: str, expected: list[list[float]]) -> None:
    optimizer = make_optimizer(1.0, 1.0, **built)
    schedule = OneCycle(optimizer, **{"cycle_min_lr": 0.1, "cycle_max_lr": 0.2, **options})
    for values in expected:
        found = [group[key][0] if key == "betas" else group[key] for group in optimizer.param_groups]
        assert found == pytest.approx(values)
        optimizer.step()
        schedule.step()


@pytest.mark.parametrize("name", ["LRRangeTest", "OneCycle", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR"])
@pytest.mark.parametrize("batch", [-1, 0, 7, 23])
def test_a_step_to_a_batch_of_deepspeeds_count(name: str, batch: int) -> None:
    walked, jumped = make_optimizer(0.2, 0.4), make_optimizer(0.2, 0.4)
    expected = take(walked, build_schedule(name, PARAMS[name], walked), 25)
    schedule: Any = build_schedule(name, PARAMS[name], jumped)
    schedule.step(batch)
    assert schedule.last_batch_iteration == batch
    assert schedule.get_lr() == schedule.get_last_lr() == pytest.approx(expected[batch + 1])
    assert take(jumped, schedule, 24 - batch) == [pytest.approx(one) for one in expected[batch + 1 :]]


def test_a_state_that_deepspeed_saved() -> None:
    optimizer = make_optimizer(1.0)
    schedule = WarmupLR(optimizer, 0.0, 1.0, 4, "linear")
    schedule.load_state_dict({"last_batch_iteration": 2})
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.5)


def test_another_warmup_type_counts_as_log_with_a_warning() -> None:
    with pytest.warns(RuntimeWarning, match="warmup_type must be 'log' or 'linear', got 'cubic'"):
        schedule = WarmupCosineLR(make_optimizer(1.0), 20, warmup_num_steps=5, warmup_type="cubic")  # type: ignore[arg-type]
    assert schedule.warmup_type == "log"
    schedule.step(3)
    assert schedule.get_lr_ratio() == pytest.approx(math.log(4) / math.log(5))


def test_one_cycle_leaves_momentum_alone_when_told() -> None:
    optimizer = make_optimizer(1.0, betas=(0.5, 0.95))
    schedule = OneCycle(optimizer, 0.1, 0.2, cycle_first_step_size=2, cycle_momentum=False)
    take(optimizer, schedule, 6)
    assert optimizer.param_groups[0]["betas"] == (0.5, 0.95)
    assert schedule.get_mom() is None
    refused(ValueError, "cycle_momentum=False", OneCycle, make_optimizer(1.0, kind="Adagrad"), 0.1, 0.2)


def test_groups_keep_rates_of_their_own() -> None:
    optimizer = make_optimizer(1.0, 3.0)
    schedule: LRScheduler = WarmupLR(optimizer, [0.0, 1.0], None, 4, "linear")
    assert take(optimizer, schedule, 6)[2] == pytest.approx([0.25, 1.5])
    assert schedule.get_last_lr() == pytest.approx([1.0, 3.0])
    optimizer = make_optimizer(1.0, 3.0)
    schedule = WarmupCosineLR(optimizer, 8, 0.0, 2, 0.0, "linear")
    assert take(optimizer, schedule, 6)[3] == pytest.approx([one * (1 + math.cos(math.pi / 6)) / 2 for one in (1, 3)])
    optimizer = make_optimizer(1.0, 3.0)
    schedule = LRRangeTest(optimizer, [0.1, 0.2], 1)
    assert take(optimizer, schedule, 2)[1] == pytest.approx([0.2, 0.4])


def test_a_rate_that_is_a_tensor() -> None:
    optimizer = torch.optim.AdamW([torch.zeros(1, requires_grad=True)], lr=torch.tensor(1.0))
    schedule = WarmupLR(optimizer, 0.0, None, 4, "linear")
    assert first_group(optimizer, schedule, 7) == pytest.approx([0, 0, 0.25, 0.5, 0.75, 1, 1])
    rate = optimizer.param_groups[0]["lr"]
    schedule.load_state_dict({"last_epoch": 3})
    assert optimizer.param_groups[0]["lr"] is rate
    assert float(rate) == pytest.approx(0.5)


def test_every_schedule_that_can_be_named_is_tested() -> None:
    assert PARAMS.keys() == schedule_names().keys()


@pytest.mark.parametrize("name", PARAMS)
@pytest.mark.parametrize("pause", [0, 1, 8, 21])
def test_resume_through_json_continues_on_the_same_curve(name: str, pause: int) -> None:
    whole = make_optimizer(0.2, 0.4)
    expected = take(whole, build_schedule(name, PARAMS[name], whole), 30)
    before = make_optimizer(0.2, 0.4)
    schedule = build_schedule(name, PARAMS[name], before)
    take(before, schedule, pause)
    saved = json.dumps(schedule_state(schedule))
    after = make_optimizer(0.2, 0.4)
    resumed = build_schedule(name, PARAMS[name], after)
    load_schedule_state(resumed, json.loads(saved))
    assert resumed.get_last_lr() == pytest.approx(expected[pause])
    remaining = take(after, resumed, 30 - pause)
    for ours, theirs in zip(remaining, expected[pause:], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-12)
    assert after.param_groups[0]["betas"] == pytest.approx(whole.param_groups[0]["betas"])


@pytest.mark.parametrize("name", PARAMS)
@pytest.mark.parametrize("before", [0, 2])
def test_the_highest_rate_to_come_is_found_without_a_step(name: str, before: int) -> None:
    """Up to the first fall: what a cycle or a restart brings later is no warmup."""
    optimizer = make_optimizer(0.1)
    schedule = build_schedule(name, PARAMS[name], optimizer)
    take(optimizer, schedule, before)
    state, rate = schedule.state_dict(), optimizer.param_groups[0]["lr"]
    found = find_peak(schedule, 25)
    assert (schedule.state_dict(), optimizer.param_groups[0]["lr"]) == (state, rate)
    rates = [one for (one,) in take(optimizer, schedule, 25)]
    falls = next((step for step, (one, other) in enumerate(pairwise(rates), 1) if other < one * (1 - 1e-9)), 25)
    assert found == rates.index(max(rates[:falls])) + 1


def test_a_schedule_of_schedules_is_foreseen_and_one_by_a_metric_is_not() -> None:
    optimizer = make_optimizer(0.1)
    parts = [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=6), lr_scheduler.CosineAnnealingLR(optimizer, 9)]
    assert find_peak(lr_scheduler.SequentialLR(optimizer, parts, milestones=[6]), 25) == 7
    assert find_peak(lr_scheduler.ReduceLROnPlateau(optimizer), 25) is None


def test_a_changed_configuration_takes_effect_on_resume() -> None:
    optimizer = make_optimizer(1.0)
    schedule = WarmupLR(optimizer, 0.0, 1.0, 4, "linear")
    take(optimizer, schedule, 3)
    later = make_optimizer(1.0)
    resumed = WarmupLR(later, 0.0, 2.0, 4, "linear")
    resumed.load_state_dict(schedule.state_dict())
    assert first_group(later, resumed, 3) == pytest.approx([1.0, 1.5, 2.0])


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda o: WarmupLR(o, warmup_num_steps=-1), "warmup_num_steps must be a whole number of at least 0, got -1"),
        (lambda o: WarmupDecayLR(o, 9, warmup_num_steps=None), "warmup_num_steps must be a whole .* got None"),
        (lambda o: WarmupLR(o).step(-2), "batch_iteration must be a whole number of at least -1, got -2"),
        (lambda o: OneCycle(o, 0.1, 0.2).step(1.5), "batch_iteration must be a whole number of at least -1, got 1.5"),
        (lambda o: WarmupLR(o, warmup_min_lr=-0.1), "warmup_min_lr must be at least 0"),
        (lambda o: WarmupLR(o, warmup_max_lr=[0.1]), "one for each of the 2 parameter groups"),
        (lambda o: WarmupDecayLR(o, 0), "total_num_steps must be at least 1"),
        (lambda o: WarmupDecayLR(o, 10), "total_num_steps must be at least warmup_num_steps 1000, got 10"),
        (lambda o: WarmupCosineLR(o, 10, warmup_num_steps=2, cos_min_ratio=1.5), "cos_min_ratio must be from 0 to 1"),
        (lambda o: LRRangeTest(o, lr_range_test_step_size=0), "lr_range_test_step_size must be at least 1"),
        (lambda o: OneCycle(o, 0.2, 0.1), "cycle_min_lr must be from 0 to cycle_max_lr 0.1, got 0.2"),
        (lambda o: OneCycle(o, [0.1] * 3, 0.3), "cycle_min_lr must be one number, or one for each of the 2 param"),
        (lambda o: OneCycle(o, 0.1, []), "cycle_max_lr must be one number, or one for each of the 2 param"),
        (lambda o: OneCycle(o, [0.1, 0.4], 0.3), "cycle_min_lr must be from 0 to cycle_max_lr 0.3, got 0.4"),
        (lambda o: OneCycle(o, 0.1, 0.2, cycle_max_mom=1.0), "cycle_max_mom must be from 0 up to, not including, 1"),
        (lambda o: OneCycle(o, 0.1, 0.2, decay_lr_rate=0.5), "decay_step_size must be at least 1, got 0"),
        (lambda o: OneCycle(o, 0.1, 0.2, cycle_second_step_size=-1), "cycle_second_step_size must be at least 0, got"),
        (lambda o: OneCycle(o, 0.1, 0.2, cycle_first_step_size=0), "cycle_first_step_size must be at least 1 step"),
        (lambda o: OneCycle(o, 0.1, 0.2, cycle_min_mom=[0.8]), "cycle_min_mom must be one number, or one for each"),
        (lambda o: OneCycle(o, 0.1, 0.2, cycle_max_mom=[0.9, 0.7]), "cycle_min_mom must be from 0 to 0.7, got 0.8"),
    ],
)
def test_bad_parameters_are_told(build: Any, message: str) -> None:
    refused(ValueError, message, build, make_optimizer(1.0, 1.0))


@pytest.mark.parametrize(
    "state", [{}, {"last_epoch": -1}, {"last_epoch": True}, {"last_batch_iteration": "2"}, [], None]
)
def test_a_state_without_a_step_is_refused_and_nothing_changes(state) -> None:
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    schedule = WarmupLR(optimizer, warmup_num_steps=5)
    schedule.step()
    before = schedule.state_dict(), optimizer.param_groups[0]["lr"]
    refused(ValueError, "of a schedule's state must be a whole number", schedule.load_state_dict, state)
    assert (schedule.state_dict(), optimizer.param_groups[0]["lr"]) == before
