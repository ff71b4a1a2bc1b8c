"""Who is compared: every optimizer of the experiments, with the codecs and intervals that a user would choose from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from experiments.training.optimizers import OPTIMIZERS, OUTER, PARENTS

__all__ = ["BASELINE", "CONTENDERS", "DILOCO", "Contender"]

BASELINE = "adamw"
"""What everything is compared with."""


@dataclass(frozen=True)
class Contender:
    """An optimizer with options.

    Attributes:
        optimizer: its name in `OPTIMIZERS`.
        label: for tables and pictures.
        colour: for pictures: one a family.
        marker: for pictures, as matplotlib has them.
        options: of its class, on top of the plan's.
        freeze: after which part of the steps a 1-bit optimizer freezes.
        beside: another contender, which it differs from in one choice; none for the baseline.
    """

    optimizer: str
    label: str
    colour: str
    marker: str
    options: Mapping[str, Any] = field(default_factory=dict)
    beside: str | None = BASELINE
    freeze: float = 0.2

    @property
    def parent(self) -> str:
        """The exact optimizer whose rates and other options suit this one."""
        outer = OUTER.get(self.optimizer)
        return PARENTS.get(self.optimizer, self.optimizer.removeprefix("sharded-")) if outer is None else outer.parent


_EXACT, _ONE_BIT, _MUON = "#5b6572", "#d1495b", "#6a4c93"
_BY_INTERVAL = {10: "#2b6ca3", 30: "#00798c"}
_BY_CODEC = {"none": "o", "int4": "D", "stat2": "v"}


def _plain(optimizer: str, colour: str, marker: str, beside: str | None = BASELINE) -> Contender:
    return Contender(optimizer, OPTIMIZERS[optimizer].label, colour, marker, beside=beside)


def _one_bit(marker: str, what: str, freeze: float = 0.2, **options: Any) -> Contender:
    label = f"{OPTIMIZERS['onebit-adam'].label}, {what}"
    return Contender("onebit-adam", label, _ONE_BIT, marker, options, "onebit-adam", freeze)


def _muon(marker: str, what: str, **options: Any) -> Contender:
    return Contender("onebit-muon", f"{OPTIMIZERS['onebit-muon'].label}, {what}", _MUON, marker, options, "muon")


def _sharded(label: str, marker: str, **options: Any) -> Contender:
    return Contender("sharded-adamw", label, _EXACT, marker, options)


def _diloco(every: int, codec: str) -> Contender:
    return Contender(
        "diloco",
        f"DiLoCo, {every} steps, {'fp32' if codec == 'none' else codec}",
        _BY_INTERVAL[every],
        _BY_CODEC[codec],
        {"every": every, "codec": codec},
        BASELINE if codec == "none" else f"diloco-{every}-none",
    )


DILOCO = {f"diloco-{every}-{codec}": _diloco(every, codec) for every in _BY_INTERVAL for codec in _BY_CODEC}
"""DiLoCo by interval and codec, all else as it is by default."""


def _diloco_muon(every: int, marker: str, what: str = "", **shared: Any) -> Contender:
    """With the mean of the workers' weights for an outer step, which is best in few of them."""
    mean = {"outer_lr": 1.0, "outer_momentum": 0.0, "overlap": 0, "mix": 0.0}
    label = f"{OPTIMIZERS['diloco-muon'].label}, {every} steps, {what or 'int4'}"
    options = {"every": every, "codec": "int4", **mean, **shared}
    return Contender("diloco-muon", label, _BY_INTERVAL[every], marker, options, "muon")


CONTENDERS = {
    BASELINE: _plain(BASELINE, _EXACT, "o", None),
    "lamb": _plain("lamb", _EXACT, "s"),
    "lion": _plain("lion", _EXACT, "^"),
    "onebit-adam": _plain("onebit-adam", _ONE_BIT, "o"),
    "onebit-adam-stat2": _one_bit("v", "stat2", codec="stat2"),
    # A warmup in four bits costs little and is longer; with less memory the variance that stays is a recent one.
    "onebit-adam-int4": _one_bit("D", "int4 warmup", 0.23, warmup_wire="int4", betas=(0.9, 0.97)),
    "onebit-adam-stat2-int4": _one_bit("P", "int4 + stat2", 0.28, warmup_wire="int4", codec="stat2", betas=(0.9, 0.97)),
    "adamw-int4": _sharded("AdamW, int4", "D", stage=0, codec="int4"),
    "adamw-zero-int4": _sharded("AdamW, ZeRO-1, int4 + int8", "P", stage=1, codec="int4"),
    "zero-one-adam": _plain("zero-one-adam", "#edae49", "o"),
    "onebit-lamb": _plain("onebit-lamb", _ONE_BIT, "s", "lamb"),
    "onebit-lion": _plain("onebit-lion", _ONE_BIT, "^", "lion"),
    "muon": _plain("muon", _MUON, "o"),
    "onebit-muon-sign1": _muon("s", "sign1"),
    "onebit-muon-sign1-nesterov": _muon("^", "sign1, Nesterov", low_rank=1, nesterov=True),
    "onebit-muon-sign1-rank4": _muon("<", "sign1, Nesterov, rank 4", nesterov=True),
    "onebit-muon-stat2-nesterov": _muon("v", "stat2, Nesterov", codec="stat2", low_rank=1, nesterov=True),
    "onebit-muon-stat2-rank4": _muon("d", "stat2, rank 4", codec="stat2", nesterov=True),
    **DILOCO,
    "diloco-10-muon": _diloco_muon(10, "P"),
    "diloco-30-muon": _diloco_muon(30, "P"),
    "diloco-30-muon-shared": _diloco_muon(30, "X", "shared", share={"momentum_buffer": 1}),
    "diloco-30-plain": Contender(
        "plain-diloco", "DiLoCo, 30 steps, by hand", "#8f6bb3", "P", {"every": 30}, "diloco-30-none"
    ),
}
"""By name, in the order in which they run and are shown."""
