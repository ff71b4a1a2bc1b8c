"""What else is asked of the tasks: DiLoCo's options, longer runs, and what parts of 0/1 Adam and 1-bit Muon do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from experiments.frontier.contenders import Contender

__all__ = ["STUDIES", "Question", "options_of", "variant_name"]


@dataclass(frozen=True)
class Question:
    """Variants of one optimizer on one task, each at its own best rate.

    Attributes:
        subject: the task's name.
        workers: who train together.
        rates: to try, for every variant.
        variants: by name. The first and the best of all run with every seed, the others with the first alone.
        steps: of every run; None for the task's own.
        seeds: at most so many; None for as many as the command says.
        all_seeds: whether every variant runs with all of them.
    """

    subject: str
    workers: int
    rates: tuple[float, ...]
    variants: Mapping[str, Contender]
    steps: int | None = None
    seeds: int | None = None
    all_seeds: bool = False


def variant_name(optimizer: str, steps: int | None, options: Mapping[str, Any]) -> str:
    """What a variant is called in the results: all that tells it from others."""
    words = [optimizer, *(f"{name}={value}" for name, value in options.items())]
    return " ".join(words if steps is None else [*words, f"steps={steps}"])


def options_of(name: str) -> dict[str, float]:
    """The numbers among the options that a variant's name tells."""
    words = dict(word.split("=") for word in name.split()[1:])
    return {option: float(value) for option, value in words.items() if value.replace(".", "", 1).isdigit()}


def _variants(optimizer: str, *choices: Mapping[str, Any], steps: int | None = None) -> dict[str, Contender]:
    return {
        variant_name(optimizer, steps, options): Contender(optimizer, "", "#2b6ca3", "o", dict(options))
        for options in choices
    }


def _outer(every: int, rate: float, momentum: float, overlap: int = 1, mix: float = 0.5) -> dict[str, Any]:
    """DiLoCo's options; all else is as it is by default."""
    return {"every": every, "outer_lr": rate, "outer_momentum": momentum, "overlap": overlap, "mix": mix}


_DEFAULT = (0.6, 0.9)
_RATES_BY_MOMENTUM = {
    0.0: (0.8, 1.0),
    0.5: (0.6, 0.8, 1.0),
    0.8: (0.45, 0.6, 0.8),
    0.9: (0.3, 0.8),
    0.95: (0.3,),
}
_TEXT_RATES = (2.5e-3, 5e-3)
"""Half and twice as much cost AdamW and DiLoCo 4% and more: variants do not try them."""

_ZERO_ONE: tuple[dict[str, Any], ...] = (
    {"local_step_clipper": 1, "codec": "stat2"},
    # As the frontier has it: freeze at step 96, the interval of the variance doubles every 4 updates, that of syncs
    # every 48 steps up to 4.
    {},
    {"local_step_clipper": 1},
    {"var_update_scaler": 8},
    {"var_update_scaler": 16},
    {"codec": "stat2"},
    {"local_step_clipper": 2, "codec": "stat2"},
    {"local_step_clipper": 1, "var_update_scaler": 8},
    {"var_freeze_step": 240},
)

_MUON: tuple[dict[str, Any], ...] = (
    {},
    {"nesterov": True},
    {"low_rank": 0},
    {"low_rank": 0, "nesterov": True},
    {"codec": "stat2", "low_rank": 1},
    {"codec": "stat2", "low_rank": 0, "nesterov": True},
)


def _grid(every: int) -> list[dict[str, Any]]:
    """The default, and outer rates by momentum."""
    others = [_outer(every, rate, momentum) for momentum, rates in _RATES_BY_MOMENTUM.items() for rate in rates]
    return [_outer(every, *_DEFAULT), *others]


_AT_ONCE = (0, 0.0)
"""No overlap, and nothing of a worker's own weights remains."""

_AVERAGING = (1.0, 0.0, *_AT_ONCE)
"""The outer step of local SGD: all workers go on from the mean of their weights."""

_BEST = (0.8, 0.8)
"""Outer rate and momentum of the lowest loss at 30 steps with the first seed."""

_BY_ARRIVAL = (
    _outer(30, *_DEFAULT),
    _outer(30, *_DEFAULT, *_AT_ONCE),
    _outer(30, *_DEFAULT, 0, 0.5),
    _outer(30, *_DEFAULT, 1, 0.0),
    _outer(30, *_BEST, *_AT_ONCE),
    _outer(30, *_AVERAGING),
)
"""Ways for a worker to take an outer step in."""


_MEAN = _outer(30, *_AVERAGING)
_SHARED, _MOMENTS = {"share": {"exp_avg": 1}}, {"share": {"exp_avg": 1, "exp_avg_sq": 6}}
_PARTS: tuple[dict[str, Any], ...] = (
    {},
    {"outer_lr": "auto"},
    {"mix": "carry"},
    {"touch": 0.005},
    _SHARED,
    _MOMENTS,
    _MEAN,
    {**_MEAN, **_SHARED},
    {**_MEAN, "touch": 0.01},
    {**_MEAN, "touch": 0.09},
    {**_MEAN, "touch": 1},  # all of the weights: no interval is left
)
_MUON_PARTS: tuple[dict[str, Any], ...] = (
    _MEAN,
    {**_MEAN, "share": {"momentum_buffer": 1}},
    {**_MEAN, "touch": 0.01},
    {**_MEAN, "touch": 0.03},
    {**_MEAN, "touch": 0.09},
    {**_MEAN, "share": {"momentum_buffer": 1}, "touch": 0.055},
)


def _parts(workers: int) -> tuple[Question, ...]:
    """What each part of DiLoCo beyond the published one does, alone and together."""
    of_qhadamw = _variants("diloco", *({"inner": "QHAdamW", **one} for one in ({}, _MEAN, {**_MEAN, **_SHARED})))
    return (
        Question("text", workers, (2.5e-3, 5e-3), _variants("diloco", *_PARTS), all_seeds=True),
        Question("text", workers, (5e-3, 1e-2), _variants("diloco-muon", *_MUON_PARTS), all_seeds=True),
        Question("text", workers, (1.25e-3, 2.5e-3, 5e-3), of_qhadamw),
    )


def _longer(subject: str, rate: float, steps: int) -> Question:
    return Question(subject, 2, (rate,), _variants("diloco", _outer(30, *_AVERAGING), steps=steps), steps, seeds=1)


STUDIES = {
    "outer": (
        Question("text", 2, _TEXT_RATES, _variants("diloco", *_grid(30))),
        Question("text", 2, _TEXT_RATES, _variants("diloco", *_BY_ARRIVAL)),
        Question("text", 2, _TEXT_RATES, _variants("diloco", _outer(10, *_AVERAGING), _outer(10, *_DEFAULT))),
        Question("text", 4, (5e-3,), _variants("diloco", _outer(30, *_AVERAGING)), seeds=1),
        Question("mini", 2, (2e-3,), _variants("diloco", _outer(30, *_AVERAGING)), seeds=1),
    ),
    "longer": (
        _longer("text", 5e-3, 600),
        _longer("text", 5e-3, 720),
        _longer("text", 5e-3, 960),
        _longer("mini", 2e-3, 520),
        # What AdamW itself needs to end 1% higher.
        Question("text", 2, (5e-3,), _variants("adamw", {}, steps=440), 440, seeds=1),
    ),
    "parts": (*_parts(4), *_parts(2)),
    "zero-one": (Question("text", 2, (5e-3,), _variants("zero-one-adam", *_ZERO_ONE)),),
    "muon": tuple(Question("text", workers, (5e-3, 1e-2), _variants("onebit-muon", *_MUON)) for workers in (2, 4)),
}
"""By name."""
